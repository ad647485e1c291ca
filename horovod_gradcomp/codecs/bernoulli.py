"""Sparsification by independent draws, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import random
from ..core.codec import Call, Extent, Shape, Tensor, check_choice, check_range, numels
from ..core.sparse import Drawn, Rescaled


@dataclass(frozen=True)
class Bernoulli(Rescaled):
    """Send every value with probability ``p``, independently, the same ones on every rank.

    The gaps between kept positions are drawn, geometric with parameter p, from a hash of (seed,
    name, step, i), so the cost is that of the kept elements. With a memory ``Q(x)_i = x_i`` where
    drawn, else 0; without one drawn values are multiplied by ``1 / p``, which makes the expectation
    x. Positions are new each step and each tensor.

    =======  =======  =====  ===============
    tensor   dtype    shape  bytes
    =======  =======  =====  ===============
    values   float32  (k,)   4 k
    =======  =======  =====  ===============

    The payload has ``k = min(n, ceil(n p + 5 sqrt(n p (1 - p)) + 5))`` places; those that are not
    drawn carry zero, and draws beyond the k-th are dropped.

    Combine: SUM, so Horovod fuses and reduces the payload itself. Bias: CONTRACTION with a memory,
    UNBIASED without, but for the rare draw that is dropped.

    Family: sparsification.

    When to use: as ``randomk``, where positions must be independent. That may be for an analysis,
    or a comparison with the paper; ``randomk`` has less variance and sends no empty places.

    Args:
        p: Probability that an element is kept, 2^-31 <= p <= 1; smaller compresses more.
        rescale: "auto" scales without a memory and not with one; "yes" and "no" force it. What
            would overflow saturates.
        then: A codec for the kept values, as in ``"bernoulli:p=0.01+fp16"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("bernoulli:p=0.01").wire_bytes(1_000_000)
        42012

    Reference:
        Wangni, Wang, Liu, Zhang, "Gradient Sparsification for Communication-Efficient Distributed
        Optimization", NeurIPS 2018, arXiv:1710.09854; Khirirat, Feyzmahdavian, Johansson,
        "Distributed learning with compressed gradients", 2018, arXiv:1806.06573.

    Differs from the paper: every element has the same probability, and all ranks keep the same
    ones, so that no position is sent.
    """

    p: float = 0.01
    rescale: str = "auto"

    def __post_init__(self) -> None:
        check_range("bernoulli", "p", self.p, 2.0**-31, 1)
        check_choice("bernoulli", "rescale", self.rescale, ("auto", "yes", "no"))
        super().__post_init__()

    def count(self, numel: int) -> int:
        """Return k."""
        mean = self.p * numel
        return min(math.ceil(mean + 5 * math.sqrt(mean * (1 - self.p)) + 5), numel)

    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        return ((self.count(sum(numels(extents))),),)

    def draw(self, xp: Any, numel: int, call: Call, like: Tensor) -> Drawn:
        gaps = random.geometric(xp, call.key, self.p, self.count(numel), like)
        where = xp.sub(xp.running_sum(xp.add(gaps, 1)), 1)  # (k,)
        inside = xp.less(where, numel)
        # What lies beyond the end carries zero, to and from the last element.
        return Drawn(
            xp.where(inside, where, numel - 1),
            inside,
            1 / float(self.p) if self.rescale == "yes" else None,
        )
