"""What differs between the backends, for Keras 3 on torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from ..torch.agreement import gathered
from ..torch.compression import Compression, Compressor
from ..torch.reduction import Reduction

__all__ = [
    "Compression",
    "Compressor",
    "Passes",
    "Reduction",
    "as_written",
    "average",
    "broadcast",
    "gathered",
    "hvd",
    "shape",
]


def as_written(function: Any) -> Any:
    """Return a function as it is: nothing rewrites it here."""
    return function


class Passes:
    """Adds up gradients on this rank, and lets an update happen every few passes.

    Args:
        every: Passes for one update, at least 2.
        mean: Whether an update takes the mean over its passes, not their sum.
    """

    def __init__(self, every: int, mean: bool) -> None:
        self._every, self._mean = every, mean
        self._sums: dict[int, Any] = {}
        self.count = 0
        """Passes so far."""

    def __call__(
        self, grads: Sequence[Any], variables: Sequence[Any], update: Callable[[list[Any]], None]
    ) -> None:
        """Add gradients, and call ``update`` with the sums when it is time to."""
        for variable, grad in zip(variables, grads):
            if grad is not None:
                self._sums[id(variable)] = grad.detach() + self._sums.get(id(variable), 0)
        self.count += 1
        if self.count % self._every:
            return
        share = self._every if self._mean else 1
        sums, self._sums = self._sums, {}
        update([None if id(v) not in sums else sums[id(v)] / share for v in variables])


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Give variables of Keras the values that they have on one rank.

    Names on the wire are positions: Keras numbers its own ones differently on each rank.
    """
    for i, variable in enumerate(variables):
        value = variable.value.detach()
        carried = value.float() if value.dtype is torch.bfloat16 else value.contiguous()
        sent = hvd.broadcast(carried, root_rank, name=f"gradcomp.broadcast.{i}")
        variable.assign(sent.to(value.dtype))


def average(values: Sequence[Any], name: str) -> list[Any]:
    """Return each value's mean over all ranks: a float, or a tensor of the value's shape."""
    own = [torch.as_tensor(value).detach().to("cpu", torch.float64) for value in values]
    flat = torch.cat([value.reshape(-1) for value in own])
    mean = hvd.allreduce(flat, op=hvd.Average, name=f"gradcomp.{name}")
    parts = mean.split([value.numel() for value in own])
    return [
        part.reshape(value.shape) if value.ndim else part.item() for part, value in zip(parts, own)
    ]


def shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a number, an array or a tensor."""
    return tuple(torch.as_tensor(value).shape)
