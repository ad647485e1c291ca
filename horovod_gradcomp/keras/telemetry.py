"""A callback that records what the compressor of a model does."""

from __future__ import annotations

from typing import Any

from ..core.codec import check_count
from ..core.errors import SettingsError, explain
from .flavour import BACKEND, keras, runtime
from .optimizer import distribution_of

_AHEAD = BACKEND == "torch"
"""Whether a record is asked for before the step that it tells of, not after it."""


class TelemetryCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Records bytes, times, norms and cosines of training, for ``gradcomp plot`` or TensorBoard.

    On TensorFlow it has what a graph shows: bytes, ratio, bad steps, and norms of what is
    remembered.

    Args:
        sink: A path (JSON lines), a ``SummaryWriter`` of ``torch.utils.tensorboard`` or of
            ``tf.summary``, or a function of a record.
        every: Batches from one record to the next, at least 1; None for one an epoch. Where a
            step of the compressor, or a call of these functions, takes several batches, there is at
            most one record for each. On torch the record is of the first step of an epoch, or of
            these batches; on TensorFlow it is made at their end, of all that was since the last.
        all_ranks: Whether each rank writes its own; give each another path.
    """

    def __init__(self, sink: Any, every: int | None = None, all_ranks: bool = False) -> None:
        super().__init__()
        if every is not None:
            check_count("TelemetryCallback", "every", every)
        self._sink, self._every, self._all_ranks = sink, every, all_ranks
        self._telemetry: Any = None
        self._batches = self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._stop()  # what an error has left running
        distribution = distribution_of(self.model.optimizer)
        compression = None if distribution is None else distribution.reduction.compression
        if not isinstance(compression, runtime.Compressor):
            raise SettingsError(
                explain(
                    got="TelemetryCallback with a model whose gradients this package does not "
                    "compress",
                    expected="an optimizer of horovod_gradcomp.keras.DistributedOptimizer with one "
                    "of its Compression",
                )
            )
        options: dict[str, Any] = {"all_ranks": self._all_ranks}
        if _AHEAD:
            options["every"] = None
        self._telemetry = compression.telemetry(self._sink, **options)
        self._batches = self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self._batches
        if _AHEAD and not self._every:
            self._telemetry.record()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if _AHEAD and self._every and (self._before + batch) % self._every == 0:
            self._telemetry.record()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # One call for steps_per_execution of them; the number is that of the last.
        done, self._batches = self._batches, self._before + batch + 1
        if not _AHEAD and self._every and self._batches // self._every > done // self._every:
            self._telemetry.record()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not _AHEAD and not self._every:
            self._telemetry.record()

    def on_train_end(self, logs: Any = None) -> None:
        self._stop()

    def _stop(self) -> None:
        telemetry, self._telemetry = self._telemetry, None
        if telemetry is not None:
            telemetry.stop()
