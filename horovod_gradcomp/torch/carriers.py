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
        self._rows: Any = None
        self._joined: bool | None = None

    def next(self, step: int, count: int, *, frozen: bool) -> torch.Tensor:
        """Return a carrier of a step that has ``count`` of them, at most.

        Args:
            step: Of this rank.
            count: Of all carriers.
            frozen: Whether the parameter no longer trains.
        """
        if self._rows is None:  # one matrix a step: Horovod reduces each row in place
            row = torch.tensor([(*Carrier.row(hvd.rank()), _mark(step))], dtype=torch.float32)
            self._rows = iter(row.repeat(count, 1).unbind(0))
        mine: torch.Tensor = next(self._rows)
        if frozen:
            mine[-1] = _mark(step, frozen=True)
        return mine

    def next_step(self) -> None:
        """Begin another step."""
        self._rows = self._joined = None

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
