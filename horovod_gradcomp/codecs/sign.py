"""One bit an element: the sign, times a scale for each block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.blocks import SMALLEST, BlockCodec
from ..core.codec import Bias, Call, Tensor, check_choice, check_count
from ..core.kernel import Kernel

_ONE = 0x3F800000  # bits of 1


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Send the sign of each value and one scale for each block.

    ``Q(x) = sign(x) * scale``, where the scale is the block's mean of ``|x|``, or its root mean
    square. **Zero counts as positive**, and so does everything above -2^-80 (-8e-25): a zero is
    decoded as ``+scale``, and the memory takes it back in the next step. A block whose scale is
    below 2^-80 is sent as zeros.

    With ``vote`` no scale is sent, and the mean is the sign of the majority: 1, -1, or 0 where as
    many ranks are for as against, whatever their number (``op=Sum`` gives N times that). Zero votes
    for 1 there, too, so that what has no gradient at all, such as padding or an unused row, moves
    by the learning rate in every step: freeze it, or except it by ``rules=``.

    =======  =======  ===========  ======================
    tensor   dtype    shape        bytes
    =======  =======  ===========  ======================
    scale    float32  (blocks, 1)  4 per block; none with ``vote``
    codes    uint8    packed rows  n / 8, 1 for negative
    =======  =======  ===========  ======================

    Family: quantisation.

    Combine: GATHER. Bias: CONTRACTION for ``scale="mean"``, which is the scale of least error;
    NEITHER for ``scale="rms"``, which keeps the block's norm but overshoots where few values are
    large. Without a memory sign descent need not converge at all. A vote is NEITHER, and takes no
    memory: its result is no sum of what ranks sent, so that nothing could keep books of it.

    When to use: on slow links, for one bit an element. Always with its memory, and with a mild
    start. Not with Adam from the first step: error feedback is reported not to converge there as it
    does with SGD (1-bit Adam starts dense). Not with many ranks, since every rank receives all
    payloads. A vote is another algorithm, signSGD: its step has the size of the learning rate in
    every element, which must be chosen for it.

    Args:
        scale: "mean" or "rms"; not used with ``vote``.
        block: Elements that share a scale, a multiple of 8; larger compresses a little more.
        vote: Whether ranks vote.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("sign").wire_bytes(1024)
        132

    Reference:
        Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes", ICML 2019, arXiv:1901.09847. ``scale="rms"``: Tang et al., "1-bit
        Adam", ICML 2021, arXiv:2102.02888. ``vote``: Bernstein, Zhao, Azizzadenesheli, Anandkumar,
        "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019,
        arXiv:1810.05291.

    Differs from the paper: a scale for each block, not each layer; a tied vote is 0.
    """

    scale: str = "mean"
    block: int = 1024
    vote: bool = False

    def __post_init__(self) -> None:
        check_choice("sign", "scale", self.scale, ("mean", "rms"))
        check_count("sign", "block", self.block, minimum=8, multiple=8)
        check_choice("sign", "vote", self.vote, (True, False))

    @property
    def bias(self) -> Bias:
        return Bias.CONTRACTION if self.scale == "mean" and not self.vote else Bias.NEITHER

    @property
    def additive(self) -> bool:
        return not self.vote

    @property
    def header_count(self) -> int:
        return 0 if self.vote else 1

    @property
    def code_bits(self) -> int:
        return 1

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def kernel(self) -> Kernel | None:
        if self.vote:
            return None
        return Kernel(f"sign_{self.scale}", 1, self.headers, (SMALLEST,))

    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        width = rows.shape[1]
        # The sum is never -0, nor a subnormal.
        codes = xp.shift_right(xp.view(xp.add(rows, SMALLEST), "int32"), 31)
        if self.vote:
            return rows[:, :0], codes
        if self.scale == "mean":
            scale = xp.scale_(xp.row_sum(xp.view(xp.magnitude(rows), "float32")), 1.0 / width)
        else:
            scale = xp.scale_(xp.row_norm(rows), 1.0 / math.sqrt(width))
        return xp.flush(xp.cast(scale, "float32"), SMALLEST), codes

    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        sign = xp.shift_left_(xp.cast(codes, "int32"), 31)
        size = _ONE if self.vote else xp.view(headers, "int32")
        return xp.view(xp.bit_xor_(sign, size), "float32")

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        if not self.vote:
            return super().decode(xp, payloads, numel, call, scale=scale)
        votes = super().decode(xp, payloads, numel, call, scale=1.0)
        # A factor on the mean of what all ranks sent is one on what they agreed on.
        return xp.scale_(xp.clamp_(votes, -1.0, 1.0), scale * len(payloads))
