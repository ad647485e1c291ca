"""Which exchange the payloads of a bucket take in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import hierarchical, twophase
from .codec import Codec, Shape
from .hierarchical import Nodes
from .memory import Memory
from .twophase import Part


class Team(NamedTuple):
    """Who takes part."""

    size: int
    """Number of ranks."""
    rank: int
    """Which of them this is."""
    nodes: Nodes | None = None
    """Where they are, if they can exchange anything inside nodes and between them."""


class Route(NamedTuple):
    """One exchange."""

    exchange: str
    """"whole", "two_phase" or "hierarchical"."""
    part: Part | None
    """What this rank reduces; None where every rank reduces everything."""


def route(how: str, codec: Codec, memory: Memory, shapes: Sequence[Shape], team: Team) -> Route:
    """Return the exchange of a step, equal on all ranks but for the part.

    Args:
        how: The setting ``exchange``.
        codec: Of the step.
        memory: Of the bucket.
        shapes: Of its tensors.
        team: Who takes part.
    """
    size, rank, nodes = team
    if nodes is not None and _takes_nodes(how, codec, memory, shapes, nodes):
        turn = nodes.inside(rank).index(rank)
        return Route("hierarchical", twophase.parts(shapes, nodes.local)[turn])
    two = not twophase.misfit(codec, memory)
    if how == "two_phase":
        two = two and twophase.fits(shapes, size)
    else:
        two = two and how == "auto" and twophase.pays(codec, shapes, size)
    return Route("two_phase", twophase.parts(shapes, size)[rank]) if two else Route("whole", None)


def _takes_nodes(
    how: str, codec: Codec, memory: Memory, shapes: Sequence[Shape], nodes: Nodes
) -> bool:
    if hierarchical.misfit(codec, memory):
        return False
    if how == "hierarchical":
        return hierarchical.fits(shapes, nodes)
    return how == "auto" and hierarchical.pays(codec, shapes, nodes)
