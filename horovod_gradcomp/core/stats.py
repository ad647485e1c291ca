"""Counting bytes and time, per bucket and in total."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

Log = Callable[[str, float, float], None]
"""Takes down what was done, and when it began and ended, as of ``time.perf_counter()``."""


@dataclass
class UnitStats:
    """Totals of one bucket, or of all tensors that are sent as they are.

    Attributes:
        numel: Elements a step.
        raw_bytes: Bytes that the gradients hold, over all steps.
        wire_bytes: Bytes handed to Horovod, over all steps.
        inside_bytes: Those of them that stay inside a node, in a hierarchical exchange.
        state_bytes: Bytes that the memory takes on this rank.
        collectives: Tensors handed to Horovod, carriers among them, over all steps.
        own_collectives: Of these, those that this package has started itself, over all steps.
        encode_ms: Time in compress, over all steps.
        wait_ms: Time waiting for own collectives, over all steps.
        decode_ms: Time in decompress without the wait, over all steps.
        codec_ms: Of these, time in which codec and memory work out numbers, over all steps.
    """

    numel: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    inside_bytes: int = 0
    state_bytes: int = 0
    collectives: int = 0
    own_collectives: int = 0
    encode_ms: float = 0.0
    wait_ms: float = 0.0
    decode_ms: float = 0.0
    codec_ms: float = 0.0
    log: Optional[Log] = None  # noqa: UP045 - read on Python 3.9
    """Where to take down what is timed, while a trace runs."""

    def timed(self, what: str) -> Timed:
        """Add the time of a block to ``encode_ms``, ``wait_ms``, ``decode_ms`` or ``codec_ms``."""
        return Timed(self, what)


class Timed:
    """A block whose time is added to a number of :class:`UnitStats`; it may be entered again."""

    __slots__ = ("_start", "_stats", "_what")

    def __init__(self, stats: UnitStats, what: str) -> None:
        self._stats, self._what = stats, what

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        end, stats, what = time.perf_counter(), self._stats, self._what
        stats.__dict__[what] += 1e3 * (end - self._start)
        if stats.log is not None and what in ("wait_ms", "decode_ms"):
            stats.log(what.removesuffix("_ms"), self._start, end)


@dataclass
class Stats:
    """All counts of one compressor."""

    steps: int = 0
    bad_steps: int = 0
    lost_norm: float = 0.0
    joined_steps: int = 0
    units: dict[str, UnitStats] = field(default_factory=dict)
    bypassed: UnitStats = field(default_factory=UnitStats)
    bypassed_names: list[str] = field(default_factory=list)

    def report(self, *, size: int, settings: str) -> dict[str, Any]:
        """Return plain numbers; see :meth:`Compressor.stats`."""
        every = [*self.units.values(), self.bypassed]
        steps = max(self.steps, 1)
        total = _sums(every, steps)
        compressed = _sums(list(self.units.values()), steps)
        return {
            "active": self.steps > 0,
            "note": "" if self.steps else _idle(size),
            "settings": settings,
            "world_size": size,
            "steps": self.steps,
            "bad_steps": self.bad_steps,
            "lost_norm": self.lost_norm,
            "joined_steps": self.joined_steps,
            **total,
            "compressed": compressed,
            "bypassed": {**_sums([self.bypassed], steps), "names": list(self.bypassed_names)},
            "buckets": {name: _sums([unit], steps) for name, unit in self.units.items()},
        }


def _sums(units: list[UnitStats], steps: int) -> dict[str, Any]:
    raw, wire = sum(u.raw_bytes for u in units), sum(u.wire_bytes for u in units)
    inside = sum(u.inside_bytes for u in units)
    return {
        "numel": sum(u.numel for u in units),
        "raw_bytes": raw,
        "wire_bytes": wire,
        "inside_bytes": inside,
        "between_bytes": wire - inside,
        "raw_bytes_per_step": raw / steps,
        "wire_bytes_per_step": wire / steps,
        "inside_bytes_per_step": inside / steps,
        "between_bytes_per_step": (wire - inside) / steps,
        "ratio": wire / raw if raw else None,
        "state_bytes": sum(u.state_bytes for u in units),
        "collectives_per_step": sum(u.collectives for u in units) / steps,
        "own_collectives_per_step": sum(u.own_collectives for u in units) / steps,
        "encode_ms_per_step": sum(u.encode_ms for u in units) / steps,
        "wait_ms_per_step": sum(u.wait_ms for u in units) / steps,
        "decode_ms_per_step": sum(u.decode_ms for u in units) / steps,
        "codec_ms_per_step": sum(u.codec_ms for u in units) / steps,
    }


def _idle(size: int) -> str:
    if size == 1:
        return "inactive: one process, Horovod reduces nothing"
    return "inactive: no step has been reduced through this compressor"
