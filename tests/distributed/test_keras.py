"""The Keras front end on two ranks: Keras 3 on TensorFlow and on torch, and tf_keras.

Many checks in each start, as starting is slow. Rank 1 has built models that rank 0 has not, so
that all names that Keras numbers differ between the ranks.
"""

from __future__ import annotations

import functools

import pytest

from .launch import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(500),
]

EVERYWHERE = (
    "one_process",
    "compressed",
    "saving",
    "overflow",
    "broadcasting",
    "metrics",
    "metrics_of_many",
    "metric_names",
    "frozen",
    "disagreement",
    "warning",
    "telemetry",
    "doubting",
)
ON_TENSORFLOW = (
    "options",
    "passes",
    "rates",
    "growing_scale",
    "loops",
    "xla",
    "sparse",
    "classes",
    "copies",
    "twins",
    "names",
    "refusals",
)
KINDS = {
    "keras": ({}, (*EVERYWHERE, *ON_TENSORFLOW)),
    "torch": ({"KERAS_BACKEND": "torch"}, (*EVERYWHERE, "passes", "freezing")),
    "tf_keras": ({"TF_USE_LEGACY_KERAS": "1"}, (*EVERYWHERE, "legacy")),
}
ROUNDING = 1e-6
"""Of float32 weights around 0.2 after a few steps."""


@functools.cache
def start(kind):
    env, checks = KINDS[kind]
    try:
        ranks = run_ranks("keras_fit.py", 2, args=checks, env=env, timeout=400)
    except AssertionError as error:
        return {}, str(error)
    return {check: [rank[check] for rank in ranks] for check in checks}, ""


def reports(kind, check):
    """Return each rank's report, none of which may be an error."""
    found, error = start(kind)
    assert not error, error
    for rank, one in enumerate(found[check]):
        if isinstance(one, dict):
            assert "error" not in one, f"rank {rank}:\n{one['error']}"
    return found[check]


def report(kind, check):
    """Return the report that all ranks agree on."""
    first, other = reports(kind, check)
    assert other == first
    return first


every_keras = pytest.mark.parametrize("kind", KINDS)


# Training -----------------------------------------------------------------------------------------
@every_keras
def test_fit_on_two_ranks_is_one_process_with_the_doubled_batch(kind):
    """Fails when Keras no longer calls what reduces: ranks then train apart."""
    for name, result in report(kind, "one_process").items():
        assert result["difference"] < ROUNDING, name
        assert result["moved"] > 0.01, name
        assert result["reductions"] == result["steps"], name


@every_keras
def test_compressed_fit_keeps_ranks_equal_and_accuracy(kind):
    found = report(kind, "compressed")
    alone = found.pop("alone")
    assert 0.8 < alone < 1
    ratios = {name: result["ratio"] for name, result in found.items()}
    for name, result in found.items():
        assert abs(result["accuracy"] - alone) < 0.04, name
    assert found["none"]["accuracy"] == alone
    assert ratios["none"] == 1
    assert ratios["topk"] < 0.2
    if kind == "keras":
        assert 0.2 < ratios["string"] < 0.3 < ratios["uncalled"] < 0.6
    assert len({result["weights"] for result in found.values()}) == len(found)


def test_sum_predivide_and_process_set():
    for name, result in report("keras", "options").items():
        # Rounded to half precision and back.
        assert result["difference"] < (1e-4 if "compressed" in name else ROUNDING), name


@pytest.mark.parametrize("kind", ["keras", "torch"])
def test_backward_passes_per_step(kind):
    found = report(kind, "passes")
    for result in found.values():
        assert (result["reductions"], result["updates"]) == (8, 8)
    assert found["summed"]["difference"] < ROUNDING
    assert ROUNDING < found["compressed"]["difference"] < 0.2


def test_what_is_remembered_follows_what_trains():
    for name, differences in report("torch", "freezing").items():
        # What two phases hold back is added up in another order; the others only skip steps.
        assert max(differences) < (1e-5 if name == "two phases" else 1e-7), name


def test_own_loops_train_as_fit_does():
    for name, difference in report("keras", "loops").items():
        assert difference == 0, name


def test_sparse_gradients():
    found = report("keras", "sparse")
    assert found["rows"]["difference"] < ROUNDING
    assert ROUNDING < found["compressed"]["difference"] < 0.05
    assert ROUNDING < found["scaled"]["difference"] < 0.05


@every_keras
def test_a_callback_records_training(kind):
    first, other = reports(kind, "telemetry")
    expected = {"epochs": [7, 15], "batches": [2, 5, 8, 11, 14, 15]}
    if kind == "torch":
        expected = {"epochs": [0, 8], "batches": [0, 3, 6, 9, 12, 15]}
        # Four batches to a step, and two steps to an epoch.
        expected.update({"passes": [0, 1, 2, 3], "epochs of passes": [0, 2]})
    elif kind == "keras":
        expected["executions"] = [3, 7, 11, 15]
    for name, steps in expected.items():
        assert first[name]["steps"] == steps, name
        assert other[name]["steps"] == [], name
        assert first[name]["counted"] == steps[-1] + 1
        assert first[name]["all"] or kind == "torch"
        assert len(first[name]["layers"][0]) == 2
        assert all(norm > 0 for norm in first[name]["residuals"] + first[name]["total"])
    assert "TelemetryCallback with a model" in first["refused"]
    assert "a broken fit" in first["broken"]
    # After 16 steps, or 4 where 4 batches make one, an epoch that ended and one that was broken.
    steps = [4, 6] if kind == "torch" else [23, 31]
    assert first["steps once"] == steps


@every_keras
def test_what_goes_badly_with_an_optimizer_is_said_once(kind):
    found = report(kind, "doubting")
    adam = sorted(found["adam"])
    assert len(adam) == 2
    assert "an optimizer that adapts" in adam[0]
    assert "the rule 'nothing.*' matches no parameter" in adam[1]
    if kind == "torch":
        assert "an optimizer that adapts" in found["scaled"][0]
        assert "takes the place of the optimizer's" in found["momentum"][0]
        assert [len(found[name]) for name in ("scaled", "late", "momentum", "none")] == [1, 0, 1, 0]
        assert found["among"] == ["fp16"]


# Mixed precision ----------------------------------------------------------------------------------
@every_keras
def test_an_overflow_on_one_rank_is_one_on_all(kind):
    found = report(kind, "overflow")
    assert len(found) == (5 if kind == "keras" else 2)
    alike = {"added by compile", "around", "inside"} & {*found}
    assert len({found[name]["weights"] for name in alike}) == 1
    for name, result in found.items():
        # The third step is bad; with two passes to an update, that is the second update.
        bad = 3 if name == "in passes" else 2
        assert result["scales"] == [32768.0] * bad + [16384.0] * (8 - bad), name
        assert result["finite"], name
        moves = [i % 2 == 1 and i != 3 if name == "in passes" else i != 2 for i in range(1, 8)]
        assert result["weights moved"] == moves, name
        assert result["memory moved"] == ([False] * 7 if name == "uncompressed" else moves), name
        assert result["class"].endswith("mixed_precision.loss_scale_optimizer") or result[
            "class"
        ].endswith("optimizers.loss_scale_optimizer")


def test_memory_is_in_units_of_unscaled_gradients():
    found = report("keras", "growing_scale")
    assert found["scales"] == [256.0, 4096.0]
    assert found["difference"] < 1e-4 < 0.05 < found["moved"]


# Files --------------------------------------------------------------------------------------------
@every_keras
def test_files_are_those_of_the_plain_optimizer(kind):
    found = report(kind, "saving")
    assert list(found) == (["keras", "h5"] if kind == "tf_keras" else ["keras"])
    for result in found.values():
        assert "gradcomp" not in result["class"]
        assert result["distributed"] == [False, True]
        assert result["iterations"] == [8, 8]
        assert result["config"]
        assert result["difference"] == 0


def test_classes_of_ones_own():
    found = report("keras", "classes")
    assert found["same object"]
    assert found["is"][:2] == [True, True]
    assert found["is"][2].endswith(".Doubled'>")
    assert found["registered"] == "team>Doubled"
    assert found["loaded"] == [True, 3.0, 8]
    assert found["variables"]
    assert found["multi"] < ROUNDING


def test_copies_are_plain():
    for one in report("keras", "copies").values():
        assert one == [True, True, 0.9]


def test_two_models_of_equal_shapes_in_one_step():
    for found in report("keras", "twins").values():
        assert found == pytest.approx([0, 0], abs=ROUNDING)


def test_process_sets_have_names_of_their_own():
    assert len(set(report("keras", "names"))) == 3


# Callbacks ----------------------------------------------------------------------------------------
@every_keras
def test_broadcast_of_weights_and_state(kind):
    found = report(kind, "broadcasting")
    assert found["difference"] < ROUNDING
    assert found["iterations"] == 32


@every_keras
def test_metrics_are_averaged(kind):
    first, second = reports(kind, "metrics")
    assert set(first["own"]) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert first["averaged"] == second["averaged"]
    for name, value in first["averaged"].items():
        assert first["own"][name] != second["own"][name], name
        mean = (first["own"][name] + second["own"][name]) / 2
        assert value == pytest.approx(mean, rel=1e-6), name


@every_keras
def test_metrics_with_several_values_are_averaged(kind):
    first, second = reports(kind, "metrics_of_many")
    assert len(first["own"]) == 3
    assert first["own"] != second["own"]
    mean = [(a + b) / 2 for a, b in zip(first["own"], second["own"])]
    assert first["averaged"] == pytest.approx(mean, rel=1e-6)
    assert first["averaged"] == second["averaged"]
    assert first["kinds averaged"] == "float"


@every_keras
def test_metrics_that_ranks_do_not_share_are_refused(kind):
    (text,) = {one["other"] for one in reports(kind, "metrics_of_many")}
    assert text.startswith("SettingsError: got ")
    assert "val_f1: numbers of shape [3] on rank 0, nothing on rank 1" in text
    assert "val_loss: a number on rank 0, nothing on rank 1" in text
    assert " loss" not in text


@every_keras
def test_metrics_are_averaged_with_their_like(kind):
    assert report(kind, "metric_names") == [1, 2, 3]


@every_keras
def test_a_model_without_anything_to_train(kind):
    found = report(kind, "frozen")
    assert found["plain"] == found["distributed"] == "nothing was raised"


def test_broadcast_to_legacy_optimizers():
    found = report("tf_keras", "legacy")
    for name in ("plain", "wrapped"):
        # The count of steps, and the momentum of two kernels and two biases.
        assert found[name][1] == [3, *(3 * n for n in (2560, 64, 192, 3))], name


@every_keras
def test_arguments_that_ranks_do_not_share_are_refused(kind):
    found = report(kind, "disagreement")
    argument = "backward_passes_per_step"
    expected = {
        "op": "op: Average on rank 0, Sum on rank 1",
        "predivide": "gradient_predivide_factor: 1 on rank 0, 2 on rank 1",
        "passes": f"{argument}: 1 on rank 0, 2 on rank 1",
        "mean": "average_aggregated_gradients: False on rank 0, True on rank 1",
    }
    assert found.pop("alike") == "nothing was raised"
    assert list(found) == list(expected)[: 2 if kind == "tf_keras" else 4]
    for name, text in found.items():
        assert text.startswith(f"SettingsError: got {expected[name]}; expected the same")


def test_learning_rates():
    found = report("keras", "rates")
    # From half of it, as there are two ranks, in equal steps.
    rise = [0.2 + 0.2 * (batch + 1) / 16 for batch in range(16)]
    assert found["warmup"]["seen"] == pytest.approx(rise + [0.4] * 8)
    assert found["warmup"]["logged"] == pytest.approx([0.3, 0.4, 0.4])
    assert found["decay"]["seen"] == pytest.approx([0.4] * 16 + [0.2] * 8)
    assert found["from zero"]["seen"] == pytest.approx([0.0] * 8 + [0.2] * 8 + [0.4] * 8)
    assert found["moved"]["True"] < ROUNDING < 0.01 < found["moved"]["False"]


@every_keras
def test_an_epoch_without_a_reduction_is_noticed(kind):
    first, second = reports(kind, "warning")
    for found in (first, second):
        assert found["distributed"] == []
        assert found.get("short epoch", []) == []
        (text,) = found["plain"]
        assert "no gradient was reduced" in text
        assert "horovod_gradcomp.keras.DistributedOptimizer" in text
    if kind == "keras":
        assert first["horovod's"].startswith("BindingError: got hvd.DistributedOptimizer around")
        # If this fails, Horovod's own optimizer has learned to reduce for Keras 3.
        assert first["weights of horovod's"] != second["weights of horovod's"]
    if kind == "tf_keras":
        assert first["horovod's"] == "nothing was raised"
        assert first["weights of horovod's"] == second["weights of horovod's"]


# Refusals -----------------------------------------------------------------------------------------
def test_xla_is_turned_off_or_refused():
    found = report("keras", "xla")
    assert found["refused"].startswith("GradCompError: got a function that XLA compiles")
    assert "jit_compile=False" in found["refused"]
    (text,) = found["warnings"]
    assert "jit_compile is turned off" in text


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("twice", ["SettingsError", "got SGD that is distributed already"]),
        ("inner", ["SettingsError", "got SGD that is distributed already"]),
        ("op", ["SettingsError", "expected op=hvd.Average or op=hvd.Sum"]),
        ("factor", ["SettingsError", "gradient_predivide_factor=0", "above 0"]),
        ("passes", ["SettingsError", "backward_passes_per_step=0", "whole number from 1"]),
        ("compression", ["SettingsError", "compression=4", "Compression.topk"]),
        ("text", ["SettingsError", "ratio=2"]),
        ("no optimizer", ["SettingsError", "got str", "keras.optimizers.SGD(...)"]),
        ("class", ["SettingsError", "the class SGD", "keras.optimizers.SGD(...)"]),
        ("wrapped", ["SettingsError", "Horovod's own DistributedOptimizer", "twice"]),
        ("no set", ["SettingsError", "process_set=[0, 1]", "hvd.add_process_set"]),
        ("unknown set", ["SettingsError", "ranks=[0, 1]", "hvd.add_process_set"]),
        ("endless", ["SettingsError", "gradient_predivide_factor=inf"]),
        ("words", ["SettingsError", "backward_passes_per_step='two'"]),
        ("legacy", ["SettingsError", "legacy", "horovod.tensorflow.keras.DistributedOptimizer"]),
        ("passes of tf_keras", ["SettingsError", "with tf_keras", "horovod.tensorflow.keras"]),
        ("horovod's", ["BindingError", "horovod_gradcomp.keras.DistributedOptimizer"]),
        ("other callbacks", ["SettingsError", "tf_keras", "TF_USE_LEGACY_KERAS=1"]),
        ("rate", ["SettingsError", "initial_lr=0"]),
        ("warmup", ["SettingsError", "warmup_epochs=0"]),
        ("schedule", ["SettingsError", "learning rate is a schedule"]),
    ],
)
def test_refusals(what, parts):
    found = report("keras", "refusals")
    assert found["untouched"]
    for part in parts:
        assert part in found[what]
