"""The highest resident size of a run on the CPU, as it can be measured: in a process of its own.

Frameworks and the C library keep freed storage for the next to ask, so what a run takes and gives
back is resident before it, and does not show. Here every tensor comes from the system and goes
back at once, which would be slower than what is timed.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, TypeVar

_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD = -3  # of mallopt
_LEAST = 2**16
"""Bytes from which on a tensor is mapped by itself; what is smaller shows in part."""

T = TypeVar("T")


def elsewhere(fn: Callable[..., T], *args: Any) -> T:
    """Return ``fn(*args)`` of the process in which :func:`host_peak` sees all."""
    return _process().submit(fn, *args).result()


def host_peak(run: Callable[[], Any]) -> int:
    """Return the highest resident size during ``run`` above the one before it, in bytes.

    The kernel counts to some 0.3 MB, on either side; of three runs the highest counts.
    """
    run()  # what is made once does not count
    return max(_one_peak(run) for _ in range(3))


def _one_peak(run: Callable[[], Any]) -> int:
    _RESET_PEAK.write_text("5")
    before = _resident("VmRSS")
    kept = run()
    peak = _resident("VmHWM") - before
    del kept
    return peak


@functools.cache
def _process() -> ProcessPoolExecutor:
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawned, initializer=_give_back_at_once)


def _give_back_at_once() -> None:
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LEAST)
    os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"  # else TensorFlow has a pool


def _resident(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {key}: this measurement needs Linux")
