"""8-bit floats with a power of two for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.blocks import BlockCodec
from ..core.codec import Bias, Call, Tensor, check_choice, check_count
from ..core.kernel import Kernel

_MANTISSA = 23
_BIAS = 127  # of float32's exponent
_ONE = 1 << _MANTISSA  # one step of the exponent, in place
_EXPONENT = 0xFF * _ONE
_LARGEST = 0x7F600000  # bits of 1.75 * 2^127; both formats' largest value is 1.75 times a power
_LEAST_TOP = (_BIAS - 80) * _ONE  # bits of 2^-80


class _Format(NamedTuple):
    mantissa: int
    """Bits."""

    exponents: int
    """Number of exponents of normal values."""

    least: int
    """The least of them."""


_FORMATS = {"e4m3": _Format(3, 15, -6), "e5m2": _Format(2, 30, -14)}


@dataclass(frozen=True)
class FP8(BlockCodec):
    """Cast to an 8-bit float after dividing each block by a power of two.

    ``Q(x) = f8(x / scale) * scale``, rounded half to even, subnormals kept. The scale is the least
    power of two that brings the block's largest magnitude to at most the format's largest value,
    448 or 57344, so that dividing by it loses nothing and no value saturates.

    ======  =========  ==================  ======================================
    format  precision  largest / smallest  error of a value far above the smallest
    ======  =========  ==================  ======================================
    e4m3    4 bits     448 / 2^-9          at most 1/16
    e5m2    3 bits     57344 / 2^-16       at most 1/8
    ======  =========  ==================  ======================================

    =======  =======  ============  ==============================
    tensor   dtype    shape         bytes
    =======  =======  ============  ==============================
    scale    float32  (blocks, 1)   4 per block
    codes    uint8    packed rows   n, as the format has them
    =======  =======  ============  ==============================

    Family: quantisation.

    Combine: GATHER. Bias: CONTRACTION.

    Values above 1.75 * 2^127 (2.98e38) become that; a block below 2^-80 (8e-25) is scaled as if
    its largest magnitude were that.

    When to use: for a quarter of the bytes with an error relative to each value. Small values of a
    block keep their precision beside large ones. Where the error of the whole counts, ``linear``
    with 8 bits sends about as much and is more exact (``gradcomp bench codecs`` shows both). Not
    with many ranks, since every rank receives all payloads.

    Args:
        format: "e4m3" is more precise, "e5m2" reaches further down within a block.
        block: Elements that share a scale, a multiple of 8; larger compresses a little more.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("fp8").wire_bytes(1024)
        1028

    Reference:
        Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.

    Differs from the paper: a scale for each block and of each step, not for each tensor and from
    earlier ones.
    """

    format: str = "e4m3"
    block: int = 1024

    def __post_init__(self) -> None:
        check_choice("fp8", "format", self.format, tuple(_FORMATS))
        check_count("fp8", "block", self.block, minimum=8, multiple=8)

    @property
    def bias(self) -> Bias:
        return Bias.CONTRACTION

    @property
    def code_bits(self) -> int:
        return 8

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def kernel(self) -> Kernel:
        return Kernel("fp8", 8, self.headers, _FORMATS[self.format])

    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        # Exponents stay in place within float32's bits. Between two powers of two values of the
        # format are evenly spaced; below its least exponent the spacing stays what it is there.
        form = _FORMATS[self.format]
        sizes = xp.clamp_(xp.magnitude(rows), 0, _LARGEST)
        top = xp.clamp_(xp.row_max(sizes), _LEAST_TOP, _LARGEST)  # (r, 1)
        top = xp.bit_and_(xp.add_(top, _ONE // 4 - 1), _EXPONENT)  # one more above 1.75
        least = xp.sub(top, (form.exponents - 1) * _ONE)
        exponents = xp.maximum(xp.bit_and(sizes, _EXPONENT), least)
        per_value = xp.sub((2 * _BIAS + form.mantissa) * _ONE, exponents)  # 1 / spacing
        steps = xp.mul_(xp.view(per_value, "float32"), xp.view(sizes, "float32"))
        steps = xp.cast(xp.round_(steps), "int32")
        code = xp.shift_signed_(xp.sub_(exponents, least), _MANTISSA - form.mantissa)
        sign = xp.bit_and_(xp.shift_signed(xp.view(rows, "int32"), 24), 0x80)
        scale = xp.view(xp.sub(least, form.least * _ONE), "float32")
        return scale, xp.bit_or_(xp.add_(code, steps), sign)

    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        # Both formats lie within float16, e5m2 as its upper byte, e4m3 with an exponent one bit
        # shorter, so that all values are 2^8 too small.
        half = xp.shift_left_(xp.cast(codes, "int16"), 8)
        if self.format == "e4m3":
            half = xp.bit_and_(xp.shift_signed_(half, 1), ~0x4000)
            headers = xp.scaled(headers, 2.0**8)
        return xp.mul_(xp.cast(xp.view(half, "float16"), "float32"), headers)
