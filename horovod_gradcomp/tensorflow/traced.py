"""Codecs as functions that are traced once, however many variables and compressors share them.

A codec is hundreds of operations, and Horovod traces every variable anew. What is the same for
variables of one shape is therefore a function of its own, which the trace of a variable only calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..core import random
from ..core.carrier import Carrier
from ..core.codec import Call, Codec, Encoded, Finished, Rounds, Tensor
from ..ops import tensorflow as xp


class TracedCodec:
    """Stands in for a codec in :func:`horovod_gradcomp.core.exchange.start`."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.combine = codec.combine
        self.timeless = codec.timeless
        self.wire_bytes = codec.wire_bytes

    def encode(self, _: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        """See :meth:`horovod_gradcomp.core.codec.Codec.encode`."""
        run = _encoder(self._codec, xp.numel(x), _plain(call), want_error)
        return Encoded(*run(x, _tensors(call)))

    def finish(
        self, _: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Finished:
        """See :meth:`horovod_gradcomp.core.codec.Codec.finish`."""
        if not tf.is_tensor(scale):
            run = _finisher(self._codec, numel, _plain(call), scale)
            return Finished(*run(list(payloads), _tensors(call)))
        run = _finisher(self._codec, numel, _plain(call), None)
        return Finished(*run(list(payloads), _tensors(call), scale))

    def rounds(self, _: Any, x: Tensor, call: Call, *, want_error: bool) -> Rounds:
        """See :meth:`horovod_gradcomp.core.codec.Codec.rounds`."""
        return self._codec.rounds(xp, x, call, want_error=want_error)


def judge(carrier: Carrier, reduced: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor on the sum of decoded payloads, and whether the carrier is a right one."""
    scale, good = _judge(carrier.ranks)(reduced)
    return scale, good


def fold(seed: int, name: str, step: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`horovod_gradcomp.core.random.fold`."""
    low, high = random.origin(seed, name)
    first, second = _advance()(tf.constant(low, tf.int64), tf.constant(high, tf.int64), step)
    return first, second


# Each takes tensors of one signature only, so that none is ever traced a second time.
@functools.cache
def _encoder(codec: Codec, numel: int, call: Call, want_error: bool) -> Any:
    def encode(x: Tensor, tensors: Any) -> tuple[Any, ...]:
        return tuple(codec.encode(xp, x, _filled(call, tensors), want_error=want_error))

    return tf.function(encode, autograph=False)


@functools.cache
def _finisher(codec: Codec, numel: int, call: Call, fixed: float | None) -> Any:
    def finish(payloads: list[Tensor], tensors: Any, scale: Any = fixed) -> tuple[Any, ...]:
        return tuple(codec.finish(xp, payloads, numel, _filled(call, tensors), scale=scale))

    return tf.function(finish, autograph=False)


@functools.cache
def _advance() -> Any:
    return tf.function(random.advance, autograph=False)


@functools.cache
def _judge(ranks: tuple[int, ...]) -> Any:
    carrier, size = Carrier(ranks), len(ranks)

    def run(reduced: Tensor) -> tuple[Tensor, Tensor]:
        values = tf.unstack(tf.cast(reduced, tf.float64))
        factor, good = carrier.judge(values, _choose)
        # In numbers, so that a mean is scaled by the same float32 as in the torch front end.
        scale = _choose(tf.equal(factor, float(size)), 1.0, factor / size)
        return tf.cast(scale, tf.float32), good

    return tf.function(run, autograph=False)


def _choose(condition: Tensor, a: Any, b: Any) -> Tensor:
    return tf.where(condition, tf.cast(a, tf.float64), tf.cast(b, tf.float64))


def _plain(call: Call) -> Call:
    """Return a call without what differs from step to step."""
    return dataclasses.replace(call, key=(0, 0), step=0, shared=())


def _tensors(call: Call) -> Any:
    """Return what differs from step to step."""
    return call.key, tf.cast(call.step, tf.int64), call.shared


def _filled(call: Call, tensors: Any) -> Call:
    key, step, shared = tensors
    return dataclasses.replace(call, key=(key[0], key[1]), step=step, shared=tuple(shared))
