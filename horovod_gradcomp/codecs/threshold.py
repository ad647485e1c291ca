"""Sparsification by a fixed threshold on magnitudes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.codec import LARGEST, Call, Tensor, check_fraction, check_range
from ..core.projection import Kept
from ..core.select import above
from ..core.sparse import Selection

_LEAST = 2.0**-126  # what float32 holds with all its digits


@dataclass(frozen=True)
class Threshold(Selection):
    """Send the values whose magnitude is above ``value``, in a payload of a fixed size.

    ``Q(x)_i = x_i`` where ``|x_i| > value``, else 0. There are
    ``k = clip(round(max_ratio * n), 1, n)`` places: of more such values the k largest are sent
    (ties by lowest position), and if there is none, the largest of all. Empty places carry zero.

    =========  ================  =====  ================================================
    tensor     dtype             shape  bytes
    =========  ================  =====  ================================================
    values     float32           (k,)   4 k, or as the codec after ``+`` has it
    positions  int32             (k,)   4 k, or
    positions  int16 + counts    (k,)   2 k + 4 for each 65,536 elements, or
    positions  bitmap            n / 8  n / 8; the cheapest of the three for this n and k
    =========  ================  =====  ================================================

    Combine: GATHER. Bias: CONTRACTION; NEITHER with a codec after ``+``, which may not keep the
    zeros of empty places.

    Family: sparsification.

    When to use: where the scale of gradients is known. A pass over them is all that selection
    costs. Horovod's messages must not change in size, so the payload does not shrink when fewer
    values are above the threshold: ``topk`` sends as much and fills every place. Too low a
    threshold fills all places in every step, and is then a slower ``topk``.

    Args:
        value: Threshold for the gradient plus what the memory holds, in units of unscaled gradients
            where the front end knows the loss scale (``grad_scaler=``, ``loss_scale=``), else as
            Horovod gets them; 2^-126 <= value < 2^128. The default suits no model in particular:
            take a quantile of the magnitudes you see.
        max_ratio: Most elements that are kept, as a fraction, 0 < max_ratio <= 1; smaller
            compresses more.
        then: A codec for the kept values, as in ``"threshold:value=0.01+fp16"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("threshold:value=0.01,max_ratio=0.01").wire_bytes(1_000_000)
        60064

    Reference:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
        Interspeech 2015; Dutta et al., "On the Discrepancy between the Theoretical Analysis and
        Practical Implementations of Compressed Communication for Distributed Deep Learning",
        AAAI 2020, arXiv:1911.08250.

    Differs from the paper: Strom sends the sign of what is above the threshold and subtracts the
    threshold, here values are sent as they are, as by the hard threshold of Dutta et al.; at most k
    and at least one are sent.
    """

    orthogonal: ClassVar[bool] = False

    value: float = 1e-3
    max_ratio: float = 0.05

    def __post_init__(self) -> None:
        check_range("threshold", "value", self.value, _LEAST, LARGEST)
        check_fraction("threshold", "max_ratio", self.max_ratio)
        super().__post_init__()

    def count(self, numel: int) -> int:
        return min(max(round(self.max_ratio * numel), 1), numel)

    def choose(self, xp: Any, x: Tensor, call: Call) -> Tensor:
        return above(xp, x, self._bits, self.count(xp.numel(x)))

    def values_at(self, xp: Any, x: Tensor, where: Tensor) -> Tensor:
        values = xp.take(x, where)
        bits = xp.magnitude(values)
        kept = xp.less(self._bits, bits)

        def one() -> Tensor:
            largest = xp.equal(bits, xp.kth_largest(bits, 1))
            return xp.logical_and(largest, xp.less(xp.running_count(largest), 2))

        kept = xp.cond(xp.equal(xp.count_true(kept), 0), one, lambda: kept)
        return xp.where(kept, values, 0.0)

    def positions(self, xp: Any, kept: Kept, call: Call) -> tuple[Tensor, Tensor | None] | None:
        return kept.note, xp.logical_not(xp.equal(xp.magnitude(kept.values), 0))

    @property
    def _bits(self) -> int:
        """The threshold's bits, which are ordered as magnitudes are."""
        bits: int = struct.unpack("i", struct.pack("f", self.value))[0]
        return bits
