"""What is remembered goes with a parameter, from one binding by hand to another.

Keras binds anew whenever other variables train. What a variable has not sent yet is then in the
binding that was in use before, and would never be sent. So a binding that begins a step first
takes what others remember of its own parameters, and leaves zero there. Nothing else is in a
parameter's place that is new, so adding is moving, for every memory.

All ranks bind in the same order and so move alike; none is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .unit import Unit

if TYPE_CHECKING:
    from .binding import Binding

Pair = tuple[tuple[Unit, int], tuple[Unit, int]]


def take_over(binding: Binding, others: Iterable[Binding]) -> bool:
    """Move what is remembered of shared parameters to a binding, between two of its steps.

    The step goes on from the largest, so that schedules do not begin again. What a parameter
    remembers stays where it is if the two bindings hold it by different memories.

    Args:
        binding: That takes.
        others: That give; those in the middle of a step keep what they have.

    Returns:
        Whether all was moved; False if one is in the middle of a step.
    """
    done, latest = True, binding
    for other in others:
        shared = [p for p in binding.params if other.index_of_parameter(p) is not None]
        if shared and other.in_step:
            done = False
        elif shared:
            pairs = [(other.place_of(p), binding.place_of(p)) for p in shared]
            _move([(a, b) for a, b in pairs if a and b and _alike(a[0], b[0])], other)
            latest = other if other.step > latest.step else latest
    if latest is not binding:
        binding.go_on_from(latest)
    return done


def _alike(unit: Unit, other: Unit) -> bool:
    return bool(unit.memory.slots) and unit.memory.slots == other.memory.slots


def _move(pairs: Iterable[Pair], other: Binding) -> None:
    for (old, i), (new, j) in pairs:
        other.settle(old)
        for here, there in zip(old.store.state, new.store.state):
            part = old.store.part(here, i)
            new.store.part(there, j).add_(part)
            part.zero_()
