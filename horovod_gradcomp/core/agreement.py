"""That all ranks are set alike: what each says of itself, and what is said where they differ.

Otherwise ranks would wait for one another in different collectives, or decode what was encoded by
another rule. How the lines get from rank to rank is the front ends' business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from .errors import explain


def line(facts: Mapping[str, str]) -> bytes:
    """Return one rank's facts, to be sent to all; alike where the facts are."""
    return json.dumps(dict(facts)).encode() + b"\n"


def complaint(lines: bytes, ranks: Sequence[int]) -> str | None:
    """Return every fact that differs, with its values and their ranks, or None.

    Args:
        lines: All ranks' lines, one after the other.
        ranks: Whose they are, in this order.
    """
    every = [json.loads(text) for text in lines.splitlines()]
    names = dict.fromkeys(name for one in every for name in one)
    differ = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, one in zip(ranks, every):
            values.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            told = (
                f"{value} on rank{'s' * (len(who) > 1)} {_short(who)}"
                for value, who in values.items()
            )
            differ.append(f"{name}: {', '.join(told)}")
    if not differ:
        return None
    return explain(
        got="; ".join(differ),
        expected="the same on all ranks",
        do="give every rank the same compression and the same model",
    )


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown} and {len(ranks) - 4} more" if len(ranks) > 4 else shown
