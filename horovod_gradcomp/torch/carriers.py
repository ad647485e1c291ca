"""The few floats that Horovod reduces in place of a gradient, and what comes back of them.

Where any rank measures (:mod:`.meter`), carriers are wider by what it tells. That some rank does
shows in the word that marks the step, which all ranks read in the same reduction; from the next
step on carriers are wide on all of them, and narrow again when none does any more. So no rank has
to be asked, and telemetry on one rank alone makes no other one wait.
"""

from __future__ import annotations

import math
import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ..core.carrier import Carrier
from ..core.errors import ExchangeError, explain
from ..core.telemetry import WIDTH

_PROBE_SECONDS = 20
"""How long to wait before a reduction over other ranks is taken for what it is."""
_MEASURES = 4.0
"""Added to the mark by a rank that measures: more than marks of two steps can differ by."""


class Carriers:
    """One optimizer's carriers, over one set of ranks.

    Args:
        ranks: Who takes part.
        prefix: Of the names of the optimizer's own collectives.
        process_set: Of Horovod.
    """

    def __init__(self, ranks: tuple[int, ...], prefix: str, process_set: Any) -> None:
        self.ranks = ranks
        self._carrier = Carrier(ranks) if ranks else None
        self._prefix, self._process_set = prefix, process_set
        self._matrix: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []
        self.filled = False
        """Whether there are carriers of the running step."""
        self._frozen = 0.0
        self._measuring: int | None = None
        self.wide = False
        """Whether carriers of the running step bring sums of :data:`WIDTH`."""
        self._seen: dict[tuple[float, ...], float] = {}
        self._joined: bool | None = None

    def fill(self, step: int, count: int, told: torch.Tensor | None, *, measures: bool) -> None:
        """Make all carriers those of a step, at once: Horovod reduces each in place.

        Args:
            step: Of this rank.
            count: Of all parameters.
            told: What to tell all ranks, shape ``(count, WIDTH)``, or None.
            measures: Whether this rank measures.
        """
        width = self._width
        if self._matrix is None or self._matrix.shape[1] != width:
            self._matrix = torch.empty(count, width)
            self._rows = list(self._matrix.unbind(0))
        words = [*Carrier.row(hvd.rank()), _mark(step) + _MEASURES * measures]
        self._matrix.copy_(torch.tensor(words + [0.0] * (width - len(words))))
        if self.wide and told is not None:
            self._matrix[:, len(words) :] = told
        self._frozen = _mark(step, frozen=True) - _mark(step)
        self.filled = True

    def row(self, index: int, *, frozen: bool) -> torch.Tensor:
        """Return a parameter's carrier.

        Args:
            index: Of the parameter.
            frozen: Whether it no longer trains.
        """
        mine = self._rows[index]
        if frozen:
            mine[Carrier.WIDTH] += self._frozen
        return mine

    @property
    def _width(self) -> int:
        return Carrier.WIDTH + 1 + WIDTH * self.wide

    def next_step(self, *, reuse: bool = True) -> None:
        """Begin another step.

        Args:
            reuse: False while Horovod may still write to the carriers of the one before.
        """
        self.filled, self._joined = False, None
        self._seen.clear()
        if not reuse:
            self._matrix = None
        elif self._measuring is not None:
            self.wide = self._measuring > 0
        self._measuring = None

    @property
    def some_joined(self) -> bool:
        """Whether some rank has joined (``hvd.join``), as far as this step has shown."""
        return bool(self._joined)

    def factor(self, values: list[float], step: int, name: str, *, frozen: bool) -> float:
        """Return the factor on the mean.

        Args:
            values: The reduced carrier.
            step: Of this rank.
            name: Of the parameter, for messages.
            frozen: As of :meth:`row`.

        Raises:
            ExchangeError: It was no linear reduction over these ranks, or they are at different
                steps, or the parameter trains on some of them only.
        """
        words = values[: Carrier.WIDTH + 1] if len(values) == self._width else values
        key = (frozen, *words)
        if key in self._seen:  # as a rule all carriers of a step come back alike
            return self._seen[key]
        factor = self._seen[key] = self._judge(words, step, name, frozen=frozen)
        return factor

    def _judge(self, values: list[float], step: int, name: str, *, frozen: bool) -> float:
        assert self._carrier is not None
        *values, mark = values
        factor = self._carrier.joined(values)
        if factor is None or not self._find_out():
            factor = self._carrier.factor(values, name)
        here = values[0] / factor * len(self.ranks)  # ranks that have not joined
        expected = _mark(step, frozen=frozen)
        measuring = (mark / values[0] - expected) / _MEASURES * here
        self._measuring = round(measuring) if math.isfinite(measuring) else -1
        plain = mark - values[0] * _MEASURES * self._measuring / here
        if self._measuring < 0 or abs(plain - values[0] * expected) > 1e-4 * values[0] * expected:
            raise ExchangeError(
                explain(
                    got=f"ranks at different steps, or '{name}' frozen on some only; this one has "
                    f"done {step}{', and it is frozen here' if frozen else ''}",
                    expected="the same on all ranks",
                    why="after hvd.join the ranks that had joined are behind",
                    do="call compression.join() in place of hvd.join(); set requires_grad alike",
                )
            )
        return factor

    def _find_out(self) -> bool:
        """Return whether some rank has joined, asked once a step: Horovod then gathers nothing."""
        if self._joined is None:
            probe = hvd.allgather_async(
                torch.ones(1), name=f"{self._prefix}.probe", process_set=self._process_set
            )
            until = time.monotonic() + _PROBE_SECONDS
            while not hvd.poll(probe):
                if time.monotonic() > until:
                    return False
                time.sleep(0.001)
            try:
                hvd.synchronize(probe)
                self._joined = False
            except HorovodInternalError:
                self._joined = True
        return self._joined


def _mark(step: int, *, frozen: bool = False) -> float:
    """Return what tells one step from others, in a carrier; no mean of marks is a third one's."""
    word = (2 * step + frozen) * 0x9E3779B1 % 2**32
    return 1.0 + (word ^ word >> 15) % 4096 / 4096
