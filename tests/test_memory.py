"""Memories: pure, in float32, and what a codec leaves comes back."""

import dataclasses
import inspect

import numpy as np
import pytest

from horovod_gradcomp import SettingsError
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core.codec import Bias
from horovod_gradcomp.core.memory import MEMORIES, Memory, NoMemory, Residual
from tests import checks, frameworks, lockstep, table


def flat(fw, values):
    return fw.tensor(np.asarray(values, np.float32))


def test_none_only_converts(fw):
    x = table.values("gaussian", 50)
    got = NoMemory().compensate(fw.xp, fw.tensor(x), (), None)
    checks.same_bits(x, fw.array(got))
    assert NoMemory().update((), None) == ()
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
    (held,) = Residual().update((flat(fw, [1, 1]),), error)
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
        if codec.bias is Bias.UNBIASED:
            with pytest.raises(SettingsError, match="unbiased"):
                Residual().check(codec)
        else:
            Residual().check(codec)
        NoMemory().check(codec)


def test_every_memory_is_registered():
    import horovod_gradcomp.core.memory as module

    own = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, Memory) and cls is not Memory
    ]
    assert set(own) == set(MEMORIES.values())
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
