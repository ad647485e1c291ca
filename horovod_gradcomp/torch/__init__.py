"""Gradient compression beside ``horovod.torch``, under the same names."""

from ..core.errors import (
    BindingError,
    ExchangeError,
    GradCompError,
    SettingsError,
    StateError,
)
from .compression import Compression, Compressor
from .nodes import node_process_sets
from .optimizer import DistributedOptimizer
from .state import resize_state

__all__ = [
    "BindingError",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "ExchangeError",
    "GradCompError",
    "SettingsError",
    "StateError",
    "node_process_sets",
    "resize_state",
]
