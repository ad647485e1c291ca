"""Gradient compression beside ``horovod.tensorflow``, under the same names."""

from ..core.errors import (
    BindingError,
    ExchangeError,
    GradCompError,
    SettingsError,
    StateError,
)
from .compression import Compression, Compressor

__all__ = [
    "BindingError",
    "Compression",
    "Compressor",
    "ExchangeError",
    "GradCompError",
    "SettingsError",
    "StateError",
]
