"""What a rank remembers between steps, so that what a step does not send is sent later.

A memory wraps any codec whose bias allows it and is written once. It is pure: state tensors go in
and come out, and only the front ends hold them. They commit the new state after the exchange, for
a whole step or not at all, so a step that a loss scaler drops leaves every memory as it was.

There are two kinds. One adds what was not sent to the next gradient (``residual``, here, and
``momentum``, in :mod:`.momentum`). The other keeps a *reference* on all ranks alike, and sends only
the difference to it (:mod:`.reference`). Here is what every memory must do, and the two that
every exchange may need: forgetting, and plain error feedback. :mod:`.memories` has the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Callable, ClassVar, NamedTuple

from .codec import Codec, Tensor, check_fraction, is_one
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
        return scaled(xp, grad, gain, out)

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
        return scaled_sum(xp, grad, gain, state[0], self.decay, out)

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        return (done.error,)

    def check(self, codec: Codec) -> None:
        super().check(codec)
        refuse_noise("residual", codec)


def scaled(xp: Any, grad: Tensor, gain: Any, out: Any) -> Tensor:
    """Return ``gain * grad`` as float32, in ``out`` where that is given."""
    made = xp.to_float32(grad, out)
    return made if is_one(gain) else xp.scale_(made, gain)


def scaled_sum(xp: Any, grad: Tensor, gain: Any, held: Tensor, factor: float, out: Any) -> Tensor:
    """Return ``gain * grad + factor * held``, without storage beside ``out``."""
    if is_one(gain):
        return xp.add_scaled(grad, held, factor, out)
    made = scaled(xp, grad, gain, out)
    if factor == 1:
        return xp.add_(made, held)

    def one(_: int, a: Tensor, b: Tensor) -> tuple[Tensor]:
        return (xp.add_(a, xp.scaled(b, factor)),)

    flat, other = (xp.reshape(t, (-1,)) for t in (made, held))
    return xp.reshape(xp.map_rows(one, [flat, other], [flat])[0], made.shape)


def refuse_noise(name: str, codec: Codec) -> None:
    """Raise :class:`SettingsError` if a memory cannot feed a codec's error back.

    Args:
        name: Of the memory, as in :data:`.memories.MEMORIES`.
        codec: What it is to enclose.
    """
    if not codec.feeds_back:
        raise SettingsError(
            explain(
                got=f"memory '{name}' with the unbiased or noisy codec '{codec.describe()}'",
                expected="memory 'none' or 'differential' with a small alpha",
                why="its error may be larger than the gradient, and feeding it back lets it grow",
                do="drop memory=, or choose a codec setting that is not unbiased",
            )
        )
