"""The compiled kernels as TensorFlow's operations: the bits of torch's and of tensor operations."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from horovod_gradcomp import native
from horovod_gradcomp.codecs import build
from horovod_gradcomp.codecs.fp16 import FP16
from horovod_gradcomp.core import select
from horovod_gradcomp.core.codec import Combine
from horovod_gradcomp.core.kernel import Kernel, elements
from horovod_gradcomp.core.sparse import Selection
from horovod_gradcomp.native import pages
from horovod_gradcomp.ops import tensorflow_kernels
from horovod_gradcomp.testing import frameworks
from tests import checks, table

FAST, PLAIN, TORCH = map(frameworks.load, ("tensorflow", "tensorflow_plain", "torch"))
ROOT = Path(__file__).resolve().parent.parent
WITH_KERNELS = [
    label
    for label, codec in table.FORMS.items()
    if getattr(codec, "kernel", None) or isinstance(codec, (FP16, Selection))
]
KINDS = ("gaussian", "ties", "subnormal", "largest")
LARGE = 300_001


def test_the_library_is_here():
    """A test run without it would prove nothing."""
    assert tensorflow_kernels.reason() == ""
    assert FAST.xp.kernels(tf.ones(3)) is tensorflow_kernels


# The same bits --------------------------------------------------------------------------------


def encoded(fw, label, values, shapes, *, graph=False, want_error=True):
    """Return payload, error and decoded values of one payload and of three, as arrays."""
    codec, call, x = table.FORMS[label], table.call(shapes), fw.tensor(values)

    def encode(x):
        return codec.encode(fw.xp, x, call, want_error=want_error)[:2]

    def decode(payloads):
        return codec.decode(fw.xp, payloads, values.size, call, scale=1 / 3)

    if graph:
        encode, decode = (tf.function(fn, autograph=False) for fn in (encode, decode))
    payload, error = encode(x)
    several = [[payload]] if codec.combine is Combine.SUM else [[payload], [payload] * 3]
    made = [payload, *([error] if want_error else []), *map(decode, several)]
    return [fw.array(each) for each in made]


def same(first, second, label):
    for i, (a, b) in enumerate(zip(first, second)):
        checks.same_bits(a, b, f"{label}: {i} of payload, error, decoded values")


@pytest.mark.parametrize("label", WITH_KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits(label, kind):
    for shapes in (table.whole(1), table.whole(1001), table.split(4097)):
        values = table.values(kind, table.numel(shapes))
        fast = encoded(FAST, label, values, shapes)
        if table.FORMS[label].bit_equal:
            same(fast, encoded(PLAIN, label, values, shapes), label)
        # Of subnormals TensorFlow, where all but the payload is flushed, has its own view.
        by_torch = encoded(TORCH, label, values, shapes)
        same(fast[:1] if kind == "subnormal" else fast, by_torch, label)


@pytest.mark.parametrize("label", WITH_KERNELS)
def test_bits_in_a_graph(label):
    shapes = table.split(LARGE)
    values = table.values("heavy", LARGE)
    fast = encoded(FAST, label, values, shapes, graph=True)
    same(fast, encoded(TORCH, label, values, shapes), label)
    alone = encoded(FAST, label, values, shapes, graph=True, want_error=False)
    same(alone, [fast[0], *fast[2:]], label)


@pytest.mark.parametrize("label", ["linear()", "natural()", "fp16()"])
def test_bits_on_several_threads(label, monkeypatch):
    monkeypatch.setattr(tensorflow_kernels, "_threads", lambda: 3)
    values, shapes = table.values("heavy", 1_100_003), table.split(1_100_003)
    same(encoded(FAST, label, values, shapes), encoded(TORCH, label, values, shapes), label)


def test_selection():
    for kind in ("gaussian", "ties", "zeros"):
        x = table.values(kind, 70_003)
        order = np.argsort(-(x.view(np.int32) & 0x7FFFFFFF).astype(np.int64), kind="stable")
        for k in (1, 700, 70_002):
            for sampled in (False, True):
                got = select.largest(FAST.xp, FAST.tensor(x), k, sampled=sampled)
                np.testing.assert_array_equal(FAST.array(got), np.sort(order[:k]))
            above = [
                fw.array(select.above(fw.xp, fw.tensor(x), 0x3F800000, k)) for fw in (FAST, PLAIN)
            ]
            np.testing.assert_array_equal(*above)


@pytest.mark.parametrize("graph", [False, True])
def test_large_scatters(graph):
    """Also in the storage of what is written to, where nobody else reads it."""
    n, few = pages.LEAST // 4 + 3, 1000
    x, values = table.values("gaussian", n), table.values("heavy", few)
    where = np.sort(table.rng(0).permutation(n)[:few])
    twice = np.sort(np.append(where[::2], where[::2]))

    def run(xp, x, values, where, twice):
        own = xp.add(x, 1.0)
        zeros = [xp.zeros(n, "float32", x) for _ in range(2)]
        return (
            xp.put_(xp.copy(x), where, values),
            xp.put_(own, where, values),
            *(xp.add_at_(z, twice, values) for z in zeros),
            xp.zeros(n, "float32", x),
        )

    def with_kernels(*given):
        return run(FAST.xp, *given)

    arrays = (x, values, where, twice)
    given = [FAST.tensor(each) for each in arrays]
    traced = tf.function(with_kernels, autograph=False)
    types = [op.type for op in traced.get_concrete_function(*given).graph.get_operations()]
    assert [types.count(f"Gradcomp{name}") for name in ("Scatter", "Zeros")] == [4, 3]
    made = (traced if graph else with_kernels)(*given)
    wanted = run(TORCH.xp, *map(TORCH.tensor, arrays))
    for got, want in zip(made, wanted):
        checks.same_bits(FAST.array(got), TORCH.array(want))
    for left, right in zip(given, arrays):
        checks.same_bits(FAST.array(left), right)


def test_positions_that_are_out_of_range():
    n = pages.LEAST // 4
    for bad in (-1, n):
        with pytest.raises(tf.errors.InvalidArgumentError, match="a position is out of range"):
            FAST.xp.put_(tf.ones(n), tf.constant([bad], tf.int64), tf.ones(1))


def test_keys_and_scales_that_a_graph_knows():
    """They come as tensors where steps are counted in a graph."""
    x, call = table.values("gaussian", 4097), table.call(table.whole(4097))
    codec = build("qsgd")

    @tf.function(autograph=False)
    def run(x, low, high, scale):
        with_key = replace(call, key=(low, high))
        payload = codec.encode(FAST.xp, x, with_key, want_error=False).payload
        return payload, codec.decode(FAST.xp, [payload], 4097, with_key, scale=scale)

    low, high = call.key
    payload, decoded = run(x, tf.constant(low, tf.int64), tf.constant(high, tf.int64), 0.25)
    case = checks.Case(TORCH, codec, x, call)
    want, _ = case.encode(want_error=False)
    checks.same_bits(FAST.array(payload), TORCH.array(want))
    checks.same_bits(FAST.array(decoded), TORCH.array(case.decode([want], 0.25)))


# What TensorFlow sees ---------------------------------------------------------------------------


def in_use(fw):
    """The operations of a codec's graph are the kernels."""
    x = tf.TensorSpec([LARGE], tf.float32)

    @tf.function(autograph=False)
    def run(x):
        call = table.call(table.whole(LARGE))
        payload, error = build("linear").encode(fw.xp, x, call, want_error=True)[:2]
        kept = build("topk").encode(fw.xp, x, call, want_error=False).payload
        total = build("linear").decode(fw.xp, [payload], LARGE, call, scale=0.5)
        assert [each.shape.as_list() for each in (error, total)] == [[LARGE], [LARGE]]
        assert payload.shape.as_list() == [build("linear").wire_bytes(LARGE) + 4]
        return error, kept, total

    types = [op.type for op in run.get_concrete_function(x).graph.get_operations()]
    for name in ("GradcompEncode", "GradcompDecode", "GradcompSelect"):
        assert types.count(name) == 1
    assert len(types) < 120


def test_kernels_are_in_use():
    in_use(FAST)
    with pytest.raises(AssertionError):
        in_use(PLAIN)


@pytest.mark.parametrize("text", ["linear", "fp16", "natural"])
@pytest.mark.parametrize("graph", [False, True])
def test_inputs_stay_as_they_are(text, graph):
    """Also where the error might have taken their storage."""
    values, call = table.values("gaussian", LARGE), table.call(table.whole(LARGE))
    variable, constant = tf.Variable(values), tf.constant(values)

    def run(x):
        held = x + 0.0
        errors = [
            build(text).encode(FAST.xp, given, call, want_error=True).error
            for given in (x, variable.read_value(), constant, held)
        ]
        return held, errors

    given = tf.constant(values)
    held, errors = (tf.function(run, autograph=False) if graph else run)(given)
    for left in (given, variable, constant, held):
        checks.same_bits(FAST.array(left), values)
    for error in errors[1:]:
        checks.same_bits(FAST.array(error), FAST.array(errors[0]))
    assert FAST.array(errors[0]).any()


def test_a_payload_that_is_too_short():
    call = table.call(table.whole(1001))
    payload = build("linear").encode(FAST.xp, tf.ones(1001), call, want_error=False).payload
    with pytest.raises(tf.errors.InvalidArgumentError, match="shorter than the settings say"):
        build("linear").decode(FAST.xp, [payload[:-8]], 1001, call, scale=1.0)


def test_another_kernel_is_not_there():
    with pytest.raises(LookupError, match="no compiled kernel is called 'new'"):
        tensorflow_kernels.encode(
            Kernel("new", 8), elements(1, 1), 1, tf.ones(1), (0, 0), want_error=False
        )


# Where they apply -----------------------------------------------------------------------------


def test_no_kernels_beside_other_devices(monkeypatch):
    devices = [tf.config.PhysicalDevice(f"/{kind}:0", kind) for kind in ("CPU", "GPU")]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda: devices)
    assert FAST.xp.kernels(tf.ones(3)) is None
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda: devices[:1])
    assert FAST.xp.kernels(tf.ones(3)) is tensorflow_kernels


def test_no_library_is_explained(monkeypatch, tmp_path):
    look = tensorflow_kernels._operations.__wrapped__
    monkeypatch.setattr(native, "find", lambda name: None)
    assert "without a C compiler" in look()[1]
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    monkeypatch.setattr(native, "find", lambda name: other)
    assert f"{other} cannot be loaded" in look()[1]
    monkeypatch.setattr(native, "find", lambda name: native.library.find("_kernels"))
    assert "finds no C interface" in look()[1]


SWITCH = """
import hashlib, json, tensorflow as tf
from horovod_gradcomp.codecs import build
from horovod_gradcomp.codecs.fp16 import FP16
from horovod_gradcomp.core.codec import Call
from horovod_gradcomp.ops import tensorflow as xp, tensorflow_kernels
x = tf.sin(tf.range(1000.0))
sent = build("linear:bits=4").encode(xp, x, Call(), want_error=False).payload
print(json.dumps({"used": bool(xp.kernels(x)), "reason": tensorflow_kernels.reason(),
                  "sent": hashlib.sha256(bytes(sent.numpy())).hexdigest()}))
"""


def test_the_switch():
    def run(**environment):
        done = subprocess.run(
            [sys.executable, "-c", SWITCH],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env={**os.environ, **environment},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    by_itself, off = run(), run(HOROVOD_GRADCOMP_NATIVE="0")
    assert by_itself["used"]
    assert not off["used"]
    assert off["reason"] == "HOROVOD_GRADCOMP_NATIVE=0 turns it off"
    assert off["sent"] == by_itself["sent"]
