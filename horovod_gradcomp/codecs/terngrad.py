"""TernGrad: minus one, zero or one, at random, times the block's largest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

from ..core import random
from ..core.blocks import SMALLEST, BlockCodec, largest
from ..core.codec import LARGEST, Bias, Call, Tensor, check_count, check_range
from ..core.kernel import Kernel


@dataclass(frozen=True)
class TernGrad(BlockCodec):
    """Send each value as ``-s``, 0 or ``s`` at random, so that its expectation is kept.

    Per block: values are clipped to ``c = clip_sigma * sigma``, ``s = max |clip(x)|``, and
    ``Q(x) = sign(x) * s`` with probability ``|clip(x)| / s``, else 0. Sigma is the deviation about
    zero, the root mean square. A block whose s is below 2^-80 (8e-25) is sent as zeros.

    =======  =======  ===========  ============================
    tensor   dtype    shape        bytes
    =======  =======  ===========  ============================
    s        float32  (blocks, 1)  4 per block
    codes    uint8    packed rows  n / 4; 0, 1, 2 for -s, 0, s
    =======  =======  ===========  ============================

    Family: quantisation.

    Combine: GATHER. Bias: UNBIASED without clipping. With clipping NEITHER: of Gaussian values
    1.2 % are clipped at 2.5 sigma, and what is cut off is lost, for much less noise in the rest. No
    memory either way: the error is about as large as the gradient, so feeding it back lets it
    grow.

    When to use: for 2 bits an element without a memory. The noise is as large as the gradient and
    averages out over ranks and steps only, so prefer it for large batches and small learning rates.
    Where a memory fits, ``sign`` and ``onebit`` send half as much and lose less (``gradcomp bench
    codecs``).

    Args:
        block: Elements that share s, a multiple of 8; larger compresses a little more and adds
            more noise.
        clip_sigma: Where to clip, in deviations, above 0; None or 0: nowhere.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("terngrad").wire_bytes(1024)
        260

    Reference:
        Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in
        Distributed Deep Learning", NeurIPS 2017, arXiv:1705.07878.

    Differs from the paper: an s for each block and each rank, not one that all ranks share, since
    codes are gathered and not summed; sigma is about zero, not about the mean, so that a block of
    nearly equal values is not clipped to nothing.
    """

    block: int = 1024
    clip_sigma: Optional[float] = 2.5  # noqa: UP045 - read at run time on Python 3.9

    def __post_init__(self) -> None:
        check_count("terngrad", "block", self.block, minimum=8, multiple=8)
        if self.clip_sigma is not None:
            check_range("terngrad", "clip_sigma", self.clip_sigma, 0.0, 1e6, also="None")

    @property
    def bias(self) -> Bias:
        return Bias.NEITHER if self.clip_sigma else Bias.UNBIASED

    @property
    def feeds_back(self) -> bool:
        return False

    @property
    def code_bits(self) -> int:
        return 2

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def kernel(self) -> Kernel:
        return Kernel("terngrad", 2, self.headers, (1.0, SMALLEST, LARGEST, self.clip_sigma or 0.0))

    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        s = largest(xp, rows)
        if self.clip_sigma:
            factor = self.clip_sigma / math.sqrt(rows.shape[1])
            limit = xp.minimum(xp.scale_(xp.row_norm(rows), factor), LARGEST)
            s = xp.minimum(s, xp.cast(limit, "float32"))
        s = xp.flush(s, SMALLEST)  # (r, 1)
        share = xp.div(rows, xp.where(xp.equal(s, 0.0), 1.0, s))
        # What is clipped has a share beyond 1 and is certain to round to 1 or more.
        level = xp.clamp_(random.round_(xp, share, call.key, start), -1.0, 1.0)
        return s, xp.add_(level, 1.0)

    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        return xp.mul_(xp.add_(xp.cast(codes, "float32"), -1.0), headers)
