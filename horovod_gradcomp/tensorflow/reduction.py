"""Gradients are reduced here where no wrapper of Horovod's does it.

Each gradient takes Horovod's own path (``compress``, allreduce, ``decompress``), under names that
depend on the position of a variable in its list and never on what Keras numbered: ranks that have
built different numbers of models meet all the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..core.environment import elastic
from . import calls, refusals
from .compression import Compression, Compressor
from .names import last_part
from .outside import outside

Tensor = Any


class Reduction:
    """Reduces the gradients of one optimizer.

    Args:
        compression: One of :data:`Compression`, its string form, or one of ``hvd.Compression``.
        name: Equal on all ranks; part of the names on the wire.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: The ranks that train together.
        gradient_predivide_factor: With Average, gradients are divided by it before the sum and
            the rest of the division comes after; above 0.
        sparse_as_dense: Whether ``tf.IndexedSlices`` are made dense, and compressed, first.
        groups: Describes the optimizer when a step is traced, as parameter groups, so that it can
            be told what goes badly with it.
        facts: What else must be alike on all ranks, by the names of arguments.

    Raises:
        SettingsError: One of these is something else.
    """

    def __init__(
        self,
        compression: Any,
        *,
        name: str,
        op: Any = hvd.Average,
        process_set: Any = hvd.global_process_set,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        groups: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        facts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.compression = Compression.resolve(compression, hvd.Compression.none)
        self.process_set = process_set
        self._name, self._op, self._groups = name, op, groups
        self._predivide = gradient_predivide_factor if op == hvd.Average else 1.0
        self._facts = {"gradient_predivide_factor": f"{self._predivide:g}", **facts}
        self._dense = sparse_as_dense
        self._functions: dict[Any, Any] = {}
        self._count: Any = None

    @property
    def active(self) -> bool:
        """Whether there is any rank to reduce with."""
        return bool(self.process_set.included()) and (elastic() or self.process_set.size() > 1)

    @property
    def count(self) -> int:
        """How often gradients have been reduced."""
        return 0 if self._count is None else int(self._count)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        *,
        names: Sequence[str] = (),
        states: Collection[int] = (),
        scale: Any = None,
    ) -> list[Any]:
        """Return the reduced gradients.

        Args:
            grads: Tensors, ``tf.IndexedSlices`` or None, for each variable. The same ones must be
                None on all ranks.
            variables: ``tf.Variable`` objects, in the same order on all ranks.
            names: Of the variables, where their own do not tell them apart.
            states: Positions of what is no gradient but a new value, which is always averaged and
                never compressed.
            scale: What the loss was multiplied by, where that changes from step to step. Memories
                are then kept in units of unscaled gradients.

        Raises:
            GradCompError: In a function that XLA compiles.
        """
        grads = [g if g is None or _is_tensor(g) else tf.convert_to_tensor(g) for g in grads]
        if not self.active or all(g is None for g in grads):
            return grads
        refusals.not_by_xla()
        wire = self._wire_name(variables)
        if self._count is None:
            self._count = outside(lambda: _counter("gradcomp_reductions"))
        turn = _turn(wire)

        def reduce(grads: list[Any], scale: Any) -> list[Any]:
            with tf.control_dependencies([turn.read_value()]):
                reduced = self._reduce(grads, variables, names, states, scale, wire)
            parts = tf.nest.flatten(reduced, expand_composites=True)
            with tf.control_dependencies([part for part in parts if part is not None]):
                turn.assign_add(1)
            return reduced

        if not tf.executing_eagerly():
            return reduce(grads, scale)
        # All collectives in flight together, and traced once.
        key = (*map(id, variables), *states)
        if key not in self._functions:
            self._functions[key] = tf.function(reduce, autograph=False, reduce_retracing=True)
        found: list[Any] = self._functions[key](grads, scale)
        return found

    def _reduce(
        self,
        grads: list[Any],
        variables: Sequence[Any],
        names: Sequence[str],
        states: Collection[int],
        scale: Any,
        wire: str,
    ) -> list[Any]:
        if self._dense:
            grads = [g if g is None else tf.convert_to_tensor(g) for g in grads]
        scaled = scale is not None and isinstance(self.compression, Compressor)
        scaled = scaled and not self.compression._settings.identity
        scaled = scaled and self.compression._binding.loss_scale is None  # or it is told twice
        own = [g if i in states or not scaled else _divided(g, scale) for i, g in enumerate(grads)]
        groups = self._groups()
        reduced: list[Any] = []
        for i, grad in enumerate(own):
            name = f"{wire}.{i}"
            if grad is None:
                reduced.append(None)
            elif i in states:
                reduced.append(self._allreduce(grad, name, hvd.Compression.none, hvd.Average))
            elif isinstance(grad, tf.IndexedSlices):
                reduced.append(self._gather(grad, name))
            else:
                call = calls.Call(
                    *(own, variables, (i,), self.process_set, self._op, name, names),
                    branches=False,
                    groups=groups,
                    facts=self._facts,
                )
                with calls.explicit(call):
                    out = self._allreduce(grad, name, self.compression, self._op)
                reduced.append(out)
        self._count.assign_add(1)
        if not scaled:
            return reduced
        return [
            out if i in states else _multiplied(out, scale, grad)
            for i, (out, grad) in enumerate(zip(reduced, grads))
        ]

    def _allreduce(self, tensor: Tensor, name: str, compression: Any, op: Any) -> Tensor:
        return hvd.allreduce(
            tensor,
            op=op,
            compression=compression,
            prescale_factor=1.0 / self._predivide,
            postscale_factor=self._predivide,
            process_set=self.process_set,
            name=name,
            ignore_name_scope=True,
        )

    def _gather(self, grad: Any, name: str) -> Any:
        """Return the sum or mean of sparse gradients: all their rows, one after the other."""
        options = {"process_set": self.process_set, "ignore_name_scope": True}
        values = hvd.allgather(grad.values, name=f"{name}.values", **options)
        indices = hvd.allgather(grad.indices, name=f"{name}.indices", **options)
        if self._op == hvd.Average:
            values /= tf.cast(self.process_set.size(), values.dtype)
        return tf.IndexedSlices(values, indices, dense_shape=grad.dense_shape)

    def _wire_name(self, variables: Sequence[Any]) -> str:
        model = [(tuple(v.shape.as_list()), v.dtype.name, last_part(v.name)) for v in variables]
        # With its ranks: a name in flight over two process sets at a time hangs in Horovod.
        told = repr((model, self.process_set.ranks))
        digest = hashlib.sha256(told.encode()).hexdigest()[:8]
        return f"gradcomp.{self._name}.{digest}"


@functools.cache
def _turn(wire: str) -> Any:
    """Return what lets reductions of the same name happen one after the other.

    Two optimizers of one class for models of equal shapes, in one step, have the same names, and
    Horovod takes a name once at a time.
    """
    return outside(lambda: _counter("gradcomp_turn"))


def _counter(name: str) -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name=name)


def _is_tensor(grad: Any) -> bool:
    return tf.is_tensor(grad) or isinstance(grad, tf.IndexedSlices)


def _divided(grad: Any, scale: Tensor) -> Any:
    """Return an unscaled gradient in float32, which can hold it where float16 cannot."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(grad.values, scale), grad.indices, grad.dense_shape)
    return tf.cast(grad, tf.float32) / tf.cast(scale, tf.float32)


def _multiplied(grad: Any, scale: Tensor, like: Any) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = _multiplied(grad.values, scale, like.values)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return tf.cast(grad * tf.cast(scale, tf.float32), like.dtype)
