"""Runs checks of the TensorFlow front end; arguments are their names.

Each reports what the test then judges, or its error.
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from tests.distributed.launch import run_checks
from tests.distributed.workers import (  # noqa: F401
    tensorflow_edges,
    tensorflow_laws,
    tensorflow_training,
)
from tests.distributed.workers.tensorflow_trainer import CHECKS, SETS

if __name__ == "__main__":
    if "process_set" in sys.argv:
        SETS.append(hvd.ProcessSet([0, 2]))
    hvd.init(process_sets=SETS)
    # A rank that ends takes Horovod's process sets with it.
    run_checks(CHECKS, lambda name: hvd.allreduce(tf.zeros([1]), name=f"end of {name}"))
