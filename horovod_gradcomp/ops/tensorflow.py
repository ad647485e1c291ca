"""The operations of :class:`horovod_gradcomp.ops.Ops` on TensorFlow tensors, eager or in a graph.

Tensors are never overwritten here: names with a trailing underscore return new ones, and the
runtime reuses the storage of inputs that nobody else reads. TensorFlow's kernels flush
subnormals, so every decision that a payload depends on is taken on bits or on whole numbers. On a
CPU each operation is a pass over fresh storage; :func:`kernels` need one for all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from ..core.errors import explain
from ..core.payload import FLAG_BYTES, ITEM_BYTES
from . import tensorflow_kernels

Tensor = Any
DTYPES = {
    "float16": tf.float16,
    "float32": tf.float32,
    "float64": tf.float64,
    "int16": tf.int16,
    "int32": tf.int32,
    "int64": tf.int64,
    "uint8": tf.uint8,
    "bool": tf.bool,
}

_ABS = 0x7FFFFFFF
_INFINITY = 0x7F800000
_MINUS_INFINITY = 0xFF800000


def numel(x: Tensor) -> int:
    count = x.shape.num_elements()
    if count is None:
        raise AssertionError(f"the shape {x.shape} is not static")
    return int(count)


def arange(start: int, count: int, dtype: str, like: Tensor) -> Tensor:
    return tf.range(start, start + count, dtype=DTYPES[dtype])


def zeros(count: int, dtype: str, like: Tensor) -> Tensor:
    if dtype == "float32" and tensorflow_kernels.large(count) and kernels(like):
        return tensorflow_kernels.zeros(count, like)
    return tf.zeros([count], DTYPES[dtype])


def zeros_like(x: Tensor) -> Tensor:
    return tf.zeros_like(x)


def empty(count: int, like: Tensor, dtype: str = "float32") -> Tensor:
    return tf.zeros([count], DTYPES[dtype])  # unused in a graph, where it costs nothing


def as_int32(word: Any, like: Tensor) -> Tensor:
    if tf.is_tensor(word):
        return tf.cast(tf.where(word >= 2**31, word - 2**32, word), tf.int32)
    return tf.constant(word - 2**32 if word >= 2**31 else word, tf.int32)


def as_int64(values: Sequence[int], like: Tensor) -> Tensor:
    return tf.constant(values, tf.int64)


def numbers(values: Sequence[Any], like: Tensor) -> Tensor:
    return tf.stack([tf.cast(value, like.dtype) for value in values])


def cast(x: Tensor, dtype: str) -> Tensor:
    return tf.cast(x, DTYPES[dtype])


def view(x: Tensor, dtype: str) -> Tensor:
    return tf.bitcast(x, DTYPES[dtype])


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return tf.reshape(x, tuple(shape))


def copy(x: Tensor) -> Tensor:
    return tf.identity(x)


def concat(parts: Sequence[Tensor], axis: int) -> Tensor:
    return tf.concat(list(parts), axis=axis)


def pad_columns(x: Tensor, width: int) -> Tensor:
    if x.shape[1] == width:
        return x
    return tf.pad(x, [[0, 0], [0, width - x.shape[1]]])


def add(a: Tensor, b: Tensor | float) -> Tensor:
    # The graph optimizer turns a tree of additions into another order, which rounds differently;
    # it does not look through this check, which costs nothing.
    total: Tensor = a + b
    return tf.ensure_shape(total, total.shape)


def add_(a: Tensor, b: Tensor | float) -> Tensor:
    return add(a, b)


def add_scaled(a: Tensor, b: Tensor, factor: float, out: Any) -> Tensor:
    a, b = tf.cast(a, tf.float32), tf.cast(b, tf.float32)
    return a + b if factor == 1 else a + scaled(b, factor)


def to_float32(a: Tensor, out: Any) -> Tensor:
    return tf.cast(a, tf.float32)


def sub(a: Tensor | float, b: Tensor) -> Tensor:
    return a - b


def sub_(a: Tensor, b: Tensor) -> Tensor:
    return a - b


def mul_(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def div(a: Tensor, b: Tensor) -> Tensor:
    return a / b


def div_(a: Tensor, b: Tensor) -> Tensor:
    return a / b


def scale_(a: Tensor, factor: float | int) -> Tensor:
    return scaled(a, factor)


def scaled(a: Tensor, factor: float) -> Tensor:
    if tf.is_tensor(factor):
        return a * tf.cast(factor, a.dtype)
    return a * tf.constant(factor, a.dtype)


def round_(a: Tensor) -> Tensor:
    return tf.round(a)


def floor_(a: Tensor) -> Tensor:
    return tf.floor(a)


def floor_divide(a: Tensor, divisor: int) -> Tensor:
    return a // tf.constant(divisor, a.dtype)


def clamp_(a: Tensor, low: float, high: float) -> Tensor:
    return tf.minimum(tf.maximum(a, tf.constant(low, a.dtype)), tf.constant(high, a.dtype))


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    return tf.minimum(a, b)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    return tf.maximum(a, b)


def where(mask: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    dtype = getattr(a, "dtype", None) or getattr(b, "dtype", tf.float32)
    return tf.where(mask, tf.convert_to_tensor(a, dtype), tf.convert_to_tensor(b, dtype))


def less(a: Tensor, b: Tensor | float) -> Tensor:
    return tf.less(a, b)


def equal(a: Tensor, b: Tensor) -> Tensor:
    return tf.equal(a, b)


def logical_and(a: Tensor, b: Tensor) -> Tensor:
    return tf.logical_and(a, b)


def logical_or(a: Tensor, b: Tensor) -> Tensor:
    return tf.logical_or(a, b)


def logical_not(a: Tensor) -> Tensor:
    return tf.logical_not(a)


def row_min(x: Tensor) -> Tensor:
    return tf.reduce_min(x, axis=1, keepdims=True)


def row_max(x: Tensor) -> Tensor:
    return tf.reduce_max(x, axis=1, keepdims=True)


def badness(x: Tensor) -> Tensor:
    # The bits of infinity and NaN are the greatest, with and without the sign. Two reductions make
    # no temporary tensor, which costs more here than reading twice; reduce_max of floats may skip
    # NaN.
    x = tf.cast(x, tf.float32)
    positive = tf.reduce_max(tf.bitcast(x, tf.int32)) >= _INFINITY
    negative = tf.reduce_max(tf.bitcast(x, tf.uint32)) >= tf.constant(_MINUS_INFINITY, tf.uint32)
    return tf.where(tf.logical_or(positive, negative), tf.constant(float("nan")), 0.0)


def row_sum(x: Tensor) -> Tensor:
    return tf.reduce_sum(tf.cast(x, tf.float64), axis=1, keepdims=True)


def row_norm(x: Tensor) -> Tensor:
    return tf.sqrt(tf.reduce_sum(tf.square(tf.cast(x, tf.float64)), axis=1, keepdims=True))


def log1p_(a: Tensor) -> Tensor:
    return tf.math.log1p(a)


def expm1_(a: Tensor) -> Tensor:
    return tf.math.expm1(a)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return tf.matmul(a, b)


def transpose(a: Tensor) -> Tensor:
    return tf.linalg.matrix_transpose(a)


def bit_and(a: Tensor, b: Tensor | int) -> Tensor:
    return tf.bitwise.bitwise_and(a, tf.convert_to_tensor(b, a.dtype))


def bit_and_(a: Tensor, b: Tensor | int) -> Tensor:
    return bit_and(a, b)


def bit_or(a: Tensor, b: Tensor | int) -> Tensor:
    return tf.bitwise.bitwise_or(a, tf.convert_to_tensor(b, a.dtype))


def bit_or_(a: Tensor, b: Tensor | int) -> Tensor:
    return bit_or(a, b)


def bit_xor(a: Tensor, b: Tensor | int) -> Tensor:
    return tf.bitwise.bitwise_xor(a, tf.convert_to_tensor(b, a.dtype))


def bit_xor_(a: Tensor, b: Tensor | int) -> Tensor:
    return bit_xor(a, b)


def shift_left(a: Tensor, count: int) -> Tensor:
    return tf.bitwise.left_shift(a, tf.constant(count, a.dtype))


def shift_left_(a: Tensor, count: int) -> Tensor:
    return shift_left(a, count)


def shift_right(a: Tensor, count: int) -> Tensor:
    shifted = tf.bitwise.right_shift(a, tf.constant(count, a.dtype))
    if a.dtype == tf.int32:  # the sign was shifted in
        return bit_and(shifted, 2 ** (32 - count) - 1)
    return shifted


def shift_signed(a: Tensor, count: int) -> Tensor:
    return tf.bitwise.right_shift(a, tf.constant(count, a.dtype))


def shift_signed_(a: Tensor, count: int) -> Tensor:
    return shift_signed(a, count)


def magnitude(x: Tensor) -> Tensor:
    if x.dtype != tf.float32:
        raise TypeError(explain(got=x.dtype.name, expected="float32"))
    return bit_and(tf.bitcast(x, tf.int32), _ABS)


def flush(x: Tensor, floor: float) -> Tensor:
    limit = struct.unpack("i", struct.pack("f", floor))[0]
    return tf.where(magnitude(x) < limit, tf.constant(0.0), x)


def strided(x: Tensor, stride: int) -> Tensor:
    return x[::stride]


def kth_largest(x: Tensor, k: int) -> Tensor:
    return tf.reduce_min(tf.math.top_k(x, k, sorted=False).values)


def positions_above(x: Tensor, bits: Tensor) -> Tensor:
    return positions_of(magnitude(x) > bits)


def positions_of(mask: Tensor) -> Tensor:
    return tf.reshape(tf.where(mask), [-1])


def count_true(mask: Tensor) -> Tensor:
    return tf.math.count_nonzero(mask)


def running_count(mask: Tensor) -> Tensor:
    return tf.cumsum(tf.cast(mask, tf.int64))


def running_sum(x: Tensor) -> Tensor:
    return tf.cumsum(x)


def length(x: Tensor) -> Tensor | int:
    return tf.size(x, out_type=tf.int64)


def cond(condition: Any, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    if isinstance(condition, bool):
        return yes() if condition else no()
    return tf.cond(condition, yes, no)


def sort(x: Tensor) -> Tensor:
    return tf.sort(x)


def fix_size(x: Tensor, count: int) -> Tensor:
    return tf.ensure_shape(x, [count])


def fit(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    filled = tf.concat([x[:count], tf.zeros([count], x.dtype)], axis=0)[:count]
    return tf.ensure_shape(filled, [count]), tf.equal(tf.size(x), count)


def confine_(positions: Tensor, count: int, damage: Tensor) -> Tensor:
    return tf.clip_by_value(positions, 0, count - 1)


def known(x: Tensor) -> list[float] | None:
    if not tf.executing_eagerly() or "GPU" in x.device:
        return None
    return [float(value) for value in tf.unstack(tf.reshape(x, [-1]))]


def take(x: Tensor, positions: Tensor) -> Tensor:
    return tf.gather(x, positions)


def put_(x: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    if tensorflow_kernels.worth(x) and kernels(x):
        return tensorflow_kernels.scatter(x, positions, values, add=False)
    return tf.tensor_scatter_nd_update(x, positions[:, tf.newaxis], values)


def mark(count: int, positions: Tensor) -> Tensor:
    true = tf.ones_like(positions, tf.bool)
    return tf.tensor_scatter_nd_update(tf.zeros([count], tf.bool), positions[:, tf.newaxis], true)


def add_at_(x: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    if tensorflow_kernels.worth(x) and kernels(x):
        return tensorflow_kernels.scatter(x, positions, values, add=True)
    return tf.tensor_scatter_nd_add(x, positions[:, tf.newaxis], values)


def search(ordered: Tensor, values: Tensor) -> Tensor:
    return tf.searchsorted(ordered, values, out_type=tf.int64)


def repeat(x: Tensor, counts: Tensor, total: int) -> Tensor:
    # tf.repeat makes a mask of len(x) * max(counts); this is total * log(len(x)).
    owner = tf.searchsorted(tf.cumsum(counts), tf.range(total, dtype=counts.dtype), side="right")
    return tf.gather(x, owner)


def repeat_each(x: Tensor, times: int) -> Tensor:
    return tf.reshape(tf.tile(x[:, tf.newaxis], [1, times]), [-1])


def kernels(*tensors: Tensor) -> Any | None:
    return tensorflow_kernels if tensorflow_kernels.apply(tensors) else None


def map_rows(
    fn: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    into: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    return tuple(fn(0, *inputs))


def join_flat(whole: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    flat = [tf.reshape(piece, [-1]) for piece in pieces]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def new_payload(layout: Any, like: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    return None, [None] * len(layout.sections)


def seal_payload(layout: Any, payload: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
    pieces = [_bytes(parts[i]) for i in layout.order() if layout.sections[i].nbytes]
    padding = layout.total - sum(section.nbytes for section in layout.sections)
    return tf.concat([*pieces, tf.zeros([padding], tf.uint8)], axis=0)


def section(payload: Tensor, start: int, dtype: str, rows: int, width: int) -> Tensor:
    item = ITEM_BYTES[dtype]
    part = payload[start : start + rows * width * item]
    if item > 1:
        part = tf.bitcast(tf.reshape(part, [rows * width, item]), DTYPES[dtype])
    return tf.reshape(part, [rows, width])


def set_flag_(payload: Tensor, flag: Tensor) -> Tensor:
    return tf.concat([payload[:-FLAG_BYTES], tf.bitcast(flag, tf.uint8)], axis=0)


def flag_of(payload: Tensor) -> Tensor:
    return tf.bitcast(payload[-FLAG_BYTES:], tf.float32)


def spoil_(x: Tensor, flag: Tensor) -> Tensor:
    # A branch costs nothing on a good step, an addition a pass over x.
    return tf.cond(tf.equal(flag, 0.0), lambda: x, lambda: x + flag)


def poison_(payload: Tensor, flag: Tensor) -> Tensor:
    if not numel(payload):
        return payload
    first = tf.reshape(tf.cast(flag, payload.dtype), [1])
    return tf.tensor_scatter_nd_add(payload, [[0]], first)


def _bytes(x: Tensor) -> Tensor:
    flat = tf.reshape(x, [-1])
    return flat if flat.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), [-1])
