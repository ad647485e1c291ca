"""Records of a compressor in a graph: what can be read between two steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd

from ..core.errors import SettingsError, explain
from ..core.sinks import Sink
from ..core.telemetry import NOTHING, Clock, Record, a_step

if TYPE_CHECKING:
    from .compression import Compressor

_BYTES = ("raw_bytes", "wire_bytes")


class Telemetry:
    """What :meth:`Compressor.telemetry` returns.

    Args:
        compressor: Whose steps are recorded.
        sink: As of :meth:`Compressor.telemetry`.
        all_ranks: Likewise.
    """

    def __init__(self, compressor: Compressor, sink: Any, all_ranks: bool) -> None:
        if not hvd.is_initialized():
            raise SettingsError(
                explain(
                    got="telemetry() before hvd.init()",
                    expected="it afterwards",
                    why="which rank writes is not known yet",
                )
            )
        self._compressor, self._write = compressor, Sink(sink)
        self._writes = all_ranks or hvd.rank() == 0
        if self._writes:
            self._write.open()
        told = compressor.stats()
        self._clock = Clock(told["steps"], told["bad_steps"], "", told["settings"])
        self._before: dict[str, Record] = {}
        self._since("", told)
        self._since("bypassed", told["bypassed"])
        for name, one in told["buckets"].items():
            self._since(f"bucket {name}", one)

    def record(self) -> None:
        """Write what there was since the last record; nothing where there was no step."""
        if not self._writes:
            return
        start, told = time.perf_counter(), self._compressor.stats()
        steps = self._clock.since(told["steps"])
        if steps < 1:
            return
        norms = self._compressor.residual_norms()
        squares = [norm * norm for norm in norms.values()]
        residual = sum(squares) ** 0.5 if squares else None
        layers = {
            name: {
                "bucket": name,
                "numel": one["numel"],
                **a_step(self._since(f"bucket {name}", one), steps),
                **NOTHING,
                "residual_norm": norms.get(name),
            }
            for name, one in told["buckets"].items()
        }
        body = {
            "total": {**a_step(self._since("", told), steps), **NOTHING, "residual_norm": residual},
            "cluster": None,
            "bypassed": a_step(self._since("bypassed", told["bypassed"]), steps),
            "buckets": {},
            "layers": {name: one for name, one in layers.items() if one["numel"]},
        }
        head = self._clock.head(
            told["steps"],
            told["bad_steps"],
            rank=hvd.rank(),
            size=told["world_size"],
            spent_ms=1e3 * (time.perf_counter() - start),
        )
        self._write({**head, **body})

    def stop(self) -> None:
        """Write what there was since the last record, and close the file."""
        self.record()
        self._write.close()

    def _since(self, what: str, told: Mapping[str, Any]) -> dict[str, float]:
        before = self._before.get(what, {})
        self._before[what] = {key: told[key] for key in _BYTES}
        return {key: told[key] - before.get(key, 0) for key in _BYTES}
