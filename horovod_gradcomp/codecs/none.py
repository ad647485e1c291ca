"""No compression: the baseline, bit-identical to plain Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.codec import Bias, Call, Codec, Combine, Encoded, Extent, Tensor, is_one, numels


@dataclass(frozen=True)
class NoneCodec(Codec):
    """Send every gradient as it is.

    ``Q(x) = x``. The front ends hand the gradient itself to Horovod, so weights are bit-identical
    to ``hvd.Compression.none``; unlike that one, bfloat16 gradients work (they travel as float32)
    and ``stats()`` counts the bytes.

    =======  ===========  =====  =======
    tensor   dtype        shape  bytes
    =======  ===========  =====  =======
    payload  as gradient  (n,)   4 n (float32)
    =======  ===========  =====  =======

    Family: baseline.

    Combine: SUM. Bias: UNBIASED, with error zero.

    When to use: as the baseline, and on fast links. Inside a node with NVLink, or at 100 Gb/s and
    up, do not compress: published surveys found compression faster in few data-centre settings.
    Measure with this first; what compression can win is at most the time that the exchange takes
    here.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("none").wire_bytes(1000)
        4000

    Reference:
        Sergeev, Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
        arXiv:1802.05799.

    Differs from the paper: bfloat16 gradients travel as float32.
    """

    combine: ClassVar[Combine] = Combine.SUM
    timeless: ClassVar[bool] = True
    identity: ClassVar[bool] = True

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED

    def wire_bytes(self, *extents: Extent) -> int:
        return 4 * sum(numels(extents))

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        error = xp.zeros(xp.numel(x), "float32", x) if want_error else None
        return Encoded(x, error)

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        (payload,) = payloads
        return xp.copy(payload) if is_one(scale) else xp.scaled(payload, scale)
