"""Runs checks of the Keras front end; arguments are their names.

Each reports what the test then judges, or its error. Rank 1 has built models that rank 0 has not.
"""

from __future__ import annotations

import importlib

import horovod_gradcomp.keras as hvd
from horovod_gradcomp.keras.flavour import BACKEND, runtime
from tests.distributed.launch import run_checks
from tests.distributed.workers import keras_training  # noqa: F401
from tests.distributed.workers.keras_trainer import CHECKS, new_model

if BACKEND == "tensorflow":
    importlib.import_module("tests.distributed.workers.keras_edges")

if __name__ == "__main__":
    hvd.init()
    for _ in range(hvd.rank()):
        new_model()
    run_checks(CHECKS, lambda name: runtime.average([0.0], f"end of {name}"))
