"""How fast the ranks' links are, measured by short collectives; all ranks get the same answer."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import Any, Callable

import horovod.torch as hvd
import torch

from ..core import links
from ..core.links import Link, fitted
from .agreement import gathered

_SMALL, _FIRST, _LARGEST = 2**10, 2**18, 2**24
"""Bytes: of what tells the latency, and of the first and the largest that tell the bandwidth."""

_LONG, _TIMES = 0.03, 4
"""What is enough to tell a bandwidth: seconds, and so many times those of the latency."""

_REPEATS, _OF_SMALL = 3, 15
"""Runs, of which the fastest counts: of large collectives, and of those that take no time."""

BRIEF, LONG = links.SHORT // 2, links.SHORT * 2
"""Bytes of gathers that count as short, and of others."""
_GATHERS = 5
"""Runs. Gloo's gathers differ by a factor of two from one to the next."""


def ring(
    name: str,
    process_set: Any = hvd.global_process_set,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Link:
    """Return the slowest link of the ring that Horovod reduces along, with its own overhead.

    All ranks of the process set must call it. It takes some tenths of a second, and on slow links
    a few allreduces of 256 KiB.

    Args:
        name: Start of the collectives' names.
        process_set: Of Horovod, of two ranks or more.
        device: Of what is reduced.
        dtype: Likewise.
    """

    def run(data: torch.Tensor, label: str) -> None:
        hvd.allreduce_(data, name=label, op=hvd.Sum, process_set=process_set)

    ranks = len(process_set.ranks or range(hvd.size()))
    small, large, busy = _two_sizes(run, name, process_set, device, dtype)
    sent = 2 * (ranks - 1) / ranks * large[0]
    return replace(fitted(ranks, small, large), work=busy / sent)


def gathers(name: str, link: Link, device: torch.device | None = None, nbytes: int = LONG) -> Link:
    """Return the slowest link as an allgather over all ranks uses it, the median of some.

    It is no faster than the link itself.

    It takes some times as long as one message does.

    Args:
        name: Start of the collectives' names.
        link: As :func:`ring` found it, of which the latency is taken.
        device: Of what is gathered.
        nbytes: Of a message.
    """
    data = torch.zeros(nbytes // 4, device=device)
    took = []
    for number in range(1 + _GATHERS):
        hvd.allreduce(torch.zeros(1), name=f"{name}.wait")
        start = time.perf_counter()
        hvd.allgather(data, name=name)
        told = slowest(time.perf_counter() - start, f"{name}.told", hvd.global_process_set)
        took += [told] * (number > 0)
    step = statistics.median(took) / (hvd.size() - 1)
    return Link(min(link.bandwidth, nbytes / max(step - link.latency, 1e-9)), link.latency)


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

    (few, soon), (many, late), busy = _two_sizes(run, name, hvd.global_process_set, device)
    speed = (many - few) / (late - soon) if late > soon else math.inf
    return Link(speed, max(0.0, soon - few / speed), busy / many)


def _two_sizes(
    run: Callable[[torch.Tensor, str], Any],
    name: str,
    process_set: Any,
    device: Any,
    dtype: torch.dtype = torch.float32,
) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Return bytes and seconds of a short collective and of a long one, and a processor's in it."""

    def seconds(nbytes: int) -> tuple[float, float]:
        data = torch.zeros(nbytes // dtype.itemsize, device=device, dtype=dtype)
        label = f"{name}.{nbytes}"
        took = quickest(lambda: run(data, label), _OF_SMALL if nbytes == _SMALL else _REPEATS)
        taken, busy = zip(*gathered(took, f"{label}.told", process_set))
        return max(taken), max(busy)

    (small, _), nbytes = seconds(_SMALL), _FIRST
    large, busy = seconds(nbytes)
    while large < max(_LONG, _TIMES * small) and nbytes < _LARGEST:
        nbytes *= 4
        large, busy = seconds(nbytes)
    return (_SMALL, small), (nbytes, large), busy


def quickest(run: Callable[[], Any], repeats: int = _REPEATS) -> tuple[float, float]:
    """Return the seconds of the fastest of some runs, after one that does not count.

    Returns:
        By the clock, and of processors in all threads of this process.
    """
    times = []
    for _ in range(1 + repeats):
        start, used = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - start, time.process_time() - used))
    return min(times[1:])


def slowest(seconds: float, name: str, process_set: Any) -> float:
    """Return what the slowest rank measured."""
    return float(max(gathered(seconds, name, process_set)))
