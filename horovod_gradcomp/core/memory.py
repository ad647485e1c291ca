"""What a rank remembers between steps, so that what a step does not send is sent later.

A memory wraps any codec whose bias allows it and is written once. It is pure: state tensors go in
and come out, and only the front ends hold them. They commit the new state after the exchange, for
a whole step or not at all, so a step that a loss scaler drops leaves every memory as it was.

There are two kinds. One adds what was not sent to the next gradient (``residual``, ``momentum``).
The other keeps a *reference* on all ranks alike, and sends only the difference to it (``ef21``,
``differential``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Callable, ClassVar, NamedTuple

from .codec import (
    Codec,
    Tensor,
    check_choice,
    check_count,
    check_fraction,
    check_range,
    is_one,
)
from .errors import SettingsError, explain


class Done(NamedTuple):
    """What a step leaves for the memory."""

    error: Tensor | None
    """What the codec left of its input."""

    note: Tensor | None = None
    """What :meth:`Memory.note` returned."""

    kept: tuple[Tensor, Tensor | None] | None = None
    """Positions whose values were sent, and which of them count; None where all were."""

    mean: Tensor | None = None
    """Mean of what all ranks sent, where the memory is a reference."""

    refreshed: bool = False
    """Whether the memory took part as if it were zero."""


@dataclass(frozen=True)
class Memory(ABC):
    """Base of all memories."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the state tensors, each flat float32 of the gradient's size, zero at first."""
    notes: ClassVar[bool] = False
    """Whether a step needs one more tensor, from :meth:`note`."""
    is_momentum: ClassVar[bool] = False
    """Whether it takes the place of the optimizer's own momentum."""
    references: ClassVar[bool] = False
    """Whether what is sent is a difference to a reference, so that :meth:`reduced` makes a gradient
    of the mean, and the size of the mean must be known."""

    def note(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], gain: Any, out: Any) -> Tensor:
        """Return what :meth:`compensate` and :meth:`update` need of the gradient.

        Args:
            xp: An operations module.
            grad: The gradient, any float dtype.
            state: As of :meth:`compensate`.
            gain: Factor on the gradient, a number or a float32 scalar tensor.
            out: Float32 storage for the result, or None.
        """
        raise AssertionError(f"{type(self).__name__} takes no notes")

    @abstractmethod
    def compensate(
        self,
        xp: Any,
        grad: Tensor,
        state: tuple[Tensor, ...],
        out: Any,
        *,
        gain: Any = 1.0,
        note: Tensor | None = None,
    ) -> Tensor:
        """Return what the codec is to encode.

        Args:
            xp: An operations module.
            grad: The gradient, any float dtype.
            state: One tensor a slot, of the gradient's shape; not to be changed.
            out: Float32 storage for the result, or None.
            gain: Factor on the gradient, a number or a float32 scalar tensor.
            note: What :meth:`note` returned.
        """

    @abstractmethod
    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        """Return the state after this step; what ``done`` holds may be overwritten."""

    def reduced(self, xp: Any, mean: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        """Return the mean gradient, from the mean of what was sent, which stays as it is."""
        return mean

    def check(self, codec: Codec) -> None:
        """Raise :class:`SettingsError` if this memory is no use with a codec."""
        if self.slots and not codec.additive:
            raise SettingsError(
                explain(
                    got=f"a memory with '{codec.describe()}'",
                    expected="memory 'none'",
                    why="its result is no sum of what ranks sent, so that nothing can be said of "
                    "what is left",
                )
            )

    def of_server(self, codec: Codec) -> Memory:
        """Return the memory of a side that encodes the mean again, for this one on each rank.

        What is left out there is added to that side's next mean, so that the books still balance;
        a reference that all ranks share is then behind by it.
        """
        return Residual() if self.slots and codec.feeds_back else NoMemory()

    def check_narrow(self) -> None:
        """Raise :class:`SettingsError` if the state cannot be held in bfloat16."""
        if self.references:
            raise SettingsError(
                explain(
                    got="state_dtype='bfloat16' with a memory that is a reference",
                    expected="state_dtype='float32'",
                    why="each rank would round its own reference and that of all ranks in another "
                    "way, and the difference would stay in every later gradient",
                )
            )

    @property
    def rate(self) -> float:
        """How far a reference follows what is sent."""
        return 1.0

    @property
    def may_refresh(self) -> bool:
        """Whether there are steps that :meth:`refreshes`."""
        return False

    def refreshes(self, step: Any, all_of: Callable[..., Any] = all) -> Any:
        """Return whether all is sent anew in a step, in float16, as if nothing were remembered.

        Args:
            step: A whole number, or a scalar tensor.
            all_of: For tensors, a function that tells whether a list of conditions holds.
        """
        return False

    @property
    def wants_error(self) -> bool:
        """Whether the codec must say what it left out."""
        return bool(self.slots)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forget what is not sent."""

    def compensate(
        self,
        xp: Any,
        grad: Tensor,
        state: tuple[Tensor, ...],
        out: Any,
        *,
        gain: Any = 1.0,
        note: Tensor | None = None,
    ) -> Tensor:
        return _scaled(xp, grad, gain, out)

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback: add what was not sent to the next gradient.

    ``x = g + decay * e; send Q(x); e' = x - Q(x)``. Each rank feeds back its own error. With
    ``decay = 1`` the books balance at every step: the mean gradients applied so far plus the mean
    residual equal the sum of true mean gradients.

    The residual is held in units of the gradient. When the learning rate falls, what is held is
    applied at the new, smaller rate.

    Args:
        decay: 0 < decay <= 1; below 1 old errors fade and the books no longer balance.

    Reference:
        Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes", ICML 2019, arXiv:1901.09847.
    """

    slots: ClassVar[tuple[str, ...]] = ("residual",)

    decay: float = 1.0

    def __post_init__(self) -> None:
        check_fraction("residual", "decay", self.decay)

    def compensate(
        self,
        xp: Any,
        grad: Tensor,
        state: tuple[Tensor, ...],
        out: Any,
        *,
        gain: Any = 1.0,
        note: Tensor | None = None,
    ) -> Tensor:
        return _sum(xp, grad, gain, state[0], self.decay, out)

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        return (done.error,)

    def check(self, codec: Codec) -> None:
        super().check(codec)
        _refuse_noise("residual", codec)


@dataclass(frozen=True)
class Momentum(Memory):
    """Momentum correction: momentum is gathered by each rank, before anything is left out.

    ``u' = m u + g; v' = v + u'; send Q(v')``; ``v`` keeps what was not sent. With ``masking`` u is
    cleared where a value was sent, so that old momentum does not push further what has just been
    moved. With ``nesterov``: ``u' = m (u + g); v' = v + u' + g``.

    It takes the place of the optimizer's own momentum, which must then be 0: momentum of the
    sparse sums would count old gradients as new ones. Masking needs a codec that keeps elements
    (``topk``, ``randomk``, ...); with others u is never cleared.

    Args:
        m: Momentum, 0 <= m < 1.
        nesterov: Whether to look one step ahead.
        masking: Whether to clear u where a value was sent.

    Reference:
        Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887.
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum", "residual")
    notes: ClassVar[bool] = True
    is_momentum: ClassVar[bool] = True

    m: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        check_range("momentum", "m", self.m, 0.0, 1.0 - 2.0**-20)
        check_choice("momentum", "nesterov", self.nesterov, (True, False))
        check_choice("momentum", "masking", self.masking, (True, False))

    def note(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], gain: Any, out: Any) -> Tensor:
        if self.nesterov:
            return xp.scale_(xp.add_(_scaled(xp, grad, gain, out), state[0]), self.m)
        return _sum(xp, grad, gain, state[0], self.m, out)

    def compensate(
        self,
        xp: Any,
        grad: Tensor,
        state: tuple[Tensor, ...],
        out: Any,
        *,
        gain: Any = 1.0,
        note: Tensor | None = None,
    ) -> Tensor:
        if self.nesterov:
            return xp.add_(xp.add_(_scaled(xp, grad, gain, out), note), state[1])
        return xp.add_(xp.to_float32(note, out), state[1])

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        speed = done.note
        if self.masking and done.kept is not None:
            where, inside = done.kept
            gone = xp.take(speed, where)
            gone = gone if inside is None else xp.where(inside, gone, 0.0)
            speed = xp.add_at_(speed, where, xp.sub(xp.zeros_like(gone), gone))
        return speed, done.error

    def check(self, codec: Codec) -> None:
        super().check(codec)
        _refuse_noise("momentum", codec)


@dataclass(frozen=True)
class EF21(Memory):
    """Send the difference to a reference that follows the gradient.

    Each rank keeps its own reference ``h`` and all keep the mean ``H`` of them:
    ``send Q(g - h); h' = h + Q(g - h)``, and the gradient is ``H' = H + mean(Q)``. Where gradients
    change little from step to step the differences are small, and so is what a codec loses of them.

    Nothing that was left out is added later, so the books of :class:`Residual` do not apply; the
    gradient itself is followed more and more closely. State is twice the size of the gradients.

    Reference:
        Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically
        Faster Error Feedback", NeurIPS 2021, arXiv:2106.05203.
    """

    slots: ClassVar[tuple[str, ...]] = ("own", "mean")
    notes: ClassVar[bool] = True
    references: ClassVar[bool] = True

    def note(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], gain: Any, out: Any) -> Tensor:
        return _scaled(xp, grad, gain, out)

    def compensate(
        self,
        xp: Any,
        grad: Tensor,
        state: tuple[Tensor, ...],
        out: Any,
        *,
        gain: Any = 1.0,
        note: Tensor | None = None,
    ) -> Tensor:
        return xp.sub_(xp.to_float32(note, out), state[0])

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        # h + Q(g - h) is the gradient less the error.
        return xp.sub_(done.note, done.error), xp.add(state[1], done.mean)

    def reduced(self, xp: Any, mean: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return xp.add(state[1], mean)

    def check(self, codec: Codec) -> None:
        super().check(codec)
        _refuse_noise("ef21", codec)


@dataclass(frozen=True)
class Differential(EF21):
    """As :class:`EF21`, with references that follow at a rate; DIANA with an unbiased codec.

    ``send Q(g - h); h' = h + alpha Q(g - h); H' = H + alpha mean(Q)``, and the gradient is
    ``H + mean(Q)``.

    Every ``refresh_every`` steps the gradient itself is sent, as float16 (beyond 65504 it is cut),
    and takes the place of all references: what sums have lost to rounding goes no further, and
    references that have gone astray are put right.

    Args:
        alpha: 0 < alpha <= 1: how fast references follow; 1 suits codecs that are contractions,
            ``1 / (1 + w)`` unbiased ones whose variance is w times the squared input.
        refresh_every: Steps from one full gradient to the next; 0 for never.

    Reference:
        Mishchenko, Gorbunov, Takac, Richtarik, "Distributed Learning with Compressed Gradient
        Differences", arXiv:1901.09269.
    """

    alpha: float = 1.0
    refresh_every: int = 100

    def __post_init__(self) -> None:
        check_fraction("differential", "alpha", self.alpha)
        check_count("differential", "refresh_every", self.refresh_every, minimum=0)

    @property
    def rate(self) -> float:
        return self.alpha

    @property
    def may_refresh(self) -> bool:
        return self.refresh_every > 0

    def refreshes(self, step: Any, all_of: Callable[..., Any] = all) -> Any:
        return self.may_refresh and all_of([step % self.refresh_every == 0, step > 0])

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        if self.alpha == 1 or done.refreshed:
            return super().update(xp, state, done)
        moved = xp.sub_(xp.sub_(done.note, done.error), state[0])
        own = xp.add_(xp.scale_(moved, self.alpha), state[0])
        return own, xp.add_scaled(state[1], done.mean, self.alpha, None)

    def check(self, codec: Codec) -> None:
        Memory.check(self, codec)
        if not codec.feeds_back and self.alpha == 1:
            raise SettingsError(
                explain(
                    got=f"alpha=1 with the unbiased or noisy codec '{codec.describe()}'",
                    expected="alpha below 1",
                    why="its noise may be larger than the difference, and a "
                    "reference that takes all of it runs away",
                    do="set alpha, as in memory='differential:alpha=0.1'",
                )
            )


MEMORIES: dict[str, type[Memory]] = {
    "none": NoMemory,
    "residual": Residual,
    "momentum": Momentum,
    "differential": Differential,
    "ef21": EF21,
}
"""Name, as in ``memory=`` and in string forms, to class."""


def _scaled(xp: Any, grad: Tensor, gain: Any, out: Any) -> Tensor:
    made = xp.to_float32(grad, out)
    return made if is_one(gain) else xp.scale_(made, gain)


def _sum(xp: Any, grad: Tensor, gain: Any, held: Tensor, factor: float, out: Any) -> Tensor:
    """Return ``gain * grad + factor * held``, without storage beside ``out``."""
    if is_one(gain):
        return xp.add_scaled(grad, held, factor, out)
    made = _scaled(xp, grad, gain, out)
    if factor == 1:
        return xp.add_(made, held)

    def one(_: int, a: Tensor, b: Tensor) -> tuple[Tensor]:
        return (xp.add_(a, xp.scaled(b, factor)),)

    flat, other = (xp.reshape(t, (-1,)) for t in (made, held))
    return xp.reshape(xp.map_rows(one, [flat, other], [flat])[0], made.shape)


def _refuse_noise(name: str, codec: Codec) -> None:
    if not codec.feeds_back:
        raise SettingsError(
            explain(
                got=f"memory '{name}' with the unbiased or noisy codec '{codec.describe()}'",
                expected="memory 'none' or 'differential' with a small alpha",
                why="its error may be larger than the gradient, and feeding it back lets it grow",
                do="drop memory=, or choose a codec setting that is not unbiased",
            )
        )
