"""Natural compression: nothing but powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import random
from ..core.codec import Bias, Call, Tensor
from ..core.kernel import Kernel
from ..core.points import PointCodec

_MANTISSA = 23
_BIAS = 127  # of float32's exponent
_TOP = 63  # exponent of the largest power that has a code
_CODES = 127  # of exponents: 1 is 2^-63, 127 is 2^63


@dataclass(frozen=True)
class Natural(PointCodec):
    """Round each value at random to one of the two powers of two around it.

    For ``2^e <= |x| < 2^(e+1)``: ``Q(x) = sign(x) * 2^(e+1)`` with probability
    ``|x| / 2^e - 1``, else ``sign(x) * 2^e``. That is done on the bits: 23 random bits are added to
    the mantissa, and what carries over raises the exponent.

    Exponents -63 to 63 have a code. Smaller results, below 1.1e-19, become 0, and larger ones,
    above 9.2e18, become ``2^63``.

    =======  =====  =====  =====
    tensor   dtype  shape  bytes
    =======  =====  =====  =====
    codes    uint8  (n,)   n
    =======  =====  =====  =====

    A code is 128 for negative values plus ``e + 64``, or plus 0 for zero.

    Family: quantisation.

    Combine: GATHER. Bias: UNBIASED for values up to 9.2e18; those below 1.1e-19 lose at most
    themselves. The variance is at most 1/8 of the squared value, whatever the other values are.

    When to use: for a quarter of the bytes, unbiased, with no memory and nothing to set. Its bound
    holds for each value by itself, however large its neighbours are. Where a memory fits,
    ``linear`` with 8 bits sends about as much with a much smaller error (``gradcomp bench
    codecs``). Not with many ranks, since every rank receives all payloads.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("natural").wire_bytes(1000)
        1000

    Reference:
        Horvath, Ho, Horvath, Sahu, Canini, Richtarik, "Natural Compression for Distributed Deep
        Learning", MSML 2022, arXiv:1905.10988.

    Differs from the paper: 7 bits of exponent instead of 8, so that sign and exponent fill one
    byte.
    """

    code_dtype: ClassVar[str] = "uint8"

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED

    @property
    def kernel(self) -> Kernel:
        return Kernel("natural", 8)

    def to_codes(self, xp: Any, x: Tensor, call: Call, start: int) -> Tensor:
        drawn = random.words(xp, call.key, start, xp.numel(x), x)
        rounded = xp.add_(xp.bit_and_(drawn, 2**_MANTISSA - 1), xp.view(x, "int32"))
        exponent = xp.bit_and_(xp.shift_signed(rounded, _MANTISSA), 0xFF)
        code = xp.clamp_(xp.add_(exponent, _CODES - _TOP - _BIAS), 0, _CODES)
        sign = xp.bit_and_(xp.shift_signed_(rounded, 24), 0x80)
        return xp.cast(xp.bit_or_(code, sign), "uint8")

    def from_codes(self, xp: Any, codes: Tensor) -> Tensor:
        # The code goes to the top of the word and, by a signed shift, one down: sign, a copy of it
        # to be cleared, and 7 bits of exponent that read as 2^(code - 127), or 0 for 0.
        word = xp.shift_signed_(xp.shift_left_(xp.cast(codes, "int32"), 24), 1)
        value = xp.view(xp.bit_and_(word, ~0x40000000), "float32")
        return xp.scale_(value, 2.0 ** (_TOP - _CODES + _BIAS))
