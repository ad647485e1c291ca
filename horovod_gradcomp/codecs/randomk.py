"""Random-k sparsification with positions that are never sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..core import random
from ..core.codec import (
    Bias,
    Call,
    Codec,
    Combine,
    Encoded,
    Tensor,
    check_choice,
    check_count,
    check_fraction,
    is_one,
)

_SMALLEST = 2.0**-126  # frameworks treat products of subnormals differently
_LARGEST = 3.4028234663852886e38  # a drawn value times its factor may go beyond float32


@dataclass(frozen=True)
class RandomK(Codec):
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
        block: Neighbouring elements kept together, for memory speed; k then counts blocks.
        rescale: "auto" scales without a memory and not with one; "yes" and "no" force it. What
            would overflow saturates.

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

    combine: ClassVar[Combine] = Combine.SUM

    ratio: float = 0.01
    block: int = 1
    rescale: str = "auto"

    def __post_init__(self) -> None:
        check_fraction("randomk", "ratio", self.ratio)
        check_count("randomk", "block", self.block)
        check_choice("randomk", "rescale", self.rescale, ("auto", "yes", "no"))

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED if self.rescale == "yes" else Bias.CONTRACTION

    def with_memory(self, has_memory: bool) -> RandomK:
        if self.rescale != "auto":
            return self
        return replace(self, rescale="no" if has_memory else "yes")

    def kept(self, numel: int) -> int:
        """Return k, in blocks."""
        blocks = -(-numel // self.block)
        return min(max(round(self.ratio * blocks), 1), blocks)

    def wire_bytes(self, *sizes: int) -> int:
        return 4 * self.kept(sum(sizes)) * self.block

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        numel = xp.numel(x)
        where, inside, sizes = self._draw(xp, x, numel, call)
        values = xp.take(x, where)
        if inside is not None:
            values = xp.where(inside, values, 0.0)
        payload = values
        if sizes is not None:
            payload = xp.mul_(xp.flush(values, _SMALLEST), sizes)
            payload = xp.clamp_(payload, -_LARGEST, _LARGEST)
        if not want_error:
            return Encoded(payload, None)
        return Encoded(payload, xp.add_at_(x, where, xp.sub(xp.zeros_like(payload), payload)))

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        (payload,) = payloads
        where, _, _ = self._draw(xp, payload, numel, call)
        values = payload if is_one(scale) else xp.scaled(payload, scale)
        return xp.add_at_(xp.zeros(numel, "float32", payload), where, values)

    def _draw(
        self, xp: Any, like: Tensor, numel: int, call: Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return positions ``(k * block,)``, which of them exist, and the factor on each."""
        blocks, k = -(-numel // self.block), self.kept(numel)
        edges = xp.floor_divide(xp.scale_(xp.arange(0, k + 1, "int64", like), blocks), k)
        sizes = xp.sub(edges[1:], edges[:-1])
        where = xp.add(edges[:-1], random.below(xp, call.key, sizes))  # (k,)
        factor = xp.cast(sizes, "float32") if self.rescale == "yes" else None
        if self.block == 1:
            return where, None, factor
        offsets = xp.reshape(xp.arange(0, self.block, "int64", like), (1, self.block))
        first = xp.reshape(xp.scale_(where, self.block), (k, 1))
        spread = xp.reshape(xp.add(first, offsets), (k * self.block,))
        inside = xp.less(spread, numel)
        if factor is not None:
            factor = xp.repeat_each(factor, self.block)
        # What lies beyond the end carries zero, to and from the last element.
        return xp.where(inside, spread, numel - 1), inside, factor
