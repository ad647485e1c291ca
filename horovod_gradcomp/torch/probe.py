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

_WIDE, _PACE = 128, 20
"""Rows of the squares whose product is computed meanwhile (some tenths of a millisecond), and how
often it is timed alone."""

BRIEF, LONG = links.SHORT // 2, links.SHORT * 2
"""Bytes of gathers that count as short, and of others."""
_GATHERS = 5
"""Runs. Gloo's gathers differ by a factor of two from one to the next."""


def ring(
    name: str,
    process_set: Any = hvd.global_process_set,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    work: bool = True,
) -> Link:
    """Return the slowest link of the ring that Horovod reduces along, with its own overhead.

    All ranks of the process set must call it. It takes some tenths of a second, and on slow links
    a few allreduces of 256 KiB.

    Args:
        name: Start of the collectives' names.
        process_set: Of Horovod, of two ranks or more.
        device: Of what is reduced.
        dtype: Likewise.
        work: Whether to measure what it takes from computing, too, which takes as long again.
    """

    def start(data: torch.Tensor, label: str) -> int:
        handle: int = hvd.allreduce_async_(data, name=label, op=hvd.Sum, process_set=process_set)
        return handle

    ranks = len(process_set.ranks or range(hvd.size()))
    small, large = _two_sizes(start, name, process_set, device, dtype)
    taken = 0.0
    if work:
        what = torch.zeros(large[0] // dtype.itemsize, device=device, dtype=dtype)
        taken = _taken(lambda: start(what, name), f"{name}.taken", process_set)
    sent = 2 * (ranks - 1) / ranks * large[0]
    return replace(fitted(ranks, small, large), work=taken / sent)


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

    def start(data: torch.Tensor, label: str) -> int:
        splits = torch.zeros(size, dtype=torch.int32)
        splits[following] = data.numel()
        handle: int = hvd.alltoall_async(data, splits, name=label)
        return handle

    (few, soon), (many, late) = _two_sizes(start, name, hvd.global_process_set, device)
    what = torch.zeros(many // 4, device=device)
    taken = _taken(lambda: start(what, name), f"{name}.taken", hvd.global_process_set)
    speed = (many - few) / (late - soon) if late > soon else math.inf
    return Link(speed, max(0.0, soon - few / speed), taken / many)


def _two_sizes(
    start: Callable[[torch.Tensor, str], int],
    name: str,
    process_set: Any,
    device: Any,
    dtype: torch.dtype = torch.float32,
) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return bytes and seconds of a short collective and of a long one."""

    def seconds(nbytes: int) -> float:
        data = torch.zeros(nbytes // dtype.itemsize, device=device, dtype=dtype)
        label = f"{name}.{nbytes}"
        repeats = _OF_SMALL if nbytes == _SMALL else _REPEATS
        took = quickest(lambda: hvd.synchronize(start(data, label)), repeats)
        return slowest(took, f"{label}.told", process_set)

    small, nbytes = seconds(_SMALL), _FIRST
    large = seconds(nbytes)
    while large < max(_LONG, _TIMES * small) and nbytes < _LARGEST:
        nbytes *= 4
        large = seconds(nbytes)
    return (_SMALL, small), (nbytes, large)


def _taken(start: Callable[[], int], name: str, process_set: Any) -> float:
    """Return the seconds that a collective takes from a thread that computes meanwhile.

    What its own threads use of a processor would be more: some of them only wait, and give way.
    """
    a = torch.full((_WIDE, _WIDE), 0.5)
    out = torch.empty_like(a)
    alone = statistics.median(quickest(lambda: torch.mm(a, a, out=out), 1) for _ in range(_PACE))
    lost = []
    for _ in range(_REPEATS):
        handle, begun, done = start(), time.perf_counter(), 0
        while not hvd.poll(handle):
            torch.mm(a, a, out=out)
            done += 1
        lost.append(time.perf_counter() - begun - done * alone)
        hvd.synchronize(handle)
    every = gathered(max(0.0, statistics.median(lost)), name, process_set)
    return statistics.fmean(every)


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
