"""What this front end refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..core.environment import elastic
from ..core.errors import (
    BindingError,
    ExchangeError,
    GradCompError,
    SettingsError,
    StateError,
    explain,
)
from ..core.settings import refuse_unchecked
from . import calls

NO_AUTO = explain(
    got="Compression.auto in TensorFlow",
    expected="a codec",
    why="a graph is traced once, with the codec in it, and a choice in the first steps would come "
    "too late",
    do="run 'gradcomp advise --measure' under horovodrun and name what it chooses",
)
"""Why there is no ``Compression.auto`` here."""


def unfit_settings(settings: Any) -> None:
    """Raise where a compressor of this front end could not follow its settings.

    Raises:
        SettingsError: They are no checked settings, or ask for what only the torch front end has.
    """
    refuse_unchecked(settings)
    if settings.options.exchange in ("two_phase", "hierarchical"):
        raise SettingsError(
            explain(
                got=f"exchange={settings.options.exchange!r}",
                expected="'auto' or 'allgather'",
                why="only the torch front end has it so far",
            )
        )
    if settings.guard is not None:
        raise SettingsError(
            explain(
                got="Compression.guarded in TensorFlow",
                expected="it in PyTorch",
                why="a graph does not measure what it sends so far",
            )
        )


def twice(label: str) -> BindingError:
    """Return what to raise where one reduction has a variable with a memory twice."""
    return BindingError(
        explain(
            got=f"the variable {label} twice in one reduction",
            expected="each variable once",
            why="it has one memory, which takes part in a step once",
            do="give the tape each source once, or use memory='none'",
        )
    )


def unfit_reduction(op: int) -> None:
    """Raise where a compressed gradient could not be reduced or decoded.

    Raises:
        ExchangeError: The reduction is not Average or Sum.
        GradCompError: TensorFlow 1 graphs, functions that XLA compiles, elastic training.
    """
    if op not in (hvd.Average, hvd.Sum):
        raise ExchangeError(
            explain(
                got=f"op={_op_name(op)}",
                expected="op=hvd.Average or op=hvd.Sum",
                why="a compressed gradient can only be decoded from a linear reduction",
                do="use one of these, or Compression.none",
            )
        )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise GradCompError(
            explain(
                got="a TensorFlow 1 graph",
                expected="TensorFlow 2 behaviour",
                why="state is kept in variables that live outside of graphs",
                do="remove tf.compat.v1.disable_eager_execution(), or use Compression.none",
            )
        )
    not_by_xla()
    if elastic():
        raise GradCompError(
            explain(
                got="elastic training",
                expected="a fixed set of ranks",
                why="their number is part of the traced graph, which outlives a reset",
                do="run without elastic, or use Compression.none",
            )
        )


def not_by_xla() -> None:
    """Raise in a function that XLA compiles.

    Raises:
        GradCompError: Always there.
    """
    if calls.compiled_by_xla():
        raise GradCompError(
            explain(
                got="a function that XLA compiles",
                expected="one that it does not",
                why="Horovod's operations have no XLA kernel; with a GPU Keras 3 chooses XLA "
                "by itself",
                do="set jit_compile=False in tf.function(...) or model.compile(...)",
            )
        )


def unknown_tensor(tensor: Any) -> BindingError:
    """Return the error for a tensor whose variable is not known, where there is a memory."""
    return BindingError(
        explain(
            got=f"a tensor of shape {tensor.shape}, {tensor.dtype.name}, that is no gradient of a "
            "variable in Horovod's reduction",
            expected="a gradient as hvd.DistributedGradientTape or hvd.DistributedOptimizer "
            "hands it over",
            why="what is not sent must be kept for this variable's next step, and two variables "
            "must never share it",
            do="reduce it through one of these, or use memory='none'",
        )
    )


def other_framework(tensor: Any) -> SettingsError:
    """Return the error for what is no tensor of TensorFlow."""
    kind = type(tensor)
    return SettingsError(
        explain(
            got=f"a {kind.__module__.split('.')[0]}.{kind.__name__}",
            expected="a tensor of TensorFlow",
            do="take Compression from the module beside your framework's, such as "
            "horovod_gradcomp.torch",
        )
    )


def copy_in_use() -> StateError:
    """Return the error for a copy of a compressor that has variables or a loss scale."""
    return StateError(
        explain(
            got="a copy or pickle of a compressor in use",
            expected="one of a compressor just made",
            why="what is remembered belongs to variables, which are told apart by identity",
            do="save it by tf.train.Checkpoint(compression=...), or make a new one for each model",
        )
    )


def unbuilt(variable: Any) -> BindingError:
    """Return the error for something else than a variable in ``bind``."""
    return BindingError(
        explain(
            got=f"{type(variable).__name__} {getattr(variable, 'name', '')}".strip(),
            expected="variables",
            do="bind after the model is built: compression.bind(model.trainable_variables)",
        )
    )


def keras_3_optimizer() -> BindingError:
    """Return the error for the one place where a Keras 3 optimizer can be noticed."""
    return BindingError(
        explain(
            got="hvd.DistributedOptimizer around a Keras 3 optimizer",
            expected="horovod_gradcomp.keras.DistributedOptimizer around it",
            why="Keras 3 never calls Horovod's wrapper, so gradients would not be reduced and "
            "ranks would train apart, with or without compression",
            do="import horovod_gradcomp.keras as hvd in place of Horovod's module",
        )
    )


def _op_name(op: int) -> str:
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    return next((f"hvd.{n}" for n in names if getattr(hvd, n, None) == op), repr(op))
