"""Linear (affine) quantisation to 2 to 8 bits, really packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import random
from ..core.blocks import BlockCodec
from ..core.codec import Bias, Call, Tensor, check_choice, check_count
from ..core.kernel import Kernel

# A range beyond half of float32's would overflow as a difference.
_LARGEST = 1.7e38
# Below 2**-102 a step would meet subnormals, which frameworks treat differently.
_SMALLEST_STEP = 2.0**-102


@dataclass(frozen=True)
class Linear(BlockCodec):
    """Round each block to ``2^bits`` evenly spaced levels between its least and greatest value.

    Per block: ``scale = (max - min) * (1 / (2^b - 1))``, ``q = round((x - min) / scale)`` half to
    even, ``Q(x) = q * scale + min``.

    =========  =======  ============  =====================
    tensor     dtype    shape         bytes
    =========  =======  ============  =====================
    min,scale  float32  (blocks, 2)   8 per block
    codes      uint8    packed rows   n * bits / 8
    =========  =======  ============  =====================

    Family: quantisation.

    Combine: GATHER. Bias: NEITHER for ``rounding="nearest"`` (a block of one sign can grow), so it
    comes with a residual memory; UNBIASED for ``rounding="stochastic"``.

    When to use: on slow links with little compute to spare. Take 8 bits where accuracy comes first,
    4 where bytes do. Not with many ranks: every rank receives all payloads, so that less is won
    with each rank beyond a few. A few values far from all others make the steps of their block
    coarse; ``logarithmic`` or a smaller block suit those better.

    Args:
        bits: Bits an element, 2 to 8; fewer compress more. One bit would leave only the extremes,
            an error larger than the gradient itself that no memory can win back.
        block: Elements that share a scale, a multiple of 8; larger compresses a little more and
            follows outliers less well.
        rounding: "nearest" or "stochastic".

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("linear:bits=4").wire_bytes(1024)
        520

    Reference:
        Markov, Ramezanikebrya, Alistarh, "CGX: Adaptive System Support for Communication-Efficient
        Deep Learning", Middleware 2022, arXiv:2111.08617.

    Differs from the paper: min and scale are float32, and error feedback is the default.
    """

    headers: ClassVar[int] = 2
    ranges: ClassVar[tuple[tuple[float, float], ...]] = ((-_LARGEST, _LARGEST), (0.0, _LARGEST))

    bits: int = 8
    block: int = 1024
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_choice("linear", "bits", self.bits, tuple(range(2, 9)))
        check_count("linear", "block", self.block, minimum=8, multiple=8)
        check_choice("linear", "rounding", self.rounding, ("nearest", "stochastic"))

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED if self.rounding == "stochastic" else Bias.NEITHER

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def kernel(self) -> Kernel:
        return Kernel(
            "linear" if self.rounding == "nearest" else "linear_random",
            self.bits,
            self.headers,
            (2**self.bits - 1, 1.0 / (2**self.bits - 1), _LARGEST, _SMALLEST_STEP),
        )

    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        levels = 2**self.bits - 1
        low = xp.flush(xp.clamp_(xp.row_min(rows), -_LARGEST, _LARGEST), _SMALLEST_STEP)
        high = xp.clamp_(xp.row_max(rows), -_LARGEST, _LARGEST)
        step = xp.flush(xp.scale_(xp.sub(high, low), 1.0 / levels), _SMALLEST_STEP)  # (r, 1)
        ratio = xp.div_(xp.sub(rows, low), xp.where(xp.equal(step, 0.0), 1.0, step))
        if self.rounding == "stochastic":
            count = rows.shape[0] * rows.shape[1]
            draw = random.uniform(xp, call.key, start, count, rows)
            level = xp.floor_(xp.add_(ratio, xp.reshape(draw, rows.shape)))
        else:
            level = xp.round_(ratio)
        return xp.concat([low, step], axis=1), xp.clamp_(level, 0.0, float(levels))

    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        low, step = headers[:, :1], headers[:, 1:]
        return xp.add_(xp.mul_(xp.cast(codes, "float32"), step), low)
