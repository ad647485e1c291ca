"""Horovod's settings in the environment, as Horovod reads them."""

from __future__ import annotations

import os
import re


def number(name: str, default: int) -> int:
    """Return a variable's number: the default where it is not set, 0 where it holds none.

    So does C's ``strtol``, by which Horovod reads them.

    Args:
        name: Such as ``HOROVOD_CACHE_CAPACITY``.
        default: Of Horovod.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    found = re.match(r"\s*[+-]?[0-9]+", text)
    return int(found.group()) if found else 0


def elastic() -> bool:
    """Return whether Horovod's elastic launcher started this process."""
    return number("HOROVOD_ELASTIC", 0) > 0
