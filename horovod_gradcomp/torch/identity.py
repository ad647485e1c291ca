"""Which parameter is this?

Horovod hands ``compress`` a tensor and nothing else. ``p.grad`` is a new object each step, so
neither its address nor the order of calls is a key. The keys are the parameters of the optimizer
that calls, which is found among the callers when it is not known yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import torch

from ..core.errors import BindingError, explain

_DEPTH = 12


def _callers() -> Iterator[Any]:
    frame: Any = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def calling_optimizer() -> Any | None:
    """Return the Horovod optimizer among the callers, or None."""
    for frame in _callers():
        owner = frame.f_locals.get("self")
        if hasattr(owner, "_parameter_names") and hasattr(owner, "_requires_update"):
            return owner
    return None


def calling_parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that Horovod's optimizer works on in a frame above, or None.

    Needed where ``tensor`` is not ``p.grad`` itself: with ``sparse_as_dense`` it is a dense copy.
    """
    for frame in _callers():
        if frame.f_code.co_name == "_allreduce_grad_async":
            p = frame.f_locals.get("p")
            if isinstance(p, torch.Tensor) and p.shape == tensor.shape:
                return p
            return None
    return None


def refuse_other_callers() -> None:
    """Raise where the slot is used by an operation whose result has another shape."""
    for frame in _callers():
        name = frame.f_code.co_name
        if name in ("reducescatter", "grouped_reducescatter"):
            raise BindingError(
                explain(
                    got=f"compression= in hvd.{name}",
                    expected="hvd.DistributedOptimizer, hvd.allreduce or hvd.grouped_allreduce",
                    why="each rank gets another part of the result, which no payload can be cut to",
                    do=f"call hvd.{name} without compression=",
                )
            )


def refuse_other_set(process_set: Any) -> None:
    """Raise where a bare reduction runs over other ranks than those that were bound.

    What is summed brings nothing back that could tell, and what ranks share would drift apart.

    Args:
        process_set: That was bound.
    """
    for frame in _callers():
        if frame.f_code.co_name in ("allreduce", "grouped_allreduce"):
            found = frame.f_locals.get("process_set")
            if found is not None and _ranks(found) != _ranks(process_set):
                raise BindingError(
                    explain(
                        got=f"a reduction over the process set of ranks {_ranks(found)}",
                        expected=f"that of ranks {_ranks(process_set)}, which was bound",
                        do="bind a compressor of its own for each process set: "
                        "compression.bind(named_parameters, process_set=...)",
                    )
                )
            return


def _ranks(process_set: Any) -> list[int]:
    return list(process_set.ranks or range(hvd.size()))


def refuse_adasum(tensor: torch.Tensor, optimizer: Any) -> None:
    """Raise where Horovod hands over a parameter (holding a difference) and not its gradient."""
    if any(tensor is p for p in optimizer._parameter_names):
        raise BindingError(
            explain(
                got="op=Adasum",
                expected="op=Average or op=Sum",
                why="Adasum is not linear, and its optimizer hands over differences of weights, "
                "which this call has already changed",
                do="start the run again with op=Average, or with hvd.Compression.none",
            )
        )
