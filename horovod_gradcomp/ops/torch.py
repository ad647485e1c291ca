"""The operations of :class:`horovod_gradcomp.ops.Ops` on PyTorch tensors.

On a CPU whole-tensor passes are bound by memory, so :func:`map_rows` and :func:`positions_above`
work in chunks that stay in the cache; :func:`kernels` need one pass. On a GPU a chunk is
everything: few large kernels.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any, Callable

import torch

from ..core.errors import explain
from ..core.payload import FLAG_BYTES
from . import torch_kernels
from .torch_kernels import fresh

Tensor = torch.Tensor
DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
CPU_CHUNK = 65_536
"""Elements a chunk: 256 KiB of float32, so that a chunk and its results fit a level-2 cache."""

_ABS = 0x7FFFFFFF
_ROUNDED = (torch.float16, torch.float32)


def numel(x: Tensor) -> int:
    return x.numel()


def arange(start: int, count: int, dtype: str, like: Tensor) -> Tensor:
    return torch.arange(start, start + count, dtype=DTYPES[dtype], device=like.device)


def zeros(count: int, dtype: str, like: Tensor) -> Tensor:
    return fresh(count, DTYPES[dtype], like).zero_()


def zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def empty(count: int, like: Tensor, dtype: str = "float32") -> Tensor:
    return fresh(count, DTYPES[dtype], like)


def as_int32(word: Any, like: Tensor) -> Tensor:
    signed = word - 2**32 if word >= 2**31 else word
    return torch.as_tensor(signed, dtype=torch.int32, device=like.device)


def as_int64(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def numbers(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def cast(x: Tensor, dtype: str) -> Tensor:
    if dtype == "uint8" and x.dtype == torch.float32 and x.device.type == "cpu":
        x = x.to(torch.int32)  # two steps that are vectorised, where the direct one is not
    return x.to(DTYPES[dtype])


def view(x: Tensor, dtype: str) -> Tensor:
    return x.view(DTYPES[dtype])


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.reshape(tuple(shape))


def copy(x: Tensor) -> Tensor:
    return fresh(x.shape, x.dtype, x).copy_(x)


def concat(parts: Sequence[Tensor], axis: int) -> Tensor:
    return torch.cat(list(parts), dim=axis)


def pad_columns(x: Tensor, width: int) -> Tensor:
    if x.shape[1] == width:
        return x
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))


def add(a: Tensor, b: Tensor | float) -> Tensor:
    return a + b


def add_(a: Tensor, b: Tensor | float) -> Tensor:
    return a.add_(b)


def add_scaled(a: Tensor, b: Tensor, factor: float, out: Any) -> Tensor:
    if out is None:
        out = fresh(a.shape, torch.float32, a)
    if a.dtype == torch.float64:
        a = a.float()
    if factor == 1:
        return torch.add(a, b, out=out)
    # alpha= would multiply and add with one rounding, in some lanes and not in others.
    return torch.mul(b, _rounded(factor), out=out).add_(a)


def to_float32(a: Tensor, out: Any) -> Tensor:
    if out is None:
        out = fresh(a.shape, torch.float32, a)
    copied: Tensor = out.copy_(a)
    return copied


def sub(a: Tensor | float, b: Tensor) -> Tensor:
    return a - b


def sub_(a: Tensor, b: Tensor) -> Tensor:
    return a.sub_(b)


def mul_(a: Tensor, b: Tensor) -> Tensor:
    return a.mul_(b)


def div(a: Tensor, b: Tensor) -> Tensor:
    return a / b


def div_(a: Tensor, b: Tensor) -> Tensor:
    return a.div_(b)


def scale_(a: Tensor, factor: float | int) -> Tensor:
    return a.mul_(_rounded(factor) if a.dtype in _ROUNDED else factor)


def scaled(a: Tensor, factor: float) -> Tensor:
    product: Tensor = a * _rounded(factor)
    return product


def round_(a: Tensor) -> Tensor:
    return a.round_()


def floor_(a: Tensor) -> Tensor:
    return a.floor_()


def floor_divide(a: Tensor, divisor: int) -> Tensor:
    return a // divisor


def clamp_(a: Tensor, low: float, high: float) -> Tensor:
    return a.clamp_(low, high)


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    return a.clamp(max=b)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    return a.clamp(min=b)


def where(mask: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    return torch.where(mask, a, b)


def less(a: Tensor, b: Tensor | float) -> Tensor:
    return a < b


def equal(a: Tensor, b: Tensor) -> Tensor:
    return a == b


def logical_and(a: Tensor, b: Tensor) -> Tensor:
    return a & b


def logical_or(a: Tensor, b: Tensor) -> Tensor:
    return a | b


def logical_not(a: Tensor) -> Tensor:
    return ~a


def row_min(x: Tensor) -> Tensor:
    return x.amin(dim=1, keepdim=True)


def row_max(x: Tensor) -> Tensor:
    return x.amax(dim=1, keepdim=True)


def badness(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # On a CPU half the cost of a copy; isfinite().all() costs several. A difference is +0 where a
    # product with 0 may be -0, whose bits would differ.
    low, high = torch.aminmax(x)
    made = (low - low) + (high - high)
    return made if made.dtype is torch.float32 else made.to(torch.float32)


def row_sum(x: Tensor) -> Tensor:
    return x.sum(dim=1, keepdim=True, dtype=torch.float64)


def row_norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
    return norm


def log1p_(a: Tensor) -> Tensor:
    return a.log1p_()


def expm1_(a: Tensor) -> Tensor:
    return a.expm1_()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def transpose(a: Tensor) -> Tensor:
    return a.transpose(-1, -2)


def bit_and(a: Tensor, b: Tensor | int) -> Tensor:
    return a & b


def bit_and_(a: Tensor, b: Tensor | int) -> Tensor:
    return a.bitwise_and_(b)


def bit_or(a: Tensor, b: Tensor | int) -> Tensor:
    return a | b


def bit_or_(a: Tensor, b: Tensor | int) -> Tensor:
    return a.bitwise_or_(b)


def bit_xor(a: Tensor, b: Tensor | int) -> Tensor:
    return a ^ b


def bit_xor_(a: Tensor, b: Tensor | int) -> Tensor:
    return a.bitwise_xor_(b)


def shift_left(a: Tensor, count: int) -> Tensor:
    return a << count


def shift_left_(a: Tensor, count: int) -> Tensor:
    return a.bitwise_left_shift_(count)


def shift_right(a: Tensor, count: int) -> Tensor:
    if a.dtype == torch.int32:  # torch shifts the sign in
        return (a >> count).bitwise_and_(2 ** (32 - count) - 1)
    return a >> count


def shift_signed(a: Tensor, count: int) -> Tensor:
    return a >> count


def shift_signed_(a: Tensor, count: int) -> Tensor:
    return a.bitwise_right_shift_(count)


def magnitude(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(explain(got=str(x.dtype), expected="float32"))
    return x.view(torch.int32) & _ABS


def flush(x: Tensor, floor: float) -> Tensor:
    limit = struct.unpack("i", struct.pack("f", floor))[0]
    return torch.where(magnitude(x) < limit, torch.zeros((), device=x.device), x)


def strided(x: Tensor, stride: int) -> Tensor:
    return x[::stride].contiguous()


def kth_largest(x: Tensor, k: int) -> Tensor:
    return torch.topk(x, k, sorted=False).values.min()


def positions_above(x: Tensor, bits: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return (magnitude(x) > bits).nonzero().view(-1)
    found = []
    for start in range(0, x.numel(), CPU_CHUNK):
        here = (magnitude(x[start : start + CPU_CHUNK]) > bits).nonzero().view(-1)
        if here.numel():
            found.append(here.add_(start))
    return torch.cat(found) if found else x.new_empty(0, dtype=torch.int64)


def positions_of(mask: Tensor) -> Tensor:
    return mask.nonzero().view(-1)


def count_true(mask: Tensor) -> Tensor:
    return mask.sum()


def running_count(mask: Tensor) -> Tensor:
    return mask.cumsum(0)


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(0)


def length(x: Tensor) -> Tensor | int:
    return x.numel()


def cond(condition: Any, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    return yes() if bool(condition) else no()


def sort(x: Tensor) -> Tensor:
    return x.sort().values


def fix_size(x: Tensor, count: int) -> Tensor:
    if x.numel() != count:
        raise AssertionError(f"{x.numel()} elements where {count} are due")
    return x


def fit(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    length = x.numel()
    if length < count:
        x = torch.cat([x, x.new_zeros(count - length)])
    return x[:count], torch.full((), length == count, device=x.device)


def confine_(positions: Tensor, count: int, damage: Tensor) -> Tensor:
    if positions.device.type == "cpu" and damage.item() == 0:  # reading is free, a pass is not
        return positions
    return positions.clamp_(0, count - 1)


def known(x: Tensor) -> list[float] | None:
    return x.reshape(-1).tolist() if x.device.type == "cpu" else None


def take(x: Tensor, positions: Tensor) -> Tensor:
    return x.index_select(0, positions)


def put_(x: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    return x.index_copy_(0, positions, values)


def mark(count: int, positions: Tensor) -> Tensor:
    mask = torch.zeros(count, dtype=torch.bool, device=positions.device)
    mask[positions] = True
    return mask


def add_at_(x: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    return x.index_add_(0, positions, values)


def search(ordered: Tensor, values: Tensor) -> Tensor:
    return torch.searchsorted(ordered, values)


def repeat(x: Tensor, counts: Tensor, total: int) -> Tensor:
    return torch.repeat_interleave(x, counts, output_size=total)


def repeat_each(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times)


def kernels(*tensors: Tensor) -> Any | None:
    return torch_kernels if torch_kernels.apply(tensors) else None


def map_rows(
    fn: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    into: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    rows = inputs[0].shape[0]
    width = max(x[:1].numel() for x in [*inputs, *into] if x is not None)
    step = max(1, CPU_CHUNK // max(1, width)) if inputs[0].device.type == "cpu" else max(1, rows)
    outs = list(into)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for i, result in enumerate(fn(start, *(x[start:stop] for x in inputs))):
            out = outs[i]
            if out is None:
                out = outs[i] = result.new_empty((rows, *result.shape[1:]))
            piece = out[start:stop]
            if piece.data_ptr() != result.data_ptr():  # else it was worked in place
                piece.copy_(result)
    return tuple(out for out in outs if out is not None)


def join_flat(whole: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    at = whole.data_ptr()
    for piece in filter(torch.numel, pieces):  # an empty one has no address
        if piece.data_ptr() != at:
            raise AssertionError("pieces are not consecutive views of the whole")
        at += piece.numel() * piece.element_size()
    return whole


def new_payload(layout: Any, like: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    payload = fresh(layout.total, torch.uint8, like)
    payload[layout.nbytes - 4 if layout.nbytes else 0 :].zero_()  # padding and flag
    return payload, layout.open(sys.modules[__name__], payload)


def seal_payload(layout: Any, payload: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
    assert payload is not None
    for view, part in zip(layout.open(sys.modules[__name__], payload), parts):
        if part.data_ptr() != view.data_ptr():
            view.copy_(part.view(view.shape))
    return payload


def section(payload: Tensor, start: int, dtype: str, rows: int, width: int) -> Tensor:
    item = DTYPES[dtype].itemsize
    return payload[start : start + rows * width * item].view(DTYPES[dtype]).view(rows, width)


def set_flag_(payload: Tensor, flag: Tensor) -> Tensor:
    payload[-FLAG_BYTES:].view(torch.float32).copy_(flag)
    return payload


def flag_of(payload: Tensor) -> Tensor:
    return payload[-FLAG_BYTES:].view(torch.float32)[0]


def spoil_(x: Tensor, flag: Tensor) -> Tensor:
    if x.device.type == "cpu":  # reading a scalar is free here and a pass over x is not
        return x if flag.item() == 0 else x.fill_(float("nan"))
    return x.add_(flag)


def poison_(payload: Tensor, flag: Tensor) -> Tensor:
    if payload.numel():
        payload[:1].add_(flag)
    return payload


def _rounded(factor: Any) -> Any:
    """Return the factor as the nearest float32, which is what other frameworks multiply by."""
    if isinstance(factor, Tensor):  # it stays on its device: nothing waits for it
        return factor
    return float(struct.unpack("f", struct.pack("f", factor))[0])
