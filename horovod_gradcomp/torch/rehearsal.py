"""One exchange of an optimizer's gradients with other settings than those in use, timed.

It has buckets, memory and names of its own, and is gone afterwards: training does not see it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

from ..core import auto, policy
from ..core.settings import Settings
from ..core.stats import Stats
from .agreement import gathered
from .binding import Binding

Tensor = torch.Tensor

MOST_BYTES = 64 * 2**20
"""Of the gradients that are tried; of more, every second, fourth, ... tensor stands for all."""

_RUNS = 2
"""After one that does not count."""


class Load(NamedTuple):
    """What an optimizer's gradients are to a candidate."""

    payload: float
    """Bytes of a rank, with what is sent as it is."""

    tried: list[int]
    """Positions of the parameters that stand for all that are compressed."""

    scale: float
    """Bytes of all of them over those of the tried ones."""


def load(settings: Settings, names: Sequence[str], params: Sequence[Tensor]) -> Load:
    """Return what a rehearsal would try; nothing is run."""
    payload, tried, numel = 0.0, [], 0
    for i, (name, p) in enumerate(zip(names, params)):
        own = policy.choose(settings, name, tuple(p.shape)) if p.is_floating_point() else None
        if own is None:
            payload += p.numel() * p.element_size()
        else:
            payload += own.codec.wire_bytes(tuple(p.shape))
            tried.append(i)
            numel += p.numel()
    few = tried
    while len(few) > 1 and 4 * sum(params[i].numel() for i in few) > MOST_BYTES:
        few = few[::2]
    part = sum(params[i].numel() for i in few)
    return Load(payload, few, numel / part if part else 1.0)


def rehearse(binding: Binding, settings: Settings, found: Load, label: str) -> auto.Rehearsal:
    """Return what the slowest rank took of each part; all ranks must call it.

    Args:
        binding: Of the optimizer.
        settings: Of the candidate.
        found: What is tried.
        label: For the names of its collectives.
    """
    named = [(binding.names[i], binding.params[i]) for i in found.tried]
    own = Binding(settings, Stats(), named, binding.process_set, None, label=label)
    own.step = max(phase.first for phase in settings.phases)  # as it is in the end
    grads = [_gradient(p) for _, p in named]
    runs = [_run(own, grads) for _ in range(1 + _RUNS)][1:]
    best = min(runs, key=lambda run: run[2])
    told = gathered(best, f"{own.prefix}.told", binding.process_set)
    encode, decode, whole = (found.scale * max(one) for one in zip(*told))
    count = round(found.scale * len(own.units))
    return auto.Rehearsal(encode, decode, whole, auto.pieces(settings, count))


def _gradient(p: Tensor) -> Tensor:
    """Return values such as the parameter's gradients have."""
    grad = p.grad
    if grad is None or grad.is_sparse or grad.shape != p.shape:
        return torch.zeros_like(p, requires_grad=False)
    return grad.detach()


def _run(own: Binding, grads: Sequence[Tensor]) -> tuple[float, float, float]:
    """Return the seconds of encoding, decoding and all of one exchange on this rank."""
    process_set = own.process_set
    hvd.allreduce(torch.zeros(1), name=f"{own.prefix}.wait", process_set=process_set)
    before = _decoding(own)
    start = time.perf_counter()
    sent: list[tuple[Any, Any]] = []
    for i, grad in enumerate(grads):
        payload, ticket = own.compress(i, grad)
        name = f"{own.prefix}.payload.{i}"
        handle = hvd.allreduce_async_(payload, name=name, process_set=process_set)
        sent.append((handle, ticket))
    encoded = time.perf_counter()
    for handle, ticket in sent:
        own.decompress(hvd.synchronize(handle), ticket)
    for grad in grads[-1:]:
        if grad.is_cuda:
            torch.cuda.synchronize(grad.device)
    end = time.perf_counter()
    return encoded - start, _decoding(own) - before, end - start


def _decoding(own: Binding) -> float:
    return sum(unit.stats.decode_ms for unit in own.units) / 1e3
