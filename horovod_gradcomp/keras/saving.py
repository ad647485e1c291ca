"""``load_model``, mirroring ``horovod.keras.load_model``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .flavour import keras
from .optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> Any:
    """Return a saved model whose optimizer, with its state, is a distributed one.

    The file may have been saved with or without this package, and in any format that Keras loads.

    Args:
        filepath: The saved model.
        custom_optimizers: Optimizer classes that Keras does not know by themselves.
        custom_objects: More of what Keras has to know, by name.
        compression: See :func:`DistributedOptimizer`.
        **options: More arguments of :func:`DistributedOptimizer`.
    """
    own = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**own, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
