"""``Compression.auto`` on real ranks: what it does from the first step to the choice and after.

Steps are made slow at will, and what a rank measures is planted where a choice must be certain.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd
import pytest
import torch

from horovod_gradcomp.torch import (
    BindingError,
    Compression,
    SettingsError,
    StateError,
    rehearsal,
)
from tests.distributed.launch import FOLDER, report

MILD, STRONG = "linear:bits=8,block=64", "topk:ratio=0.02"
FORMS = [MILD, STRONG]
SLOW = 0.03
"""Seconds that are added to a step which is to be slow."""


class Run:
    """A model whose gradients are made to measure, trained by ``auto``."""

    def __init__(self, kind: Any = torch.optim.SGD, **settings: Any) -> None:
        gen = torch.Generator().manual_seed(5)
        self.weights = [torch.nn.Parameter(torch.randn(48, 40, generator=gen)) for _ in range(2)]
        self.weights.append(torch.nn.Parameter(torch.zeros(40)))
        self.named = [(f"w{i}", p) for i, p in enumerate(self.weights)]
        self.compression = Compression.auto(**{"candidates": FORMS, **settings})
        self.optimizer = hvd.DistributedOptimizer(
            kind(self.weights, lr=1.0),
            named_parameters=self.named,
            compression=self.compression,
        )
        self.start = [p.detach().clone() for p in self.weights]
        self.count = 0

    def gradient(self, i: int, rank: int, step: int) -> torch.Tensor:
        gen = torch.Generator().manual_seed(1000 * step + 10 * rank + i)
        return torch.randn(self.weights[i].shape, generator=gen)

    def step(self, slow: float = 0.0) -> None:
        self.optimizer.zero_grad()
        grads = (self.gradient(i, hvd.rank(), self.count) for i in range(3))
        sum((p * g).sum() for p, g in zip(self.weights, grads)).backward()
        time.sleep(slow)
        self.optimizer.step()
        self.count += 1

    def until_settled(self, dense: float = SLOW, chosen: float = 0.0) -> list[Any]:
        """Train with steps made so much slower; return the choice after each."""
        seen: list[Any] = []
        while not self.told["settled"]:
            assert self.count < 30, "it never settles"
            self.step(dense if self.choice is None else chosen)
            seen.append(self.choice)
        return seen

    @property
    def told(self) -> Mapping[str, Any]:
        if not self.compression._bindings:
            self.compression.bind_optimizer(self.optimizer)
        return self.compression.stats()["auto"][0]

    @property
    def choice(self) -> str | None:
        return self.told["choice"]

    def check_books(self) -> None:
        """What was applied and the mean of what ranks hold is the sum of the true means."""
        memory = self.compression.state_dict()["optimizers"][0]["memory"].get("residual", {})
        ranks = range(hvd.size())
        for i, (name, p) in enumerate(self.named):
            true = sum(self.gradient(i, r, s) for r in ranks for s in range(self.count)) / len(
                ranks
            )
            held = memory.get(name, torch.zeros_like(p))
            owed = hvd.allreduce(held, name=f"owed.{name}")
            gap = (self.start[i] - p.detach() + owed - true).abs().max().item()
            assert gap < 1e-4, f"{name} is off by {gap} after {self.count} steps"
            if i == 2:
                assert not held.any()

    def weights_alike(self) -> None:
        for name, p in self.named:
            all_of_them = hvd.allgather(p.detach()[None], name=f"alike.{name}")
            assert all(torch.equal(one, all_of_them[0]) for one in all_of_them)


@contextlib.contextmanager
def measured(by_rank: Mapping[int, Mapping[str, float]]) -> Iterator[None]:
    """Let rehearsals take what is planted for a rank, by the codec's name, in seconds."""
    plain = rehearsal._run

    def run(own: Any, grads: Any) -> tuple[float, float, float]:
        plain(own, grads)
        seconds = by_rank[hvd.rank() % 2][own.settings.codec.registered]
        return seconds / 4, seconds / 4, seconds

    with mock.patch.object(rehearsal, "_run", run):
        yield


def alike(**seconds: float) -> Mapping[int, Mapping[str, float]]:
    return {0: seconds, 1: seconds}


STRONG_WINS = alike(linear=9.0, topk=1e-6)


def right_from_the_first_step() -> None:
    run = Run()
    with measured(STRONG_WINS):
        for _ in range(3):
            run.step(SLOW)
            means = [
                sum(run.gradient(i, r, run.count - 1) for r in range(hvd.size())) / hvd.size()
                for i in range(3)
            ]
            assert all(torch.allclose(p.grad, m, atol=1e-6) for p, m in zip(run.weights, means))
            run.check_books()
        seen = run.until_settled()
    assert seen[0] is None, seen
    assert seen[-1] == STRONG, seen
    for _ in range(5):
        run.step()
        run.check_books()
    run.weights_alike()
    stats = run.compression.stats()
    assert stats["auto"][0]["candidates"][STRONG]["step_ms"] < stats["auto"][0]["dense_step_ms"]
    assert list(stats["bypassed"]["names"]) == ["w2"]
    assert stats["compressed"]["numel"] == 2 * 48 * 40
    assert stats["compressed"]["wire_bytes"] > 0


def clocks_that_differ() -> None:
    """Alone, rank 0 would take the strong one, and rank 1 the mild one."""
    run = Run()
    with measured({0: {"linear": 9.0, "topk": 1e-6}, 1: {"linear": 1e-6, "topk": SLOW / 2}}):
        run.until_settled()
    assert run.choice == STRONG, run.told  # the slowest rank of each decides
    told = torch.tensor([run.told["candidates"][form]["step_ms"] for form in FORMS])
    every = hvd.allgather(told[None], name="told")
    assert all(torch.equal(one, every[0]) for one in every)
    run.check_books()


def no_codec_is_worth_it() -> None:
    run = Run()
    with measured(alike(linear=9.0, topk=9.0)):
        seen = run.until_settled(dense=0.0)
    assert {*seen} == {None, "none"}, seen
    run.step()
    run.check_books()
    assert run.compression.stats()["compressed"]["wire_bytes"] == 0


def one_that_does_not_hold_what_it_promised() -> None:
    run = Run()
    with measured(STRONG_WINS):
        seen = run.until_settled(chosen=3 * SLOW)
    assert STRONG in seen, seen
    assert seen[-1] == "none"
    assert not run.compression.state_dict()["optimizers"][0]["memory"]
    assert run.compression.stats()["state_bytes"] == 0
    run.check_books()
    run.step()
    run.check_books()
    run.weights_alike()


def a_bad_step_when_all_is_to_be_sent() -> None:
    """What is remembered stays, and is sent by the next step."""
    run = Run()
    with measured(STRONG_WINS):
        while "trial_step_ms" not in run.told:
            run.step(SLOW if run.choice is None else 3 * SLOW)
    assert run.compression._bindings[0].units[0].store.owed > 0
    weights = [p.detach().clone() for p in run.weights]
    plain, run.gradient = run.gradient, lambda *which: plain(*which) / (which[1] != 1)
    run.step()  # rank 1 has inf and NaN
    run.gradient = plain
    for p, before in zip(run.weights, weights):
        assert not p.isfinite().all()
        p.data.copy_(before)  # as a loss scaler does
    run.count -= 1
    assert run.choice == STRONG
    run.check_books()
    run.step()
    assert run.choice == "none"
    run.check_books()


def saved_and_resumed() -> None:
    first = Run()
    with measured(STRONG_WINS):
        first.until_settled()
    saved = copy.deepcopy(first.compression.state_dict())
    weights = [p.detach().clone() for p in first.weights]
    count = first.count
    for _ in range(3):
        first.step()
    for bound in (False, True):
        again = Run()
        if bound:
            again.compression.bind_optimizer(again.optimizer)
        again.compression.load_state_dict(saved)
        for p, before in zip(again.weights, weights):
            p.data.copy_(before)
        again.count = count
        with mock.patch.object(rehearsal, "_run", side_effect=AssertionError("measured again")):
            for _ in range(3):
                again.step()
        assert again.told["settled"]
        assert again.choice == STRONG
        assert all(torch.equal(p, q) for p, q in zip(again.weights, first.weights))
    other = Run(candidates=[MILD])
    with pytest.raises(StateError, match="settings"):
        other.compression.load_state_dict(saved)
    clone = copy.deepcopy(first.compression)
    assert clone.state_dict()["optimizers"][0]["auto"]["choice"] == STRONG


def saved_before_the_choice() -> None:
    run = Run()
    run.step()
    saved = run.compression.state_dict()
    assert saved["optimizers"][0]["auto"]["choice"] is None
    again = Run()
    again.compression.load_state_dict(saved)
    with measured(STRONG_WINS):
        assert again.until_settled()[-1] == STRONG


def ranks_with_other_choices_say_so() -> None:
    first = Run()
    with measured(STRONG_WINS):
        first.until_settled()
    again = Run()
    if hvd.rank() == 0:
        again.compression.load_state_dict(first.compression.state_dict())
    with pytest.raises(SettingsError, match=f"auto: {STRONG} on rank 0, None on rank"):
        again.step()


def an_optimizer_that_adapts() -> None:
    """Error feedback does not go with Adam, so that nothing is left to choose from."""
    run = Run(torch.optim.Adam)
    with mock.patch.object(rehearsal, "_run", side_effect=AssertionError("measured")):
        seen = run.until_settled()
    assert seen[-1] == "none"


def log_and_join() -> None:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("horovod_gradcomp")
    logger.addHandler(handler)
    run = Run()
    run.step()
    with pytest.raises(BindingError, match=r"before Compression\.auto has chosen"):
        run.compression.join()
    with measured(STRONG_WINS):
        run.until_settled()
    logger.removeHandler(handler)
    assert len(lines) == (hvd.rank() == 0), lines
    assert all(f"chose {STRONG}: " in line for line in lines)


def two_optimizers_and_a_trace() -> None:
    """One object serves both; each chooses for itself, and a trace follows the new buckets."""
    run = Run()
    other = torch.nn.Parameter(torch.ones(50, 50))
    second = hvd.DistributedOptimizer(
        torch.optim.SGD([other], lr=0.1),
        named_parameters=[("other", other)],
        compression=run.compression,
    )
    folder = Path(os.environ[FOLDER])
    with measured(STRONG_WINS), run.compression.trace(folder / "trace.json"):
        while not all(one["settled"] for one in [run.told, *run.compression.stats()["auto"]]):
            run.step(SLOW if run.choice is None else 0.0)
            (other * other).sum().backward()
            second.step()
            second.zero_grad()
    first, mine = run.compression.stats()["auto"]
    assert first["choice"] == STRONG
    assert mine["choice"] in ("none", *FORMS)
    run.check_books()
    if hvd.rank() == 0:
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert {"encode w1+1", "decode w1+1", "step 0"} <= {event["name"] for event in events}


def telemetry_follows() -> None:
    """Records tell of the buckets and settings in use, and of all bytes since the one before."""
    for chosen, last in ((0.0, STRONG), (3 * SLOW, "none")):
        run, records = Run(), []
        with (
            measured(STRONG_WINS),
            run.compression.telemetry(records.append, every=2, all_ranks=True),
        ):
            run.until_settled(chosen=chosen)
            for _ in range(3 + run.count % 2):
                run.step()
        assert run.choice == last
        assert [record["step"] for record in records] == list(range(0, run.count, 2))
        assert not records[0]["buckets"]
        used = {name for record in records for name in record["buckets"]}
        assert used == {"w1+1"}, used
        assert bool(records[-1]["buckets"]) == (last != "none")
        sent = sum(record["steps"] * record["total"]["wire_bytes"] for record in records)
        expected = run.compression.stats()["wire_bytes_per_step"] * (records[-1]["step"] + 1)
        assert abs(sent - expected) < 1e-3 * expected, (sent, expected)
        run.check_books()


CHECKS = {
    check.__name__: check
    for check in (
        right_from_the_first_step,
        clocks_that_differ,
        no_codec_is_worth_it,
        one_that_does_not_hold_what_it_promised,
        a_bad_step_when_all_is_to_be_sent,
        saved_and_resumed,
        saved_before_the_choice,
        ranks_with_other_choices_say_so,
        an_optimizer_that_adapts,
        log_and_join,
        two_optimizers_and_a_trace,
        telemetry_follows,
    )
}


def main() -> None:
    """Run the checks that the command line names, or all; stop at the first that fails."""
    hvd.init()
    torch.set_num_threads(1)
    found = {}
    for name in sys.argv[1:] or CHECKS:
        try:
            CHECKS[name]()
        except BaseException:
            found[name] = traceback.format_exc()
            report(found)
            raise
        found[name] = "ok"
    report(found)


if __name__ == "__main__":
    main()
