"""What differs between the backends, for TensorFlow: ``tf_keras`` and Keras 3."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..tensorflow.compression import Compression, Compressor
from ..tensorflow.outside import outside
from ..tensorflow.reduction import Reduction
from ..tensorflow.refusals import keras_3_optimizer as horovods_wrapper

__all__ = [
    "Compression",
    "Compressor",
    "Passes",
    "Reduction",
    "as_written",
    "average",
    "broadcast",
    "gathered",
    "horovods_wrapper",
    "hvd",
    "shape",
]

as_written = tf.autograph.experimental.do_not_convert
"""Keeps a function as it is where TensorFlow would rewrite it."""


class Passes:
    """Adds up gradients on this rank, and lets an update happen every few passes.

    Args:
        every: Passes for one update, at least 2.
        mean: Whether an update takes the mean over its passes, not their sum.
    """

    def __init__(self, every: int, mean: bool) -> None:
        self._every, self._mean = every, mean
        self._sums: dict[int, Any] = {}
        self._passed: Any = None

    @property
    def count(self) -> int:
        """Passes so far."""
        return 0 if self._passed is None else int(self._passed)

    def __call__(
        self, grads: Sequence[Any], variables: Sequence[Any], update: Callable[[list[Any]], None]
    ) -> None:
        """Add gradients, and call ``update`` with the sums when it is time to."""
        present = [i for i, grad in enumerate(grads) if grad is not None]
        new = [i for i in present if id(variables[i]) not in self._sums]
        made = outside(lambda: [_zeros(variables[i]) for i in new])
        self._sums.update((id(variables[i]), zeros) for i, zeros in zip(new, made))
        if self._passed is None:
            self._passed = outside(_count)
        sums = {i: self._sums[id(variables[i])] for i in present}
        for i, total in sums.items():
            if isinstance(grads[i], tf.IndexedSlices):
                total.scatter_add(grads[i])
            else:
                total.assign_add(tf.cast(grads[i], total.dtype))
        passed = self._passed.assign_add(1)

        def now() -> Any:
            share = self._every if self._mean else 1
            given = {i: tf.cast(total / share, grads[i].dtype) for i, total in sums.items()}
            update([given.get(i) for i in range(len(grads))])
            for total in sums.values():
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        tf.cond(tf.equal(passed % self._every, 0), now, lambda: tf.constant(False))


def _zeros(variable: Any) -> Any:
    with tf.device(variable.device):
        return tf.Variable(tf.zeros_like(variable), trainable=False, name="gradcomp_sum")


def _count() -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="gradcomp_passes")


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Give variables of Keras the values that they have on one rank.

    Names on the wire are positions: Keras numbers its own ones differently on each rank.
    """
    for i, variable in enumerate(variables):
        value = tf.convert_to_tensor(variable)
        carried = tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value
        sent = hvd.broadcast(carried, root_rank, name=f"gradcomp.broadcast.{i}")
        variable.assign(tf.cast(sent, value.dtype))


def average(values: Sequence[Any], name: str) -> list[Any]:
    """Return each value's mean over all ranks: a float, or a tensor of the value's shape."""
    own = [tf.cast(tf.convert_to_tensor(value), tf.float64) for value in values]
    flat = tf.concat([tf.reshape(value, [-1]) for value in own], 0)
    mean = hvd.allreduce(flat, op=hvd.Average, name=f"gradcomp.{name}")
    parts = tf.split(mean, [value.shape.num_elements() for value in own])
    return [
        tf.reshape(part, value.shape) if value.shape.rank else float(part[0])
        for part, value in zip(parts, own)
    ]


def shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a number, an array or a tensor."""
    return tuple(tf.convert_to_tensor(value).shape)


def gathered(value: Any, name: str) -> list[Any]:
    """Return what each rank gives, in rank order.

    Args:
        value: What JSON can hold.
        name: Of the collective.
    """
    line = tf.io.decode_raw(tf.constant(json.dumps(value) + "\n"), tf.uint8)
    every = hvd.allgather(line, name=name)
    return [json.loads(text) for text in bytes(memoryview(every)).splitlines()]
