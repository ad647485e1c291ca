"""The frame of codecs that send factors of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from . import factors
from .codec import Bias, Extent, Tensor, check_count, check_fraction
from .factors import Part
from .projection import Composable


class Pair(NamedTuple):
    """Both factors of one matrix, or one tensor as it is."""

    part: Part
    left: Tensor
    """``(r, m)``, or the tensor as ``(rows, cols)``."""

    right: Tensor | None
    """``(r, n)``, or None."""


@dataclass(frozen=True)
class LowRank(Composable):
    """Base of codecs that send ``(r, m)`` and ``(r, n)`` factors, or one of them, a matrix."""

    bit_equal: ClassVar[bool] = False
    mixes: ClassVar[bool] = True

    rank: int = 4
    max_rate: float = 0.5

    def __post_init__(self) -> None:
        check_count(type(self).__name__.lower(), "rank", self.rank)
        check_fraction(type(self).__name__.lower(), "max_rate", self.max_rate)
        super().__post_init__()

    @property
    def own_bias(self) -> Bias:
        return Bias.CONTRACTION

    def parts(self, extents: Sequence[Extent]) -> list[Part]:
        """Return every tensor as a matrix."""
        return factors.parts(extents, self.rank, self.max_rate)

    def matrices(self, extents: Sequence[Extent]) -> list[Part]:
        """Return those that are factorised."""
        return [p for p in self.parts(extents) if p.rank]


def rebuild(xp: Any, pairs: Sequence[Pair], numel: int) -> Tensor:
    """Return all products of factors, and tensors as they are, flat, in fresh storage."""
    whole, out = xp.empty(numel, pairs[0].left), []
    for p, left, right in pairs:
        place = p.of(xp, whole)
        if right is None:
            out.append(xp.to_float32(left, place))
        else:
            out.append(factors.product(xp, left, right, place))
    return xp.join_flat(whole, out)


def remove(xp: Any, pairs: Sequence[Pair], x: Tensor) -> Tensor:
    """Return ``x`` less what :func:`rebuild` returns; ``x`` may be overwritten."""
    out = []
    for p, left, right in pairs:
        matrix = p.of(xp, x)
        if right is None:
            out.append(xp.sub_(matrix, left))
        else:
            out.append(factors.subtract_product(xp, matrix, left, right))
    return xp.join_flat(x, out)


def take(tensors: Iterator[Tensor], xp: Any, part: Part) -> Tensor:
    """Return the next tensor, as ``(rows, cols)`` where it is one that is sent as it is."""
    return next(tensors) if part.rank else xp.reshape(next(tensors), (part.rows, part.cols))
