"""Random-k sparsification with positions that are never sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import random
from ..core.codec import (
    Call,
    Extent,
    Shape,
    Tensor,
    check_choice,
    check_count,
    check_fraction,
    numels,
)
from ..core.sparse import Drawn, Rescaled


@dataclass(frozen=True)
class RandomK(Rescaled):
    """Send ``k = clip(round(ratio * n), 1, n)`` values at random positions, the same on every rank.

    The n elements are cut into k strata of as equal size as can be, ``s_i = n // k`` or one more,
    and one position is drawn in each from a hash of (seed, name, step, i). With a memory
    ``Q(x)_i = x_i`` where drawn, else 0; without one drawn values are multiplied by ``s_i``, which
    makes the expectation x. Positions are new each step and each tensor.

    =======  =======  ===========  ===============
    tensor   dtype    shape        bytes
    =======  =======  ===========  ===============
    values   float32  (k * block,)  4 k * block
    =======  =======  ===========  ===============

    Family: sparsification.

    Combine: SUM, so Horovod fuses and reduces the payload itself. Bias: CONTRACTION with a memory,
    UNBIASED without.

    When to use: for many ranks on slow links, with little compute to spare. Horovod reduces the
    payload, so no rank receives more however many there are. With few ranks ``topk`` loses less for
    the same bytes (``gradcomp bench codecs``). Not with momentum of 0.9: values are held back until
    they are drawn, and come in bursts that momentum prolongs.

    Args:
        ratio: Fraction of elements kept, 0 < ratio <= 1; smaller compresses more.
        block: Neighbouring elements kept together, for memory speed, at most all n; k then counts
            blocks.
        rescale: "auto" scales without a memory and not with one; "yes" and "no" force it. What
            would overflow saturates.
        then: A codec for the kept values, as in ``"randomk:ratio=0.01+fp16"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("randomk:ratio=0.01").wire_bytes(1_000_000)
        40000

    Reference:
        Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599.

    Differs from the paper: one position in each stratum instead of a uniform k-subset; each
    element is as likely, the variance is no larger, and no permutation is needed.
    """

    ratio: float = 0.01
    block: int = 1
    rescale: str = "auto"

    def __post_init__(self) -> None:
        check_fraction("randomk", "ratio", self.ratio)
        check_count("randomk", "block", self.block)
        check_choice("randomk", "rescale", self.rescale, ("auto", "yes", "no"))
        super().__post_init__()

    def count(self, numel: int) -> int:
        """Return k, in blocks."""
        blocks = -(-numel // self._width(numel))
        return min(max(round(self.ratio * blocks), 1), blocks)

    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        numel = sum(numels(extents))
        return ((self.count(numel) * self._width(numel),),)

    def draw(self, xp: Any, numel: int, call: Call, like: Tensor) -> Drawn:
        width = self._width(numel)
        blocks, k = -(-numel // width), self.count(numel)
        where, sizes = random.strata(xp, call.key, blocks, k, like)  # (k,)
        factor = xp.cast(sizes, "float32") if self.rescale == "yes" else None
        if width == 1:
            return Drawn(where, None, factor)
        offsets = xp.reshape(xp.arange(0, width, "int64", like), (1, width))
        first = xp.reshape(xp.scale_(where, width), (k, 1))
        spread = xp.reshape(xp.add(first, offsets), (k * width,))
        inside = xp.less(spread, numel)
        if factor is not None:
            factor = xp.repeat_each(factor, width)
        # What lies beyond the end carries zero, to and from the last element.
        return Drawn(xp.where(inside, spread, numel - 1), inside, factor)

    def _width(self, numel: int) -> int:
        """Return the elements of a block: no more than there are."""
        return min(self.block, max(numel, 1))
