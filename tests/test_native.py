"""The compiled kernels give the bits of the tensor operations, on every level and any threads."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from horovod_gradcomp import native
from horovod_gradcomp.codecs import build
from horovod_gradcomp.codecs.linear import Linear
from horovod_gradcomp.codecs.natural import Natural
from horovod_gradcomp.core import random, select
from horovod_gradcomp.core.codec import Combine
from horovod_gradcomp.native import pages
from horovod_gradcomp.ops import torch_kernels
from horovod_gradcomp.testing import frameworks
from tests import checks, table

ROOT = Path(__file__).resolve().parent.parent
FAST, PLAIN = frameworks.load("torch"), frameworks.load("torch_plain")
BEST = native.level()
LEVELS = [name for name in ("base", "avx2", "avx512") if native.use(name) == name]
native.use(BEST)

FORMS = pytest.mark.parametrize("label", table.FORMS)
SHAPES = (table.whole(1), table.whole(1001), table.split(4097))
EVERY_LEVEL = ("gaussian", "ties", "subnormal", "largest")


@pytest.fixture(params=LEVELS)
def level(request):
    """Each level of instructions that this processor has."""
    assert native.use(request.param) == request.param
    yield request.param
    assert native.use(BEST) == BEST


def test_the_library_is_here():
    """A test run without it would prove nothing."""
    assert native.available(), native.reason()
    assert BEST in LEVELS
    assert "base" in LEVELS
    assert FAST.xp.kernels(FAST.tensor(np.ones(3, np.float32))) is torch_kernels


# The same bits --------------------------------------------------------------------------------


def pair(label, shapes, kind):
    """Return one case with the kernels and one without."""
    values, call = table.values(kind, table.numel(shapes)), table.call(shapes)
    return [checks.Case(fw, table.FORMS[label], values, call) for fw in (FAST, PLAIN)]


def kernels_agree(fast, plain):
    """Payload, error and decoded values, of one payload and of three, are the same bits."""
    if not fast.codec.bit_equal:
        checks.frameworks_agree([fast, plain])
        return
    for what in ("payload", "error", "decoded"):
        a, b = (case.fw.array(getattr(case.once, what)) for case in (fast, plain))
        checks.same_bits(a, b, what)
    payload, error = fast.encode(want_error=False)
    assert error is None
    checks.same_bits(PLAIN.array(plain.once.payload), FAST.array(payload), "payload alone")
    if fast.codec.combine is Combine.GATHER:
        other = plain.on(plain.x[::-1] * np.float32(0.7)).once.payload
        several = [payload, other, payload]
        a, b = (case.fw.array(case.decode(several, 1 / 3)) for case in (fast, plain))
        checks.same_bits(a, b, "three payloads")


@FORMS
@pytest.mark.parametrize("kind", table.VALUES)
def test_bits(label, kind):
    for shapes in SHAPES:
        kernels_agree(*pair(label, shapes, kind))


@FORMS
def test_bits_on_every_level(label, level):
    for kind in EVERY_LEVEL:
        kernels_agree(*pair(label, table.split(1025), kind))


@FORMS
def test_bits_on_several_threads(label, monkeypatch):
    monkeypatch.setattr(torch_kernels.torch, "get_num_threads", lambda: 3)
    kernels_agree(*pair(label, table.split(1_100_003), "heavy"))


@pytest.mark.parametrize(
    "label", [label for label, codec in table.FORMS.items() if getattr(codec, "kernel", None)]
)
def test_any_payload_can_be_decoded(label):
    """Bytes from elsewhere may give any value, but are never read or written beyond."""
    codec = table.FORMS[label]
    for n in (1, 9, 1001):
        size = codec.wire_bytes(n) + 4
        payload = FAST.tensor(table.rng(n).integers(0, 256, size).astype(np.uint8))
        decoded = codec.decode(FAST.xp, [payload], n, table.call(table.whole(n)), scale=1.0)
        assert decoded.shape == (n,)


def test_every_quantiser_has_a_kernel():
    """But the plain logarithmic rule, whose levels differ from block to block."""
    from horovod_gradcomp.core.blocks import BlockCodec
    from horovod_gradcomp.core.points import PointCodec

    without = [
        label
        for label, codec in table.FORMS.items()
        if isinstance(codec, (BlockCodec, PointCodec)) and codec.kernel is None
    ]
    assert without == ["logarithmic(bits=3,range=None)", "sign(vote=True)"]


# Random words ---------------------------------------------------------------------------------


def test_words(level):
    key, like = random.fold(1, "x", 2), np.zeros(1, np.float32)
    for start, count in ((0, 1), (3, 70_001), (2**31 - 20, 19)):
        want, got = (
            fw.array(random.words(fw.xp, key, start, count, fw.tensor(like)))
            for fw in (PLAIN, FAST)
        )
        np.testing.assert_array_equal(got, want)


# Selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*table.VALUES, "nan"])
def test_selection(kind, level):
    for n in (1, 31, 32, 33, 1000, 70_003):
        x = table.values("gaussian" if kind == "nan" else kind, n)
        if kind == "nan":
            x[::7], x[::11] = np.nan, -np.inf
        tensor, order = FAST.tensor(x), np.argsort(-magnitudes(x), kind="stable")
        for k in {1, min(n, 5), -(-n // 100), -(-n // 3), max(n - 1, 1)}:
            want = np.sort(order[:k])
            for sampled in (False, True):
                got = select.largest(FAST.xp, tensor, k, sampled=sampled)
                np.testing.assert_array_equal(FAST.array(got), want)


def magnitudes(x):
    return (x.view(np.int32) & 0x7FFFFFFF).astype(np.int64)


def test_more_positions_than_there_is_room_for(level):
    x = np.where(np.arange(1000) % 3, 1.0, -2.0).astype(np.float32)
    limit, every = int(magnitudes(np.float32([1.5]))[0]), np.arange(0, 1000, 3)
    tensor = FAST.tensor(x)
    for k in (1, 31, 64, 333, 334, 335, 999, 1000):
        out = FAST.tensor(np.full(k + 1, -1))
        native.above(tensor.data_ptr(), x.size, limit, k, 0, 1, out.data_ptr())
        others = np.setdiff1d(np.arange(1000), every)[: max(k - every.size, 0)]
        want = np.sort(np.append(every[:k], others))
        np.testing.assert_array_equal(FAST.array(out)[:k], want)
        assert out[k] == -1, "written beyond the room"


@pytest.mark.parametrize("kind", table.VALUES)
def test_selection_above_a_limit(kind):
    for n in (1, 33, 1000, 70_003):
        x = table.values(kind, n)
        for k in {1, -(-n // 100), -(-n // 3), n}:
            for limit in (0, int(np.median(magnitudes(x))), 2**31 - 1):
                got, want = (
                    fw.array(select.above(fw.xp, fw.tensor(x), limit, k)) for fw in (FAST, PLAIN)
                )
                np.testing.assert_array_equal(got, want)


def test_a_full_selection_takes_no_room():
    from horovod_gradcomp.cli import measure

    row = measure.measure("topk:select=exact", 8_000_000, repeat=1)
    assert row["peak_extra_bytes"] <= 4 * 8_000_000 / 8


# Where they apply -----------------------------------------------------------------------------


def test_tensors_that_do_not_qualify():
    torch, kernels = FAST.framework, FAST.xp.kernels
    good = torch.ones(4, 4)
    assert kernels(good)
    assert kernels(good, torch.nn.Parameter(good))
    for bad in (good.T[:, :2], torch.ones(4, device="meta"), good.as_subclass(OwnTensor)):
        assert kernels(bad) is None
        assert kernels(good, bad) is None


class OwnTensor(FAST.framework.Tensor):
    pass


def test_another_rule_has_no_kernel():
    """A subclass with a rule of its own would be sent by the rule of its parent."""

    class Other(Linear):
        def quantize(self, xp, rows, call, start):
            return super().quantize(xp, rows * 2, call, start)

    class Points(Natural):
        def from_codes(self, xp, codes):
            return super().from_codes(xp, codes)

    class Named(Linear):
        pass

    assert Other().kernel is None
    assert Points().kernel is None
    assert Named().kernel is not None
    values = table.values("gaussian", 100)
    case = checks.Case(FAST, Other(), values, table.call(table.whole(100)))
    checks.same_bits(
        FAST.array(replace(case, fw=PLAIN).once.payload), FAST.array(case.once.payload)
    )


def test_a_kernel_that_is_not_there():
    with pytest.raises(LookupError, match="no compiled kernel is called 'new'"):
        native.index("new")


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


ENCODE = """
import hashlib, json, torch
from horovod_gradcomp import native
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core.codec import Call
from horovod_gradcomp.ops import torch as xp
x = torch.arange(1000.0).sin()
sent = build("linear:bits=4").encode(xp, x, Call(), want_error=False).payload
print(json.dumps({"reason": native.reason(), "level": native.level(), "used": bool(xp.kernels(x)),
                  "sent": hashlib.sha256(bytes(sent.tolist())).hexdigest()}))
"""


def test_the_switch():
    by_itself = run(ENCODE)
    assert by_itself["used"]
    assert by_itself["level"] == BEST
    off = run(ENCODE, HOROVOD_GRADCOMP_NATIVE="0")
    assert not off["used"]
    assert off["reason"] == "HOROVOD_GRADCOMP_NATIVE=0 turns it off"
    base = run(ENCODE, HOROVOD_GRADCOMP_NATIVE="base")
    assert base["level"] == "base"
    assert off["sent"] == base["sent"] == by_itself["sent"]
    unknown = run(ENCODE, HOROVOD_GRADCOMP_NATIVE="mmx")
    assert "mmx is no level that this processor has" in unknown["reason"]


def test_no_library_is_explained(monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setattr(native.library, "EXTENSION_SUFFIXES", [])
    found, why, _ = native.library.loaded.__wrapped__()
    assert found is None
    assert "without a C compiler" in why


FORK = """
import json, os, torch
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core.codec import Call
from horovod_gradcomp.ops import torch as xp
torch.set_num_threads(3)
codec, x = build("linear"), torch.arange(2e6)
payload = codec.encode(xp, x, Call(), want_error=False).payload
child = os.fork()
if child == 0:
    codec.decode(xp, [payload], x.numel(), Call(), scale=1.0)
    os._exit(17)
_, status = os.waitpid(child, 0)
print(json.dumps(os.waitstatus_to_exitcode(status)))
"""


def test_threads_after_a_fork():
    assert run(FORK) == 17


def test_an_install_without_a_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-f", "-b", tmp_path, "-t", tmp_path / "made"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "CC": "/nowhere/cc"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tensor operations" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))


# Huge pages -----------------------------------------------------------------------------------


def test_large_storage_is_asked_for_in_huge_pages(monkeypatch):
    asked = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *what: asked.append(what))
    like = FAST.tensor(np.ones(1, np.float32))
    FAST.xp.empty(pages.LEAST // 4 - 1, like)
    assert not asked
    large = FAST.xp.zeros(pages.LEAST // 4, "float32", like)
    assert not large.any()
    ((first, count, _),) = asked
    at = large.data_ptr()
    assert at <= first < at + 65_536
    assert first + count == at + pages.LEAST
    asked.clear()
    build("linear").decode(
        FAST.xp,
        [FAST.tensor(np.zeros(4_000_000, np.uint8))],
        2**21,
        table.call(((2**21,),)),
        scale=1,
    )
    assert len(asked) == 1


def test_huge_pages_are_optional(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    pages.advise(0, 2**40)
