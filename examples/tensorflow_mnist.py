"""Train a small convolutional net on handwritten digits by a gradient tape of TensorFlow.

Run it on two local ranks, with one or several kinds of compression one after the other:

    horovodrun -np 2 python examples/tensorflow_mnist.py --compression topk:ratio=0.01
"""

from __future__ import annotations

import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras_training import (
    accuracy,
    convolutional_net,
    digits,
    gradient_bytes,
    one_thread,
    shuffled,
    weights_equal,
)
from table import row, run

from horovod_gradcomp.tensorflow import Compression


def train(
    name: str,
    epochs: int,
    batch: int,
    lr: float,
    momentum: float,
    seed: int,
    telemetry: Path | None,
) -> dict[str, object]:
    """Train once and return one row of the table."""
    train_set, test_set = digits()
    model = convolutional_net(seed)
    # Horovod takes TensorFlow's own variables, which those of Keras 3 hold.
    variables = [v.value for v in model.trainable_variables]
    hvd.broadcast_variables(variables, root_rank=0)
    optimizer = keras.optimizers.SGD(lr * hvd.size(), momentum=momentum)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # The one line: hvd.Compression.none becomes Compression.topk(ratio=0.01), or any other.
    compression = hvd.Compression.none if name == "dense" else Compression.from_string(name)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    records = compression.telemetry(telemetry) if telemetry and name != "dense" else None

    began, steps = time.perf_counter(), []
    for epoch in range(epochs):
        images, labels = shuffled(*train_set, seed + epoch, hvd)
        for i in range(0, len(images) // batch * batch, batch):
            start = time.perf_counter()
            loss = step(
                tf.constant(images[i : i + batch]), tf.constant(labels[i : i + batch])
            ).numpy()
            steps.append(time.perf_counter() - start)
        if records:
            records.record()
        mean_loss = hvd.allreduce(tf.constant(loss), name="loss").numpy()
        if hvd.rank() == 0:
            print(f"{name}: epoch {epoch + 1}/{epochs}, loss {mean_loss:.4f}", flush=True)
    seconds = time.perf_counter() - began
    return row(
        name,
        accuracy=accuracy(model, test_set),
        seconds=seconds,
        steps=steps,
        dense=gradient_bytes(model),
        compression=compression,
        equal=weights_equal(model, hvd),
    )


if __name__ == "__main__":
    one_thread()
    run(train, hvd)
