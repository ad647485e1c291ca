"""Which Keras this is, and the Horovod that goes with its backend.

It is ``tf_keras`` where ``TF_USE_LEGACY_KERAS`` is set, as for ``tf.keras``, else ``keras``. With
``KERAS_BACKEND=torch`` everything goes through ``horovod.torch`` and TensorFlow is not imported.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..core.errors import GradCompError, explain

__all__ = ["BACKEND", "LEGACY", "hvd", "keras", "made_by", "runtime"]

LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
"""Whether ``tf_keras`` is in use."""

if LEGACY:
    import tf_keras as keras
else:
    import keras

BACKEND = "tensorflow" if LEGACY else str(keras.backend.backend())
"""The backend of Keras: tensorflow or torch."""

if BACKEND not in ("tensorflow", "torch"):
    raise GradCompError(
        explain(
            got=f"the {BACKEND} backend of Keras",
            expected="tensorflow or torch",
            why="Horovod has no operations for others",
            do="set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before the first import",
        )
    )

runtime: Any = importlib.import_module(f".on_{BACKEND}", __package__)
"""What differs between the backends."""

hvd: Any = runtime.hvd
"""``horovod.tensorflow`` or ``horovod.torch``."""


def made_by(thing: Any, package: str) -> bool:
    """Return whether an object's class descends from one of a package, such as ``keras``."""
    return any(kind.__module__.split(".")[0] == package for kind in type(thing).__mro__)
