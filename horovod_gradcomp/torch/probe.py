"""How fast the ranks' links are, measured by short collectives; all ranks get the same answer."""

from __future__ import annotations

import math
import time
from typing import Any, Callable

import horovod.torch as hvd
import torch

from ..core.links import Link, fitted
from .agreement import gathered

_SMALL, _FIRST, _LARGEST = 2**10, 2**18, 2**24
"""Bytes: of what tells the latency, and of the first and the largest that tell the bandwidth."""

_LONG = 0.03
"""Seconds that are enough to tell a bandwidth."""

_REPEATS = 3


def ring(
    name: str, process_set: Any = hvd.global_process_set, device: torch.device | None = None
) -> Link:
    """Return the slowest link of the ring that Horovod reduces along, with its own overhead.

    All ranks of the process set must call it. It takes some tenths of a second, and on slow links
    a few allreduces of 256 KiB.

    Args:
        name: Start of the collectives' names.
        process_set: Of Horovod, of two ranks or more.
        device: Of what is reduced.
    """

    def run(data: torch.Tensor, label: str) -> None:
        hvd.allreduce_(data, name=label, op=hvd.Sum, process_set=process_set)

    small, large = _two_sizes(run, name, process_set, device)
    return fitted(len(process_set.ranks or range(hvd.size())), small, large)


def neighbours(name: str, device: torch.device | None = None) -> Link:
    """Return the link from each rank to the next one of its host, where hosts hold several.

    All ranks must call it; consecutive ranks share a host.

    Args:
        name: Start of the collectives' names.
        device: Of what is sent.
    """
    size, local, first = hvd.size(), hvd.local_size(), hvd.rank() - hvd.local_rank()
    following = first + (hvd.local_rank() + 1) % local

    def run(data: torch.Tensor, label: str) -> None:
        splits = torch.zeros(size, dtype=torch.int32)
        splits[following] = data.numel()
        hvd.alltoall(data, splits, name=label)

    (few, soon), (many, late) = _two_sizes(run, name, hvd.global_process_set, device)
    speed = (many - few) / (late - soon) if late > soon else math.inf
    return Link(speed, max(0.0, soon - few / speed))


def _two_sizes(
    run: Callable[[torch.Tensor, str], Any], name: str, process_set: Any, device: Any
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return bytes and seconds of a short collective, and of one long enough to tell a speed."""

    def seconds(nbytes: int) -> float:
        data, label = torch.zeros(nbytes // 4, device=device), f"{name}.{nbytes}"
        return slowest(quickest(lambda: run(data, label)), f"{label}.told", process_set)

    small, nbytes = seconds(_SMALL), _FIRST
    while (large := seconds(nbytes)) < _LONG and nbytes < _LARGEST:
        nbytes *= 4
    return (_SMALL, small), (nbytes, large)


def quickest(run: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def slowest(seconds: float, name: str, process_set: Any) -> float:
    """Return what the slowest rank measured."""
    return float(max(gathered(seconds, name, process_set)))
