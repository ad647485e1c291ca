"""The TensorFlow front end on real ranks: many checks in each start, as starting is slow."""

from __future__ import annotations

import pytest

from .launch import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(500),
]

WORKER = "tensorflow_tape.py"
ROUNDING = 1e-6
"""Of float32 sums, relative to the greatest value."""

TWO_RANKS = (
    "training",
    "options",
    "none_is_horovod",
    "missing_gradient",
    "shared_gradient",
    "two_tapes",
    "bad_step",
    "sparse",
    "dtypes",
    "unknown_tensor",
    "outer_tape",
    "checkpoint",
    "other_variables",
    "handed_over",
    "strangers",
    "unknown_shape",
    "copies",
    "counting",
    "traces",
    "eager_everything",
    "refusals",
)
LAWS = (
    "schedules",
    "bad_step_in_a_schedule",
    "overflow",
    "loss_scale",
    "loss_scale_optimizer",
    "memories",
    "options_of_memories",
    "disagreement",
    "go_on_from_three",
)


def start(np, checks, **options):
    ranks = run_ranks(WORKER, np, args=checks, timeout=450, **options)
    return {check: [rank[check] for rank in ranks] for check in checks}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Where three ranks leave checkpoints for two."""
    return {"GRADCOMP_TEST_CHECKPOINTS": str(tmp_path_factory.mktemp("checkpoints"))}


@pytest.fixture(scope="module")
def two_ranks():
    return start(2, TWO_RANKS)


@pytest.fixture(scope="module")
def laws(checkpoints, three_ranks):
    return start(2, LAWS, env=checkpoints)


@pytest.fixture(scope="module")
def three_ranks(checkpoints):
    checks = ("training_briefly", "bad_step_briefly", "process_set", "save_for_others")
    return start(3, checks, env=checkpoints)


@pytest.fixture(scope="module")
def two_ranks_over_mpi():
    env = {"TF_USE_LEGACY_KERAS": "1"}
    checks = ("training_briefly", "bad_step_briefly", "legacy_keras", "legacy_keras_mixed")
    return start(2, checks, controller="mpi", env=env)


@pytest.fixture(scope="module")
def one_rank():
    return start(1, ("one_process", "keras_3_optimizer"))


def results(reports):
    """Return each rank's report, none of which may be an error."""
    for rank, report in enumerate(reports):
        if isinstance(report, dict):
            assert "error" not in report, f"rank {rank}:\n{report['error']}"
    return reports


def equal_on_all_ranks(reports):
    first, *others = results(reports)
    for other in others:
        assert other == first
    return first


def check_training(reports):
    for run, result in equal_on_all_ranks(reports).items():
        # Without a memory fp16 forgets what it rounds off.
        assert max(result["imbalance"]) < (1e-3 if run.startswith("fp16") else ROUNDING), run


def check_bad_step(reports):
    for run, result in equal_on_all_ranks(reports).items():
        where = result["where"]
        # The bias is not compressed, so it is spoilt by its own values only.
        assert result["finite"] == [False, where != 1, False], run
        assert result["state kept"], run
        # Which order Horovod sums three ranks' values in depends on what it happened to fuse.
        assert result["then off"] <= (ROUNDING if len(reports) > 2 else 0), run
        assert result["counted"] == 1, run


def test_ranks_stay_bit_equal_and_books_balance(two_ranks):
    check_training(two_ranks["training"])


def test_function_and_eager_tape_train_alike(two_ranks):
    runs = results(two_ranks["training"])[0]
    for codec in ("topk", "randomk", "linear", "fp16", "none", "acp", "powersgd"):
        assert runs[f"{codec}, function"] == runs[f"{codec}, eager"]
    assert len({run["weights"] for run in runs.values()}) == 7


def test_ranks_stay_bit_equal_and_books_balance_on_three(three_ranks):
    check_training(three_ranks["training_briefly"])


def test_ranks_stay_bit_equal_and_books_balance_over_mpi(two_ranks_over_mpi):
    check_training(two_ranks_over_mpi["training_briefly"])


def test_options_of_the_tape_change_nothing_but_the_factor(two_ranks):
    for run, result in equal_on_all_ranks(two_ranks["options"]).items():
        assert result == {"difference": 0.0, "same state": True}, run


def test_none_is_bit_identical_to_horovods(two_ranks):
    same = equal_on_all_ranks(two_ranks["none_is_horovod"])
    assert len(same) == 4
    assert all(same.values()), same


def test_a_missing_gradient_shifts_no_residual(two_ranks):
    for run, imbalance in equal_on_all_ranks(two_ranks["missing_gradient"]).items():
        assert max(imbalance) < ROUNDING, run


def test_variables_that_share_a_gradient_tensor_have_their_own_residuals(two_ranks):
    assert max(equal_on_all_ranks(two_ranks["shared_gradient"])) < ROUNDING


def test_two_models_in_one_function(two_ranks):
    for run, imbalance in equal_on_all_ranks(two_ranks["two_tapes"]).items():
        assert max(imbalance) < ROUNDING, run


def test_a_bad_step_on_one_rank_is_one_on_all(two_ranks):
    check_bad_step(two_ranks["bad_step"])


def test_a_bad_step_on_one_rank_of_three_is_one_on_all(three_ranks):
    check_bad_step(three_ranks["bad_step_briefly"])


def test_a_bad_step_over_mpi(two_ranks_over_mpi):
    check_bad_step(two_ranks_over_mpi["bad_step_briefly"])


def test_sparse_gradients_pass_by_and_still_count_as_bad(two_ranks):
    for run, result in equal_on_all_ranks(two_ranks["sparse"]).items():
        assert result["state kept"], run
        assert not result["finite"], run
        if run.startswith("sparse"):
            assert result["kind"] == "IndexedSlices", run
            assert result["residuals"] == [960], run
            assert result["bypassed"] == ["0.table"], run
        else:
            # Compressed: of rows 1 and 5, eight elements each, the twelve largest are sent.
            assert result["kind"] == "EagerTensor", run
            assert result["residuals"] == [240, 960], run
            assert result["bypassed"] == [], run
        assert result["table"] == [8.0 if result["kind"] == "IndexedSlices" else 4.0, 16.0, 0.0]


def test_dtypes_come_back_and_residuals_are_float32(two_ranks):
    found = equal_on_all_ranks(two_ranks["dtypes"])
    for dtype, rounding in (("float16", 1e-3), ("bfloat16", 1e-2), ("float64", ROUNDING)):
        assert found[dtype]["dtypes"] == [dtype]
        assert found[dtype]["residuals"] == ["float32", "int64"]
        assert max(found[dtype]["imbalance"]) < rounding
    assert found["int32"] == {"dtypes": ["int32"], "sum": [1, 3, 5, 7, 9]}


def test_a_tensor_of_unknown_origin(two_ranks):
    found = equal_on_all_ranks(two_ranks["unknown_tensor"])
    assert found["with memory"].startswith("BindingError: got a tensor of shape (24, 40), float32")
    assert "hvd.DistributedGradientTape" in found["with memory"]
    assert found["without"] == 1.5
    assert len(found["warnings"]) == 1
    assert "uncompressed" in found["warnings"][0]


def test_a_tape_around_a_step(two_ranks):
    finite, _ = equal_on_all_ranks(two_ranks["outer_tape"])
    assert finite


def test_copies(two_ranks):
    for found in equal_on_all_ranks(two_ranks["copies"]).values():
        assert found["alike"]
        assert found["own"] == [0, True]
        assert found["in use"].startswith("StateError: got a copy or pickle of a compressor in use")
        assert "tf.train.Checkpoint" in found["in use"]
    found = two_ranks["copies"][0]
    assert found["deepcopy"]["scaled"] == "nothing was raised"
    assert found["pickle"]["scaled"].startswith("StateError")


def test_a_checkpoint_continues_bit_for_bit(two_ranks):
    same = results(two_ranks["checkpoint"])
    for rank in same:
        assert len(rank) == 3
        assert all(rank.values()), rank


def test_variables_of_equal_shapes_in_turn_have_their_own_memories(two_ranks):
    assert equal_on_all_ranks(two_ranks["other_variables"]) == {
        "optimizer": [80.0, 0.0],
        "first": 80.0,
        "second": 0.0,
        "nonzeros of a dense one": 80,
        "owed": [76.0, 0.0],  # four of 80 have been sent
        "third": 0.0,
        "steps": 4,
    }


def test_a_function_that_takes_variables_is_warned_of(two_ranks):
    found = equal_on_all_ranks(two_ranks["handed_over"])
    (text,) = found.pop("argument")
    assert "takes variables as arguments" in text
    assert found == {"closure": [], "eager": [], "no memory": []}


def test_a_checkpoint_of_other_variables_is_refused(two_ranks):
    for found in results(two_ranks["strangers"]):
        first, again = found["alike"]
        assert first == again
        assert found["kept"]
        for what, part in {
            "three": "2 variables, expected 3",
            "one": "2 variables, expected 1",
            "shape": "variable 1.kernel of shape (8, 10), expected 1.kernel of shape (16, 10)",
            "name": "variable 1.kernel of shape (8, 10), expected 1.bias",
            "parts": "lists of [1, 1] and this one in lists of [2]",
            "late": "lists of [1, 1] and this one in lists of [2]",
            "late again": "lists of [1, 1] and this one in lists of [2]",
        }.items():
            assert "StateError" in found[what], found[what]
            assert part in found[what]


def test_gradients_of_unknown_shape_are_counted_as_they_are_sent(two_ranks):
    found = equal_on_all_ranks(two_ranks["unknown_shape"])
    assert found["raw"] == found["bypassed"]["wire_bytes"] == 4 * 4 * (50 + 30)
    assert found["bypassed"]["numel"] == 160  # the mean
    assert found["ratio"] == 1.0


def test_stats(two_ranks):
    for rank, found in enumerate(results(two_ranks["counting"])):
        stats = found["stats"]
        assert not found["before"]
        assert stats["active"]
        assert (stats["world_size"], stats["steps"], stats["bad_steps"]) == (2, 4, 0)
        assert stats["bypassed"]["names"] == [f"1.dense_{1 + rank}/bias"]
        assert stats["bypassed"]["wire_bytes"] == 4 * 4 * 40
        # 48 of 960: float32 values, int16 positions and a count, the exchange's word and the
        # carrier; the first variable took part in three of four steps, the flag in all.
        unit = 4 * 48 + 2 * 48 + 4 + 4 + 4 * 3
        buckets = {name: bucket["wire_bytes"] for name, bucket in stats["buckets"].items()}
        assert buckets == {
            f"0.dense_{rank}/kernel": 3 * unit,
            f"2.dense_{2 + rank}/kernel": 4 * unit,
            "bad-step flag": 4 * 4,
        }
        assert stats["raw_bytes"] == 4 * (4 * 40 + 3 * 960 + 4 * 960)
        assert stats["wire_bytes"] == 7 * unit + 16 + 640
        assert stats["wait_ms_per_step"] is None
        assert found["repr"].startswith("Compressor(topk:ratio=0.05")


def test_every_variable_is_traced_once(two_ranks):
    found = equal_on_all_ranks(two_ranks["traces"])
    assert found == {"compress": 3, "variables": 6}


def test_functions_that_run_eagerly(two_ranks):
    found = equal_on_all_ranks(two_ranks["eager_everything"])
    assert max(found.pop("imbalance")) < ROUNDING
    assert found == {"finite": [False, True, False], "state kept": True, "steps": 3}


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("Adasum", ["ExchangeError", "got op=hvd.Adasum", "hvd.Average or op=hvd.Sum"]),
        ("Max", ["ExchangeError", "got op=hvd.Max"]),
        ("XLA", ["GradCompError", "jit_compile=False"]),
        ("Max unnoticed", ["InvalidArgumentError", "a linear reduction over ranks [0, 1]"]),
        ("elastic", ["GradCompError", "got elastic training"]),
        ("no variables", ["BindingError", "expected variables"]),
        ("no settings", ["SettingsError", "Compression.topk(...)"]),
        ("auto", ["SettingsError", "traced once", "gradcomp advise --measure"]),
        ("other context", ["BindingError", "a context of int"]),
        ("twice", ["BindingError", "kernel twice in one reduction", "memory='none'"]),
        ("twice without memory", ["nothing was raised"]),
        ("other framework", ["SettingsError", "got a numpy.ndarray", "a tensor of TensorFlow"]),
    ],
)
def test_refusals(two_ranks, what, parts):
    for rank in results(two_ranks["refusals"]):
        for part in parts:
            assert part in rank[what]


def test_schedules(laws):
    found = equal_on_all_ranks(laws["schedules"])
    changes = {"ramp": [3, 6], "sums": [3], "ranks": [3, 6], "rounds": [2]}
    turns = {"ramp": [2, 3, 3], "sums": [3, 5], "ranks": [2, 3, 3], "rounds": [2, 6]}
    for name, run in found.items():
        assert run["changes"] == changes[name], name
        assert run["turns"] == sorted(2 * turns[name]), name
        # Horovod adds float16 payloads in float16.
        assert max(run["imbalance"]) < (1e-3 if name == "sums" else ROUNDING), name
        assert run["resumed"], name
    # Three phases: of 960 values each, twice; then the bias and the flag.
    ramp = [2 * (6 * k + 4 + 4 + 12) + 164 for k in (480, 152, 48)]
    assert sorted(set(found["ramp"]["sent"]), reverse=True)[0] == found["ramp"]["sent"][0]
    assert found["ramp"]["sent"][-1] == ramp[-1]


def test_all_steps_count_for_a_schedule_and_good_ones_for_a_codec(laws):
    found = equal_on_all_ranks(laws["bad_step_in_a_schedule"])
    assert found["kept"]
    # Of six steps the second is bad; the codec changes at the third and the fifth.
    assert found["sent"][0] == found["sent"][1] > found["sent"][2] == found["sent"][3]
    assert found["turns"] == [1, 2, 2] * 2


def test_an_overflow_of_the_result_is_a_bad_step(laws):
    for run, result in equal_on_all_ranks(laws["overflow"]).items():
        assert result["finite"] == [i != result["where"] for i in range(3)], run
        assert result["state kept"], run
        assert result["counted"] == 1, run
        assert result["then"], run
        assert result["moved"], run


def test_memories_are_held_without_the_loss_scale(laws):
    found = equal_on_all_ranks(laws["loss_scale"])
    text, plus, read = found.pop("refused")
    assert text.startswith("SettingsError: got loss_scale='auto'")
    assert "before '+'" in plus
    assert "expected a scalar variable" in read
    for run, result in found.items():
        assert all(result["as without a scale"]), run
        assert result["state"], run
        assert max(result["imbalance"]) < ROUNDING, run


def test_a_bad_step_on_one_rank_under_a_loss_scale_optimizer(laws):
    found = equal_on_all_ranks(laws["loss_scale_optimizer"])
    assert "optimizer.build" in found["unbuilt"]
    assert found["scales"] == [256.0, 256.0, 128.0, 128.0]
    assert found["kept"] == [False, False, True, False]


def test_options_of_memories(laws):
    found = equal_on_all_ranks(laws["options_of_memories"])
    assert found["narrow"]["dtype"] == ["bfloat16"] * 2
    assert ROUNDING < max(found["narrow"]["imbalance"]) < 1e-2
    assert max(found["clipped"]) < ROUNDING
    sent = found["sent"]
    assert sent[0] == sent[1] == sent[2] == sent[4] < sent[3] / 2
    assert found["off"] < 1e-3 < found["worse"]
    for how, message in found["refused"].items():
        assert message.startswith(f"SettingsError: got exchange='{how}'")


def test_laws_of_memories(laws):
    found = equal_on_all_ranks(laws["memories"])
    assert len(found) == 4
    for memory, result in found.items():
        assert result["spoilt"] == [False, True, False], memory
        assert result["kept"], memory
        assert result["resumed"], memory
        assert max(result["books"]) < ROUNDING, memory


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("codec", ["codec: linear:bits=4", "on rank 0, linear:bits=5"]),
        ("kind", ["codec: topk", "memory: residual"]),
        ("memory", ["memory: none on rank 0, residual:decay=1.0 on rank 1"]),
        ("size", ["min_numel: 1000000 on rank 0, 64 on rank 1"]),
        ("none", ["codec: none on rank 0, topk"]),
        ("op", ["op: Average on rank 0, Sum on rank 1"]),
        ("steps", ["steps so far: 0 on rank 0, 7 on rank 1"]),
    ],
)
def test_ranks_that_are_set_differently_say_so(laws, what, parts):
    for rank in results(laws["disagreement"]):
        assert rank[what].startswith("InvalidArgumentError")
        for part in ("SettingsError: got ", "expected the same on all ranks", *parts):
            assert part in rank[what]


def test_a_rank_that_traces_more_than_the_others_waits_for_nobody(laws):
    equal_on_all_ranks([rank["afterwards"] for rank in results(laws["disagreement"])])


def test_two_ranks_go_on_from_what_three_saved(laws, three_ranks):
    assert max(equal_on_all_ranks(three_ranks["save_for_others"])) < ROUNDING
    reports = results(laws["go_on_from_three"])
    found = equal_on_all_ranks([{k: v for k, v in r.items() if k != "refused"} for r in reports])
    assert max(found["before"]) < ROUNDING
    assert max(found["after"]) < ROUNDING


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("unbound", "compression.bind(model.trainable_variables)"),
        ("unresized", "resize_state"),
        ("missing", "checkpoints of ranks [0, 1], expected one of each of 3"),
        ("steps", "saved at different steps"),
        ("settings", "settings differs"),
    ],
)
def test_checkpoints_that_do_not_fit(laws, what, part):
    for rank in results(laws["go_on_from_three"]):
        assert rank["refused"][what].startswith("StateError"), rank["refused"][what]
        assert part in rank["refused"][what]


def test_batches_of_other_sizes_go_on_with_the_same_memory() -> None:
    """A smaller last batch, an evaluation, and training again: traced anew, the books balance."""
    first, second = run_ranks("tensorflow_retraced.py", 2, timeout=120)
    assert first["weights"] == second["weights"]
    for one in (first, second):
        assert one["traces"] == 3
        assert one["steps"] == 7
        assert one["off"] < 1e-5
        assert one["owed"] > 0.1, "nothing was left out"


def test_a_thousand_eager_steps_leave_nothing_behind() -> None:
    for one in run_ranks("tensorflow_long.py", 2, timeout=200):
        assert one["steps"] == 1000
        first, *later = one["looks"]
        for look in later:
            for what in ("variables", "records", "tensors"):
                assert look[what] == first[what]
            assert look["blocks"] < first["blocks"] + 400, "Python holds more from step to step"
            assert look["resident"] < first["resident"] + 9e6  # a gradient a step would be 9.8e6


def test_process_set(three_ranks):
    zero, one, two = results(three_ranks["process_set"])
    assert zero["grads"] == two["grads"] != one["grads"]
    assert one["grads"] == one["own"]
    assert [rank["steps"] for rank in (zero, one, two)] == [5, 0, 5]
    assert max(zero["imbalance"]) < ROUNDING


def test_fit_of_tf_keras(two_ranks_over_mpi):
    found = equal_on_all_ranks(two_ranks_over_mpi["legacy_keras"])
    assert found["before"] != found["after"]
    assert found["steps"] == 16
    assert found["ratio"] < 0.1


def test_fit_of_tf_keras_with_a_loss_scale(two_ranks_over_mpi):
    reports = results(two_ranks_over_mpi["legacy_keras_mixed"])
    held = [rank.pop("held") for rank in reports]
    found = equal_on_all_ranks(reports)
    assert found["scale"] == 32.0
    assert found["finite"]
    assert found["steps"] == [8, 1]
    assert 0 < max(held) < 1  # of scaled gradients it would be 32 times as much
    (text,) = found["warnings"]
    assert "start_after" in text


def test_one_process_changes_nothing(one_rank):
    (found,) = results(one_rank["one_process"])
    assert found["untouched"]
    assert not found["stats"]["active"]
    assert found["stats"]["ratio"] is None
    assert found["stats"]["note"].startswith("inactive: one process")


def test_a_keras_3_optimizer_is_refused_at_construction(one_rank):
    (texts,) = one_rank["keras_3_optimizer"]
    assert len(texts) == 2
    for text in texts:
        assert text.startswith("BindingError: got hvd.DistributedOptimizer around a Keras 3")
