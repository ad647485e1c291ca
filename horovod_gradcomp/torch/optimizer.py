"""``DistributedOptimizer`` with Horovod's own arguments, bound at once instead of on first use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

from .compression import Compression, Compressor


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Return ``hvd.DistributedOptimizer(...)`` with its compressor bound to it.

    Arguments are Horovod's, in Horovod's order. ``compression`` may also be a string form such as
    ``"topk:ratio=0.01"``.
    """
    if isinstance(compression, str):
        compression = Compression.from_string(compression)
    wrapped = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=named_parameters,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    if isinstance(compression, Compressor) and op != hvd.Adasum:
        compression.bind_optimizer(wrapped)
    return wrapped
