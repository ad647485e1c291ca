"""What a rank remembers between steps, so that what a step does not send is sent later.

A memory wraps any codec whose bias allows it and is written once. It is pure: state tensors go in
and come out, and only the front ends hold them. They commit the new state after the exchange, for
a whole step or not at all, so a step that a loss scaler drops leaves every memory as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from .codec import Bias, Codec, Tensor, check_fraction
from .errors import SettingsError, explain


@dataclass(frozen=True)
class Memory(ABC):
    """Base of all memories."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the state tensors, each flat float32 of the gradient's size, zero at first."""

    @abstractmethod
    def compensate(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], out: Any) -> Tensor:
        """Return what the codec is to encode.

        Args:
            xp: An operations module.
            grad: The gradient, any float dtype.
            state: One tensor a slot, of the gradient's shape; not to be changed.
            out: Float32 storage for the result, or None.
        """

    @abstractmethod
    def update(self, state: tuple[Tensor, ...], error: Tensor | None) -> tuple[Tensor, ...]:
        """Return the state after this step, from the error that the codec left."""

    def check(self, codec: Codec) -> None:  # noqa: B027 - most memories suit every codec
        """Raise :class:`SettingsError` if this memory is no use with a codec."""

    @property
    def wants_error(self) -> bool:
        """Whether the codec must say what it left out."""
        return bool(self.slots)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forget what is not sent."""

    def compensate(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], out: Any) -> Tensor:
        return xp.to_float32(grad, out)

    def update(self, state: tuple[Tensor, ...], error: Tensor | None) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback: add what was not sent to the next gradient.

    ``x = g + decay * e; send Q(x); e' = x - Q(x)``. Each rank feeds back its own error. With
    ``decay = 1`` the books balance at every step: the mean gradients applied so far plus the mean
    residual equal the sum of true mean gradients.

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

    def compensate(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], out: Any) -> Tensor:
        return xp.add_scaled(grad, state[0], self.decay, out)

    def update(self, state: tuple[Tensor, ...], error: Tensor | None) -> tuple[Tensor, ...]:
        return (error,)

    def check(self, codec: Codec) -> None:
        if codec.bias is Bias.UNBIASED:
            raise SettingsError(
                explain(
                    got=f"memory 'residual' with the unbiased codec '{codec.describe()}'",
                    expected="memory 'none'",
                    why="the error of an unbiased codec may be larger than the gradient, "
                    "and feeding it back lets it grow",
                    do="drop memory=, or choose a codec setting that is not unbiased",
                )
            )


MEMORIES: dict[str, type[Memory]] = {"none": NoMemory, "residual": Residual}
"""Name, as in ``memory=`` and in string forms, to class."""
