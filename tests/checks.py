"""The laws of several ranks and of the carrier; those of one codec come with the package.

The suite applies them to every registered codec, and ``test_suite_bites.py`` to planted faults, so
that each is seen to fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from horovod_gradcomp import ExchangeError
from horovod_gradcomp.core.carrier import Carrier
from horovod_gradcomp.core.codec import Combine
from horovod_gradcomp.testing.laws import (
    EPS,
    FEW_KINDS_LAWS,
    LAWS,
    Case,
    Result,
    bad_values_keep_the_size,
    bias_is_declared,
    error_is_optional,
    frameworks_agree,
    generators_are_left_alone,
    mean_is_unbiased,
    nearly_agree,
    nothing_is_lost,
    obey,
    payloads_add,
    results_are_finite,
    results_are_flat_float32,
    runs_repeat,
    same_bits,
    sizes_are_declared,
    storage_is_own,
    zeros_stay_zeros,
)
from tests import table
from tests.lockstep import Ranks

__all__ = [
    "EPS",
    "FEW_KINDS_LAWS",
    "LAWS",
    "WORLDS",
    "Case",
    "Result",
    "bad_ranks_are_seen_by_all",
    "bad_values_keep_the_size",
    "bias_is_declared",
    "books_balance",
    "carrier_knows_average_and_sum",
    "carrier_refuses_other_sets",
    "carrier_refuses_what_is_not_linear",
    "carriers",
    "error_is_optional",
    "every_memory_keeps_its_books",
    "frameworks_agree",
    "generators_are_left_alone",
    "goes_on_bit_for_bit",
    "mean_is_unbiased",
    "nearly_agree",
    "nothing_is_lost",
    "obey",
    "payloads_add",
    "results_are_finite",
    "results_are_flat_float32",
    "ring_sum",
    "runs_repeat",
    "same_bits",
    "sizes_are_declared",
    "storage_is_own",
    "zeros_stay_zeros",
]


# Over several ranks ---------------------------------------------------------------------------


def books_balance(ranks: Ranks, *, steps: int = 40) -> None:
    """At every step applied plus held is the sum of the true mean gradients.

    The gradients hold a spike for three steps. A reduction in half precision rounds after the
    memory has looked, so its books balance to half precision.
    """
    fw, rng = ranks.fw, np.random.default_rng(0)
    applied, true, lost, moved = np.zeros((4, ranks.numel))
    eps = _rounding(ranks)
    for step in range(steps):
        grads = rng.standard_normal((ranks.size, ranks.numel)).astype(np.float32)
        if 10 <= step < 13:
            grads[:, ranks.numel // 3] = 1e4
        outcomes = ranks.step(step, grads)
        totals = [fw.array(o.total) for o in outcomes]
        for total in totals[1:]:
            same_bits(totals[0], total, f"step {step}: what two ranks apply")
        for shared in ranks.shared[1:]:
            for a, b in zip(ranks.shared[0], shared):
                same_bits(fw.array(a), fw.array(b), f"step {step}: what two ranks share")
        errors = np.stack([fw.array(o.error) for o in outcomes]).astype(np.float64)
        applied += totals[0]
        true += grads.mean(axis=0, dtype=np.float64)
        lost += errors.mean(axis=0)
        held = lost
        if ranks.memory.slots:
            held = np.mean([fw.array(s[0]).astype(np.float64) for s in ranks.held], axis=0)
        moved += np.abs(totals[0]) + np.abs(grads).max(axis=0) + np.abs(errors).max(axis=0)
        wrong = np.abs(applied + held - true)
        allowed = eps * np.maximum(moved, moved.max()) if ranks.codec.mixes else eps * moved
        assert (wrong <= allowed).all(), f"step {step}: off by {wrong.max()}"


def _rounding(ranks: Ranks) -> float:
    """Return how a sum over ranks rounds, relative to its terms."""
    if ranks.codec.combine is Combine.GATHER:
        return EPS
    probe = Case(ranks.fw, ranks.codec, np.ones(1, np.float32), table.call(table.whole(1)))
    return float(np.finfo(ranks.fw.array(probe.once.payload).dtype).eps)


def every_memory_keeps_its_books(ranks: Ranks, *, steps: int = 6) -> None:
    """All that a rank took in was applied, is held, or is what the codec left for good.

    What is taken in is the gradient, with the speed that a momentum has gathered. Where the memory
    is a reference it is the difference to that, each step has books of its own, and the reference
    moves by what was sent. Ranks apply the same bits, and share the same bits.
    """
    fw, memory, rng = ranks.fw, ranks.memory, np.random.default_rng(1)
    eps = 4 * _rounding(ranks)
    applied, taken, left, moved = np.zeros((4, ranks.numel))

    def held() -> np.ndarray:  # (slots, ranks, numel)
        state = [[fw.array(s).astype(np.float64) for s in rank] for rank in zip(*ranks.held)]
        return np.array(state).reshape(len(memory.slots), ranks.size, ranks.numel)

    def agree(a: np.ndarray, b: np.ndarray, what: str) -> None:
        allowed = eps * (moved.max() if ranks.codec.mixes or memory.references else moved)
        assert (np.abs(a - b) <= allowed).all(), f"{what}: off by {np.abs(a - b).max()}"

    for step in range(steps):
        grads = rng.standard_normal((ranks.size, ranks.numel)).astype(np.float32)
        before = held()
        outcomes = ranks.step(step, grads)
        total, errors = outcomes[0].total, np.stack([fw.array(o.error) for o in outcomes])
        for rank, outcome in enumerate(outcomes):
            same_bits(fw.array(total), fw.array(outcome.total), f"step {step}: what is applied")
            for a, b in zip(ranks.shared[0], ranks.shared[rank], strict=True):
                same_bits(fw.array(a), fw.array(b), f"step {step}: what is shared")
        moved += np.abs(fw.array(total)) + np.abs(grads).max(axis=0) + np.abs(errors).max(axis=0)
        if len(before):
            moved += np.abs(before).max(axis=(0, 1))
        if memory.references:
            sent = grads - before[0] - errors
            agree(fw.array(total), before[1][0] + sent.mean(axis=0), f"step {step}: gradient")
            after = held()
            agree(after[0], before[0] + memory.rate * sent, f"step {step}: own reference")
            for mean in after[1]:
                same_bits(after[1][0], mean, f"step {step}: mean of references")
            agree(after[1][0], after[0].mean(axis=0), f"step {step}: mean of references")
            continue
        speed = memory.m * before[0] if memory.is_momentum else 0.0
        taken += (grads.astype(np.float64) + speed).mean(axis=0)
        applied += fw.array(total)
        left = held()[-1].mean(axis=0) if memory.slots else left + errors.mean(axis=0)
        agree(applied + left, taken, f"step {step}: books")


def goes_on_bit_for_bit(ranks: Ranks, *, steps: int = 2) -> None:
    """From what was held and shared at one time the same steps give the same bits again.

    Nothing else is remembered, and nothing that is held is written to.
    """
    fw = ranks.fw
    grads = np.random.default_rng(2).standard_normal((4 * steps, ranks.size, ranks.numel))
    grads = grads.astype(np.float32)
    for step in range(steps):
        ranks.step(step, grads[step])
    kept = [[fw.array(t).copy() for t in rank] for rank in (*ranks.held, *ranks.shared)]
    turn, runs = ranks.turn, []
    for _ in range(2):
        again = [tuple(fw.tensor(t) for t in rank) for rank in kept]
        ranks.held, ranks.shared, ranks.turn = again[: ranks.size], again[ranks.size :], turn
        done = [ranks.step(step, grads[step]) for step in range(steps, 2 * steps)]
        runs.append([fw.array(each.total) for outcomes in done for each in outcomes])
    for a, b in zip(*runs, strict=True):
        same_bits(a, b, "a run that goes on")


def bad_ranks_are_seen_by_all(ranks: Ranks, grads: np.ndarray) -> None:
    """Inf or NaN on one rank gives every rank the same bad, non-finite outcome.

    Every memory stays as it was, and the next step is a good one.
    """
    fw = ranks.fw
    ranks.step(0, grads)
    for bad_rank in range(ranks.size):
        for value, at in ((np.nan, 0), (np.inf, ranks.numel // 2), (-np.inf, ranks.numel - 1)):
            before = [[fw.array(s) for s in state] for state in [*ranks.held, *ranks.shared]]
            spoilt = grads.copy()
            spoilt[bad_rank, at] = value
            for outcome in ranks.step(1, spoilt):
                assert np.isnan(fw.array(outcome.bad)), "the flag does not tell"
                assert not np.isfinite(fw.array(outcome.total)).any(), "a finite gradient"
            for old, state in zip(before, [*ranks.held, *ranks.shared]):
                for a, b in zip(old, state):
                    same_bits(a, fw.array(b), "memory after a bad step")
    for outcome in ranks.step(2, grads):
        assert fw.array(outcome.bad) == 0
        assert np.isfinite(fw.array(outcome.total)).all()


# The carrier ----------------------------------------------------------------------------------

WORLDS = (*range(1, 65), 100, 1000, 4096)


def carriers(cls: type[Carrier], ranks: Iterable[int]) -> np.ndarray:
    """Return what some ranks contribute, a row each."""
    return np.array([cls.row(rank) for rank in ranks], np.float32)


def ring_sum(rows: np.ndarray) -> np.ndarray:
    """Return the sum of rows as a ring forms it, one after the other in float32."""
    out = np.zeros(rows.shape[1], np.float32)
    for row in rows:
        out += row
    return out


def carrier_knows_average_and_sum(cls: type[Carrier]) -> None:
    """The factor is exactly 1 or N, also where N times float32(1 / N) is not 1."""
    f32 = np.float32
    for size in WORLDS:
        carrier, total = cls(range(size)), ring_sum(carriers(cls, range(size)))
        assert carrier.factor((total * f32(1 / size)).tolist(), "w") == 1.0, size
        assert carrier.factor((total / f32(size)).tolist(), "w") == 1.0, size
        assert carrier.factor(total.tolist(), "w") == float(size), size


def carrier_refuses_other_sets(cls: type[Carrier]) -> None:
    """No reduction over other ranks passes, whatever their mean rank."""
    for size in range(2, 9):
        carrier = cls(range(size))
        for count in range(1, size):
            for others in itertools.combinations(range(size), count):
                total = ring_sum(carriers(cls, others))
                for values in (total / count, total, total / size):
                    _refused(carrier, values)


def carrier_refuses_what_is_not_linear(cls: type[Carrier]) -> None:
    """Adasum, Min, Max and Product are told from any sum or mean."""
    for size in (2, 4, 8, 16, 32, 64):
        rows = carriers(cls, range(size)).astype(np.float64)
        for values in (_adasum(rows), rows.min(axis=0), rows.max(axis=0), rows.prod(axis=0)):
            _refused(cls(range(size)), values)


def _adasum(rows: np.ndarray) -> np.ndarray:
    if len(rows) == 1:
        return rows[0]
    a, b = _adasum(rows[: len(rows) // 2]), _adasum(rows[len(rows) // 2 :])
    dot = a @ b
    return a * (1 - dot / (2 * (a @ a))) + b * (1 - dot / (2 * (b @ b)))


def _refused(carrier: Carrier, values: np.ndarray) -> None:
    try:
        factor = carrier.factor(values.tolist(), "w")
    except ExchangeError:
        return
    raise AssertionError(f"{values.tolist()} gave the factor {factor}")
