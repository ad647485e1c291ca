"""Gradient compression for Horovod, for PyTorch and TensorFlow.

Importing this package imports no framework, no Horovod and no NumPy. Take the names from the
front end that you train with, which mirrors Horovod's own::

    from horovod_gradcomp.torch import Compression        # beside horovod.torch
    from horovod_gradcomp.tensorflow import Compression   # beside horovod.tensorflow
"""

from ._version import __version__
from .core.errors import (
    BindingError,
    ExchangeError,
    GradCompError,
    SettingsError,
    StateError,
)
from .core.schedule import ramp

__all__ = [
    "BindingError",
    "ExchangeError",
    "GradCompError",
    "SettingsError",
    "StateError",
    "__version__",
    "ramp",
]
