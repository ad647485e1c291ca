"""The two-phase exchange: parts, the rule that chooses it, and its books, on both frameworks."""

import math

import numpy as np
import pytest

from horovod_gradcomp.codecs import build
from horovod_gradcomp.core import twophase
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.core.reference import Differential
from horovod_gradcomp.core.route import Team, route
from tests import lockstep, table

SHAPES = ((37, 41), (501,), (8, 3, 3, 3), (1,), (1700,))
NUMEL = sum(map(math.prod, SHAPES))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_parts_cover_everything_once(size):
    parts = twophase.parts(SHAPES, size)
    assert [p.start for p in parts] == [0, *[p.stop for p in parts[:-1]]]
    assert parts[-1].stop == NUMEL
    lengths = [p.numel for p in parts]
    assert max(lengths) - min(lengths) <= 1
    for part in parts:
        assert sum(map(math.prod, part.shapes)) == part.numel
    ends = set(np.cumsum([math.prod(s) for s in SHAPES]))
    seen, at = set(), 0
    for part in parts:
        for (length,) in part.shapes:
            at += length
            seen.add(at)
    assert ends <= seen  # no piece spans two tensors


@pytest.mark.parametrize(
    ("text", "numel", "size", "chosen"),
    [
        ("linear:bits=4", 10**6, 8, True),
        ("natural", 10**6, 3, True),
        ("linear:bits=4", 10**6, 2, False),  # the same bytes, and one more rounding
        ("linear:bits=4", 50_000, 8, False),  # too small
        ("topk:ratio=0.5", 10**6, 8, False),
        ("sign", 10**6, 8, True),
        ("sign:vote=True", 10**7, 8, False),
        ("fp16", 10**7, 8, False),
        ("powersgd", 10**7, 8, False),
    ],
)
def test_the_rule(text, numel, size, chosen):
    assert twophase.pays(build(text), [(numel,)], size) == chosen


def run(fw, codec, memory, server, size, steps, *, bad=None):
    """Return what was applied, what is owed in the end, and what was true."""
    xp = fw.xp
    zero = np.zeros(NUMEL, np.float32)
    held = [tuple(fw.tensor(zero) for _ in memory.slots) for _ in range(size)]
    parts = twophase.parts(SHAPES, size)
    owed = [tuple(fw.tensor(zero[: p.numel]) for _ in server.slots) for p in parts]
    applied, true = np.zeros(NUMEL), np.zeros(NUMEL)
    for step in range(steps):
        grads = [table.values("gaussian", NUMEL) * (r + 1) * (step % 3 + 1) for r in range(size)]
        grads = [np.roll(g, 17 * step + r).astype(np.float32) for r, g in enumerate(grads)]
        if step == bad:
            grads[-1][5] = np.inf
        runs = [
            twophase.start(
                xp,
                codec,
                memory.compensate(xp, fw.tensor(grad), state, None),
                table.call(SHAPES, size=size, step=step, rank=rank),
                want_error=memory.wants_error,
                name="layer",
                server=twophase.Server(server, own),
            )
            for rank, (grad, state, own) in enumerate(zip(grads, held, owed))
        ]
        outcomes = lockstep.drive(fw, runs, average=False)
        totals = [fw.array(o.total) for o in outcomes]
        assert all(t.tobytes() == totals[0].tobytes() for t in totals), "ranks differ"
        if step == bad:
            assert all(math.isnan(fw.array(o.bad)) for o in outcomes)
            assert np.isnan(totals[0]).all()
            continue
        assert all(fw.array(o.bad) == 0 for o in outcomes)
        applied += totals[0] / size
        true += np.mean(np.asarray(grads, np.float64), 0)
        if memory.slots:
            held = [(o.error,) for o in outcomes]
        if server.slots:
            owed = [(o.owed,) for o in outcomes]
    left = np.zeros(NUMEL)
    if memory.slots:
        left += np.mean([fw.array(state[0]).astype(np.float64) for state in held], 0)
    if server.slots:
        left += np.concatenate([fw.array(state[0]) for state in owed])
    return applied, left, true


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("linear:bits=4", 2),
        ("sign", 3),
        ("onebit", 2),
        ("fp8", 4),
        ("bf16", 3),
        ("topk:ratio=0.1", 3),
        ("dgc", 2),
    ],
)
def test_books_balance(fw, text, size):
    codec = build(text).with_memory(True)
    applied, left, true = run(fw, codec, Residual(), Residual(), size, 4, bad=2)
    assert np.abs(left).max() > 0
    assert np.abs(applied + left - true).max() < 4e-6 * np.abs(true).max()


@pytest.mark.parametrize("text", ["qsgd", "terngrad"])
def test_unbiased_stays_so(fw, text):
    codec = build(text).with_memory(False)
    applied, _, true = run(fw, codec, NoMemory(), NoMemory(), 2, 24)
    few, _, few_true = run(fw, codec, NoMemory(), NoMemory(), 2, 3)
    error = np.linalg.norm(applied - true) / 24
    few_error = np.linalg.norm(few - few_true) / 3
    assert error < 0.5 * few_error  # falls as the root of the number of steps


def test_what_a_codec_must_be():
    assert twophase.able(build("topk"))
    for text in ("svd", "tucker", "acp", "powersgd", "cltk", "randomk", "sign:vote=True", "none"):
        assert not twophase.able(build(text)), text


def test_a_reference_that_would_stray_travels_whole():
    """What an unbiased codec leaves out of a mean would be missing from it for good."""
    shapes, team = [(10**7,)], Team(4, 1)
    for memory, exchange in ((NoMemory(), "two_phase"), (Differential(0.1), "whole")):
        for how in ("auto", "two_phase"):
            assert route(how, build("qsgd"), memory, shapes, team).exchange == exchange
