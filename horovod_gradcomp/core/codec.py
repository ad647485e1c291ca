"""What a codec is.

A codec is a frozen dataclass of settings with pure functions over ``xp``, one of the modules in
:mod:`horovod_gradcomp.ops`. It holds no state, starts no collective and imports no framework. It
declares how its payloads combine, how its error behaves and how many bytes it sends, so that the
exchange and the memory follow from declarations and never from a codec's name.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Union

from .errors import SettingsError, explain

Tensor = Any
Shape = tuple[int, ...]
LARGEST = 3.4028234663852886e38
"""The largest float32."""

Extent = Union[int, Shape]
"""A tensor's shape, or its number of elements where that is all that counts."""


class Combine(enum.Enum):
    """How the payloads of several ranks become one."""

    SUM = "sum"
    """The payload is what Horovod allreduces: ``decode(a + b) == decode(a) + decode(b)``."""

    GATHER = "gather"
    """Every rank needs every payload: positions, packed codes and scales cannot be summed."""

    ROUNDS = "rounds"
    """Several payloads are summed, one after the other, each made from the sum before."""


class Bias(enum.Enum):
    """What is known of ``Q(x) = decode(encode(x))``."""

    UNBIASED = "unbiased"
    """``E[Q(x)] == x``: safe without a memory."""

    CONTRACTION = "contraction"
    """``||x - Q(x)|| <= ||x||``: what error feedback needs to converge."""

    NEITHER = "neither"


class Encoded(NamedTuple):
    """A payload, and what it leaves out."""

    payload: Tensor
    """One dense tensor: uint8 for GATHER (:mod:`.payload`), float16 or float32 for SUM."""

    error: Tensor | None
    """``x - decode(payload)``, flat float32, where it was asked for."""

    kept: tuple[Tensor, Tensor | None] | None = None
    """Positions of what is sent, int64, and which of them count; None where all is sent."""


class Finished(NamedTuple):
    """What all payloads of a step add up to."""

    total: Tensor
    """``scale * sum(decoded payloads)``, flat float32."""

    shared: tuple[Tensor, ...] = ()
    """The codec's next shared state, see :attr:`Codec.slots`."""

    damage: Tensor | None = None
    """What is wrong with each payload, see :mod:`.damage`; None where nothing can be."""


Rounds = Generator[Tensor, Tensor, tuple[Finished, Union[Tensor, None]]]
"""Yields float payloads, receives their sums, returns the sum of all and what this rank left."""


@dataclass(frozen=True)
class Call:
    """What a codec may know of the step it runs in; all but the rank is equal on all ranks.

    Attributes:
        size: Number of ranks whose payloads are combined.
        shapes: Shapes of the tensors that make up the flat input, in order.
        key: Two 32-bit words from :func:`horovod_gradcomp.core.random.fold`.
        step: Good steps of this codec before this one, so that it goes on when the shared state
            does; a number, or an int64 scalar tensor in a graph.
        rank: Which of the ranks, in the order of payloads, this is.
        shared: The codec's shared state, one tensor for each of :attr:`Codec.slots`.
        notes: What encoding leaves for decoding, in an exchange that does both; None elsewhere.
    """

    size: int = 1
    shapes: tuple[Shape, ...] = ()
    key: tuple[Any, Any] = field(default=(0, 0))
    step: Any = 0
    rank: int = 0
    shared: tuple[Tensor, ...] = ()
    notes: dict[str, Any] | None = field(default=None, compare=False)

    def extents(self, numel: int) -> tuple[Shape, ...]:
        """Return the shape of each tensor; of a flat one, where no shapes are given."""
        return self.shapes or ((numel,),)

    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.extents(numel))


@dataclass(frozen=True)
class Codec(ABC):
    """Base of all codecs; see :mod:`horovod_gradcomp.codecs` for the registry."""

    identity: ClassVar[bool] = False
    """Whether nothing is changed at all, so that a front end may hand gradients straight on."""
    slots: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that all ranks share and carry from step to step: the same bits on every
    rank, made anew by :meth:`initial`, and kept only where a step is good."""
    bit_equal: ClassVar[bool] = True
    """Whether payloads of all frameworks agree bit for bit.

    False where exp or log, which every framework rounds in its own way, decide on a code. Decoded
    values then agree to 1e-6 of the block's largest magnitude, except where a value lies as close
    to the middle between two codes: there they may be one code apart.
    """

    timeless: ClassVar[bool] = False
    """Whether a payload means the same in every step, so that a sum of different steps' payloads is
    still a sum of gradients."""

    narrow: ClassVar[bool] = False
    """Whether what is summed is float16."""

    encodes_all: ClassVar[bool] = False
    """Whether every element has a code of its own."""

    mixes: ClassVar[bool] = False
    """Whether a decoded value is a sum of products over its whole tensor, so that it is rounded to
    1e-5 of the tensor's largest value, in every framework in its own way."""

    @property
    @abstractmethod
    def combine(self) -> Combine:
        """How payloads combine with the present settings."""

    @property
    @abstractmethod
    def bias(self) -> Bias:
        """How the error behaves with the present settings."""

    @property
    def additive(self) -> bool:
        """Whether decoded payloads add up; where they do not, no memory can keep books of them."""
        return True

    @property
    def feeds_back(self) -> bool:
        """Whether its error may be added to the next input.

        Where it may be larger than the input, as that of an unbiased codec may, it would grow
        without end.
        """
        return self.additive and self.bias is not Bias.UNBIASED

    @property
    def default_memory(self) -> str:
        """The memory that this codec comes with."""
        return "residual" if self.feeds_back else "none"

    @abstractmethod
    def wire_bytes(self, *extents: Extent) -> int:
        """Return the exact size of a step's payloads in bytes, headers included.

        Args:
            extents: Shape, or number of elements, of each tensor that is encoded.
        """

    def initial(self, xp: Any, call: Call, like: Tensor) -> tuple[Tensor, ...]:
        """Return the shared state before the first step, on the device of ``like``."""
        return ()

    @abstractmethod
    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        """Encode a flat float32 tensor.

        Args:
            xp: An operations module.
            x: Shape ``(numel,)``, float32, numel > 0. It is **consumed**: where the framework
                allows, its storage is reused for the error.
            call: The step.
            want_error: Whether to return the error.
        """

    @abstractmethod
    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        """Return ``scale * sum(decoded payloads)``, flat float32, always fresh storage.

        Args:
            xp: An operations module.
            payloads: One payload a rank, in rank order; one reduced payload for SUM.
            numel: Number of elements.
            call: The step, equal to the one of ``encode``.
            scale: Factor on the sum, a number or a float32 scalar tensor.
        """

    def finish(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Finished:
        """Return what :meth:`decode` does, the next shared state, and what is damaged.

        Payloads may hold any bytes, of the right number.
        """
        return Finished(self.decode(xp, payloads, numel, call, scale=scale))

    def rounds(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Rounds:
        """Take the place of encode and decode where payloads combine in rounds."""
        raise AssertionError(f"{type(self).__name__} combines by {self.combine}")

    def round_count(self, extents: Sequence[Extent]) -> int:
        """Return how many collectives a step takes; known from shapes alone."""
        return 1

    def with_memory(self, has_memory: bool) -> Codec:
        """Return the form of this codec to use with, or without, an error memory."""
        return self

    def describe(self) -> str:
        """Return the string form, ``name:setting=value,...``, that builds an equal codec."""
        return self.describe_fields([f.name for f in fields(self)])

    def describe_fields(self, names: Sequence[str]) -> str:
        """Return the string form with some of the settings; None stands for a default of None."""
        defaults = {f.name: f.default for f in fields(self)}
        parts = [
            f"{name}={_text(getattr(self, name))}"
            for name in names
            if getattr(self, name) is not None or defaults[name] is not None
        ]
        return f"{self.registered}:{','.join(parts)}" if parts else self.registered

    @property
    def registered(self) -> str:
        """The name under which this codec's class is registered."""
        from ..codecs import name_of  # a codec does not know its name, the registry does

        return name_of(self)


def adds_halves(codec: Codec) -> bool:
    """Return whether Horovod adds payloads up as float16."""
    inner = getattr(codec, "then", None) or codec
    return codec.combine is Combine.SUM and inner.narrow


def numels(extents: Sequence[Extent]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [e if isinstance(e, int) else math.prod(e) for e in extents]


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def is_one(factor: Any) -> bool:
    """Return whether multiplying by a factor can be left out.

    A scalar tensor never says so: its value is not known while a graph is traced.
    """
    return isinstance(factor, (int, float)) and factor == 1


def check_choice(codec: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise :class:`SettingsError` unless ``value`` is one of ``allowed``."""
    if not any(type(value) is type(a) and value == a for a in allowed):  # True and 4.0 are no ints
        raise SettingsError(
            f"{codec}: "
            + explain(got=f"{name}={value!r}", expected=f"one of {', '.join(map(repr, allowed))}")
        )


def check_fraction(codec: str, name: str, value: Any) -> None:
    """Raise :class:`SettingsError` unless ``0 < value <= 1``."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= 1  # NaN is neither
    ):
        raise SettingsError(
            f"{codec}: " + explain(got=f"{name}={value!r}", expected=f"a fraction, 0 < {name} <= 1")
        )


def check_range(
    codec: str, name: str, value: Any, low: float, high: float, *, also: str = ""
) -> None:
    """Raise :class:`SettingsError` unless ``low <= value <= high``.

    Args:
        codec: For the message.
        name: Of the setting.
        value: Of the setting.
        low: Least value.
        high: Greatest value.
        also: What else is allowed, and checked by the caller.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # NaN is neither
        allowed = f"a number, {low:g} <= {name} <= {high:g}{', or ' if also else ''}{also}"
        raise SettingsError(f"{codec}: " + explain(got=f"{name}={value!r}", expected=allowed))


def check_count(codec: str, name: str, value: Any, *, minimum: int = 1, multiple: int = 1) -> None:
    """Raise :class:`SettingsError` unless ``value`` is a whole number in range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum or value % multiple:
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        raise SettingsError(
            f"{codec}: "
            + explain(got=f"{name}={value!r}", expected=f"a whole number, {name} >= {minimum}{of}")
        )
