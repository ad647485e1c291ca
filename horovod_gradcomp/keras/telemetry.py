"""A callback that records what the compressor of a model does."""

from __future__ import annotations

from typing import Any

from ..core.codec import check_count
from ..core.errors import SettingsError, explain
from .flavour import BACKEND, keras, runtime
from .optimizer import distribution_of

_EVERY = 100
"""Steps from one record to the next where an epoch's length is not known."""


class TelemetryCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Records bytes, times, norms and cosines of training, for ``gradcomp plot`` or TensorBoard.

    On TensorFlow it has what a graph shows: bytes, ratio, bad steps, and norms of what is
    remembered.

    Args:
        sink: A path (JSON lines), a ``SummaryWriter`` of ``torch.utils.tensorboard`` or of
            ``tf.summary``, or a function of a record.
        every: Batches from one record to the next, at least 1; None for one an epoch.
        all_ranks: Whether each rank writes its own; give each another path.
    """

    def __init__(self, sink: Any, every: int | None = None, all_ranks: bool = False) -> None:
        super().__init__()
        if every is not None:
            check_count("TelemetryCallback", "every", every)
        self._sink, self._every, self._all_ranks = sink, every, all_ranks
        self._telemetry: Any = None
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
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
        if BACKEND == "torch":
            options["every"] = self._every or self.params.get("steps") or _EVERY
        self._telemetry = compression.telemetry(self._sink, **options)
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._every and self._batches % self._every == 0:
            self._record()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._every:
            self._record()

    def on_train_end(self, logs: Any = None) -> None:
        self._telemetry.stop()

    def _record(self) -> None:
        if BACKEND != "torch":  # whose steps are recorded as they come
            self._telemetry.record()
