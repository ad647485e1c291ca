"""Training whose last batch is smaller, with an evaluation and a second round: three traces."""

from __future__ import annotations

import hashlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_gradcomp.tensorflow import Compression
from tests.distributed.launch import report

BATCHES = (8, 8, 5, 8, 8, 3, 5)
traced = []


def main() -> None:
    hvd.init()
    kernel = tf.Variable(tf.random.stateless_normal([64, 48], [1, 2]), name="kernel")
    compression = Compression.topk(ratio=0.05)

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(x @ kernel)) / tf.cast(tf.shape(x)[0], tf.float32)

    @tf.function
    def train(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        traced.append(x.shape)
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(x)
        own = tape.gradient(loss, kernel)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [kernel])[0], own

    evaluate = tf.function(loss_of)
    applied, true, largest = 0.0, 0.0, 0.0
    for step, size in enumerate(BATCHES):
        x = tf.random.stateless_normal([size, 64], [step, hvd.rank()])
        grad, own = train(x)
        mean = hvd.allreduce(own, name=f"true.{step}").numpy().astype(np.float64)
        applied, true = applied + grad.numpy().astype(np.float64), true + mean
        largest = max(largest, float(np.abs(mean).max()))
        kernel.assign_sub(1e-4 * grad)
        evaluate(x[:2])
    (residual,) = [v for v in compression.variables if v.shape == [64 * 48]]
    owed = hvd.allreduce(residual, name="owed").numpy().reshape(64, 48)
    report(
        {
            "traces": len(traced),
            "off": float(np.abs(applied + owed - true).max() / largest),
            "owed": float(np.abs(owed).max() / largest),
            "weights": hashlib.sha256(kernel.numpy().tobytes()).hexdigest(),
            "steps": compression.stats()["steps"],
        }
    )


if __name__ == "__main__":
    main()
