"""One codec of a variable's schedule, with the state that it shares with all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..core.carrier import Carrier
from ..core.codec import Call, Codec, Combine, Shape
from ..core.payload import FLAG_BYTES
from ..ops import tensorflow as xp

Tensor = Any


class Candidates:
    """What variables become if the step turns out good, held in variables outside of checkpoints.

    They are empty between steps. Putting a tensor into a variable, and on into another, copies
    nothing.

    Args:
        targets: The variables, each of a fixed shape.
    """

    def __init__(self, targets: Sequence[Any]) -> None:
        self._targets = list(targets)
        self._held = [
            tf.Variable(_empty(v.dtype), shape=tf.TensorShape(None), trainable=False)
            for v in self._targets
        ]

    def put(self, values: Sequence[Tensor]) -> None:
        """Take one tensor for each variable."""
        for held, value in zip(self._held, values):
            held.assign(tf.cast(value, held.dtype))

    def keep(self) -> None:
        """Let them take the variables' places."""
        for held, target in zip(self._held, self._targets):
            target.assign(tf.ensure_shape(held.read_value(), target.shape))
        self.drop()

    def drop(self) -> None:
        """Forget them."""
        for held in self._held:
            held.assign(_empty(held.dtype))


class Stage(tf.Module):  # type: ignore[misc]
    """A codec in use from some step on.

    Args:
        codec: The codec.
        number: Of the stage, from 0.
        shape: Of the variable.
        key: Of the codec's first random draws.
        label: Begins the names of variables.
        own: Whether payloads travel by collectives of the package's own.
    """

    def __init__(
        self,
        codec: Codec,
        number: int,
        shape: Shape,
        key: tuple[int, int],
        label: str,
        *,
        own: bool,
    ) -> None:
        super().__init__(name="stage")
        self.codec, self.number = codec, number
        self.rounds = codec.round_count((shape,))
        self.payload_bytes = codec.wire_bytes(shape)
        if codec.combine is Combine.GATHER:
            self.payload_bytes += FLAG_BYTES
        self.wire_bytes = self.payload_bytes + (4 * Carrier.WIDTH if own else 0)
        initial = codec.initial(xp, Call(shapes=(shape,), key=key), tf.zeros([0]))
        for slot, value in zip(codec.slots, initial):
            setattr(self, slot, tf.Variable(value, trainable=False, name=f"{label}/{slot}"))
        self.candidates = Candidates([getattr(self, slot) for slot in codec.slots])
        with tf.device("CPU:0"):
            self.turn = tf.Variable(0, trainable=False, dtype=tf.int64, name=f"{label}/turn")

    def shared(self) -> tuple[Tensor, ...]:
        """Return the state that all ranks share."""
        return tuple(getattr(self, slot).read_value() for slot in self.codec.slots)

    def keep(self) -> None:
        """Count a good step, and take up the state that it left."""
        self.candidates.keep()
        self.turn.assign_add(1)


def _empty(dtype: Any) -> Tensor:
    return tf.zeros([0], dtype)
