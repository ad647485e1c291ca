"""Every codec with every memory that suits it trains on real ranks, under TensorFlow.

Of each pair: the books, equal ranks, a bad step on one rank, and a run that is resumed, eagerly:
a graph of each would be traced for longer than it runs.
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


def laws(label):
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
        again = resumed(trainer.steps, build, path, graph=False)
    grads = digest(flat(trainer.run(1)))
    out["resumed"] = digest(flat(again.run(1))) == grads
    out["state"] = digest(state(trainer.compression)) == digest(state(again.compression))
    return out


if __name__ == "__main__":
    hvd.init()
    for label in table.trained_pairs():
        try:
            report({label: laws(label)})
        except Exception:
            report({label: {"error": traceback.format_exc()}})
            raise
