"""What the checks of the Keras front end share: a task, models, and who builds how many."""

from __future__ import annotations

import hashlib

import numpy as np

import horovod_gradcomp.keras as hvd
from horovod_gradcomp.keras.flavour import BACKEND, keras

CHECKS = {}
STEPS, BATCH = 8, 16
"""Steps of an epoch, and examples of all ranks in one of them."""


def check(function):
    CHECKS[function.__name__] = function
    return function


def data(ranks=1, rank=0):
    """Return this rank's part of each step's examples, of three classes."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, STEPS * BATCH)
    centres = 0.35 * generator.standard_normal((3, 40))
    x = (centres[labels] + generator.standard_normal((STEPS * BATCH, 40))).astype(np.float32)
    x = x.reshape(STEPS, ranks, BATCH // ranks, 40)[:, rank].reshape(-1, 40)
    return x, labels.reshape(STEPS, ranks, BATCH // ranks)[:, rank].reshape(-1)


def mine():
    return data(hvd.size(), hvd.rank())


def new_model(seed=3):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.layers.Input((40,)), *layers])


def compiled(optimizer, model=None, **options):
    model = model or new_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


def fit(model, part=None, epochs=2, ranks=None, **options):
    """Train on this rank's part of every step, or as one process on all of it."""
    x, y = part or mine()
    batch = int(BATCH / (ranks or hvd.size()))
    return model.fit(
        x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **options
    ).history


def distributed(optimizer=None, **options):
    return hvd.DistributedOptimizer(optimizer or sgd(), **options)


def sgd(**options):
    return keras.optimizers.SGD(0.05, **options)


def topk(**options):
    return hvd.Compression.topk(ratio=0.1, min_numel=64, **options)


def digest(arrays):
    state = hashlib.sha256()
    for array in arrays:
        state.update(np.asarray(array).tobytes())
    return state.hexdigest()[:16]


def weights(model):
    return digest(model.get_weights())


def memory(compression):
    """Return a digest of what a compressor keeps."""
    if BACKEND == "tensorflow":
        # All steps are counted, bad ones, too.
        return digest(v for v in compression.variables if not v.name.endswith("/step:0"))
    tables = [one["memory"] for one in compression.state_dict()["optimizers"]]
    return digest(v for table in tables for slot in table.values() for v in slot.values())


def difference(model, other):
    pairs = zip(model.get_weights(), other.get_weights())
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
