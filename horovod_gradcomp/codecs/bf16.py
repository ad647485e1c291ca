"""Brain float: float32's range in 2 bytes, which Horovod itself cannot carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.codec import Bias, Call, Tensor
from ..core.kernel import Kernel
from ..core.points import PointCodec

_INFINITY = 0x7F80


@dataclass(frozen=True)
class BF16(PointCodec):
    """Cast to bfloat16: the upper half of each float32, rounded to nearest.

    ``Q(x) = x`` rounded to 8 significant bits, half to even, with the exponent of float32, so
    there is no scale and nothing to overflow. What would round up to infinity, from 3.396e38 on,
    becomes the largest bfloat16, 3.39e38. Ranks' values are summed as float32.

    =======  =====  =====  =====
    tensor   dtype  shape  bytes
    =======  =====  =====  =====
    codes    int16  (n,)   2 n
    =======  =====  =====  =====

    Family: cast.

    Combine: GATHER, since Horovod can neither send nor sum bfloat16. Every rank receives every
    other rank's payload; from 3 ranks on ``fp16``, which Horovod reduces, receives less. Bias:
    CONTRACTION. No memory by default: the error is at most 1/256 of each value.

    When to use: where float16's range is too narrow. It halves the bytes and keeps float32's range.
    Not with many ranks, since every rank receives all payloads, and not where precision matters
    more than range: float16 has 11 significant bits.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("bf16").wire_bytes(1000)
        2000

    Reference:
        Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322.

    Differs from the paper: subnormals are kept, not flushed.
    """

    code_dtype: ClassVar[str] = "int16"

    @property
    def bias(self) -> Bias:
        return Bias.CONTRACTION

    @property
    def default_memory(self) -> str:
        return "none"

    @property
    def kernel(self) -> Kernel:
        return Kernel("bf16", 16)

    def to_codes(self, xp: Any, x: Tensor, call: Call, start: int) -> Tensor:
        bits = xp.view(x, "int32")
        odd = xp.bit_and_(xp.shift_signed(bits, 16), 1)  # makes a half go to the even neighbour
        rounded = xp.add_(xp.add_(odd, bits), 0x7FFF)
        codes = xp.cast(xp.shift_signed_(rounded, 16), "int16")
        above = xp.cast(xp.equal(xp.bit_and(codes, 0x7FFF), _INFINITY), "int16")
        return xp.sub_(codes, above)

    def from_codes(self, xp: Any, codes: Tensor) -> Tensor:
        return xp.view(xp.shift_left_(xp.cast(codes, "int32"), 16), "float32")
