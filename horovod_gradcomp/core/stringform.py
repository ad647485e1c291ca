"""How a string form is read: ``name:key=value,key=value``, with another one after ``+``.

Here nothing is known of what the names mean; :mod:`.settings` looks them up.
"""

from __future__ import annotations

import re
from typing import Any

from .errors import SettingsError, explain
from .schedule import parse_ramp


def split(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the keywords of a string form, values turned into numbers.

    What follows a ``+`` becomes the keyword ``then``.
    """
    if not isinstance(text, str):
        raise SettingsError(explain(got=repr(text), expected="a string such as 'topk:ratio=0.01'"))
    text, *inner = re.split(r"\+(?=\s*[A-Za-z_])", text, maxsplit=1)  # not in 1e+5
    name, _, rest = text.strip().partition(":")
    settings: dict[str, Any] = {"then": inner[0].strip()} if inner else {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise SettingsError(
                f"{name}: " + explain(got=repr(item), expected="key=value", do=f"see {text!r}")
            )
        if key.strip() in settings:
            raise SettingsError(f"{name}: " + explain(got=f"{key} twice", expected="it once"))
        settings[key.strip()] = _value(value.strip())
    return name.strip(), settings


def _value(text: str) -> Any:
    moving = parse_ramp(text)
    if moving is not None:
        return moving
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "true": True, "False": False, "false": False, "None": None}.get(
        text, text
    )
