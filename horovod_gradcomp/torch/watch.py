"""The guard of one optimizer: falls back and returns, on all ranks at the same step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd

from ..core.guard import Guard, Standing
from ..core.telemetry import FORMAT, Heard, Record, Sums, total

if TYPE_CHECKING:
    from .binding import Binding
    from .meter import Meter


class Watch:
    """Listens to what all ranks have measured.

    Args:
        guard: The settings.
        binding: Of the optimizer.
        meter: That measures its steps.
    """

    def __init__(self, guard: Guard, binding: Binding, meter: Meter) -> None:
        self._guard, self._binding, self._meter = guard, binding, meter
        self._said = False
        self.standing = Standing()

    def _place(self, step: int) -> bool:
        """Let all units use what a step uses, and return whether this is the fallback."""
        back = self.standing.falls_back(step)
        for unit in self._binding.units:
            unit.falls_back = back
        return back

    def begin(self, step: int) -> None:
        """A step begins."""
        if not self._place(step) and step == self.standing.until > 0:
            self._tell("return", step)

    def due(self, step: int) -> bool:
        """Return whether a step is to be looked at."""
        return step % self._guard.every == 0 and not self.standing.falls_back(step)

    def measured(self, step: int, own: Mapping[str, Sums] | None, spent_ms: float) -> None:
        """Wait for what all ranks have measured."""

    def heard(self, step: int, heard: Heard | None) -> None:
        """Judge what all ranks have measured; what only some have is no mean of all."""
        if step % self._guard.every:  # measured for another listener
            return
        size = len(self._binding.process_set.ranks or range(hvd.size()))
        sums = None if heard is None or heard.ranks < size else total(heard.layers.values())
        if sums is None:
            return
        now = step + 2  # a step is heard of at the end of the next one
        self.standing, why = self.standing.after(self._guard, step, sums, now)
        if why:
            self._tell("fallback", now, measured=step, until=self.standing.until, why=why)
            self._warn(now, why)

    def told(self, event: Record) -> None:
        """Events are this one's own."""

    def follow(self) -> None:
        """Settings with a guard stay."""

    def skip(self, steps: int) -> None:
        """Where it stands is told by :meth:`stand`."""

    def state(self) -> dict[str, Any]:
        """Return where it stands, and what this rank has measured and not yet told."""
        return {"standing": list(self.standing), "rows": self._meter.rows()}

    def stand(self, standing: Sequence[int], step: int) -> None:
        """Stand where another one does, nothing for the beginning, after so many steps."""
        self.standing = Standing(*standing)
        self._place(max(step - 1, 0))

    def _tell(self, what: str, step: int, **more: Any) -> None:
        codec = self._guard.fallback if what == "fallback" else self._binding.settings.codec
        event = {"gradcomp": FORMAT, "event": what, "step": step, "codec": codec.describe()}
        for listener in self._meter.listeners:
            listener.told({**event, **more})

    def _warn(self, step: int, why: str) -> None:
        ranks = self._binding.process_set.ranks or range(hvd.size())
        if not self._said and hvd.rank() == min(ranks):
            warnings.warn(
                f"horovod_gradcomp: from step {step} on gradients are sent with "
                f"'{self._guard.fallback.describe()}' for {self._guard.hold} steps: {why}; "
                "this is said once, telemetry records each time",
                stacklevel=2,
            )
        self._said = True
