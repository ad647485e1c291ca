"""What a received payload may be wrong in, and who says so.

A rank with bad memory, another version or a bug may send anything. Decoding never goes beyond a
tensor, whatever the bytes are, and says of each payload what is wrong with it: positions that do
not ascend within the tensor, counts that do not add up, headers that no encoder writes. Values and
codes are not looked at: any of them could have been sent, and what is not finite shows in the
result.

Damage is a float32 number, 0 or the sum of what is wrong, one for each payload. Where it can be
read without waiting (on a CPU) it ends in an :class:`ExchangeError`. On a GPU, and in a graph, the
result is spoilt to NaN instead, as that of a step in which some gradient was not finite; a front
end may have its graph assert on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from .codec import Tensor
from .errors import ExchangeError, explain

POSITIONS, COUNTS, HEADERS, STEPS = 1, 2, 4, 8
_REASONS = {
    POSITIONS: "positions that do not ascend within the tensor",
    COUNTS: "another number of positions than these settings have",
    HEADERS: "scales that are not finite or of the wrong sign",
    STEPS: "payloads of ranks at different steps, added up",
}


def unless(xp: Any, whole: Tensor, what: int) -> Tensor:
    """Return the damage of one payload, shape ``(1,)``: 0 where ``whole``, else ``what``."""
    wrong = xp.cast(xp.logical_not(whole), "float32")
    return xp.scale_(xp.reshape(wrong, (1,)), what)


def added(xp: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return both kinds of damage of the same payloads; None where nothing can be wrong."""
    if first is None or second is None:
        return second if first is None else first
    return xp.add(first, second)


def joined(xp: Any, each: Sequence[Tensor | None]) -> Tensor | None:
    """Return the damage of one payload after the other, of which all or none are None."""
    known = [one for one in each if one is not None]
    return xp.concat(known, 0) if known else None


def settle(
    xp: Any,
    name: str,
    damage: Tensor | None,
    bad: Tensor,
    ranks: Sequence[int] | None = None,
    tell: Callable[[int, int, str], str] | None = None,
) -> Tensor:
    """Raise :class:`ExchangeError` for what is damaged, or make the step a bad one.

    A step that is bad anyway is dropped by all ranks, and its payloads are of no account: scales of
    values that are not finite are not finite.

    Args:
        xp: An operations module.
        name: Of the tensor or bucket, for messages.
        damage: Of all payloads, in rank order.
        bad: 0, or NaN where some rank's input was not finite.
        ranks: Who has sent them; default: all, in order.
        tell: Makes the message of a rank, what is wrong, and the name; default: one that names all
            three.

    Returns:
        ``bad``, or NaN where something is damaged and cannot be read here.
    """
    if damage is None:
        return bad
    known = xp.known(damage)
    if known is None:
        return xp.add(bad, xp.badness(xp.where(xp.equal(damage, 0.0), damage, float("nan"))))
    if any(known) and xp.known(bad) == [0.0]:
        rank, what = next(
            (rank, int(what)) for rank, what in zip(ranks or range(len(known)), known) if what
        )
        raise ExchangeError((tell or _of_rank)(rank, what, name))
    return bad


def _of_rank(rank: int, what: int, name: str) -> str:
    return complaint(f"from rank {rank}", describe(what), name)


def describe(what: int) -> str:
    """Return what is wrong, in words."""
    return " and ".join(reason for bit, reason in _REASONS.items() if what & bit)


def complaint(source: str, what: str, name: str) -> str:
    """Return the message for a damaged payload."""
    return explain(
        got=f"{what} for '{name}' {source}",
        expected="a payload as this version and these settings write it",
        why="decoding it would give a wrong gradient; that rank runs another version, or its "
        "memory or network is faulty",
        do="use the same version on every rank; where it is the same, replace that machine",
    )


def legend() -> str:
    """Return what each number stands for, for messages that can only show numbers."""
    return ", ".join(f"{bit} for {reason}" for bit, reason in _REASONS.items())
