"""Train a small convolutional net on handwritten digits by ``model.fit`` of Keras 3.

Run it on two local ranks, with one or several kinds of compression one after the other:

    horovodrun -np 2 python examples/keras_mnist.py --compression topk:ratio=0.01
"""

from __future__ import annotations

import time
from pathlib import Path

import keras
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

import horovod_gradcomp.keras as hvd


class Clock(keras.callbacks.Callback):
    """Takes the time of steps, and says how far training is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.steps = name, []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.steps.append(time.perf_counter() - self.start)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if hvd.rank() == 0:
            of = self.params["epochs"]
            print(f"{self.name}: epoch {epoch + 1}/{of}, loss {logs['loss']:.4f}", flush=True)


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
    images, labels = shuffled(*train_set, seed, hvd)
    model = convolutional_net(seed)

    # The one line: compression=None becomes Compression.topk(ratio=0.01), or any other.
    compression = None if name == "dense" else hvd.Compression.from_string(name)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(lr * hvd.size(), momentum=momentum), compression=compression
    )
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    clock = Clock(name)
    began = time.perf_counter()
    model.fit(
        images[: len(images) // batch * batch],
        labels[: len(labels) // batch * batch],
        batch_size=batch,
        epochs=epochs,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            clock,
            *([hvd.callbacks.TelemetryCallback(telemetry)] if telemetry and compression else []),
        ],
    )
    seconds = time.perf_counter() - began
    return row(
        name,
        accuracy=accuracy(model, test_set),
        seconds=seconds,
        steps=clock.steps,
        dense=gradient_bytes(model),
        compression=compression,
        equal=weights_equal(model, hvd),
    )


if __name__ == "__main__":
    one_thread()
    run(train, hvd)
