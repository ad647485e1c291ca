"""That all ranks are set alike.

Otherwise ranks would wait for one another in different collectives, or decode what was encoded by
another rule. How facts get from rank to rank is the front ends' business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import SettingsError, explain

_MODEL = "give every rank the same compression and the same model"


def check(facts: Mapping[int, Mapping[str, Any]], do: str = _MODEL) -> None:
    """Compare what ranks say of themselves.

    Args:
        facts: By rank, each by name.
        do: What to do where they differ.

    Raises:
        SettingsError: With every fact that differs, its values and their ranks.
    """
    names = dict.fromkeys(name for one in facts.values() for name in one)
    differ = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, one in facts.items():
            values.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            told = (
                f"{value} on rank{'s' * (len(who) > 1)} {_short(who)}"
                for value, who in values.items()
            )
            differ.append(f"{name}: {', '.join(told)}")
    if differ:
        raise SettingsError(
            explain(
                got="; ".join(differ),
                expected="the same on all ranks",
                do=do,
            )
        )


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown} and {len(ranks) - 4} more" if len(ranks) > 4 else shown
