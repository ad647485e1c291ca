"""What ``gradcomp bench network --json`` writes: facts of each part, and its rows."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import SettingsError, explain
from .costs import machine

Row = dict[str, Any]
Content = dict[str, Any]


_PART = "model", "hosts", "bandwidth"
"""What all rows of one table have in common."""


def grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return rows together that have the same under some keys, in order of the first of each."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.values())


def parts(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each table."""
    return grouped(rows, _PART)


def part(row: Row) -> tuple[Any, ...]:
    """Return which table a row is of."""
    return tuple(row[key] for key in _PART)


def nothing() -> Content:
    """Return what is filled in."""
    return {"machine": machine(), "facts": [], "rows": []}


def together(before: Content, now: Content) -> Content:
    """Return what was measured now, and before that of other models, hosts and links.

    Raises:
        SettingsError: It was another machine.
    """
    if before["machine"] != now["machine"]:
        raise SettingsError(
            explain(got="--add", expected=f"rows of this machine, not of {before['machine']}")
        )
    new = {part(facts) for facts in now["facts"]}
    kept = {key: [x for x in before[key] if part(x) not in new] for key in ("facts", "rows")}
    return {**now, **{key: kept[key] + now[key] for key in kept}}


def read(path: Path) -> Content:
    """Return a file's content.

    Raises:
        SettingsError: It holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(explain(got=f"{path}: {error}", expected="a JSON file")) from None
    if not isinstance(content, dict) or not {"machine", "facts", "rows"} <= content.keys():
        raise SettingsError(
            explain(got=str(path), expected="what 'gradcomp bench network --json FILE' writes")
        )
    return content


def write(path: Path, content: Content) -> None:
    """Write a file that :func:`read` reads."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def taken() -> dict[str, str]:
    """Return how and when a part is measured."""
    return {
        "command": "gradcomp " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
