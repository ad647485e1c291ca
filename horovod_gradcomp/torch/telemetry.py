"""``Compression.telemetry``: records of some steps, on their way to a file or a writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

import horovod.torch as hvd

from ..core.codec import check_count
from ..core.errors import SettingsError, explain
from ..core.sinks import Sink
from ..core.stats import Stats
from ..core.telemetry import NOTHING, Clock, Heard, Record, Since, Sums, a_step, added, total

if TYPE_CHECKING:
    from .binding import Binding


class Telemetry:
    """What :meth:`Compressor.telemetry` returns; it runs until :meth:`stop`.

    Args:
        sink: As of :meth:`Compressor.telemetry`.
        every: Likewise.
        all_ranks: Likewise.
        stats: Of the compressor.
        switch: Called with this and True to begin, and with False to end.
    """

    def __init__(
        self,
        sink: Any,
        every: int | None,
        all_ranks: bool,
        stats: Stats,
        switch: Callable[[Telemetry, bool], None],
    ) -> None:
        if every is not None:
            check_count("telemetry", "every", every)
        if not hvd.is_initialized():
            raise SettingsError(
                explain(
                    got="telemetry() before hvd.init()",
                    expected="it afterwards",
                    why="which rank writes is not known yet",
                )
            )
        self.every, self._all_ranks, self._switch = every, all_ranks, switch
        self.write = Sink(sink)
        if self.writes(0):
            self.write.open()
        self.stats = stats
        self.bypassed = Since(stats.bypassed)
        self.asked = 0
        """How often :meth:`record` has been called."""
        self._recorders: dict[int, Recorder] = {}
        self._running = True
        switch(self, True)

    def record(self) -> None:
        """Record the next step of each optimizer, whatever its number."""
        self.asked += 1

    def stop(self) -> None:
        """End, once the last record is written; without effect where it has ended."""
        if self._running:
            self._running = False
            self._switch(self, False)
            self.write.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def writes(self, first: int) -> bool:
        """Return whether this rank writes what ``first`` and others do."""
        return self._all_ranks or bool(hvd.rank() == first)

    def attach(self, binding: Binding) -> None:
        """Record an optimizer's steps."""
        for number, old in list(self._recorders.items()):
            if old.ended:
                self._recorders.pop(number).close()
        first = not self._recorders
        recorder = Recorder(self, binding, "" if first else binding.prefix.partition(".")[2])
        self._recorders[binding.number] = recorder
        binding.listen(recorder)

    def detach(self, binding: Binding) -> None:
        """Record no more of them."""
        recorder = self._recorders.pop(binding.number)
        binding.ignore(recorder)
        recorder.close()


class Recorder:
    """Makes the records of one optimizer, on the ranks that write.

    Args:
        owner: Who wants them.
        binding: Of the optimizer.
        name: Of the optimizer in records.
    """

    def __init__(self, owner: Telemetry, binding: Binding, name: str) -> None:
        self._owner, self._binding, self._name = owner, binding, name
        self._counts = {unit.bucket.name: Since(unit.stats) for unit in binding.units}
        self._gone: list[dict[str, float]] = []
        settings = binding.settings.describe()
        self._clock = Clock(binding.step, owner.stats.bad_steps, name, settings)
        self._pending: Record | None = None
        self._answered = 0

    @property
    def ended(self) -> bool:
        """Whether there is no such optimizer any more."""
        optimizer = self._binding.optimizer
        return optimizer is not None and optimizer() is None

    def close(self) -> None:
        """Write what has been kept to be told with what all ranks have measured."""
        if self._pending is not None:
            self.heard(self._pending["step"], None)

    def due(self, step: int) -> bool:
        """Return whether a step is to be measured."""
        every = self._owner.every
        return self._owner.asked > self._answered or (every is not None and step % every == 0)

    def measured(self, step: int, own: Mapping[str, Sums] | None, spent_ms: float) -> None:
        """Make the record of a step, to be written when all ranks have been heard."""
        self._answered = self._owner.asked
        ranks = self._binding.process_set.ranks or range(hvd.size())
        if self._owner.writes(min(ranks)):
            self._pending = self._record(step, own or {}, spent_ms, len(ranks))

    def heard(self, step: int, heard: Heard | None) -> None:
        """Write the record of a step."""
        if self._pending is not None and step >= self._pending["step"]:
            record, self._pending = self._pending, None
            if heard is not None and step == record["step"]:  # else a step was given up in between
                record["cluster"] = heard.figures()
            self._owner.write(record)

    def follow(self) -> None:
        """Go on with the optimizer's new settings and buckets."""
        self._gone += [since.take() for since in self._counts.values()]
        self._counts = {unit.bucket.name: Since(unit.stats) for unit in self._binding.units}
        self._clock.settings = self._binding.settings.describe()

    def skip(self, steps: int) -> None:
        """Count no steps that were done elsewhere; write what waits for one to be told."""
        self.close()
        self._clock.skip(steps)

    def told(self, event: Record) -> None:
        """Write something that has happened, once what came before it is written."""
        ranks = self._binding.process_set.ranks or range(hvd.size())
        if self._owner.writes(min(ranks)):
            self._owner.write({**event, "optimizer": self._name, "time": round(time.time(), 3)})

    def _record(self, step: int, own: Mapping[str, Sums], spent_ms: float, size: int) -> Record:
        owner, units = self._owner, self._binding.units
        steps, bypassed = self._clock.since(step + 1), owner.bypassed.take()
        counts = {name: since.take() for name, since in self._counts.items()}
        whole = total(own.values())
        gone, self._gone = self._gone, []
        bad = owner.stats.bad_steps
        return {
            **self._clock.head(step + 1, bad, rank=hvd.rank(), size=size, spent_ms=spent_ms),
            "total": {
                **a_step(added([*counts.values(), *gone, bypassed]), steps),
                **(whole.figures() if whole else NOTHING),
            },
            "cluster": None,
            "bypassed": a_step(bypassed, steps),
            "buckets": {
                unit.bucket.name: {
                    "codec": unit.codec.describe(),
                    "numel": unit.bucket.numel,
                    **a_step(counts[unit.bucket.name], steps),
                }
                for unit in units
            },
            "layers": {
                m.name: {
                    "bucket": unit.bucket.name,
                    "numel": m.numel,
                    **a_step(counts[unit.bucket.name], steps, m.numel / unit.bucket.numel),
                    **(own[m.name].figures() if m.name in own else NOTHING),
                }
                for unit in units
                for m in unit.bucket.members
            },
        }
