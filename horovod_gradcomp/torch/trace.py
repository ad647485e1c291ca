"""``Compression.trace``: when each bucket was encoded, on its way and decoded, on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import horovod.torch as hvd

from ..core.errors import SettingsError, explain
from ..core.trace import Event, Events, document
from .agreement import gathered

if TYPE_CHECKING:
    from .binding import Binding
    from .unit import Unit


class Trace:
    """A trace of the steps between :meth:`start` and :meth:`stop`, or of a ``with`` block.

    Made by :meth:`Compressor.trace`.

    Args:
        path: Of the file that :meth:`stop` writes.
        gather: As of :meth:`Compressor.trace`.
        attach: Called with the trace when it starts, and with None when it stops.
    """

    def __init__(
        self, path: str | os.PathLike[str], gather: bool, attach: Callable[[Trace | None], None]
    ) -> None:
        self._path, self._gather, self._attach = Path(path), gather, attach
        if not self._path.parent.is_dir():
            raise SettingsError(
                explain(got=f"trace({str(path)!r})", expected="a file in a folder that there is")
            )
        self._events: Events | None = None

    def start(self) -> Trace:
        """Begin; what came before is forgotten."""
        self._events = Events(hvd.rank() if hvd.is_initialized() else 0)
        self._attach(self)
        return self

    def stop(self) -> None:
        """End, and write the file; unless ``gather`` is off, all ranks must call it."""
        events = self._end()
        if events is None:
            return
        ranks = [events]
        if self._gather and hvd.is_initialized() and hvd.size() > 1:
            ranks = gathered(events, "gradcomp.trace")
            if hvd.rank() != 0:
                return
        self._path.write_text(document(ranks), encoding="utf-8")

    def __enter__(self) -> Trace:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
            return
        events = self._end()  # others may not come: this rank writes what it knows
        if events is not None:
            rank = events[0]["pid"]
            path = self._path.with_name(f"{self._path.stem}.rank{rank}{self._path.suffix}")
            path.write_text(document([events]), encoding="utf-8")

    def recorder(self, binding: Binding) -> Recorder:
        """Return what takes down the steps of an optimizer."""
        assert self._events is not None
        return Recorder(self._events, binding.prefix, binding.units)

    def _end(self) -> list[Event] | None:
        events, self._events = self._events, None
        if events is None:
            return None
        self._attach(None)
        return events.events


class Recorder:
    """Takes down the steps of one optimizer.

    One row shows its steps, and within them what the calling thread does for each bucket; one row
    a bucket shows what is on its way, from the start of a collective to when it was first seen to
    be over. That is looked for whenever Horovod calls.

    Args:
        events: Of this rank.
        name: Of the optimizer.
        units: Its buckets.
    """

    def __init__(self, events: Events, name: str, units: Sequence[Unit]) -> None:
        self._events, self._name = events, name
        self._units: Sequence[Unit] = ()
        self._row = events.row(name, f"steps {name}")
        self._begun: float | None = None
        self._step = 0
        self._reduced: dict[int, float] = {}
        self.follow(units)

    def follow(self, units: Sequence[Unit]) -> None:
        """Take down these buckets and no others."""
        self.close()
        self._units = units
        for unit in units:
            row = self._events.row((self._name, unit.bucket.name), f"exchange {unit.bucket.name}")
            unit.log_to(self._logger(unit, row))

    def close(self) -> None:
        """Take down no more."""
        for unit in self._units:
            unit.log_to(None)

    def begin(self, step: int) -> None:
        """A step begins with its first gradient."""
        self._begun, self._step = time.perf_counter(), step
        self._reduced.clear()

    def end(self, **args: Any) -> None:
        """A step ends with its last result, or is given up."""
        if self._begun is not None:
            end = time.perf_counter()
            self._events.span(self._row, f"step {self._step}", self._begun, end, **args)
        self._begun = None

    def look(self) -> None:
        """See what is over."""
        for unit in self._units:
            if unit.sent:
                unit.look()

    def sent(self, unit: Unit) -> None:
        """Horovod gets a payload to reduce."""
        self._reduced[id(unit)] = time.perf_counter()

    def arrived(self, unit: Unit) -> None:
        """Horovod has reduced a payload."""
        start = self._reduced.pop(id(unit), None)
        if start is not None and unit.stats.log is not None:
            unit.stats.log("exchange", start, time.perf_counter())

    def _logger(self, unit: Unit, row: int) -> Callable[[str, float, float], None]:
        def log(what: str, start: float, end: float) -> None:
            if self._begun is None:  # of a step that had begun before
                return
            here = row if what == "exchange" else self._row
            name = f"{what} {unit.bucket.name}"
            self._events.span(here, name, start, end, step=self._step, values=unit.bucket.numel)

        return log
