"""Runs checks of the TensorFlow front end; arguments are their names.

Each reports what the test then judges, or its error.
"""

from __future__ import annotations

import sys
import time
import traceback

import horovod.tensorflow as hvd
import tensorflow as tf

from tests.distributed.launch import report
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
    seconds = {}
    for name in sys.argv[1:]:
        start = time.monotonic()
        try:
            value = CHECKS[name]()
        except Exception:
            value = {"error": traceback.format_exc()}
        seconds[name] = round(time.monotonic() - start, 1)
        report({name: value, "seconds": seconds})
        # A rank that ends takes Horovod's process sets with it.
        hvd.allreduce(tf.zeros([1]), name=f"end of {name}")
