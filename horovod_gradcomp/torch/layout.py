"""Which parameters are encoded together, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core import policy
from ..core.plan import buckets
from ..core.settings import Settings
from ..core.stats import Stats
from .unit import Unit

Place = tuple[Unit, int]
"""A unit and the position of a parameter in its bucket."""


def lay_out(
    settings: Settings, names: Sequence[str], params: Sequence[torch.Tensor], stats: Stats
) -> tuple[list[Unit], list[Place | None]]:
    """Return the units of an optimizer, and where each parameter is, None if uncompressed.

    Args:
        settings: Of the compressor.
        names: Of the parameters.
        params: The parameters, in the optimizer's order.
        stats: To which what is counted is added.
    """
    groups: dict[tuple[Any, ...], tuple[Settings, list[int]]] = {}
    for i in reversed(range(len(params))):  # gradients arrive last layer first
        p = params[i]
        chosen = None
        if p.is_floating_point():
            chosen = policy.choose(settings, names[i], tuple(p.shape))
        if chosen is None:
            stats.bypassed.numel += p.numel()
            stats.bypassed_names.append(names[i])
        else:
            groups.setdefault((p.device, id(chosen)), (chosen, []))[1].append(i)
    units: list[Unit] = []
    where: list[Place | None] = [None] * len(params)
    for (device, _), (own, indices) in groups.items():
        entries = [(names[i], tuple(params[i].shape)) for i in indices]
        at = iter(indices)
        for bucket in buckets(entries, settings.options.bucket_bytes, together=not own.by_horovod):
            unit = Unit(bucket, own, device)
            for member in range(len(bucket.members)):
                where[next(at)] = (unit, member)
            units.append(unit)
            stats.units[_unique(bucket.name, stats)] = unit.stats
    return units, where


def clear_away(
    units: Sequence[Unit],
    where: Sequence[Place | None],
    names: Sequence[str],
    params: Sequence[torch.Tensor],
    stats: Stats,
) -> None:
    """Let other settings lay out an optimizer anew; what was counted stays."""
    for unit in units:
        unit.stats.numel = unit.stats.state_bytes = 0
    for name, p, place in zip(names, params, where):
        if place is None:
            stats.bypassed.numel -= p.numel()
            stats.bypassed_names.remove(name)


def _unique(name: str, stats: Stats) -> str:
    count, unique = 1, name
    while unique in stats.units:
        count += 1
        unique = f"{name}#{count}"
    return unique
