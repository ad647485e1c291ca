"""Half precision, scaled so that no sum over ranks overflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.codec import Bias, Call, Codec, Combine, Encoded, Extent, Tensor, numels
from ..core.kernel import Kernel, elements

_LARGEST = 65504.0


@dataclass(frozen=True)
class FP16(Codec):
    """Cast to float16, divided first by the power of two that a sum over all ranks needs.

    ``Q(x) = f16(clip(x, +-65504) * 2^-s) * 2^s`` with ``s = ceil(log2 N)`` for N ranks. With plain
    ``hvd.Compression.fp16`` two ranks of 40000 each give infinity, here 40000. Values above 65504
    saturate; a memory keeps what is cut off. The price are the last ``s`` bits of values that are
    subnormal in float16, below 6e-5.

    =======  =======  =====  =====
    tensor   dtype    shape  bytes
    =======  =======  =====  =====
    payload  float16  (n,)   2 n
    =======  =======  =====  =====

    Family: cast.

    Combine: SUM. Bias: CONTRACTION (rounding to nearest never exceeds the value itself).

    Horovod forms the sum over ranks in float16, too, also where this codec follows another, as in
    ``"acp+fp16"``. What that rounds, up to 2^-11 of a sum, no memory sees or gives back.

    When to use: first, as the cheapest step that risks least. It halves the bytes, Horovod reduces
    it as it does any gradient, and it needs no memory. Not where half is not enough, nor where
    gradients below about 3e-8 times the number of ranks matter, which become zero: ``bf16`` reaches
    as far down as float32.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("fp16").wire_bytes(1000)
        2000

    Reference:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv:1710.03740.

    Differs from the paper: the scale follows from the number of ranks, so that their sum fits,
    and not from the loss, so that small gradients fit; a loss scaler may be used on top of it.
    """

    combine: ClassVar[Combine] = Combine.SUM
    timeless: ClassVar[bool] = True
    narrow: ClassVar[bool] = True

    @property
    def bias(self) -> Bias:
        return Bias.CONTRACTION

    @property
    def default_memory(self) -> str:
        return "none"

    def wire_bytes(self, *extents: Extent) -> int:
        return 2 * sum(numels(extents))

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        up = _headroom(call.size)
        kernels, numel = xp.kernels(x), xp.numel(x)
        if kernels:
            made = kernels.encode(
                _kernel(up),
                elements(numel, 2),
                2 * numel,
                x,
                call.key,
                want_error=want_error,
                dtype="float16",
            )
            return Encoded(*made)

        def one(_: int, chunk: Tensor) -> tuple[Tensor, ...]:
            clipped = xp.clamp_(xp.copy(chunk), -_LARGEST, _LARGEST)
            half = xp.cast(xp.scale_(clipped, 1.0 / up), "float16")
            if not want_error:
                return (half,)
            return half, xp.sub_(chunk, xp.scale_(xp.cast(half, "float32"), up))

        payload, *errors = xp.map_rows(one, [x], [None, x][: 2 if want_error else 1])
        return Encoded(payload, xp.join_flat(x, errors) if want_error else None)

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        (payload,) = payloads
        kernels = xp.kernels(payload)
        factor = _headroom(call.size) * scale
        if kernels:
            where = elements(numel, 2)
            return kernels.decode(_kernel(), where, 2 * numel, payloads, numel, scale=factor)
        return xp.scale_(xp.cast(payload, "float32"), factor)


def _kernel(up: float = 1.0) -> Kernel:
    return Kernel("fp16", 16, 0, (_LARGEST, 1.0 / up, up))


def _headroom(size: int) -> float:
    return float(1 << max(0, size - 1).bit_length())
