"""QSGD: stochastic rounding to a few levels of the block's norm, unbiased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core import random
from ..core.blocks import SMALLEST, BlockCodec, largest
from ..core.codec import LARGEST, Bias, Call, Tensor, check_choice, check_count
from ..core.kernel import Kernel


@dataclass(frozen=True)
class QSGD(BlockCodec):
    """Round ``|x| / norm`` at random to one of the two nearest of ``L = 2^(bits-1) - 1`` levels.

    Per block: ``step = norm * (1 / L)``, ``q = x / step`` rounded up with a probability equal to
    its fraction, else down; ``Q(x) = q * step``, with q from -L to L. A zero stays zero. A block
    whose step is below 2^-80 (8e-25) is sent as zeros.

    =======  =======  ===========  ======================
    tensor   dtype    shape        bytes
    =======  =======  ===========  ======================
    step     float32  (blocks, 1)  4 per block
    codes    uint8    packed rows  n * bits / 8, each q + L
    =======  =======  ===========  ======================

    Family: quantisation.

    Combine: GATHER. Bias: UNBIASED, so no memory is needed, nor allowed: its error may be larger
    than the gradient.

    When to use: where there is no room for a memory. Its noise averages out over ranks and steps,
    and no state has to be saved. Where a memory fits, ``linear`` with as many bits has a smaller
    error (``gradcomp bench codecs``), and nothing is lost for good. Not with 2 bits and few ranks,
    where noise outweighs the gradient.

    Args:
        bits: Bits an element, 2 to 8; fewer compress more and add more noise.
        block: Elements that share a norm, a multiple of 8; larger compresses a little more and
            adds more noise.
        norm: "max" is the largest magnitude; "l2" the Euclidean norm, as the paper has it, which
            leaves most values at zero and adds much more noise.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("qsgd").wire_bytes(1024)
        520

    Reference:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
        Quantization and Encoding", NeurIPS 2017, arXiv:1610.02132.

    Differs from the paper: codes have a fixed width where the paper has Elias coding, so that
    sizes never depend on values; the default norm is the maximum, which the paper uses in its
    experiments.
    """

    bits: int = 4
    block: int = 512
    norm: str = "max"

    def __post_init__(self) -> None:
        check_choice("qsgd", "bits", self.bits, tuple(range(2, 9)))
        check_count("qsgd", "block", self.block, minimum=8, multiple=8)
        check_choice("qsgd", "norm", self.norm, ("max", "l2"))

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def _levels(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    @property
    def kernel(self) -> Kernel:
        return Kernel(
            f"qsgd_{self.norm}", self.bits, self.headers, (self._levels, SMALLEST, LARGEST)
        )

    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        levels = self._levels
        if self.norm == "max":
            norm = largest(xp, rows)
        else:
            norm = xp.cast(xp.minimum(xp.row_norm(rows), LARGEST), "float32")
        step = xp.flush(xp.scale_(norm, 1.0 / levels), SMALLEST)  # (r, 1)
        ratio = xp.div(rows, xp.where(xp.equal(step, 0.0), 1.0, step))
        level = xp.clamp_(random.round_(xp, ratio, call.key, start), -levels, levels)
        return step, xp.add_(level, levels)

    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        return xp.mul_(xp.add_(xp.cast(codes, "float32"), -self._levels), headers)
