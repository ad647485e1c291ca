"""Memories: pure, in float32, and what a codec leaves comes back."""

import dataclasses
import importlib
import inspect
import pkgutil

import numpy as np
import pytest

from horovod_gradcomp import SettingsError, core
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core.memories import MEMORIES
from horovod_gradcomp.core.memory import Done, Memory, NoMemory, Residual
from horovod_gradcomp.core.momentum import Momentum
from horovod_gradcomp.core.reference import EF21, Differential
from horovod_gradcomp.core.settings import make
from horovod_gradcomp.testing import frameworks
from tests import checks, lockstep, table


def flat(fw, values):
    return fw.tensor(np.asarray(values, np.float32))


def test_none_only_converts(fw):
    x = table.values("gaussian", 50)
    got = NoMemory().compensate(fw.xp, fw.tensor(x), (), None)
    checks.same_bits(x, fw.array(got))
    assert NoMemory().update(fw.xp, (), Done(None)) == ()
    assert not NoMemory().wants_error
    assert NoMemory.slots == ()


def test_none_gives_storage_of_its_own(fw):
    """What is compensated is consumed by a codec; the gradient must survive."""
    grad = flat(fw, [1, 2, 3])
    fw.ruin(NoMemory().compensate(fw.xp, grad, (), None))
    assert fw.array(grad).tolist() == [1, 2, 3]


def test_residual_adds_what_is_held(fw):
    grad, held = flat(fw, [1, 2, -3]), flat(fw, [0.5, 0, 10])
    got = Residual().compensate(fw.xp, grad, (held,), None)
    assert fw.array(got).tolist() == [1.5, 2, 7]
    fw.ruin(got)
    assert fw.array(grad).tolist() == [1, 2, -3]
    assert fw.array(held).tolist() == [0.5, 0, 10]
    assert Residual().wants_error
    assert Residual.slots == ("residual",)


def test_residual_holds_the_error(fw):
    error = flat(fw, [4, 5])
    (held,) = Residual().update(fw.xp, (flat(fw, [1, 1]),), Done(error))
    assert fw.array(held).tolist() == [4, 5]


def test_residual_decays(fw):
    for decay in (0.9, 0.5, 0.1):
        grad, held = table.values("gaussian", 4099), table.values("heavy", 4099)
        got = Residual(decay).compensate(fw.xp, fw.tensor(grad), (fw.tensor(held),), None)
        want = grad + held * np.float32(decay)
        np.testing.assert_allclose(fw.array(got), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.3])
def test_frameworks_compensate_alike(decay, dtype):
    """Else the payloads of two frameworks drift apart."""
    grad, held = table.values("gaussian", 4099), table.values("gaussian", 4099)[::-1].copy()
    grad = grad.astype(dtype)
    got = [
        fw.array(Residual(decay).compensate(fw.xp, fw.tensor(grad), (fw.tensor(held),), None))
        for fw in map(frameworks.load, frameworks.NAMES)
    ]
    checks.same_bits(*got)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("memory", [NoMemory(), Residual()], ids=["none", "residual"])
def test_any_float_dtype_becomes_float32(fw, memory, dtype):
    kind = getattr(fw.framework, dtype)
    values = flat(fw, [1.5, -2.25, 1024])
    grad = fw.framework.cast(values, kind) if fw.name == "tensorflow" else values.to(kind)
    state = tuple(flat(fw, [0.25, 0.5, 1]) for _ in memory.slots)
    got = fw.array(memory.compensate(fw.xp, grad, state, None))
    assert got.dtype == np.float32
    assert got.tolist() == ([1.75, -1.75, 1025] if memory.slots else [1.5, -2.25, 1024])


@pytest.mark.parametrize("memory", [NoMemory(), Residual(), Residual(0.5)], ids=repr)
def test_the_result_lands_in_out(memory):
    import torch

    fw = frameworks.load("torch")
    state = tuple(torch.ones(2, 3) for _ in memory.slots)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for grad in (torch.full((2, 3), 2.0, dtype=dtype), torch.full((1, 3), 2.0).expand(2, 3)):
            whole = torch.zeros(10)
            out = whole[2:8].view(2, 3)
            got = memory.compensate(fw.xp, grad, state, out)
            assert got.data_ptr() == out.data_ptr()
            want = 2.0 + getattr(memory, "decay", 0.0)
            assert whole.tolist() == [0, 0, *[want] * 6, 0, 0]


def test_strided_gradients_keep_their_coordinates():
    import torch

    fw = frameworks.load("torch")
    grad = torch.arange(6.0).view(3, 2).t()
    for memory, held in ((NoMemory(), ()), (Residual(), (torch.zeros(2, 3),))):
        out = torch.empty(2, 3)
        memory.compensate(fw.xp, grad, held, out)
        assert out.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_only_biased_codecs_may_have_a_residual():
    for codec in table.FORMS.values():
        if not codec.feeds_back:
            with pytest.raises(SettingsError, match=r"unbiased|no sum"):
                Residual().check(codec)
        else:
            Residual().check(codec)
        NoMemory().check(codec)


def test_every_memory_is_registered():
    own = {
        cls
        for found in pkgutil.iter_modules(core.__path__)
        for cls in vars(importlib.import_module(f"{core.__name__}.{found.name}")).values()
        if inspect.isclass(cls) and issubclass(cls, Memory) and cls is not Memory
    }
    assert own == set(MEMORIES.values())
    for cls in own:
        assert cls() == cls()
        assert dataclasses.is_dataclass(cls)


@pytest.mark.parametrize("text", ["topk:ratio=0.05", "linear:bits=2", "randomk:ratio=0.05", "fp16"])
def test_what_is_not_sent_is_sent_later(text):
    """A constant gradient arrives: the mean of what is applied tends to it."""
    fw, codec = frameworks.load("torch"), build(text).with_memory(True)
    grad = table.values("gaussian", 400)
    ranks = lockstep.Ranks(fw, codec, Residual(), size=2, numel=400)
    steps, applied = 300, np.zeros(400)
    for step in range(steps):
        applied += fw.array(ranks.step(step, [grad, grad])[0].total)
    assert np.abs(applied / steps - grad).mean() < 0.1 * np.abs(grad).mean()
    # Grows no more: on average it holds what comes in between two sendings.
    assert np.abs(fw.array(ranks.held[0][0])).mean() < 30 * np.abs(grad).mean()


# Momentum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("text", ["topk:ratio=0.1", "randomk:ratio=0.1,block=3", "linear:bits=3"])
def test_momentum_is_the_papers_rule(fw, text, masking, nesterov):
    """From the formulas: what is sent, and what is kept of speed and sum."""
    n, m = 200, 0.8
    codec, memory = build(text).with_memory(True), Momentum(m, nesterov, masking)
    ranks = lockstep.Ranks(fw, codec, memory, size=1, numel=n)
    u, v = np.zeros((2, n))
    for step in range(8):
        grad = table.rng(step).standard_normal(n).astype(np.float32)
        u = m * (u + grad) if nesterov else m * u + grad
        v = v + u + grad if nesterov else v + u
        (outcome,) = ranks.step(step, [grad])
        sent = fw.array(outcome.total).astype(np.float64)
        v = v - sent
        if masking and not text.startswith("linear"):
            u = np.where(sent != 0, 0.0, u)
        speed, left = (fw.array(s) for s in ranks.held[0])
        np.testing.assert_allclose(speed, u, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(left, v, rtol=1e-4, atol=1e-5)


def test_a_coordinate_that_is_never_large_is_sent_at_last():
    fw, n = frameworks.load("torch"), 50
    ranks = lockstep.Ranks(fw, build("topk:ratio=0.02"), Momentum(0.9), size=2, numel=n)
    grad, applied = np.ones(n, np.float32), np.zeros(n)
    grad[7] = 0.05
    for step in range(2000):
        total = fw.array(ranks.step(step, [grad, grad])[0].total)
        applied += total
        if total[7]:
            break
    else:
        raise AssertionError("it was never sent")
    assert fw.array(ranks.held[0][0])[7] == 0  # its speed is cleared
    assert fw.array(ranks.held[0][1])[7] == 0
    assert (applied > 0).all()


# References ------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("topk:ratio=0.1", EF21()),
        ("sign", EF21()),
        ("linear:bits=3", Differential()),
        ("randomk:ratio=0.3", Differential(0.7)),
        ("qsgd:bits=4", Differential(0.3)),
        ("acp:rank=2", EF21()),
        ("powersgd:rank=2", Differential(0.9)),
        ("fp16", EF21()),
    ],
)
def test_references_are_equal_and_follow(fw, text, memory, average):
    """All ranks' means are the same bits and the mean of their own, and tend to the gradient."""
    n, size = 1500, 3
    codec = build(text).with_memory(True)
    ranks = lockstep.Ranks(fw, codec, memory, size, n, average)
    grads = table.rng(1).standard_normal((size, n)).astype(np.float32)
    true, factor = grads.mean(axis=0), 1 if average else size
    first = None
    for step in range(12 if fw.name == "tensorflow" else 60):
        totals = [fw.array(o.total) for o in ranks.step(step, grads)]
        means = [fw.array(state[1]) for state in ranks.held]
        for other in range(1, size):
            checks.same_bits(totals[0], totals[other], "total")
            checks.same_bits(means[0], means[other], "mean")
        own = np.mean([fw.array(state[0]) for state in ranks.held], axis=0)
        limit = 2e-2 if text == "fp16" else 1e-4
        np.testing.assert_allclose(means[0], own, atol=limit)
        off = np.linalg.norm(totals[0] / factor - true) / np.linalg.norm(true)
        first = off if first is None else first
    assert off < (0.7 * first + 1e-3 if fw.name == "tensorflow" else 0.35 * first + 1e-3)


def test_the_reference_is_what_was_sent():
    """From the formulas, in NumPy, with top-k."""
    fw, n, alpha = frameworks.load("torch"), 60, 0.6
    codec = build("topk:ratio=0.2")
    ranks = lockstep.Ranks(fw, codec, Differential(alpha), size=2, numel=n)
    own, mean = np.zeros((2, n)), np.zeros(n)
    for step in range(6):
        grads = table.rng(step).standard_normal((2, n)).astype(np.float32)
        sent = np.zeros((2, n))
        for rank in range(2):
            difference = grads[rank] - own[rank]
            best = np.argsort(-np.abs(difference))[:12]
            sent[rank, best] = difference[best]
        total = fw.array(ranks.step(step, grads)[0].total)
        np.testing.assert_allclose(total, mean + sent.mean(axis=0), rtol=1e-5, atol=1e-5)
        own += alpha * sent
        mean += alpha * sent.mean(axis=0)
        np.testing.assert_allclose(fw.array(ranks.held[1][0]), own[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(fw.array(ranks.held[1][1]), mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "memory", "part"),
    [
        ("qsgd", "momentum", "unbiased"),
        ("qsgd", "ef21", "unbiased"),
        ("qsgd", "differential", "alpha=1"),
        ("topk", "momentum:m=1.0", "m=1.0"),
        ("topk", "momentum:m=-0.1", "m=-0.1"),
        ("topk", "momentum:nesterov=1", "nesterov=1"),
        ("topk", "momentum:masking=no", "masking='no'"),
        ("topk", "differential:alpha=0", "alpha=0"),
        ("topk", "differential:alpha=1.5", "alpha=1.5"),
        ("topk", "ef21:alpha=0.5", "alpha"),
    ],
)
def test_unfit_memories_are_refused_at_construction(text, memory, part):
    with pytest.raises(SettingsError, match=part):
        make(text, {"memory": memory})


def test_an_unbiased_codec_may_have_a_slow_reference():
    assert make("qsgd", {"memory": "differential:alpha=0.2"}).memory == Differential(0.2)
