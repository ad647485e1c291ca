"""A codec from outside: the page of the documentation, followed to the letter, and faults."""

import re
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from horovod_gradcomp import SettingsError
from horovod_gradcomp.codecs import REGISTRY, register
from horovod_gradcomp.codecs.linear import Linear
from horovod_gradcomp.core.codec import Bias, Codec
from horovod_gradcomp.testing import check_codec
from horovod_gradcomp.testing.frameworks import load
from horovod_gradcomp.torch import Compression

PAGE = Path(__file__).parent.parent / "docs" / "own_codec.md"


@pytest.fixture
def ternary():
    """The module that the page tells to write."""
    before = dict(REGISTRY)
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) < 40
    module = types.ModuleType("ternary")
    exec(compile(code, "ternary.py", "exec"), module.__dict__)
    yield module
    REGISTRY.clear()
    REGISTRY.update(before)
    vars(Compression).pop("ternary", None)


def test_the_page_gives_a_codec_that_keeps_all_laws(ternary):
    check_codec("ternary")


def test_it_has_a_name(ternary):
    assert "ternary:block=64" in repr(Compression.ternary(block=64))
    assert "+ternary:block=256" in repr(Compression.from_string("topk:ratio=0.01+ternary"))
    with pytest.raises(SettingsError, match="block=7"):
        Compression.ternary(block=7)


def fault(ternary, **changed):
    return dataclass(frozen=True)(type("Ternary", (ternary.Ternary,), changed))()


@pytest.mark.parametrize("path", ["torch", "tensorflow"])
def test_bits_of_other_floats_are_refused(path):
    fw = load(path)
    sums = fw.xp.row_sum(fw.tensor(np.ones((2, 3), np.float32)))
    with pytest.raises(TypeError, match="float64; expected float32"):
        fw.xp.flush(sums, 1e-20)


def test_headers_and_ranges_must_match(ternary):
    with pytest.raises(TypeError, match="headers = 2 and 1 ranges"):
        fault(ternary, headers=2)


def test_frameworks_that_differ_are_told_with_the_values(ternary):
    """Subnormals: zero in TensorFlow, and not in PyTorch."""

    def quantize(self, xp, rows, call, start):
        headers, _ = ternary.Ternary.quantize(self, xp, rows, call, start)
        return headers, xp.cast(xp.less(rows, 0.0), "float32")

    with pytest.raises(
        AssertionError, match=r"frameworks_agree, subnormal values, shapes \(.*of torch and"
    ):
        check_codec(fault(ternary, quantize=quantize, bias=Bias.NEITHER))


def twice_now_and_then(original):
    """The error is of other values than are decoded."""
    calls = []

    def dequantize(self, xp, headers, codes):
        calls.append(1)
        out = original.dequantize(self, xp, headers, codes)
        return xp.scale_(out, 2.0) if len(calls) % 2 else out

    return {"dequantize": dequantize}


def far_too_much(original):
    """What is left is more than there was."""

    def quantize(self, xp, rows, call, start):
        s, codes = original.quantize(self, xp, rows, call, start)
        return xp.scale_(s, 6.0), codes

    return {"quantize": quantize}


def another_size(_):
    return {"wire_bytes": lambda self, *extents: 4}


@pytest.mark.parametrize(
    ("law", "planted"),
    [
        ("nothing_is_lost", twice_now_and_then),
        ("bias_is_declared", far_too_much),
        ("sizes_are_declared", another_size),
    ],
)
def test_faults_are_named(ternary, law, planted):
    with pytest.raises(AssertionError, match=law):
        check_codec(fault(ternary, **planted(ternary.Ternary)), ["torch"])


@pytest.mark.parametrize(
    ("name", "cls", "message"),
    [
        ("Ternary", Linear, "name 'Ternary'"),
        ("auto", Linear, "name 'auto'"),
        ("resolve", Linear, "name 'resolve'"),
        ("topk", Linear, "which TopK has"),
        ("mine", Codec, "without"),
        ("mine", dict, "a class of codecs"),
        ("mine", 3, "a class of codecs"),
    ],
)
def test_what_is_no_codec_is_refused(name, cls, message):
    with pytest.raises(SettingsError, match=message):
        register(name, cls)
    assert "mine" not in REGISTRY


def test_registered_twice_is_as_good_as_once():
    register("linear", Linear)
    assert REGISTRY["linear"] is Linear


def test_a_codec_without_a_name_says_so(ternary):
    with pytest.raises(SettingsError, match=r"register\('ternary', Ternary\)"):
        fault(ternary).describe()
