"""One bit an element: below zero or not, and the mean of either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.blocks import SMALLEST, BlockCodec
from ..core.codec import LARGEST, Bias, Call, Tensor, check_count
from ..core.kernel import Kernel


@dataclass(frozen=True)
class OneBit(BlockCodec):
    """Send for each value on which side of zero it is, and the mean of both sides for each block.

    ``Q(x)`` is the mean of the block's values below zero where ``x < 0``, and the mean of its
    values at or above zero elsewhere. What lies between -2^-80 (-8e-25) and 0 counts as zero. A
    side without values has mean 0, and so has one whose mean is below 2^-80.

    =======  =======  ===========  ==============================
    tensor   dtype    shape        bytes
    =======  =======  ===========  ==============================
    means    float32  (blocks, 2)  8 per block: at or above, below
    codes    uint8    packed rows  n / 8, 1 for below
    =======  =======  ===========  ==============================

    Family: quantisation.

    Combine: GATHER. Bias: CONTRACTION, with the least error that two values a block allow when
    they are split at zero.

    When to use: as ``sign``, for gradients that lean to one side of zero. There two means fit
    better than one; where both sides are alike nothing is won, and encoding takes longer
    (``gradcomp bench codecs`` shows both). With its memory, and with a mild start. Not with many
    ranks, since every rank receives all payloads.

    Args:
        block: Elements that share the means, a multiple of 8; larger compresses a little more.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("onebit").wire_bytes(1024)
        136

    Reference:
        Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
        Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.

    Differs from the paper: means for each block, not each column of a weight matrix.
    """

    headers: ClassVar[int] = 2
    ranges: ClassVar[tuple[tuple[float, float], ...]] = ((0.0, LARGEST), (-LARGEST, 0.0))

    block: int = 1024

    def __post_init__(self) -> None:
        check_count("onebit", "block", self.block, minimum=8, multiple=8)

    @property
    def bias(self) -> Bias:
        return Bias.CONTRACTION

    @property
    def code_bits(self) -> int:
        return 1

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def kernel(self) -> Kernel:
        return Kernel("onebit", 1, self.headers, (SMALLEST,))

    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        # The sum is never -0, nor a subnormal.
        codes = xp.shift_right(xp.view(xp.add(rows, SMALLEST), "int32"), 31)
        below = xp.row_sum(codes)  # (r, 1), float64, a whole number
        counts = xp.concat([xp.sub(float(rows.shape[1]), below), below], axis=1)  # (r, 2)
        sums = [xp.row_sum(side) for side in (xp.maximum(rows, 0.0), xp.minimum(rows, 0.0))]
        empty = xp.equal(counts, 0.0)
        total = xp.where(empty, 0.0, xp.concat(sums, axis=1))
        means = xp.div_(total, xp.where(empty, 1.0, counts))
        return xp.flush(xp.cast(means, "float32"), SMALLEST), codes

    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        # Chosen by bits: above ^ (code ? above ^ below : 0).
        bits = xp.view(headers, "int32")
        above, below = bits[:, :1], bits[:, 1:]
        mask = xp.shift_signed_(xp.shift_left_(xp.cast(codes, "int32"), 31), 31)
        chosen = xp.bit_xor_(xp.bit_and_(mask, xp.bit_xor(above, below)), above)
        return xp.view(chosen, "float32")
