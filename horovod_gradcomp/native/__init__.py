"""The compiled kernels, where there are any: at memory speed, what tensor operations do in passes.

The library is plain C without Python's or a framework's headers. It is loaded by ctypes, which
lets go of Python's lock during a call. Tensors are taken by address, so this package knows no
framework; which tensors qualify is for the operations modules to say. Large work is split over
threads by rows, and no result depends on how.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from ..core.kernel import SPAN, Kernel
from .library import SWITCH, available, find, index, level, loaded, reason, use
from .structs import DecodeCall, EncodeCall

__all__ = [
    "SWITCH",
    "above",
    "available",
    "decode",
    "encode",
    "find",
    "index",
    "largest",
    "level",
    "loaded",
    "reason",
    "use",
    "words",
]


def encode(
    kernel: Kernel,
    spans: array[int],
    x: int,
    payload: int,
    nbytes: int,
    key: tuple[int, int],
    *,
    want_error: bool,
    threads: int,
) -> None:
    """Encode a flat tensor into a payload.

    Args:
        kernel: What to do.
        spans: Where rows lie, from :func:`horovod_gradcomp.core.kernel.spans`.
        x: Address of the float32 values; they become the error where that is wanted.
        payload: Address of the bytes to fill. Padding and flag at the end become zero.
        nbytes: How many there are.
        key: Of the random draws.
        want_error: Whether to turn ``x`` into what the payload leaves out.
        threads: How many to use at most.
    """
    call = EncodeCall(
        x=x,
        payload=payload,
        nbytes=nbytes,
        spans=spans.buffer_info()[0],
        count=len(spans) // SPAN,
        numbers=kernel.numbers.buffer_info()[0],
        tables=kernel.tables.buffer_info()[0],
        kernel=index(kernel.name),
        threads=threads,
        low=key[0],
        high=key[1],
        bits=kernel.bits,
        headers=kernel.headers,
        want_error=want_error,
    )
    _judge(kernel, loaded()[0].gradcomp_encode(call))


def decode(
    kernel: Kernel,
    spans: array[int],
    payloads: Sequence[int],
    out: int,
    scale: float | None,
    *,
    threads: int,
) -> None:
    """Decode payloads and add them up.

    Args:
        kernel: What to do.
        spans: As in :func:`encode`.
        payloads: Their addresses.
        out: Address of the float32 values to fill.
        scale: Factor on the sum; None for none.
        threads: How many to use at most.
    """
    addresses = (ctypes.c_void_p * len(payloads))(*payloads)
    call = DecodeCall(
        out=out,
        payloads=ctypes.addressof(addresses),
        number=len(payloads),
        spans=spans.buffer_info()[0],
        count=len(spans) // SPAN,
        numbers=kernel.numbers.buffer_info()[0],
        tables=kernel.tables.buffer_info()[0],
        kernel=index(kernel.name),
        threads=threads,
        scale=1.0 if scale is None else scale,
        scaled=scale is not None,
        bits=kernel.bits,
        headers=kernel.headers,
    )
    _judge(kernel, loaded()[0].gradcomp_decode(call))


def largest(x: int, numel: int, k: int, rank: int, stride: int, out: int) -> None:
    """Write the ascending positions of the k largest magnitudes, ties by lowest position.

    Args:
        x: Address of float32 values.
        numel: How many there are.
        k: ``1 <= k <= numel``.
        rank: Which of the magnitudes of a sample is a little below the k-th of all; 0 for none.
        stride: One element in so many is in the sample.
        out: Address of k int64 to fill.
    """
    loaded()[0].gradcomp_largest(x, numel, k, rank, stride, out)


def above(x: int, numel: int, bits: int, k: int, rank: int, stride: int, out: int) -> None:
    """Write positions as :func:`horovod_gradcomp.core.select.above` chooses them.

    Args:
        x: Address of float32 values.
        numel: How many there are.
        bits: Of the limit.
        k: ``1 <= k <= numel``.
        rank: As in :func:`largest`.
        stride: As in :func:`largest`.
        out: Address of k int64 to fill.
    """
    loaded()[0].gradcomp_above(x, numel, bits, k, rank, stride, out)


def words(key: tuple[int, int], start: int, count: int, out: int) -> None:
    """Write what :func:`horovod_gradcomp.core.random.words` draws.

    Args:
        key: Two 32-bit words.
        start: First position.
        count: Number of words.
        out: Address of as many int32 to fill.
    """
    loaded()[0].gradcomp_words(*key, start, count, out)


def _judge(kernel: Kernel, state: int) -> None:
    if state:
        raise MemoryError(f"{kernel.name}: no memory for the codes of one block")
