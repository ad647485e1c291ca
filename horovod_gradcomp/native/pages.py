"""Huge pages for large fresh storage.

Touching 100 MB for the first time takes as long as writing it twice when the kernel hands it out 4
KiB at a time. Linux does so unless a program asks for more, where it lets one (``madvise``, the
default of most distributions). Asking is harmless: what fails changes nothing.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any

LEAST = 4 << 20
"""Bytes. Smaller storage comes from a heap that is reused, so that its pages are there."""


def advise(address: int, nbytes: int) -> None:
    """Ask for huge pages for storage of this size, if it is large."""
    if nbytes < LEAST:
        return
    madvise = _madvise()
    if madvise is not None:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        madvise(first, address + nbytes - first, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Any:
    """Return the function of the C library, None where there is none."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
