"""A step's mark, at the end of payloads that Horovod adds up.

What a payload of ``randomk`` or ``acp`` means follows from the step: which elements were drawn, or
which factor is sent. Ranks that are at different steps, as after ``hvd.join`` in one of them, would
add up what does not belong together, and nothing would tell. So a payload ends with a one and a few
bits of the step's random key, each as one or two: in the sum of ranks at one step every number is
the first one's or twice that, whatever the reduction's factor and however many ranks took part.

Ones and twos are summed without rounding, in float16 up to :data:`MOST_RANKS` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import damage
from .codec import Call, Tensor
from .errors import explain

BITS = 8
WIDTH = 1 + BITS
"""Numbers at the end of a payload."""
MOST_RANKS = 1024
"""Beyond this many ranks payloads have no mark."""

_NEAR = 2.0**-14
"""Twice a number is rounded as the number itself is, so that this is for nothing but safety."""


def attach(xp: Any, payload: Tensor, call: Call) -> Tensor:
    """Return a payload with the mark of its step.

    Args:
        xp: An operations module.
        payload: Flat, float32 or float16.
        call: The step.
    """
    if call.size > MOST_RANKS:
        return payload
    return xp.concat([payload, xp.numbers([1, *_marks(call)], payload)], 0)


def detach(xp: Any, reduced: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return what was reduced without its mark, and whether the mark is wrong.

    Args:
        xp: An operations module.
        reduced: What Horovod made of the payloads of :func:`attach`.
        call: The step.

    Returns:
        The reduced payload and, shape ``(1,)``, 0 or :data:`.damage.STEPS`; None without a mark, or
        where the right one can be read without waiting.
    """
    if call.size > MOST_RANKS:
        return reduced, None
    numel = xp.numel(reduced) - WIDTH
    tail = xp.cast(reduced[numel:], "float32")
    # A key of tensors is part of a graph, or of what could be one.
    numbers = xp.known(tail) if isinstance(call.key[0], int) else None
    if numbers is not None and _plainly_right(numbers, call):
        return reduced[:numel], None
    first = xp.copy(tail[:1])
    expected = xp.mul_(xp.numbers(_marks(call), tail), first)
    off = xp.sub(tail[1:], expected)
    allowed = xp.scaled(first, _NEAR)
    # Written so that what is not a number is wrong.
    near = xp.less(xp.mul_(off, xp.copy(off)), xp.mul_(allowed, xp.copy(allowed)))
    return reduced[:numel], damage.unless(xp, xp.equal(xp.count_true(near), BITS), damage.STEPS)


def _plainly_right(numbers: Sequence[float], call: Call) -> bool:
    """Return whether numbers that can be read are the mark; tensors say so at a higher price."""
    first, *others = numbers
    return all(abs(n - first * m) < _NEAR * abs(first) for n, m in zip(others, _marks(call)))


def complaint(_: int, what: int, name: str) -> str:
    """Return the message for a wrong mark, as :func:`.damage.settle` asks for it."""
    return explain(
        got=f"{damage.describe(what)}, for '{name}'",
        expected="all ranks at the same step",
        why="after hvd.join the ranks that had joined are behind, as is a rank that alone loaded a "
        "state, and what it sends belongs to other elements",
        do="call compression.join() in place of hvd.join(), and load states on all ranks",
    )


def _marks(call: Call) -> list[Any]:
    return [1 + call.key[0] // 2**bit % 2 for bit in range(BITS)]
