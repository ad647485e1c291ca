"""The frames of codecs that keep some elements of the input and forget the others.

Either every rank chooses its own, and positions are sent along with values, or all ranks draw the
same, and values alone are summed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from . import damage, positions
from .codec import LARGEST, Bias, Call, Codec, Extent, Finished, Shape, Tensor, numels
from .payload import Section
from .projection import Kept, Projection, Sent, scaled


@dataclass(frozen=True)
class Selection(Projection):
    """Base of codecs whose ranks choose their own positions, and send them."""

    summable: ClassVar[bool] = False

    @property
    def own_bias(self) -> Bias:
        return Bias.CONTRACTION

    @abstractmethod
    def count(self, numel: int) -> int:
        """Return how many elements are kept of ``numel``."""

    @abstractmethod
    def choose(self, xp: Any, x: Tensor, call: Call) -> Tensor:
        """Return which elements are kept, int64, ascending, as many as :meth:`count` says."""

    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        return ((self.count(sum(numels(extents))),),)

    def side(self, extents: Sequence[Extent]) -> tuple[Section, ...]:
        numel = sum(numels(extents))
        return positions.sections(numel, self.count(numel))

    def values_at(self, xp: Any, x: Tensor, where: Tensor) -> Tensor:
        """Return what is sent of the kept elements."""
        return xp.take(x, where)

    def project(self, xp: Any, x: Tensor, call: Call) -> Kept:
        where = self.choose(xp, x, call)
        side = positions.encode(xp, where, xp.numel(x))
        return Kept(self.values_at(xp, x, where), tuple(side), where)

    def positions(self, xp: Any, kept: Kept, call: Call) -> tuple[Tensor, Tensor | None] | None:
        return kept.note, None

    def left(self, xp: Any, x: Tensor, kept: Kept, sent: Tensor, call: Call) -> Tensor:
        return xp.put_(x, kept.note, xp.sub(xp.take(x, kept.note), sent))

    def finish(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Finished:
        out, k, wrong = xp.zeros(numel, "float32", payloads[0]), self.count(numel), []
        for values, side, inner in self._open(xp, payloads, call.extents(numel), call):
            where, own = positions.decode(xp, side, numel, k)
            out = xp.add_at_(out, where, xp.reshape(scaled(xp, values, scale), (k,)))
            wrong.append(damage.added(xp, own, inner))
        return Finished(out, (), damage.joined(xp, wrong))


class Drawn(NamedTuple):
    """Positions that are the same on every rank."""

    where: Tensor
    """int64, each below the number of elements."""

    inside: Tensor | None = None
    """Which of them count; the others carry zero. None where all do."""

    factor: Any = None
    """What values are multiplied by, a number or one for each; None for 1."""


_SMALLEST = 2.0**-126  # frameworks treat products of subnormals differently


@dataclass(frozen=True)
class Draw(Projection):
    """Base of codecs whose ranks keep the same positions, so that values alone are summed."""

    summable: ClassVar[bool] = True

    @abstractmethod
    def draw(self, xp: Any, numel: int, call: Call, like: Tensor) -> Drawn:
        """Return the positions of a step, from what all ranks know."""

    def project(self, xp: Any, x: Tensor, call: Call) -> Kept:
        where, inside, factor = drawn = self.draw(xp, xp.numel(x), call, x)
        if call.notes is not None:
            call.notes["drawn"] = drawn
        values = xp.take(x, where)
        if inside is not None:
            values = xp.where(inside, values, 0.0)
        if factor is not None:
            values = xp.flush(values, _SMALLEST)
            number = isinstance(factor, float)
            values = xp.scale_(values, factor) if number else xp.mul_(values, factor)
            values = xp.clamp_(values, -LARGEST, LARGEST)  # it may go beyond float32
        return Kept(values, (), drawn)

    def positions(self, xp: Any, kept: Kept, call: Call) -> tuple[Tensor, Tensor | None] | None:
        return kept.note.where, kept.note.inside

    def left(self, xp: Any, x: Tensor, kept: Kept, sent: Tensor, call: Call) -> Tensor:
        where, inside, _ = kept.note
        if inside is not None and self.then is not None:  # an inner codec may not keep zeros
            sent = xp.where(inside, sent, 0.0)
        return xp.add_at_(x, where, xp.sub(xp.zeros_like(sent), sent))

    def expand(
        self, xp: Any, sent: Sequence[Sent], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        (only,) = sent
        values = only.values
        drawn = (call.notes or {}).get("drawn")
        where, inside, _ = drawn or self.draw(xp, numel, call, values)
        if inside is not None and self.then is not None:  # an inner codec may not keep zeros
            values = xp.where(inside, values, 0.0)
        out = xp.zeros(numel, "float32", values)
        return xp.add_at_(out, where, scaled(xp, values, scale))


class Rescaled(Draw):
    """Base of codecs that draw each element with a known probability.

    Without a memory kept values are divided by it, which makes the expectation x. The setting,
    ``rescale``, is a field of each codec, so that it lies where its signature has it.
    """

    rescale: str

    @property
    def own_bias(self) -> Bias:
        return Bias.UNBIASED if self.rescale == "yes" else Bias.CONTRACTION

    def with_memory(self, has_memory: bool) -> Codec:
        if self.rescale != "auto":
            return super().with_memory(has_memory)
        codec: Any = self
        fixed = replace(codec, rescale="no" if has_memory else "yes")
        return super(Rescaled, fixed).with_memory(has_memory)
