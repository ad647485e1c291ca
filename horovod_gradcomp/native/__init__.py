"""The compiled kernels, where there are any: at memory speed, what tensor operations do in passes.

The library is plain C without Python's or a framework's headers. It is loaded by ctypes, which
lets go of Python's lock during a call. Tensors are taken by address, so this package knows no
framework; which tensors qualify is for the operations module to say. Large work is split over
threads by rows, and no result depends on how.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

from ..core.kernel import Kernel
from .library import SWITCH, available, index, level, loaded, reason, use
from .structs import DecodeJob, EncodeJob

__all__ = ["SWITCH", "Kernels", "available", "level", "reason", "use"]

_WORTH_A_THREAD = 262_144
"""Elements; starting a thread takes about as long as these."""


class Kernels:
    """The kernels, for contiguous tensors in the computer's own memory.

    Args:
        threads: How many to use at most.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def encode(
        self,
        kernel: Kernel,
        rows: Any,
        head: Any,
        codes: Any,
        start: int,
        key: tuple[int, int],
        *,
        want_error: bool,
    ) -> None:
        """Encode rows into a payload.

        Args:
            kernel: What to do.
            rows: Shape ``(r, width)``, float32; becomes the error where that is wanted.
            head: Shape ``(r, headers)``, float32, to be filled; None without headers.
            codes: Shape ``(r, bytes)``, to be filled.
            start: Position of the first element, for random draws.
            key: Of the random draws.
            want_error: Whether to turn ``rows`` into what the payload leaves out.
        """
        job = EncodeJob(
            x=rows.data_ptr(),
            head=None if head is None else head.data_ptr(),
            codes=codes.data_ptr(),
            width=rows.shape[1],
            row_bytes=codes.shape[1] * codes.element_size(),
            numbers=kernel.numbers.buffer_info()[0],
            tables=kernel.tables.buffer_info()[0],
            start=start,
            low=key[0],
            high=key[1],
            bits=kernel.bits,
            headers=kernel.headers,
            want_error=want_error,
        )
        self._run(loaded()[0].gradcomp_encode, kernel, job, rows.shape)

    def decode(
        self, kernel: Kernel, heads: Sequence[Any], codes: Sequence[Any], out: Any, scale: Any
    ) -> None:
        """Decode payloads and add them up.

        Args:
            kernel: What to do.
            heads: One of each payload, as in :meth:`encode`; empty without headers.
            codes: One of each payload, as in :meth:`encode`.
            out: Shape ``(r, width)``, float32, to be filled.
            scale: Factor on the sum, a number or a scalar tensor; None for none.
        """
        addresses = ctypes.c_void_p * len(codes)
        code_list = addresses(*(part.data_ptr() for part in codes))
        head_list = addresses(*(part.data_ptr() for part in heads))
        job = DecodeJob(
            out=out.data_ptr(),
            heads=ctypes.addressof(head_list),
            codes=ctypes.addressof(code_list),
            payloads=len(codes),
            width=out.shape[1],
            row_bytes=codes[0].shape[1] * codes[0].element_size(),
            numbers=kernel.numbers.buffer_info()[0],
            tables=kernel.tables.buffer_info()[0],
            scale=1.0 if scale is None else float(scale),
            scaled=scale is not None,
            bits=kernel.bits,
            headers=kernel.headers,
        )
        self._run(loaded()[0].gradcomp_decode, kernel, job, out.shape)

    def above(self, x: Any, limit: Any, out: Any) -> int:
        """Write ascending positions of magnitudes above a limit; return how many there are.

        Where there are more than ``out`` has room for, one more than that is returned.

        Args:
            x: Shape ``(n,)``, float32.
            limit: Bits of a magnitude.
            out: Int64, to be filled.
        """
        found: int = loaded()[0].gradcomp_above(
            x.data_ptr(), x.numel(), int(limit), out.data_ptr(), out.numel()
        )
        return found

    def kth(self, x: Any, k: int) -> int:
        """Return the bits of the k-th largest magnitude of float32 or of its bits."""
        bits: int = loaded()[0].gradcomp_kth(x.data_ptr(), x.numel(), k)
        return bits

    def largest(self, x: Any, out: Any) -> None:
        """Fill ``out``, int64, with ascending positions of that many largest magnitudes.

        Ties go to the lowest position.
        """
        loaded()[0].gradcomp_largest(x.data_ptr(), x.numel(), out.numel(), out.data_ptr())

    def _run(
        self, call: Callable[..., int], kernel: Kernel, job: Any, shape: tuple[int, int]
    ) -> None:
        number, (rows, width) = index(kernel.name), shape
        shares = max(1, min(self._threads, rows, rows * width // _WORTH_A_THREAD))
        edges = [rows * share // shares for share in range(shares + 1)]
        jobs = ctypes.byref(job)
        if shares == 1:
            states = [call(number, jobs, 0, rows)]
        else:
            pool = _pool(os.getpid(), self._threads)
            states = list(pool.map(lambda i: call(number, jobs, *edges[i : i + 2]), range(shares)))
        if any(states):
            raise MemoryError(f"{kernel.name}: no memory for the codes of one block")


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads of a process; a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="gradcomp")
