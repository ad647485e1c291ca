"""The frame of codecs that send fewer numbers than they are given, and of ``A + B``.

Such a codec keeps some numbers (coordinates of the input, or factors of its matrices) and
forgets the rest. The numbers it keeps are sent as float32, or encoded by a second codec, ``then``;
either way one memory around both sees the whole error. A codec gives three functions, what is
kept, what is left, and what the kept numbers stand for; payloads, the inner codec and the sum over
ranks are written here once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Optional

from . import damage, random
from .codec import (
    Bias,
    Call,
    Codec,
    Combine,
    Encoded,
    Extent,
    Finished,
    Shape,
    Tensor,
    is_one,
    numels,
)
from .errors import SettingsError, explain
from .payload import ITEM_BYTES, Layout, Section

_INNER = 0x2B  # makes the inner codec's draws differ from the outer one's


class Kept(NamedTuple):
    """What a codec keeps of its input."""

    values: Tensor
    """Flat float32; :meth:`Projection.kept` gives its shapes."""

    side: tuple[Tensor, ...] = ()
    """What is sent beside the values, one tensor for each of :meth:`Projection.side`."""

    note: Any = None
    """What :meth:`Projection.left` needs to know again."""


class Sent(NamedTuple):
    """Values and side of one payload, as they arrive."""

    values: Tensor
    side: tuple[Tensor, ...]
    damage: Tensor | None = None
    """What is wrong with the encoded values, see :mod:`.damage`."""


@dataclass(frozen=True)
class Composable(Codec):
    """Base of codecs ``A`` in ``A + B``: the numbers they keep may be encoded by ``then``."""

    composes: ClassVar[bool] = True
    """Whether they may."""
    orthogonal: ClassVar[bool] = True
    """Whether what is kept and what is left are orthogonal, so that errors add up as squares."""

    then: Optional[Codec] = None  # noqa: UP045 - read at run time on Python 3.9

    @property
    @abstractmethod
    def own_bias(self) -> Bias:
        """How the error behaves without an inner codec."""

    def __post_init__(self) -> None:
        if self.then is None:
            return
        name = self.registered
        if not isinstance(self.then, Codec):
            raise SettingsError(
                f"{name}: " + explain(got=f"then={self.then!r}", expected="a codec")
            )
        inner = self.then.describe()
        if isinstance(self.then, Composable) or self.then.identity:
            expected = "a codec that encodes values, such as fp16 or linear:bits=8"
            raise SettingsError(
                f"{name}: " + explain(got=f"'{inner}' after '+'", expected=expected)
            )
        noisy = self.own_bias is not Bias.UNBIASED and not self.then.feeds_back
        if noisy or not self.then.additive:
            raise SettingsError(
                f"{name}: "
                + explain(
                    got=f"'{inner}' after '+'",
                    expected="a codec whose error may be fed back, such as fp16 or linear:bits=8",
                    why="its error may be larger than what it encodes, and the memory that "
                    f"'{name}' needs would let it grow",
                )
            )
        if not self.composes:
            raise SettingsError(
                f"{name}: " + explain(got=f"'+ {inner}'", expected=f"'{name}' alone")
            )

    def describe(self) -> str:
        own = self.describe_fields([f.name for f in fields(self) if f.name != "then"])
        return own if self.then is None else f"{own}+{self.then.describe()}"

    @property
    def bias(self) -> Bias:
        own = self.own_bias
        if self.then is None:
            return own
        together = own is Bias.UNBIASED or (own is Bias.CONTRACTION and self.orthogonal)
        return own if together and own is self.then.bias else Bias.NEITHER

    @property
    def feeds_back(self) -> bool:
        return self.own_bias is not Bias.UNBIASED and (self.then is None or self.then.feeds_back)

    def with_memory(self, has_memory: bool) -> Codec:
        if self.then is None:
            return self
        return replace(self, then=self.then.with_memory(has_memory))


def inner_call(call: Call, shapes: Sequence[Shape], size: int) -> Call:
    """Return the call that an inner codec sees; it draws other random numbers than the outer one.

    Args:
        call: The outer one.
        shapes: Of the values.
        size: How many ranks' values are summed in the payload's own type.
    """
    key = random.advance(*call.key, _INNER)
    return Call(size=size, shapes=tuple(shapes), key=key, step=call.step, rank=call.rank)


@dataclass(frozen=True)
class Projection(Composable):
    """Base of codecs that keep a part of the input, in one payload."""

    summable: ClassVar[bool]
    """Whether kept values of several ranks may be added up: all ranks keep the same coordinates."""

    # What a codec says of itself ----------------------------------------------------------------
    @abstractmethod
    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        """Return the shapes of the kept values; an inner codec's blocks do not cross them."""

    def side(self, extents: Sequence[Extent]) -> tuple[Section, ...]:
        """Return the payload sections of what is sent beside the values."""
        return ()

    @abstractmethod
    def project(self, xp: Any, x: Tensor, call: Call) -> Kept:
        """Return what is kept of a flat float32 tensor, which stays as it is."""

    @abstractmethod
    def left(self, xp: Any, x: Tensor, kept: Kept, sent: Tensor, call: Call) -> Tensor:
        """Return ``x`` less what will be decoded; ``x`` may be overwritten.

        Args:
            xp: An operations module.
            x: What :meth:`project` was given.
            kept: What it returned.
            sent: The values as they will be decoded: ``kept.values``, but for an inner codec.
            call: The step.
        """

    def expand(
        self, xp: Any, sent: Sequence[Sent], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        """Return ``scale`` times the sum of what values stand for, flat, in fresh storage.

        Where something is sent beside the values, a codec overrides :meth:`finish` instead.
        """
        raise AssertionError(f"{type(self).__name__} has neither expand nor finish")

    def positions(self, xp: Any, kept: Kept, call: Call) -> tuple[Tensor, Tensor | None] | None:
        """Return which elements are kept, where it is elements that are kept."""
        return None

    def share(self, xp: Any, values: Tensor, call: Call) -> tuple[Tensor, ...]:
        """Return the next shared state from the sum of all ranks' values, or its mean."""
        return ()

    # What follows -------------------------------------------------------------------------------
    @property
    def combine(self) -> Combine:
        inner = self.then is None or self.then.combine is Combine.SUM
        return Combine.SUM if self.summable and inner else Combine.GATHER

    def wire_bytes(self, *extents: Extent) -> int:
        if self.combine is Combine.GATHER:
            return self._layout(extents).nbytes
        kept = self.kept(extents)
        return 4 * sum(numels(kept)) if self.then is None else self.then.wire_bytes(*kept)

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        extents = call.extents(xp.numel(x))
        kept = self.project(xp, x, call)
        payload = sent = kept.values
        if self.then is not None:
            inner = self._inner(extents, call)
            payload = self.then.encode(xp, xp.copy(sent), inner, want_error=False).payload
            if want_error:
                sent = self._values(xp, [payload], extents, call).total
        if self.combine is Combine.GATHER:
            layout = self._layout(extents)
            storage, _ = layout.new(xp, x)
            if self.then is not None and self.then.combine is Combine.GATHER:
                payload = payload[: layout.sections[0].nbytes]  # its own flag is no use here
            payload = layout.seal(xp, storage, [payload, *kept.side])
        if not want_error:
            return Encoded(payload, None)
        return Encoded(payload, self.left(xp, x, kept, sent, call), self.positions(xp, kept, call))

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        return self.finish(xp, payloads, numel, call, scale=scale).total

    def finish(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Finished:
        sent = self._open(xp, payloads, call.extents(numel), call)
        return Finished(
            self.expand(xp, sent, numel, call, scale=scale),
            self.share(xp, sent[0].values, call) if self.slots else (),
            damage.joined(xp, [one.damage for one in sent]),
        )

    def _open(
        self, xp: Any, payloads: Sequence[Tensor], extents: Sequence[Extent], call: Call
    ) -> list[Sent]:
        """Return values, as float32, and side of each payload; of all, where values add up."""
        values, sides = list(payloads), [()] * len(payloads)
        if self.combine is Combine.GATHER:
            opened = [self._layout(extents).open(xp, payload) for payload in payloads]
            values = [xp.reshape(parts[0], (-1,)) for parts in opened]
            sides = [tuple(parts[1:]) for parts in opened]
        together = [values] if self.summable else [[v] for v in values]
        done = [self._values(xp, each, extents, call) for each in together]
        return [Sent(d.total, side, d.damage) for d, side in zip(done, sides)]

    def _values(
        self, xp: Any, encoded: list[Tensor], extents: Sequence[Extent], call: Call
    ) -> Finished:
        if self.then is not None:
            inner = self._inner(extents, call)
            return self.then.finish(xp, encoded, sum(numels(inner.shapes)), inner, scale=1.0)
        (values,) = encoded
        return Finished(values)

    def _inner(self, extents: Sequence[Extent], call: Call) -> Call:
        # Where payloads are gathered nothing is summed in the payload's own type.
        size = 1 if self.combine is Combine.GATHER else call.size
        return inner_call(call, self.kept(extents), size)

    def _layout(self, extents: Sequence[Extent]) -> Layout:
        """Return where values and side lie in a GATHER payload."""
        kept = self.kept(extents)
        count = sum(numels(kept))
        values = Section("float32", 1, count)
        if self.then is not None:
            nbytes = self.then.wire_bytes(*kept)
            if self.then.combine is Combine.GATHER:
                values = Section("uint8", 1, nbytes, align=4)
            else:
                kind = next(k for k in ("float16", "float32") if count * ITEM_BYTES[k] == nbytes)
                values = Section(kind, 1, count)
        return Layout((values, *self.side(extents)))


def scaled(xp: Any, values: Tensor, scale: Any) -> Tensor:
    """Return ``scale * values``; the values themselves where the scale is the number 1."""
    return values if is_one(scale) else xp.scaled(values, scale)
