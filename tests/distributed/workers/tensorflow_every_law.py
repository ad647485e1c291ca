"""Every codec with every memory that suits it trains on real ranks, under TensorFlow.

Of each pair: the books, equal ranks, a bad step on one rank, and a run that is resumed, eagerly:
a graph of each would be traced for longer than it runs. For the same reason one memory of each
codec is resumed in a compressor just made, and the rest in the one that has gone a step further.
"""

from __future__ import annotations

import tempfile
import traceback

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tests import table
from tests.distributed.launch import report
from tests.distributed.workers.tensorflow_laws import Momentum, books_of, resumed
from tests.distributed.workers.tensorflow_trainer import Trainer, digest, flat, make, spoil, state

STEPS = 2


class Halved(Momentum):
    m = 0.5


def afresh(labels):
    """Return one label of each codec, with memories in turn."""
    memories = {}
    for label in labels:
        memories.setdefault(label.rsplit(" ", 1)[0], []).append(label)
    return {own[number % len(own)] for number, own in enumerate(memories.values())}


def laws(label, fresh):
    text, memory = label.rsplit(" ", 1)
    name = memory.partition(":")[0]

    def build():
        return make(text, memory=memory)

    kind = Halved if name == "momentum" else Trainer
    trainer = kind(build(), rate=0.01, graph=False)
    trainer.run(STEPS)
    out = {"weights": digest(trainer.weights)}
    if memory != "none":
        out["books"] = max(books_of(name, trainer))
    before = digest(state(trainer.compression))
    spoilt = trainer.step(spoil(0, np.nan))
    out["spoilt"] = [bool(np.isfinite(g).all()) for g in spoilt]
    out["kept"] = before == digest(state(trainer.compression))
    out["bad steps"] = trainer.compression.stats()["bad_steps"]
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compression=trainer.compression).write(f"{folder}/c")
        straight = digest(flat(trainer.run(1))), digest(state(trainer.compression))
        if fresh:
            trainer = resumed(trainer.steps - 1, build, path, graph=False)
        else:
            trainer.steps -= 1
            read = tf.train.Checkpoint(compression=trainer.compression).read(path)
            read.assert_existing_objects_matched()
    grads = digest(flat(trainer.run(1)))
    out["resumed"] = (grads, digest(state(trainer.compression))) == straight
    return out


if __name__ == "__main__":
    hvd.init()
    labels = list(table.trained_pairs())
    fresh = afresh(labels)
    for label in labels:
        try:
            report({label: laws(label, label in fresh)})
        except Exception:
            report({label: {"error": traceback.format_exc()}})
            raise
