"""Gradient compression beside ``horovod.tensorflow``, under the same names."""

from ..core.errors import (
    BindingError,
    ExchangeError,
    GradCompError,
    SettingsError,
    StateError,
)
from .compression import Compression, Compressor
from .state import resize_state

__all__ = [
    "BindingError",
    "Compression",
    "Compressor",
    "ExchangeError",
    "GradCompError",
    "SettingsError",
    "StateError",
    "resize_state",
]
