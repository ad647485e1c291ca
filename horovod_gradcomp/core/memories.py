"""The table of all memories, looked up where a setting or a string form names one."""

from __future__ import annotations

from .memory import Memory, NoMemory, Residual
from .momentum import Momentum
from .reference import EF21, Differential

MEMORIES: dict[str, type[Memory]] = {
    "none": NoMemory,
    "residual": Residual,
    "momentum": Momentum,
    "differential": Differential,
    "ef21": EF21,
}
"""Name, as in ``memory=`` and in string forms, to class."""
