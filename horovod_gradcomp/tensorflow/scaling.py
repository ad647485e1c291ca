"""What gradients are multiplied by, so that memories are held without it.

In scaled units a change of the loss scale would put all that is remembered wrong by the ratio of
both scales.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..core.errors import SettingsError, explain

Tensor = Any


class LossScale:
    """Reads the loss scale of a step, eagerly or in the graph that is being traced.

    Args:
        source: A scalar variable or tensor, a loss-scale optimizer of ``tf_keras`` or Keras 3, or a
            function without arguments that returns one of these, called once a trace.

    Raises:
        SettingsError: It is none of these.
    """

    def __init__(self, source: Any) -> None:
        if not (_is_optimizer(source) or _is_scalar(source) or callable(source)):
            raise SettingsError(
                explain(
                    got=f"loss_scale={source!r}",
                    expected="a scalar variable, a loss-scale optimizer, or a function that "
                    "returns one of these",
                )
            )
        self._source = source

    def read(self) -> Tensor:
        """Return the scale, float32.

        Raises:
            SettingsError: A Keras 3 optimizer that is not built has no scale to follow yet.
        """
        source = self._source
        if not (_is_optimizer(source) or _is_scalar(source)):
            source = source()
        if hasattr(source, "loss_scale"):  # tf_keras
            source = source.loss_scale
        elif _is_optimizer(source):
            if not source.built:
                raise SettingsError(
                    explain(
                        got="a loss-scale optimizer that is not built",
                        expected="one with a scale to follow",
                        do="call optimizer.build(model.trainable_variables) before the first step",
                    )
                )
            source = source.dynamic_scale
        if not _is_scalar(source):
            raise SettingsError(
                explain(got=f"a loss scale of {source!r}", expected="a scalar variable or tensor")
            )
        return tf.identity(tf.cast(tf.convert_to_tensor(source), tf.float32))


def _is_optimizer(source: Any) -> bool:
    # tf_keras, and Keras 3, which makes its scale when it is built.
    return hasattr(source, "loss_scale") or hasattr(source, "scale_loss")


def _is_scalar(source: Any) -> bool:
    if isinstance(source, (int, float)):
        return not isinstance(source, bool) and source > 0
    shape = getattr(source, "shape", None)
    return shape is not None and len(shape) == 0
