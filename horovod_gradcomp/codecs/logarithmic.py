"""Logarithmic quantisation: levels that are closer the smaller they are."""

from __future__ import annotations

import functools
import math
import struct
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, ClassVar, Union

from ..core.blocks import SMALLEST, BlockCodec
from ..core.codec import Bias, Call, Tensor, check_choice, check_count, check_range
from ..core.kernel import Kernel

_AUTO = 32.0  # least squared error of Student's t with 3 degrees of freedom, for every width
_LARGEST = {True: 1e38, False: 3.4e38}  # by whether the rule is plain; decoded, it may grow by 1e-5


@dataclass(frozen=True)
class Logarithmic(BlockCodec):
    """Round each magnitude to one of ``2^(bits-1)`` levels, evenly spaced in ``log(1 + y)``.

    Per block ``y = |x| / unit``, with ``unit = max|x| / range`` and ``scale = log(1 + range) / L``.
    Levels are ``(exp(q * scale) - 1) * unit`` for q from 0 to ``L = 2^(bits-1) - 1``; each
    magnitude goes to the nearest, and keeps its sign. Below the unit levels are about evenly
    spaced, above it in equal ratios: with 8 bits and ``range=32`` the least is 1/1150 of the
    largest magnitude, and steps near that one are of 2.8 %.

    ``range="auto"`` is 32: the unit is 1/32 of the block's largest magnitude. ``range=None`` is the
    plain rule, ``unit = 1`` and ``scale = log(1 + max|x|) / L``; where all values are much smaller
    than 1, as gradients are, that is no more than evenly spaced levels.

    =======  =======  ===========  ====================================
    tensor   dtype    shape        bytes
    =======  =======  ===========  ====================================
    unit     float32  (blocks, 1)  4 per block; scale for ``range=None``
    codes    uint8    packed rows  n * bits / 8: q, and the sign on top
    =======  =======  ===========  ====================================

    Family: quantisation.

    Combine: GATHER. Bias: CONTRACTION, since zero is a level and the nearest is taken.

    A block whose unit (plain: scale) is below 2^-80 (8e-25) is sent as zeros; magnitudes above
    3.4e38 (plain: 1e38) count as that.

    When to use: for heavy-tailed gradients, at 8 bits. Small values beside a few large ones keep
    more of their precision than with ``linear``. Where values are spread evenly ``linear`` is more
    exact and takes less time (``gradcomp bench codecs`` shows both). Not with many ranks, since
    every rank receives all payloads.

    Args:
        bits: Bits an element, 2 to 8; fewer compress more.
        block: Elements that share a unit, a multiple of 8; larger compresses a little more.
        range: How many units the largest magnitude has, 1 to 1e6, "auto" or None. Larger follows
            small values further down and is coarser everywhere.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("logarithmic").wire_bytes(1024)
        1028

    Reference:
        Miyashita, Lee, Murmann, "Convolutional Neural Networks using Logarithmic Data
        Representation", arXiv:1603.01025; with ``log(1 + |x|)`` as in mu-law companding, ITU-T
        G.711.

    Differs from the paper: zero is a level; rounding is to the nearest value, not the nearest
    logarithm, which can more than double a small value.
    """

    bit_equal: ClassVar[bool] = False

    bits: int = 8
    block: int = 1024
    range: Union[float, str, None] = "auto"  # noqa: UP007 - read at run time on Python 3.9

    def __post_init__(self) -> None:
        check_choice("logarithmic", "bits", self.bits, tuple(range(2, 9)))
        check_count("logarithmic", "block", self.block, minimum=8, multiple=8)
        if self.range is not None and not (isinstance(self.range, str) and self.range == "auto"):
            check_range("logarithmic", "range", self.range, 1.0, 1e6, also="'auto' or None")

    @property
    def bias(self) -> Bias:
        return Bias.CONTRACTION

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def _top(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def _units(self) -> float | None:
        return _AUTO if isinstance(self.range, str) else self.range

    @property
    def kernel(self) -> Kernel | None:
        # The plain rule has other levels in every block, and so no table.
        return None if self._units is None else _kernel(self.bits, self._units)

    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        units = self._units
        sizes = xp.clamp_(xp.view(xp.magnitude(rows), "float32"), 0.0, _LARGEST[units is None])
        top = xp.row_max(sizes)  # (r, 1)
        if units is None:
            header = xp.flush(xp.scale_(xp.log1p_(top), 1.0 / self._top), SMALLEST)
            scale = xp.where(xp.equal(header, 0.0), 1.0, header)
            place = xp.div_(xp.log1p_(sizes), scale)
            half = xp.log1p_(xp.scale_(xp.expm1_(xp.copy(scale)), 0.5))
            place = xp.add_(place, xp.sub(1.0, xp.div_(half, scale)))
        else:
            header = xp.flush(xp.scale_(top, 1.0 / units), SMALLEST)
            unit = xp.where(xp.equal(header, 0.0), 1.0, header)
            step = math.log1p(units) / self._top
            place = xp.scale_(xp.log1p_(xp.div_(sizes, unit)), 1.0 / step)
            place = xp.add_(place, 1.0 - math.log1p(math.expm1(step) / 2) / step)
        level = xp.cast(xp.clamp_(xp.floor_(place), 0.0, float(self._top)), "int32")
        sign = xp.shift_signed(xp.view(rows, "int32"), 32 - self.bits)
        return header, xp.bit_or_(level, xp.bit_and_(sign, self._top + 1))

    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        units, codes = self._units, xp.cast(codes, "int32")
        level = xp.bit_and(codes, self._top)
        if units is None:
            size = xp.expm1_(xp.mul_(xp.cast(level, "float32"), headers))
        else:
            bits = xp.as_int64([_bits(size) for size in _sizes(self.bits, units)], headers)
            table = xp.view(xp.cast(bits, "int32"), "float32")
            flat = xp.take(table, xp.reshape(xp.cast(level, "int64"), (-1,)))
            size = xp.mul_(xp.reshape(flat, level.shape), headers)
        sign = xp.bit_and_(xp.shift_left_(codes, 32 - self.bits), -(2**31))
        return xp.view(xp.bit_xor_(sign, xp.view(size, "int32")), "float32")


@functools.lru_cache(maxsize=16)
def _kernel(bits: int, units: float) -> Kernel:
    """Return the kernel with its tables: a size is looked up by the leading bits of 1 + size.

    Bins are narrower than levels are apart, so that in each at most one level begins.
    """
    top = (1 << (bits - 1)) - 1
    step = math.log1p(units) / top
    fine = max(0, math.ceil(-math.log2(math.expm1(step)))) + 1  # bits of the mantissa
    begins = [_begin(level, step) for level in range(1, top + 1)]
    low, levels, limits = 0.0, [], []
    while low <= units * 1.001:  # the largest may be more than so many units by rounding
        level = bisect_right(begins, low)
        levels.append(float(level))
        limits.append(begins[level] if level < top else math.inf)
        low += math.ldexp(1.0, math.frexp(1.0 + low)[1] - 1 - fine)
    sizes = _sizes(bits, units)
    numbers = (1.0 / units, SMALLEST, _LARGEST[False], fine, len(levels))
    return Kernel("logarithmic", bits, 1, numbers, [*sizes, *levels, *limits])


def _sizes(bits: int, units: float) -> list[float]:
    """Return what each level stands for, in units: the same on every rank, in every framework."""
    top = (1 << (bits - 1)) - 1
    step = _single(math.log1p(units) / top)
    return [_single(math.expm1(_single(level * step))) for level in range(top + 1)]


def _begin(level: int, step: float) -> float:
    """Return the least float32 that is quantised to a level, by the very roundings of the rule."""
    half = math.log1p(math.expm1(step) / 2)
    factor, shift = _single(1.0 / step), _single(1.0 - half / step)
    exact = math.expm1((level - 1) * step + half)
    low, high = (_bits(exact * share) for share in (0.999, 1.001))
    while low < high:
        middle = (low + high) // 2
        (size,) = struct.unpack("f", struct.pack("i", middle))
        if _single(_single(_single(math.log1p(size)) * factor) + shift) >= level:
            high = middle
        else:
            low = middle + 1
    (size,) = struct.unpack("f", struct.pack("i", low))
    return float(size)


def _single(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _bits(x: float) -> int:
    return int(struct.unpack("i", struct.pack("f", x))[0])
