"""The compiled kernels on PyTorch tensors, see :class:`horovod_gradcomp.ops.Kernels`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from .. import native
from ..core.kernel import Kernel
from ..native import pages

Tensor = torch.Tensor

_DTYPES = {"uint8": torch.uint8, "float16": torch.float16}


def apply(tensors: Sequence[Tensor]) -> bool:
    """Return whether kernels are there, and may read and write the storage of all these."""
    # A subclass may have no storage, as while a graph is traced.
    for x in tensors:
        plain = type(x) is Tensor or type(x) is torch.nn.Parameter
        if not plain or x.device.type != "cpu" or not x.is_contiguous():
            return False
    return native.available()


def reason() -> str:
    """Return in one line why the kernels are not available; empty where they are."""
    return native.reason()


def fresh(shape: int | torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return storage to fill; on a CPU with huge pages, whose faults cost half as much."""
    x = torch.empty(shape, dtype=dtype, device=like.device)
    if type(x) is Tensor and x.device.type == "cpu":
        pages.advise(x.data_ptr(), x.numel() * x.element_size())
    return x


def encode(
    kernel: Kernel,
    spans: array[int],
    nbytes: int,
    x: Tensor,
    key: tuple[int, int],
    *,
    want_error: bool,
    dtype: str = "uint8",
) -> tuple[Tensor, Tensor | None]:
    kind = _DTYPES[dtype]
    payload = fresh(nbytes // kind.itemsize, kind, x)
    native.encode(
        kernel,
        spans,
        x.data_ptr(),
        payload.data_ptr(),
        nbytes,
        key,
        want_error=want_error,
        threads=torch.get_num_threads(),
    )
    return payload, x if want_error else None


def decode(
    kernel: Kernel,
    spans: array[int],
    nbytes: int,
    payloads: Sequence[Tensor],
    numel: int,
    *,
    scale: Any,
) -> Tensor:
    for payload in payloads:
        if payload.numel() * payload.element_size() < nbytes:
            raise AssertionError(f"a payload of {payload.numel()} bytes where {nbytes} are due")
    out = fresh(numel, torch.float32, payloads[0])
    native.decode(
        kernel,
        spans,
        [payload.data_ptr() for payload in payloads],
        out.data_ptr(),
        None if scale is None else float(scale),
        threads=torch.get_num_threads(),
    )
    return out


def largest(x: Tensor, k: int, rank: int, stride: int) -> Tensor:
    out = fresh(k, torch.int64, x)
    native.largest(x.data_ptr(), x.numel(), k, rank, stride, out.data_ptr())
    return out


def above(x: Tensor, bits: int, k: int, rank: int, stride: int) -> Tensor:
    out = fresh(k, torch.int64, x)
    native.above(x.data_ptr(), x.numel(), bits, k, rank, stride, out.data_ptr())
    return out


def words(key: tuple[int, int], start: int, count: int, like: Tensor) -> Tensor:
    out = fresh(count, torch.int32, like)
    native.words(key, start, count, out.data_ptr())
    return out
