"""``DistributedOptimizer`` for Keras 3, whose optimizers Horovod's own wrapper never reduces for.

An optimizer keeps being what it is, to itself and to everything that asks for its class: name,
config, state and saved files are those of the plain optimizer. Only the one method that every
update passes through reduces the gradients first, so clipping, weight decay, averages and
accumulation see reduced gradients.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core.errors import SettingsError, explain
from .flavour import hvd, keras, made_by, runtime


class Distribution:
    """What makes an optimizer a distributed one; kept beside it, never saved with it."""

    def __init__(self, reduction: Any, passes: Any) -> None:
        self.reduction = reduction
        self.busy = False
        self._passes = passes

    @property
    def count(self) -> int:
        """How often gradients have been reduced, or added up to be reduced later."""
        return int(self.reduction.count) + (0 if self._passes is None else int(self._passes.count))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let optimizers inside of this one update as they are."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def apply(self, optimizer: Any, plain: Any, grads: Sequence[Any], given: Any) -> None:
        """Reduce gradients of Keras 3 and call the plain ``apply``."""
        variables = list(optimizer._trainable_variables if given is None else given)
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)

        def update(grads: Sequence[Any]) -> None:
            with self.working():
                plain(optimizer, self.reduce(optimizer, grads, variables), given and variables)

        if self._passes is None or not self.reduction.active:
            update(grads)
        else:
            self._passes(grads, [_native(v) for v in variables], update)

    def reduce(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of variables of Keras."""
        states = [
            i for i, v in enumerate(variables) if getattr(v, "overwrite_with_gradient", False)
        ]
        found: list[Any] = self.reduction(
            list(grads),
            [_native(v) for v in variables],
            names=[getattr(v, "path", v.name) for v in variables],
            states=states,
            scale=getattr(optimizer, "dynamic_scale", None),
        )
        return found


def _native(variable: Any) -> Any:
    return variable.value if made_by(variable, "keras") else variable


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    *,
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Make a Keras optimizer reduce gradients over all ranks before each update, and return it.

    It is the same object, with its state; it saves and loads as the plain optimizer. It works in
    ``model.fit``, with ``optimizer.apply`` and with ``optimizer.apply_gradients``, on the
    TensorFlow and torch backends of Keras 3 and in ``tf_keras``. With ``mixed_float16`` the loss
    scale halves on all ranks when gradients overflow on one, whether a ``LossScaleOptimizer`` is
    given here, is put around this optimizer, or is added by ``model.compile``; what is remembered
    is in units of unscaled gradients.

    Copies are plain, too: of the optimizer by ``copy``, ``pickle`` or ``from_config``, and of a
    compiled model. Wrap theirs before training them, or ranks train apart.

    The same gradients must be None on all ranks: where one is on some only, all wait for ever.

    With ``gradient_accumulation_steps`` of Keras every micro-step is reduced; with
    ``backward_passes_per_step`` gradients are added up first, and schedules count updates.

    Args:
        optimizer: Any optimizer of Keras 3 or tf_keras (not of ``tf_keras.optimizers.legacy``).
        name: Equal on all ranks, which wait for each other for ever where it differs, as it is
            part of the names on the wire. Default: the class of optimizer.
            In one step, reductions of the same name and shapes wait for one another.
        compression: ``Compression.topk(ratio=0.01)`` and so on, one object for each model; or its
            string form, or one of ``hvd.Compression``. Default: none.
        sparse_as_dense: Whether sparse gradients are made dense, and so compressed.
        gradient_predivide_factor: With Average, gradients are divided by it before the sum and
            multiplied by it / ranks after it; above 0.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: Passes whose gradients are added up on a rank for one update, at
            least 1; Keras 3 only.
        average_aggregated_gradients: Whether these are averaged, not summed.
        process_set: The ranks that train together; others train by themselves.

    Raises:
        SettingsError: An argument is out of range, or the optimizer is not one of these or is
            distributed already.
        GradCompError: When it is traced: in a function that XLA compiles.
    """
    _check(optimizer, op, process_set)
    _check_numbers(gradient_predivide_factor, backward_passes_per_step)
    inner = optimizer
    if made_by(optimizer, "tf_keras"):
        # Its loss scaler has the inner optimizer reduce before it looks for overflows.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if backward_passes_per_step != 1:
            raise SettingsError(
                explain(
                    got=f"backward_passes_per_step={backward_passes_per_step} with tf_keras",
                    expected="1",
                    do="use horovod.tensorflow.keras.DistributedOptimizer, which adds up gradients",
                )
            )
    if distribution_of(optimizer) is not None:
        raise SettingsError(
            explain(
                got=f"{type(inner).__name__} that is distributed already",
                expected="one that is not",
                why="gradients would be reduced twice",
            )
        )
    reduction = runtime.Reduction(
        compression,
        name=name or f"Distributed{type(inner).__name__}",
        op=op,
        process_set=process_set,
        gradient_predivide_factor=gradient_predivide_factor,
        facts={
            "backward_passes_per_step": str(backward_passes_per_step),
            "average_aggregated_gradients": str(bool(average_aggregated_gradients)),
        },
        sparse_as_dense=sparse_as_dense,
        groups=lambda: [_group(optimizer)],
    )
    passes = None
    if backward_passes_per_step > 1:
        passes = runtime.Passes(backward_passes_per_step, average_aggregated_gradients)
    distribution = Distribution(reduction, passes)
    _distribute(inner, distribution)
    if getattr(inner, "inner_optimizer", None) is not None:  # so that it is not wrapped, too
        object.__setattr__(inner.inner_optimizer, "_gradcomp", distribution)
    return optimizer


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return what makes an optimizer, or the one inside of it, a distributed one."""
    inner = getattr(optimizer, "inner_optimizer", None)
    found = getattr(optimizer, "_gradcomp", None) or getattr(inner, "_gradcomp", None)
    return found if isinstance(found, Distribution) else None


def _group(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's settings as they are now, those inside of a loss scaler.

    Not by ``get_config``, which reads variables: within a graph these have no values.
    """
    return dict(vars(getattr(optimizer, "inner_optimizer", optimizer)))


def _check(optimizer: Any, op: Any, process_set: Any) -> None:
    hooks = ("apply", "aggregate_gradients")
    if isinstance(optimizer, type) or not any(hasattr(optimizer, hook) for hook in hooks):
        kind = "the class " if isinstance(optimizer, type) else ""
        raise SettingsError(
            explain(
                got=f"{kind}{getattr(optimizer, '__name__', type(optimizer).__name__)} as the "
                "optimizer",
                expected="an optimizer of Keras 3, or of tf_keras but not of its legacy module",
                do="make it first: keras.optimizers.SGD(...); for tf_keras.optimizers.legacy use "
                "horovod.tensorflow.keras.DistributedOptimizer",
            )
        )
    if hasattr(optimizer, "_aggregated_gradients"):
        raise SettingsError(
            explain(
                got="an optimizer that Horovod's own DistributedOptimizer returned",
                expected="the optimizer that was given to it",
                why="gradients would be reduced twice, or not at all",
            )
        )
    if op not in (hvd.Average, hvd.Sum):
        raise SettingsError(explain(got=f"op={op!r}", expected="op=hvd.Average or op=hvd.Sum"))
    if not isinstance(process_set, hvd.ProcessSet) or process_set.process_set_id is None:
        raise SettingsError(
            explain(
                got=f"process_set={process_set}",
                expected="one that Horovod knows",
                do="make it by hvd.add_process_set([...]) after hvd.init()",
            )
        )


def _check_numbers(factor: Any, passes: Any) -> None:
    number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if not number or not 0 < factor < math.inf:
        raise SettingsError(
            explain(got=f"gradient_predivide_factor={factor!r}", expected="a factor above 0")
        )
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise SettingsError(
            explain(got=f"backward_passes_per_step={passes!r}", expected="a whole number from 1")
        )


def _distribute(optimizer: Any, distribution: Distribution) -> None:
    # Not by the optimizer's own __setattr__, which tracks what it is given.
    object.__setattr__(optimizer, "_gradcomp", distribution)
    kind: Any = type(optimizer)
    if not hasattr(kind, "_gradcomp_plain"):
        object.__setattr__(optimizer, "__class__", _distributed(kind))


@functools.cache
def _distributed(plain: Any) -> type[Any]:
    """Return a class that reduces, and that passes for the plain one in all other respects."""
    hooks = _hooks(plain) if hasattr(plain, "apply") else _legacy_hooks(plain)
    hooks["_gradcomp_plain"] = plain
    # What is saved is looked up by an object's class, and so are registered names.
    hooks["__class__"] = property(lambda self: plain)
    hooks["__module__"], hooks["__doc__"] = plain.__module__, plain.__doc__
    # What is made of this class or unpickled is plain, as what is loaded from a file.
    hooks["__new__"] = lambda kind, *args, **options: plain(*args, **options)
    if hasattr(plain, "_unpickle_model"):
        hooks["_unpickle_model"] = plain._unpickle_model
    return type(plain.__name__, (plain,), hooks)


def _hooks(plain: Any) -> dict[str, Any]:
    @runtime.as_written  # type: ignore[untyped-decorator]
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        distribution, grads = self._gradcomp, list(grads)
        if distribution.busy or not grads or (trainable_variables is None and not self.built):
            plain.apply(self, grads, trainable_variables)
        else:
            distribution.apply(self, plain.apply, grads, trainable_variables)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        plain.__setattr__(self, name, value)
        if name == "loss_scale_factor" and value is None:
            # Keras puts a loss scaler around this one, whose look for overflows is local: a rank
            # without would wait in the reduction for ever. So the scaler reduces from now on.
            around = sys._getframe(1).f_locals.get("self")
            if isinstance(around, keras.optimizers.LossScaleOptimizer):
                _distribute(around, self._gradcomp)

    return {"apply": apply, "__setattr__": __setattr__}


def _legacy_hooks(plain: Any) -> dict[str, Any]:
    @runtime.as_written  # type: ignore[untyped-decorator]
    def aggregate_gradients(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        if not pairs:  # as where all layers are frozen
            return list(plain.aggregate_gradients(self, pairs))
        grads, variables = zip(*pairs)
        return list(zip(self._gradcomp.reduce(self, grads, variables), variables))

    return {"aggregate_gradients": aggregate_gradients}
