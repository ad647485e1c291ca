"""What the turns of two systems in one run say of them: ratios within a round, never of times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def ratios(above: str, below: str, turns: Sequence[Row]) -> list[float]:
    """Return one system's step over another's, round by round."""
    over, under = ([t["step_ms"] for t in turns if t["system"] == one] for one in (above, below))
    return [a / b for a, b in zip(over, under)]


def compared(name: str, base: str, turns: Sequence[Row], called: str) -> Row:
    """Return a system's step, and how many times another's it is.

    Args:
        name: Of the system.
        base: Of the other one.
        turns: Of all systems, round by round, each with ``system`` and ``step_ms``.
        called: Key of the median ratio.

    Returns:
        ``step_ms``, the ratio's median, and ``times_least`` and ``times_most`` over rounds.
    """
    times = ratios(name, base, turns)
    return {
        "step_ms": statistics.median(t["step_ms"] for t in turns if t["system"] == name),
        called: statistics.median(times),
        "times_least": min(times),
        "times_most": max(times),
    }
