"""What the checks of the TensorFlow front end share.

The gradient of ``sum(w * g)`` is ``g``, so every rank knows every rank's gradients: ``draw``
makes them from (rank, step, variable).
"""

from __future__ import annotations

import hashlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_gradcomp.tensorflow import Compression

SHAPES = ((24, 40), (40,), (24, 40))
NAMES = ("kernel", "bias", "kernel")
CODECS = {
    "topk": "topk:ratio=0.05",
    "randomk": "randomk:ratio=0.1",
    "linear": "linear:bits=4",
    "fp16": "fp16",
    "acp": "acp:rank=2",
    "powersgd": "powersgd:rank=2",
    "none": "none",
}
CHECKS = {}
SETS = []


def check(function):
    CHECKS[function.__name__] = function
    return function


def make(codec, **options):
    return Compression.from_string(CODECS.get(codec, codec), min_numel=64, **options)


def new_weights(dtype=tf.float32):
    # As Keras does it where a rank has built one model more: names differ between ranks.
    start = np.random.default_rng(3)
    return [
        tf.Variable(
            tf.cast(start.standard_normal(shape), dtype), name=f"dense_{i + hvd.rank()}/{name}"
        )
        for i, (shape, name) in enumerate(zip(SHAPES, NAMES))
    ]


def draw(rank, step, shapes=SHAPES):
    generator = np.random.default_rng([rank, step])
    # The last layer's gradients are large, so that a residual in the wrong place shows.
    return [
        (generator.standard_normal(shape) * 10.0**i).astype(np.float32)
        for i, shape in enumerate(shapes)
    ]


class Trainer:
    """Reduces drawn gradients through a tape and keeps the books."""

    def __init__(self, compression, *, graph=True, rate=0.0, weights=None, scale=None, **tape):
        self.compression, self.rate, self.tape = compression, rate, tape
        self.scale = tf.Variable(1.0) if scale is None else scale
        self.weights = weights or new_weights()
        self.applied = [np.zeros(w.shape) for w in self.weights]
        self.true = [np.zeros(w.shape) for w in self.weights]
        self.steps = 0
        self.reduce = tf.function(self._reduce) if graph else self._reduce

    def _reduce(self, grads, leave_out=()):
        weights = self.weights
        with tf.GradientTape() as tape:
            terms = [
                tf.reduce_sum(w * tf.cast(g, w.dtype))
                for i, (w, g) in enumerate(zip(weights, grads))
                if i not in leave_out
            ]
            loss = tf.add_n([tf.cast(term, tf.float32) for term in terms]) * self.scale
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, **self.tape)
        return tape.gradient(loss, weights, use_generic_names=True)

    def step(self, change=None, leave_out=()):
        by_rank = [draw(rank, self.steps) for rank in range(hvd.size())]
        mine = [tf.constant(g) for g in (change or (lambda g: g))(by_rank[hvd.rank()])]
        reduced = self.reduce(mine, leave_out)
        self.steps += 1
        for i, grad in enumerate(reduced):
            if grad is None:
                continue
            self.true[i] += np.mean([np.float64(g[i]) for g in by_rank], axis=0)
            self.applied[i] += tf.cast(grad, tf.float64).numpy() / self.scale.numpy()
            if self.rate:
                self.weights[i].assign_sub(self.rate * grad)
        return reduced

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    def imbalance(self, slot="residual"):
        """Law 1, for each variable: applied + mean residual - true, relative to the true sum."""
        out = []
        for i, (applied, true) in enumerate(zip(self.applied, self.true)):
            held = residual(self.compression, i, slot)
            if held is not None:
                held = tf.cast(held, tf.float32)
                held = hvd.allreduce(held, op=hvd.Average, name=f"held.{i}").numpy()
                applied = applied + np.float64(held.reshape(true.shape))
            out.append(float(np.abs(applied - true).max() / np.abs(true).max()))
        return out


def residual(compression, i, slot="residual"):
    for variable in getattr(compression, "variables", ()):
        if variable.name.split(":")[0] == f"dense_{i + hvd.rank()}/{NAMES[i]}/{slot}":
            return variable.read_value()
    return None


def state(compression):
    """What a bad step must leave as it was: all but the count of steps, which are all counted."""
    return [v for v in compression.variables if not v.name.endswith("/step:0")]


def digest(tensors):
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tf.convert_to_tensor(tensor).numpy().tobytes())
    return state.hexdigest()[:16]


def flat(steps):
    return [grad for grads in steps for grad in grads]


def mode(graph):
    return "function" if graph else "eager"


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def spoil(where, value):
    def change(grads):
        if hvd.rank() == hvd.size() - 1:
            grads[where].flat[7] = value
        return grads

    return change
