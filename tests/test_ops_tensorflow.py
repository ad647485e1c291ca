"""Both operations modules compute the same bits, TensorFlow eagerly and in a graph.

One row of CASES an operation; NumPy arrays go in, and what comes out is compared byte by byte.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf
import torch

from horovod_gradcomp.core import random, select
from horovod_gradcomp.core.payload import Layout, Section
from horovod_gradcomp.ops import Ops
from horovod_gradcomp.ops import tensorflow as tf_ops
from horovod_gradcomp.ops import torch as torch_ops

_rng = np.random.default_rng(7)
X = (_rng.standard_normal(4099) * 10.0 ** _rng.integers(-30, 30, 4099)).astype(np.float32)
X[:6] = [0.0, -0.0, 1.5, 2.5, -2.5, 0.5]
Y = np.roll(X, 1) + np.float32(0.75)
HALF = np.clip(X, -60000, 60000).astype(np.float16)
ROWS = X[:4096].reshape(32, 128)
INTS = _rng.integers(-(2**31), 2**31, 777).astype(np.int32)
LONGS = _rng.integers(0, 2**40, 777)
BYTES = _rng.integers(0, 256, 776).astype(np.uint8)
TIES = _rng.integers(0, 50, 777).astype(np.int32)
MASK = X > 0
WHERE = np.sort(_rng.permutation(4099)[:300])
SMALL = X[300:600]
SMALL_ROWS = _rng.standard_normal((9, 41)).astype(np.float32)
LAYOUT = Layout((Section("uint8", 1, 5), Section("float32", 3, 2), Section("int16", 1, 3)))
PARTS = (BYTES[:5].reshape(1, 5), X[:6].reshape(3, 2), INTS[:3].astype(np.int16).reshape(1, 3))
NAN = np.float32(np.nan)


def spoilt(value: float) -> np.ndarray:
    x = X.copy()
    x[77] = value
    return x


def sealed(xp, *parts):
    payload, views = LAYOUT.new(xp, parts[1])
    assert len(views) == len(parts)
    return LAYOUT.seal(xp, payload, parts)


def mapped(xp, rows):
    return xp.map_rows(
        lambda first, chunk: (xp.row_max(chunk), xp.sub(chunk, chunk)), [rows], [None, None]
    )


def selected(xp, x):
    """Select with compiled kernels."""
    assert xp.kernels(x)
    return select.largest(xp, x, 99, sampled=False)


def flat(xp, rows):
    whole = xp.reshape(rows, (-1,))
    return xp.join_flat(whole, [xp.reshape(whole[:4000], (40, 100)), whole[4000:]])


def drawn(xp, step, like):
    key = random.fold(3, "w", step)
    return random.words(xp, key, 5, 1000, like)


CASES = {
    "numel": [(lambda xp, x: xp.zeros(xp.numel(x), "int32", x), [ROWS])],
    "arange": [(lambda xp, x, to=to: xp.arange(3, 9, to, x), [X]) for to in ("int32", "int64")],
    "zeros": [(lambda xp, x: xp.zeros(5, "float32", x), [X])],
    "zeros_like": [(lambda xp, x: xp.zeros_like(x), [INTS])],
    "empty": [(lambda xp, x: xp.zeros_like(xp.empty(5, x)), [X])],
    "as_int32": [
        (lambda xp, x, word=word: xp.bit_or(x, xp.as_int32(word, x)), [np.zeros(2, np.int32)])
        for word in (0, 5, 2**31, 2**32 - 1)
    ],
    "as_int64": [(lambda xp, x: xp.as_int64((3, -1, 2**40), x), [X])],
    "numbers": [(lambda xp, x: xp.numbers([1, 2, 0.5], x), [x]) for x in (X, HALF, LONGS)],
    "cast": [
        (lambda xp, x, to=to: xp.cast(x, to), [x])
        for x, to in [
            (X, "float16"),
            (HALF, "float32"),
            (INTS, "int64"),
            (LONGS, "int32"),
            (LONGS & 65535, "int16"),
            (INTS.astype(np.int16), "int64"),
            (np.arange(256, dtype=np.float32), "uint8"),
            (BYTES, "float32"),
            (BYTES & 1, "bool"),
            (MASK, "uint8"),
            (INTS, "uint8"),
            (INTS, "float32"),
            (BYTES, "int16"),
            (BYTES, "int32"),
            (INTS, "int16"),
            (X, "float64"),
            (X.astype(np.float64), "float32"),
        ]
    ],
    "view": [
        (lambda xp, x: xp.view(x, "int32"), [X]),
        (lambda xp, x: xp.view(x, "float32"), [X.view(np.int32)]),
        (lambda xp, x: xp.view(x, "float16"), [HALF.view(np.int16)]),
    ],
    "reshape": [(lambda xp, x: xp.reshape(x, (64, -1)), [ROWS])],
    "copy": [(lambda xp, x: xp.copy(x), [X])],
    "concat": [(lambda xp, x: xp.concat([x, x[:, :3]], axis=1), [ROWS])],
    "pad_columns": [(lambda xp, x, w=w: xp.pad_columns(x, w), [ROWS]) for w in (128, 136)],
    "add": [
        (lambda xp, a, b: xp.add(a, b), [X, Y]),
        (lambda xp, a: xp.add(a, 0.1), [X]),
        (lambda xp, a: xp.add(a, 7), [INTS]),
    ],
    "add_": [
        (lambda xp, a, b: xp.add_(a, b), [X, Y]),
        (lambda xp, a: xp.add_(a, 0.1), [X]),
    ],
    "add_scaled": [
        (lambda xp, a, b: xp.add_scaled(a, b, 1.0, None), [X, Y]),
        (lambda xp, a, b: xp.add_scaled(a, b, 0.5, None), [HALF, Y]),
    ],
    "to_float32": [(lambda xp, a: xp.to_float32(a, None), [HALF])],
    "sub": [
        (lambda xp, a, b: xp.sub(a, b), [X, Y]),
        (lambda xp, b: xp.sub(1.0, b), [X]),
        (lambda xp, b: xp.sub(5, b), [INTS]),
        (lambda xp, a: xp.sub(a, 5), [INTS]),
    ],
    "sub_": [(lambda xp, a, b: xp.sub_(a, b), [X, Y])],
    "mul_": [
        (lambda xp, a, b: xp.mul_(a, b), [SMALL * 0 + 3, SMALL]),
        (lambda xp, a, b: xp.mul_(a, b), [INTS, INTS[::-1].copy()]),
    ],
    "div": [
        (lambda xp, a, b: xp.div(a, b), [np.float32([1, 2, 3, 10]), np.float32([3, 7, 49, 41])])
    ],
    "div_": [
        (lambda xp, a, b: xp.div_(a, b), [np.float32([1, 2, 3, 10]), np.float32([3, 7, 49, 41])])
    ],
    "scale_": [
        (lambda xp, a: xp.scale_(a, 1 / 15), [Y]),
        (lambda xp, a: xp.scale_(a, 1 / 15), [Y.astype(np.float64)]),
        (lambda xp, a: xp.scale_(a, -2048144789), [INTS]),
        (lambda xp, a: xp.scale_(a, 65536), [LONGS]),
    ],
    "scaled": [(lambda xp, a: xp.scaled(a, 1 / 3), [Y])],
    "round_": [(lambda xp, a: xp.round_(a), [np.arange(-8, 8, 0.25, np.float32)])],
    "floor_": [(lambda xp, a: xp.floor_(a), [np.arange(-8, 8, 0.25, np.float32)])],
    "floor_divide": [(lambda xp, a: xp.floor_divide(a, 41), [LONGS])],
    "clamp_": [
        (lambda xp, a: xp.clamp_(a, -2.0, 1.5), [X]),
        (lambda xp, a: xp.clamp_(a, -5, 2**30), [INTS]),
    ],
    "minimum": [
        (lambda xp, a, b: xp.minimum(a, b), [ROWS, ROWS[:, :1].copy()]),
        (lambda xp, a: xp.minimum(a, 0.5), [X]),
    ],
    "maximum": [
        (lambda xp, a, b: xp.maximum(a, b), [INTS, INTS[::-1].copy()]),
        (lambda xp, a, b: xp.maximum(a, b), [ROWS, ROWS[:, :1].copy()]),
        (lambda xp, a: xp.maximum(a, 0.5), [X]),
    ],
    "where": [
        (lambda xp, m, a: xp.where(m, a, 1.0), [MASK, X]),
        (lambda xp, m, a: xp.where(m, 7, a), [MASK[:777], LONGS]),
        (lambda xp, m, a, b: xp.where(m, a, b), [MASK, X, Y]),
    ],
    "less": [
        (lambda xp, a, b: xp.less(a, b), [X, Y]),
        (lambda xp, a: xp.less(a, 0.5), [X]),
    ],
    "equal": [(lambda xp, a, b: xp.equal(a, b), [X, np.abs(X)])],
    "logical_and": [(lambda xp, a, b: xp.logical_and(a, b), [MASK, ~MASK[::-1]])],
    "logical_or": [(lambda xp, a, b: xp.logical_or(a, b), [MASK, ~MASK[::-1]])],
    "logical_not": [(lambda xp, a: xp.logical_not(a), [MASK])],
    "row_min": [(lambda xp, a: xp.row_min(a), [ROWS])],
    "row_max": [(lambda xp, a: xp.row_max(a), [ROWS])],
    "badness": [
        (lambda xp, a: xp.equal(xp.badness(a), 0.0), [a])
        for a in (
            X,
            X[:0],
            ROWS,
            X.astype(np.float64),
            np.float32([3.4e38, -3.4e38]),
            *(spoilt(v) for v in (np.inf, -np.inf, np.nan, -np.nan)),
        )
    ],
    "row_sum": [
        (lambda xp, a: xp.cast(xp.row_sum(a), "float32"), [ROWS]),
        (lambda xp, a: xp.row_sum(a), [INTS.reshape(21, 37)]),
    ],
    "row_norm": [(lambda xp, a: xp.cast(xp.row_norm(a), "float32"), [SMALL_ROWS])],
    # Rounded to what every framework agrees on.
    "log1p_": [(lambda xp, a: xp.round_(xp.scale_(xp.log1p_(a), 1e3)), [np.abs(SMALL_ROWS)])],
    "expm1_": [(lambda xp, a: xp.round_(xp.scale_(xp.expm1_(a), 1e3)), [np.abs(SMALL_ROWS)])],
    # Of small whole numbers, whose sums are exact.
    "matmul": [
        (lambda xp, a, b: xp.matmul(xp.round_(a), xp.round_(b)), [SMALL_ROWS, SMALL_ROWS.T.copy()]),
        (
            lambda xp, a, b: xp.matmul(xp.round_(a), xp.round_(b)),
            [SMALL_ROWS[:, :9].copy(), SMALL_ROWS[:, :36].reshape(4, 9, 9)],
        ),
    ],
    "transpose": [
        (lambda xp, a: xp.transpose(a), [ROWS]),
        (lambda xp, a: xp.transpose(a), [ROWS.reshape(4, 8, 128)]),
    ],
    "bit_and": [
        (lambda xp, a: xp.bit_and(a, 15), [BYTES]),
        (lambda xp, a: xp.bit_and(a, 2**32 - 1), [LONGS]),
        (lambda xp, a, b: xp.bit_and(a, b), [INTS, INTS[::-1].copy()]),
    ],
    "bit_and_": [(lambda xp, a, b: xp.bit_and_(a, b), [INTS, INTS[::-1].copy()])],
    "bit_or": [(lambda xp, a, b: xp.bit_or(a, b), [BYTES, BYTES[::-1].copy()])],
    "bit_or_": [(lambda xp, a, b: xp.bit_or_(a, b), [INTS, INTS[::-1].copy()])],
    "bit_xor": [(lambda xp, a, b: xp.bit_xor(a, b), [INTS, INTS[::-1].copy()])],
    "bit_xor_": [(lambda xp, a, b: xp.bit_xor_(a, b), [INTS, INTS[::-1].copy()])],
    "shift_left": [(lambda xp, a: xp.shift_left(a, 3), [BYTES])],
    "shift_left_": [(lambda xp, a: xp.shift_left_(a, 3), [INTS])],
    "shift_right": [
        (lambda xp, a, by=by: xp.shift_right(a, by), [a])
        for a, by in ((BYTES, 3), (INTS, 16), (INTS, 1), (LONGS, 32))
    ],
    "shift_signed": [
        (lambda xp, a, by=by: xp.shift_signed(a, by), [a])
        for a, by in ((INTS, 1), (INTS, 31), (INTS.astype(np.int16), 4))
    ],
    "shift_signed_": [(lambda xp, a: xp.shift_signed_(a, 3), [INTS])],
    "magnitude": [(lambda xp, a: xp.magnitude(a), [np.append(X, [NAN, np.float32(-1e-40)])])],
    "flush": [(lambda xp, a: xp.flush(a, 1e-20), [np.append(X, np.float32([1e-40, -1e-45]))])],
    "strided": [(lambda xp, a: xp.strided(a, 101), [X])],
    "kth_largest": [
        (lambda xp, a, k=k: xp.reshape(xp.kth_largest(a, k), (1,)), [TIES]) for k in (1, 300, 777)
    ],
    "positions_above": [
        (lambda xp, a: xp.positions_above(a, xp.kth_largest(xp.magnitude(a), 99)), [X])
    ],
    "positions_of": [(lambda xp, m: xp.positions_of(m), [m]) for m in (MASK, MASK & ~MASK)],
    "count_true": [(lambda xp, m: xp.reshape(xp.count_true(m), (1,)), [MASK])],
    "running_count": [(lambda xp, m: xp.running_count(m), [MASK])],
    "running_sum": [(lambda xp, a: xp.running_sum(a), [LONGS])],
    "length": [(lambda xp, a: a[: 7 - xp.length(xp.positions_of(xp.less(a, 3)))], [np.arange(9)])],
    "cond": [
        (lambda xp, a, n=n: xp.cond(xp.length(a) >= n, lambda: a[:2], lambda: a[3:]), [X])
        for n in (5, 5000)
    ],
    "sort": [(lambda xp, a: xp.sort(a), [LONGS])],
    "fix_size": [(lambda xp, m: xp.fix_size(xp.positions_of(m), int(MASK.sum())), [MASK])],
    "fit": [
        (lambda xp, a, n=n, i=i: xp.fit(a, n)[i], [X])
        for n in (X.size - 1, X.size, X.size + 3)
        for i in (0, 1)
    ],
    "confine_": [
        (lambda xp, at: xp.confine_(at, 4104, xp.zeros(1, "float32", at)), [WHERE]),
        (lambda xp, at: xp.confine_(at, 5, xp.cast(at[:1] < 0, "float32")), [WHERE - 1000]),
    ],
    "known": [(lambda xp, a: a if xp.known(a[:2]) in (None, X[:2].tolist()) else a[:0], [X])],
    "take": [(lambda xp, a, at: xp.take(a, at), [X, WHERE])],
    "put_": [(lambda xp, a, at, v: xp.put_(a, at, v), [X, WHERE, SMALL])],
    "mark": [(lambda xp, at: xp.mark(4104, at), [WHERE])],
    "add_at_": [
        (lambda xp, a, at, v: xp.add_at_(a, at, v), [X, WHERE, SMALL]),
        (lambda xp, a, at, v: xp.add_at_(a, at, v), [X * 0, np.int64([3, 5, 3]), X[2:5]]),
    ],
    "search": [(lambda xp, a, v: xp.search(a, v), [WHERE, np.int64([-1, 0, 77, WHERE[9], 9999])])],
    "repeat": [
        (lambda xp, a, n: xp.repeat(a, n, 12), [LONGS[:5], np.int64([0, 4, 0, 7, 1])]),
        (lambda xp, a, n: xp.repeat(a, n, 3), [LONGS[:2], np.int64([3, 0])]),
    ],
    "repeat_each": [(lambda xp, a: xp.repeat_each(a, 3), [X])],
    "kernels": [(selected, [X])],
    "map_rows": [(lambda xp, a: xp.concat(mapped(xp, a), axis=1), [ROWS])],
    "join_flat": [(flat, [ROWS])],
    "new_payload": [(sealed, PARTS)],
    "seal_payload": [(sealed, PARTS)],
    "section": [
        (lambda xp, *p, i=i: LAYOUT.open(xp, sealed(xp, *p))[i], PARTS) for i in range(len(PARTS))
    ],
    "set_flag_": [(lambda xp, a, f: xp.set_flag_(a, f[0]), [BYTES, np.float32([-1.25])])],
    "flag_of": [(lambda xp, a: xp.reshape(xp.flag_of(a), (1,)), [BYTES])],
    "spoil_": [
        (lambda xp, a, f: xp.spoil_(a, f[0]), [X, np.float32([0])]),
        (lambda xp, a, f: xp.less(xp.spoil_(a, f[0]), 1e38), [X, np.float32([NAN])]),
    ],
    "poison_": [
        (lambda xp, a, f: xp.poison_(a, f[0]), [HALF, np.float32([0])]),
        (lambda xp, a, f: xp.less(xp.poison_(a, f[0]), 1e38), [Y, np.float32([NAN])]),
    ],
}
ALL = [pytest.param(*case, id=f"{n}-{i}") for n, cs in CASES.items() for i, case in enumerate(cs)]


def bits(x: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return x.dtype.name, x.shape, x.tobytes()


def by_torch(fn, arrays):
    return bits(fn(torch_ops, *(torch.from_numpy(a.copy()) for a in arrays)).numpy())


def by_tensorflow(fn, arrays, *, graph):
    call = tf.autograph.experimental.do_not_convert(lambda *a: fn(tf_ops, *a))
    return bits((tf.function(call) if graph else call)(*map(tf.constant, arrays)).numpy())


@pytest.mark.parametrize(("fn", "arrays"), ALL)
def test_both_modules_give_the_same_bits(fn, arrays):
    expected = by_torch(fn, arrays)
    assert by_tensorflow(fn, arrays, graph=False) == expected
    assert by_tensorflow(fn, arrays, graph=True) == expected


def test_both_modules_define_the_same_names_in_the_same_order():
    def names(module):
        return [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
        ]

    protocol = [name for name in vars(Ops) if name[0] != "_"]
    assert names(torch_ops) == protocol
    assert names(tf_ops) == protocol
    assert list(CASES) == protocol


@pytest.mark.parametrize("graph", [False, True])
def test_random_words_with_a_step_tensor_are_those_of_a_number(graph):
    for step in (0, 1, 2**31 + 5, 2**40 + 3):
        expected = bits(drawn(torch_ops, step, torch.zeros(1)).numpy())

        def draw(count):
            return drawn(tf_ops, count, tf.zeros([1]))

        draw = tf.function(tf.autograph.experimental.do_not_convert(draw)) if graph else draw
        assert bits(draw(tf.constant(step, tf.int64)).numpy()) == expected


def test_inputs_are_left_alone():
    for cases in CASES.values():
        for fn, arrays in cases:
            tensors = [tf.constant(a) for a in arrays]
            before = [bits(t.numpy()) for t in tensors]
            fn(tf_ops, *tensors)
            assert [bits(t.numpy()) for t in tensors] == before


def test_sizes_stay_static_in_a_graph():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def fixed(x):
        y = tf_ops.fix_size(x, 3)
        assert tf_ops.numel(y) == 3
        return y

    fixed(tf.constant([1, 2, 3], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="3"):
        fixed(tf.constant([1, 2], tf.int64))


def test_a_shape_that_is_not_static_is_refused():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def count(x):
        return tf_ops.numel(x)

    with pytest.raises(AssertionError, match="not static"):
        count(tf.zeros([3]))
