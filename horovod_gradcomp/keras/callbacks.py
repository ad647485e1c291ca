"""Callbacks for ``model.fit``, with the names and arguments of ``horovod.keras.callbacks``.

They serve Keras 3 and ``tf_keras``, and warn when an epoch of training ends in which no gradient
was reduced.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..core.agreement import check
from ..core.errors import SettingsError, explain
from .flavour import BACKEND, LEGACY, hvd, keras, made_by, runtime
from .optimizer import distribution_of
from .telemetry import TelemetryCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "TelemetryCallback",
]


class _Watching(keras.callbacks.Callback):  # type: ignore[misc]
    """Notices that ranks train apart, and refuses models for which this is certain."""

    _before: int | None = None

    def set_model(self, model: Any) -> None:
        package = "tf_keras" if LEGACY else "keras"
        if not made_by(model, package):
            raise SettingsError(
                explain(
                    got=f"a model of {type(model).__module__}",
                    expected=f"one of {package}",
                    do="set TF_USE_LEGACY_KERAS=1 before the first import for tf_keras, else leave "
                    "it out",
                )
            )
        if hasattr(model.optimizer, "_aggregated_gradients") and not LEGACY:
            raise runtime.horovods_wrapper()
        super().set_model(model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = _reductions(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvd.size() > 1 and self._before is not None and _reductions(self.model) == self._before:
            self._before = None
            warnings.warn(_APART.format(type(self.model.optimizer).__name__), stacklevel=2)


_APART = (
    "horovod_gradcomp: an epoch ended in which no gradient was reduced, so every rank trains a "
    "model of its own; the optimizer is a plain {}. What to do: compile the model with "
    "horovod_gradcomp.keras.DistributedOptimizer(optimizer)"
)


def _reductions(model: Any) -> int | None:
    """Return how often gradients have been reduced, as far as can be told, or None."""
    distribution = distribution_of(model.optimizer)
    if distribution is not None:
        whole = not distribution.reduction.active
        return None if whole else distribution.count
    if type(model).train_step is not keras.Model.train_step:
        return None  # it may reduce by a tape
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    # Horovod's own says whether it was asked to.
    return None if getattr(optimizer, "_aggregated_gradients", False) else 0


class BroadcastGlobalVariablesCallback(_Watching):
    """Starts all ranks from the weights and the optimizer's state of one.

    This happens when training begins, or after its first batch where the model has no weights
    before. States of random generators stay as they are on each rank.

    On TensorFlow it also turns off ``jit_compile``, which Keras 3 chooses by itself with a GPU and
    for which Horovod has no operations, and says so.

    Args:
        root_rank: The rank that has the values.
        device: Without effect; for Horovod's signature.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        if BACKEND == "tensorflow" and not LEGACY and self.model.jit_compile and hvd.size() > 1:
            warnings.warn(
                "horovod_gradcomp: jit_compile is turned off, as Horovod's operations cannot be "
                "compiled by XLA; to be without this warning: model.compile(jit_compile=False)",
                stacklevel=2,
            )
            self.model.jit_compile = False
            self.model.make_train_function(force=True)
        # All at the same time: a rank may have loaded a model that the others have yet to build.
        ready = float(bool(self.model.built and self.model.weights))
        if min(runtime.average([ready], "ready")) == 1.0:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()

    def _broadcast(self) -> None:
        if self._done:
            return
        self._done = True
        optimizer = self.model.optimizer
        if not hasattr(optimizer, "build"):  # of tf_keras.optimizers.legacy
            optimizer._create_all_weights(self.model.trainable_variables)
        elif not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)
        state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        runtime.broadcast([*self.model.weights, *state], self.root_rank)


class MetricAverageCallback(_Watching):
    """Puts the mean over all ranks in place of each metric at the end of an epoch.

    The mean of a metric with several values, such as one for each class, is one of each value.

    It must stand before callbacks that use metrics, such as ``ReduceLROnPlateau``.

    Args:
        device: Without effect; for Horovod's signature.

    Raises:
        SettingsError: At the end of an epoch, on all ranks: they have other metrics, as when only
            one of them validates.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        logs = {} if logs is None else logs
        # Keras numbers its names differently on ranks: metric on one may be metric_9 on another,
        # and metric_9 is before metric_10.
        names = sorted(logs, key=lambda name: (_plain(name), _numbers(name)))
        self._compare([(_plain(name), runtime.shape(logs[name])) for name in names])
        if names:
            logs.update(zip(names, runtime.average([logs[name] for name in names], "metrics")))

    def _compare(self, metrics: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        # In every epoch: whether a rank's metrics are new to it, others do not know.
        facts: dict[str, str] = {}
        for name, shape in metrics:
            told = "a number" if shape == () else f"numbers of shape {list(shape)}"
            facts[name] = f"{facts[name]} and {told}" if name in facts else told
        if hvd.size() > 1:
            every = runtime.gathered(facts, "gradcomp.metrics.names")
            check(dict(enumerate(every)), do="let every rank have the same metrics and validate")


_NUMBER = r"_(\d+)(?=_|$)"
"""What Keras puts at the end of a name, and a metric's name may go on after it."""


def _plain(name: str) -> str:
    return re.sub(_NUMBER, "", name)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(_NUMBER, name)]


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` between two epochs.

    Args:
        initial_lr: Learning rate that is multiplied, above 0.
        multiplier: ``f(epoch)``, or a constant, which is raised to the epochs since the first.
        start_epoch: First epoch of the adjustment.
        end_epoch: Epoch before which it ends, or None.
        staircase: Whether it happens once an epoch; else every batch, and the epoch given to
            ``multiplier`` has a fraction.
        momentum_correction: Whether what an optimizer with momentum has gathered is scaled by the
            change of the learning rate, as in "Accurate, Large Minibatch SGD" (Goyal et al., 2017).
        steps_per_epoch: Batches of an epoch, where Keras does not know.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None or not initial_lr > 0:
            raise SettingsError(explain(got=f"initial_lr={initial_lr}", expected="above 0"))
        self.initial_lr, self.staircase = initial_lr, staircase
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self._epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = float(multiplier)
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise SettingsError(
                    explain(
                        got="data of unknown length",
                        expected="steps_per_epoch=",
                        do=f"give it to {type(self).__name__}",
                    )
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self.start_epoch or self._epoch >= (self.end_epoch or math.inf):
            return
        if not self.staircase:
            self._adjust(self._epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self._epoch)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        try:
            optimizer.learning_rate = after
        except TypeError as error:
            raise SettingsError(
                explain(
                    got="an optimizer whose learning rate is a schedule",
                    expected="a number, which this callback can set",
                    do="leave out the callback, or the schedule",
                )
            ) from error
        if self.momentum_correction and 0 != before != after:
            _scale_momentum(getattr(optimizer, "inner_optimizer", optimizer), after / before)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


def _scale_momentum(optimizer: Any, ratio: float) -> None:
    if getattr(optimizer, "momentum", 0.0):
        # The momentum itself is a constant of the traced step; what it multiplies is not.
        for name in ("momentums", "_momentums"):
            for gathered in getattr(optimizer, name, None) or ():
                gathered.assign(gathered * ratio)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr``, batch by batch.

    From "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (Goyal et al., 2017).

    Args:
        initial_lr: The learning rate that is reached, above 0.
        warmup_epochs: Epochs until then, at least 1.
        momentum_correction: See :class:`LearningRateScheduleCallback`.
        steps_per_epoch: Batches of an epoch, where Keras does not know.
        verbose: 1 to say on rank 0 when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if not warmup_epochs >= 1:
            raise SettingsError(
                explain(got=f"warmup_epochs={warmup_epochs}", expected="at least 1")
            )

        def multiplier(epoch: float) -> float:
            # With the batch that begins, so that an epoch ends at a round number.
            done = (epoch + 1 / (self.steps_per_epoch or 1)) / warmup_epochs
            size = int(hvd.size())
            return (done * (size - 1) + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch == epoch + 1 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            sys.stdout.write(f"\nEpoch {epoch + 1}: finished gradual warmup to {rate:g}.\n")
