"""How well a step's payloads stand for what was to be sent, measured on some steps.

In a step that is measured every parameter gets a row of sums (:mod:`..core.telemetry`). Rows of
this rank ride on the next step's carriers, and come back as sums over all ranks, the same bits on
each. Nothing that is sent or remembered changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..core.plan import Bucket
from ..core.stats import UnitStats
from ..core.telemetry import WIDTH, Heard, Record, Sums

Tensor = torch.Tensor


class Listener(Protocol):
    """Who wants to know."""

    def due(self, step: int) -> bool:
        """Return whether a step, counted from 0, is to be measured."""

    def measured(self, step: int, own: Mapping[str, Sums] | None, spent_ms: float) -> None:
        """Take in what this rank has measured in a step that was due; None where it was bad."""

    def heard(self, step: int, heard: Heard | None) -> None:
        """Take in what all ranks have measured in a step, at the end of the next one."""

    def told(self, event: Record) -> None:
        """Take in something that has happened to all ranks alike."""

    def follow(self) -> None:
        """Go on with the optimizer's new settings and buckets."""

    def skip(self, steps: int) -> None:
        """Take note that so many steps were done elsewhere."""


class Gauge:
    """Measures one bucket in one step.

    Args:
        bucket: Whose members get rows.
        stats: Of the bucket, whose times are not to include this.
        lift: What gradients are multiplied by, a number or a float32 scalar tensor.
    """

    def __init__(self, bucket: Bucket, stats: UnitStats, lift: Any) -> None:
        self._bucket, self._stats, self._lift = bucket, stats, lift
        self._norms: dict[int, Tensor] = {}
        self._wanted: Tensor | None = None
        self.rows: dict[str, Tensor] = {}
        """Four sums of each member that has sent something, float32, on its device."""
        self.spent_ms = 0.0

    def take(self, index: int, grad: Tensor) -> None:
        """Take in one member's gradient."""
        start = time.perf_counter()
        kind = None if grad.dtype is torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(grad, dtype=kind).float()
        self._norms[index] = norm * (1 / self._lift)
        self._spent(start, "encode_ms")

    def keep(self, wanted: Tensor, *, consumed: bool) -> None:
        """Take in what is to be sent.

        Args:
            wanted: Flat float32.
            consumed: Whether it will be overwritten before :meth:`finish`.
        """
        start = time.perf_counter()
        self._wanted = wanted.clone() if consumed else wanted
        self._spent(start, "encode_ms")

    def finish(self, error: Tensor | None) -> None:
        """Take in what was left out of it, flat float32."""
        wanted, self._wanted = self._wanted, None
        if wanted is None or error is None:
            return
        start = time.perf_counter()
        for index, norm in self._norms.items():
            m = self._bucket.members[index]
            x, e = (flat[m.start : m.start + m.numel] for flat in (wanted, error))
            sums = [norm * norm, torch.dot(x, x), torch.dot(e, e), torch.dot(x, e)]
            self.rows[m.name] = torch.stack(sums)
        self._spent(start, "decode_ms")

    def _spent(self, start: float, within: str) -> None:
        spent = 1e3 * (time.perf_counter() - start)
        self.spent_ms += spent
        setattr(self._stats, within, getattr(self._stats, within) - spent)


class Meter:
    """What is measured of one optimizer's steps.

    Args:
        names: Of its parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._places = {name: i for i, name in enumerate(names)}
        self._rows: dict[str, Sequence[float]] = {}
        self.listeners: list[Listener] = []
        self.row: Tensor | None = None
        """What rides on the running step's carriers, a row of :data:`WIDTH` a parameter."""

    def due(self, step: int) -> bool:
        """Return whether a step is to be measured."""
        return any(one.due(step) for one in self.listeners)

    def hear(self, index: int, row: Sequence[float]) -> None:
        """Take in what a parameter's reduced carrier brings."""
        self._rows[self._names[index]] = row

    def end(
        self, step: int, gauges: Sequence[Gauge], *, bad: bool, size: int, factor: float
    ) -> None:
        """End a step: tell what was heard of the one before, and what this one has shown.

        Args:
            step: That ends.
            gauges: Of its units; none where it was not measured.
            bad: Whether it counts for nothing.
            size: How many ranks there are.
            factor: Of the reduction on a mean.
        """
        heard = Heard.of(size, factor, self._rows)
        for one in self.listeners:
            one.heard(step - 1, heard)
        self.forget()
        own = None if bad else _read(gauges)
        self.set_rows({name: [1.0, *sums] for name, sums in (own or {}).items()})
        spent = sum(gauge.spent_ms for gauge in gauges)
        for one in self.listeners:
            if one.due(step):
                one.measured(step, own, spent)

    def rows(self) -> dict[str, list[float]]:
        """Return what is to be told, by parameter."""
        if self.row is None:
            return {}
        return {name: row for name, row in zip(self._names, self.row.tolist()) if row[0]}

    def set_rows(self, rows: Mapping[str, Sequence[float]]) -> None:
        """Take up what :meth:`rows` returned."""
        self.row = None
        if rows:
            self.row = torch.zeros(len(self._names), WIDTH)
            self.row[[self._places[name] for name in rows]] = torch.tensor(list(rows.values()))

    def skip(self, steps: int) -> None:
        """Go on after steps that were done elsewhere."""
        self.forget()
        for one in self.listeners:
            one.skip(steps)

    def forget(self) -> None:
        """Let what was to be told, or heard, go."""
        self.row = None
        self._rows = {}


def _read(gauges: Sequence[Gauge]) -> dict[str, Sums]:
    """Return all rows, from the device at once."""
    every = {name: row for gauge in gauges for name, row in gauge.rows.items()}
    devices: dict[torch.device, list[str]] = {}
    for name, row in every.items():
        devices.setdefault(row.device, []).append(name)
    found: dict[str, Sums] = {}
    for names in devices.values():
        values = torch.stack([every[name] for name in names]).tolist()
        found.update((name, Sums(*row)) for name, row in zip(names, values))
    return found
