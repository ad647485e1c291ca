"""The few floats that Horovod reduces in place of a gradient, and what comes back of them."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ..core.errors import ExchangeError, explain
from ..core.exchange import Carrier

_PROBE_SECONDS = 20
"""How long to wait before a reduction over other ranks is taken for what it is."""


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
        self._given = 0
        self._seen: dict[tuple[float, ...], float] = {}
        self._joined: bool | None = None

    def next(self, step: int, count: int, *, frozen: bool) -> torch.Tensor:
        """Return a carrier of a step that has ``count`` of them, at most.

        Args:
            step: Of this rank.
            count: Of all carriers.
            frozen: Whether the parameter no longer trains.
        """
        if not self._given:
            self._fill(step, count)
        mine = self._rows[self._given]
        self._given += 1
        if frozen:
            mine[-1] = _mark(step, frozen=True)
        return mine

    def _fill(self, step: int, count: int) -> None:
        """Make all rows those of a step, at once: Horovod reduces each in place."""
        if self._matrix is None:
            self._matrix = torch.empty(count, Carrier.WIDTH + 1)
            self._rows = list(self._matrix.unbind(0))
        self._matrix.copy_(torch.tensor((*Carrier.row(hvd.rank()), _mark(step))))

    def next_step(self, *, reuse: bool = True) -> None:
        """Begin another step.

        Args:
            reuse: False while Horovod may still write to the carriers of the one before.
        """
        self._given, self._joined = 0, None
        self._seen.clear()
        if not reuse:
            self._matrix = None

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
            frozen: As of :meth:`next`.

        Raises:
            ExchangeError: It was no linear reduction over these ranks, or they are at different
                steps, or the parameter trains on some of them only.
        """
        key = (frozen, *values)
        if key in self._seen:  # as a rule all carriers of a step come back alike
            return self._seen[key]
        factor = self._seen[key] = self._judge(values, step, name, frozen=frozen)
        return factor

    def _judge(self, values: list[float], step: int, name: str, *, frozen: bool) -> float:
        assert self._carrier is not None
        *values, mark = values
        factor = self._carrier.joined(values)
        if factor is None or not self._find_out():
            factor = self._carrier.factor(values, name)
        expected = values[0] * _mark(step, frozen=frozen)
        if abs(mark - expected) > 1e-4 * expected:
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
