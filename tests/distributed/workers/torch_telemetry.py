"""Check telemetry and the guard of the torch front end on real ranks, on every rank."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops

from horovod_gradcomp.torch import Compression, SettingsError
from tests.distributed.launch import FOLDER, report
from tests.distributed.workers.torch_laws import (
    ALL,
    SIZES,
    SMALL,
    Net,
    backward,
    digest,
    make,
    mean,
    reduce,
    same_everywhere,
    total_residual,
    wanted,
    whole_state,
)
from tests.distributed.workers.waits import leave_cores_to_others

OTHERS = {
    "qsgd": lambda **o: Compression.qsgd(**o),
    "natural": lambda **o: Compression.natural(**o),
    "fp16_alone": lambda **o: Compression.fp16(**o),
    "unbiased_randomk": lambda **o: Compression.randomk(ratio=0.1, memory="none", **o),
    "onebit": lambda **o: Compression.onebit(**o),
    "cltk": lambda **o: Compression.cltk(**o),
    "dgc": lambda **o: Compression.dgc(**o),
    "tucker": lambda **o: Compression.tucker(**o),
    "guarded": lambda **o: Compression.guarded("topk", cosine=1.0, every=3, patience=2, **o),
}
STEPS = 5
ALIKE = ("topk_f16", "linear8", "svd", "acp", "late_topk", "ramp_topk", "ramp_acp", "differential")
"""Kinds that differ from others in nothing that measuring touches."""
CHECKS: dict[str, Any] = {}
JOINS: dict[str, Any] = {}
"""Checks that need ``HOROVOD_CACHE_CAPACITY=0``."""


def check(run: Any) -> Any:
    CHECKS[run.__name__] = run
    return run


@contextmanager
def counted() -> Iterator[list[tuple[Any, ...]]]:
    """Count what is handed to Horovod, by kind and shape."""
    calls: list[tuple[Any, ...]] = []
    names = ("_allreduce_async", "_allgather_async", "_alltoall_async", "_broadcast_async")
    before = {name: getattr(mpi_ops, name) for name in names}
    try:
        for name, plain in before.items():

            def call(
                tensor: Any, *args: Any, name: str = name, plain: Any = plain, **kw: Any
            ) -> Any:
                calls.append((name, tuple(tensor.shape)))
                return plain(tensor, *args, **kw)

            setattr(mpi_ops, name, call)
        yield calls
    finally:
        for name, plain in before.items():
            setattr(mpi_ops, name, plain)


@check
def no_bit_changes() -> list[str]:
    """Return the kinds for which gradients, memories and collectives are those without."""
    kinds = {kind: build for kind, build in {**ALL, **OTHERS}.items() if kind not in ALIKE}
    for kind, build in kinds.items():
        found = []
        for on in (False, True):
            net, compression, records = Net(), build(**SMALL), []
            optimizer = make(net, compression)
            if on:
                compression.telemetry(records.append, every=2)
            seen = []
            with counted() as calls:
                for step in range(STEPS):
                    spoil = "kernel" if step == 3 and hvd.rank() == 0 else ""
                    grads = reduce(net, optimizer, step, spoil=spoil, exact=True)
                    seen.append(digest([*grads.values(), *whole_state(compression).values()]))
            # No collective more: carriers alone are wider.
            seen.append([name for name, _ in sorted(calls)])
            found.append(seen)
            count = len([r for r in records if "event" not in r])
            assert count == (2 if on and hvd.rank() == 0 else 0), (kind, count)
        assert found[0] == found[1], kind
    return list(kinds)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=2e-5, abs_tol=1e-6)


@check
def figures_are_those_of_the_step() -> None:
    for kind in ("topk", "linear4", "ef21", "momentum", "two_phase"):
        net, compression, records = Net(), ALL[kind](**SMALL), []
        optimizer = make(net, compression, lr=0.0)
        compression.telemetry(records.append, every=1, all_ranks=True)
        states: list[dict[str, torch.Tensor]] = [{}]
        for step in range(4):
            reduce(net, optimizer, step)
            states.append({n: v.double() for n, v in whole_state(compression).items()})
        assert [record["step"] for record in records] == [0, 1, 2], "one step late"
        for record in records:
            step, every = record["step"], {}
            for name, layer in record["layers"].items():
                grad = wanted(name, net.get_parameter(name), step, hvd.rank()).double()
                before, after = (
                    {slot: states[at].get(f"{slot}/{name}", torch.zeros(())) for slot in SLOTS}
                    for at in (step, step + 1)
                )
                true, left = grad + before["residual"], after["residual"]
                if kind == "ef21":
                    true, left = grad, grad - after["own"]
                if kind == "momentum":
                    true = before["residual"] + 0.9 * before["momentum"] + grad
                sent = true - left
                cosine = float((true * sent).sum() / (true.norm() * sent.norm()))
                expected = {"grad_norm": grad, "residual_norm": left}
                for key, value in expected.items():
                    assert close(layer[key], float(value.norm())), (kind, name, key, layer)
                assert abs(layer["cosine"] - cosine) < 2e-5, (kind, name, cosine, layer)
                every[name] = [
                    float(v)
                    for v in (
                        grad.norm() ** 2,
                        left.norm() ** 2,
                        (true * sent).sum(),
                        true.norm() ** 2,
                        sent.norm() ** 2,
                    )
                ]
            check_means(record, hvd.allgather_object(every))


SLOTS = ("residual", "own", "momentum")


def check_means(record: dict[str, Any], ranks: list[dict[str, list[float]]]) -> None:
    """Hold a record's means against what each rank worked out."""
    cluster = record["cluster"]
    assert cluster["ranks"] == hvd.size()
    for name, layer in [*cluster["layers"].items(), ("", cluster)]:
        rows = [row for one in ranks for at, row in one.items() if name in ("", at)]
        grad, left, dot, true, sent = (sum(column) for column in zip(*rows))
        assert close(layer["grad_norm"], math.sqrt(grad / hvd.size())), (name, layer)
        assert close(layer["residual_norm"], math.sqrt(left / hvd.size())), (name, layer)
        assert abs(layer["cosine"] - dot / math.sqrt(true * sent)) < 2e-5, (name, layer)
    assert set(cluster["layers"]) == set(record["layers"]) == {"a", "b", "kernel", "wide"}


@check
def counts_add_up() -> None:
    net, compression, records = Net(), ALL["topk"](**SMALL), []
    optimizer = make(net, compression)
    telemetry = compression.telemetry(records.append, every=3, all_ranks=True)
    for step in range(7):
        reduce(net, optimizer, step, spoil="a" if step == 5 and hvd.rank() else "")
    told = compression.stats()
    telemetry.stop()
    assert [(r["step"], r["steps"], r["bad_steps"]) for r in records] == [
        (0, 1, 0),
        (3, 3, 0),
        (6, 3, 1),
    ]
    assert records[-1]["cluster"] is None, "nothing comes after the last step"
    for key in ("raw_bytes", "wire_bytes"):
        assert sum(r["total"][key] * r["steps"] for r in records) == pytest.approx(told[key])
        for r in records:
            tables = [*r["buckets"].values(), r["bypassed"]]
            assert sum(t[key] for t in tables) == pytest.approx(r["total"][key])
            layers = [*r["layers"].values(), r["bypassed"]]
            assert sum(t[key] for t in layers) == pytest.approx(r["total"][key])
    assert all(r["total"]["encode_ms"] > 0 and r["telemetry_ms"] > 0 for r in records)
    reduce(net, optimizer, 7)
    assert len(records) == 3


@check
def a_bad_step_has_no_figures() -> None:
    net, compression, records = Net(), ALL["topk"](), []
    optimizer = make(net, compression)
    compression.telemetry(records.append, every=1, all_ranks=True)
    for step in range(3):
        reduce(net, optimizer, step, spoil="b" if step == 1 and hvd.rank() == 0 else "")
    good, bad = records
    assert good["total"]["cosine"] > 0
    assert bad["total"]["cosine"] is bad["cluster"] is bad["layers"]["a"]["grad_norm"] is None
    assert bad["bad_steps"] == 1
    json.dumps(bad, allow_nan=False)


@check
def one_rank_alone() -> None:
    """Nobody waits for anybody, and carriers are as they were once it has ended."""
    net, compression, records = Net(), ALL["topk"](), []
    optimizer = make(net, compression)
    widths, telemetry = [], None
    for step in range(8):
        if step == 2 and hvd.rank() == 0:
            telemetry = compression.telemetry(records.append, every=1)
        if step == 5 and telemetry:
            telemetry.stop()
        with counted() as calls:
            same_everywhere(reduce(net, optimizer, step).values())
        widths.append({shape for name, shape in calls if shape in ((4,), (9,))})
    assert widths == [{(4,)}] * 3 + [{(9,)}] * 3 + [{(4,)}] * 2, widths
    assert [r["cluster"] and r["cluster"]["ranks"] for r in records] == [1, 1, None][: len(records)]
    assert len(records) == (3 if hvd.rank() == 0 else 0)
    if records:
        for key in ("grad_norm", "residual_norm", "cosine"):
            assert close(records[0]["cluster"][key], records[0]["total"][key])


@check
def horovod_adds_up_by_itself() -> None:
    net, compression, records = Net(), ALL["randomk"](), []
    optimizer = make(net, compression)
    compression.telemetry(records.append, every=1, all_ranks=True)
    for step in range(3):
        reduce(net, optimizer, step)
    assert [record["cluster"] for record in records] == [None, None]
    assert all(0 < layer["cosine"] < 1 for layer in records[1]["layers"].values())


@check
def op_sum_and_a_loss_scale() -> None:
    class Scaler:
        def is_enabled(self) -> bool:
            return True

        def _get_scale_async(self) -> torch.Tensor:
            return torch.tensor(64.0)

    found = []
    for options in ({}, {"op": hvd.Sum}, {"scaled": True}):
        scaled = options.pop("scaled", False)
        net, records = Net(), []
        compression = Compression.topk(ratio=0.02, grad_scaler=Scaler() if scaled else None)
        optimizer = make(net, compression, **options)
        compression.telemetry(records.append, every=1, all_ranks=True)
        times = 64.0 if scaled else 1.0
        for step in range(2):
            reduce(net, optimizer, step, of=lambda *a, times=times: wanted(*a) * times)
        (record,) = records
        found.append([record["total"]["grad_norm"], record["cluster"]["layers"]])
    assert found[0] == found[1] == found[2]


@check
def sinks_of_all_kinds() -> None:
    folder = Path(os.environ[FOLDER])
    net, compression = Net(), ALL["topk"]()
    optimizer = make(net, compression)
    for wrong in (3, None):
        with pytest.raises(SettingsError, match="a path, a SummaryWriter"):
            compression.telemetry(wrong)
    with pytest.raises(SettingsError, match=r"every >= 1"):
        compression.telemetry(print, every=0)
    if hvd.rank() == 0:
        with pytest.raises(SettingsError, match="a folder that there is"):
            compression.telemetry(folder / "none" / "run.jsonl")
    path, calls = folder / "run.jsonl", []

    def fails(record: Any) -> None:
        calls.append(record["step"])
        raise OSError("disk full")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lines = compression.telemetry(path, every=2)
        compression.telemetry(fails, every=1, all_ranks=True)
        for step in range(5):
            same_everywhere(reduce(net, optimizer, step).values())
        with lines:
            pass
        reduce(net, optimizer, 5)
    told = [str(one.message) for one in said if "telemetry ends" in str(one.message)]
    assert calls == [0]
    assert len(told) == 1, told
    assert "its sink failed at step 0: OSError: disk full" in told[0]
    hvd.barrier()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in written] == [0, 2, 4]
    assert [record["rank"] for record in written] == [0, 0, 0]


@check
def two_optimizers() -> None:
    net, other, records = Net(), Net(), []
    other.register_parameter("more", torch.nn.Parameter(torch.zeros(50, 60)))
    compression = ALL["topk"]()
    compression.telemetry(records.append, every=1, all_ranks=True)
    both = [(one, make(one, compression)) for one in (net, other)]
    for step in range(3):
        for one, optimizer in both:
            optimizer.zero_grad()
            backward(
                one, step, skip={"more"} - {n for n, _ in one.named_parameters()}, of=wanted_or
            )
            optimizer.step()
    names = {record["optimizer"] for record in records}
    assert len(records) == 4
    assert "" in names
    assert len(names) == 2


def wanted_or(name: str, like: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    return torch.full_like(like, 0.5) if name == "more" else wanted(name, like, step, rank)


# The guard ------------------------------------------------------------------------------------
def worse(name: str, like: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Return a gradient that is nearly all in its largest values, but for some steps of one rank,
    whose gradients are then large and spread out."""
    value = wanted(name, like, step, rank)
    if 6 <= step <= 9 and rank == hvd.size() - 1:
        return value * (10 / SIZES[name])
    value *= 1e-5
    value.view(-1)[:: max(1, value.numel() // 8)] += 100 * (1 + rank)
    return value


def guarded(**options: Any) -> Any:
    given = {"fallback": "fp16", "cosine": 0.9, "every": 2, "hold": 5, **options}
    return Compression.guarded("topk:ratio=0.02", bucket_bytes=8192, **given)


def codecs(compression: Any) -> list[str]:
    (binding,) = compression._bindings
    return sorted({unit.codec.describe().partition(":")[0] for unit in binding.units})


@check
def a_guard_falls_back_and_returns() -> dict[str, Any]:
    """Return which codec each step used; the books balance throughout."""
    used = {}
    for fallback in ("fp16", "none", "linear:bits=8"):
        net, compression, lines = Net(), guarded(fallback=fallback), []
        optimizer = make(net, compression, lr=0.0)
        compression.telemetry(lines.append, every=4, all_ranks=True)
        applied = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in net.named_parameters()}
        true = {n: v.clone() for n, v in applied.items()}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(20):
                grads = reduce(net, optimizer, step, of=worse)
                same_everywhere(grads.values())
                used.setdefault(fallback, []).append(codecs(compression))
                for n, p in net.named_parameters():
                    applied[n] += grads[n].double()
                    true[n] += mean(n, p, step, of=worse)
                if step == 8:
                    drained = sum(float(v.norm()) for v in whole_state(compression).values())
                if step == 7:
                    held = sum(float(v.norm()) for v in whole_state(compression).values())
        if hvd.rank() == hvd.size() - 1:
            assert held > 100, held
            assert drained < {"none": 1e-30}.get(fallback, 0.02 * held), (fallback, drained, held)
        left = total_residual(compression)
        for n in left:
            off = (applied[n] + left[n] - true[n]).abs().max() / true[n].abs().max()
            assert off < (1e-3 if fallback == "fp16" else 2e-6), (fallback, n, off)
        told = [str(one.message) for one in said if "from step" in str(one.message)]
        assert len(told) == (hvd.rank() == 0), told
        events = [(e["event"], e["step"]) for e in lines if "event" in e]
        assert events == [("fallback", 8), ("return", 13)], events
        (first, second) = (e for e in lines if "event" in e)
        assert (first["measured"], first["until"]) == (6, 13)
        assert "cosine 0." in first["why"]
        assert "below 0.9" in first["why"]
        assert first["codec"].startswith(fallback)
        assert second["codec"].startswith("topk")
    return used


@check
def a_guard_resumes() -> None:
    """A run that was saved in any step is the run that was not."""

    def steps(compression: Any, first: int, last: int) -> tuple[list[str], list[Any]]:
        net, seen, states = Net(), [], []
        optimizer = make(net, compression, lr=0.0)
        for step in range(first, last):
            grads = reduce(net, optimizer, step, of=worse, exact=False)
            seen.append(digest(grads.values()) + str(codecs(compression)))
            states.append(compression.state_dict())
        return seen, states

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight, states = steps(guarded(patience=1), 0, 16)
        assert len({text[64:] for text in straight}) == 2
        for at in (6, 7, 8, 10, 12, 13):
            resumed = guarded(patience=1)
            resumed.load_state_dict(states[at - 1])
            assert steps(resumed, at, 16)[0] == straight[at:], at


@check
def patience_and_the_residual() -> None:
    """Spikes of one look are let pass; a residual that grows is not."""
    for options, first in (
        ({"patience": 2}, 10),
        ({"cosine": None, "residual_norm": 0.4, "every": 1}, 8),
        ({"cosine": 0.01}, None),
    ):
        net, compression = Net(), guarded(**options)
        optimizer = make(net, compression, lr=0.0)
        used = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(14):
                reduce(net, optimizer, step, of=worse)
                used.append(codecs(compression) == ["fp16"])
        found = used.index(True) if True in used else None
        assert found == first, (options, found)


@check
def guards_refuse() -> None:
    for match, build in {
        "residual_norm= or cosine=": lambda: Compression.guarded("topk"),
        "cosine=2": lambda: Compression.guarded("topk", cosine=2.0),
        "hold >= 1": lambda: Compression.guarded("topk", cosine=0.1, hold=0),
        "did you mean 'fp16'": lambda: Compression.guarded("topk", fallback="fp61", cosine=0.1),
        "memory 'residual' with": lambda: Compression.guarded("topk", fallback="qsgd", cosine=0.1),
        "another exchange": lambda: Compression.guarded(
            "linear", cosine=0.1, exchange="hierarchical"
        ),
        "both codecs in the string": lambda: guarded() + Compression.linear(),
    }.items():
        with pytest.raises(SettingsError, match=match):
            build()


def measured_while_ranks_join() -> None:
    """A rank runs out of data in a fallback that ends before it comes back; figures go on."""
    net, records = Net(), []
    options = {"fallback": "fp16", "cosine": 1.0, "every": 2, "hold": 4, "max_rate": 1.0}
    compression = Compression.guarded("acp:rank=2", bucket_bytes=8192, **options)
    optimizer = make(net, compression, lr=0.0)
    compression.telemetry(records.append, every=1, all_ranks=True)
    used = []

    def one(step: int) -> None:
        reduce(net, optimizer, step)
        used.append(codecs(compression))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4 + 5 * hvd.rank()):
            one(step)
        last = compression.join()
        assert last == 1
        for step in range(9, 14):
            one(step)
            same_everywhere(net.get_parameter(n).grad for n in SIZES)
    assert used[:4] == [["acp"]] * 2 + [["fp16"]] * 2
    assert used[-5:] == [["acp"]] * 3 + [["fp16"]] * 2  # a look at step 10 counts again
    ranks = [r["cluster"]["ranks"] for r in records if "event" not in r and r["cluster"]]
    assert ranks[0] == ranks[-1] == hvd.size()
    assert hvd.rank() == 0 or min(ranks) == 1


JOINS["measured_while_ranks_join"] = measured_while_ranks_join


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    leave_cores_to_others()
    for name in sys.argv[1:]:
        try:
            report({name: {**CHECKS, **JOINS}[name]()})
        except Exception:  # ranks are not together any more
            report({name: {"error": traceback.format_exc()}})
            raise


if __name__ == "__main__":
    main()
