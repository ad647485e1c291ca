"""What variables are called, alike on all ranks and in every run.

Keras numbers layers by how many there have been in the process, which may differ between ranks. So
a variable is called by the order in which it was first met and the last part of its name.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Met(NamedTuple):
    """A variable that has been met, as a checkpoint tells it."""

    name: str
    shape: str
    listed: int
    """Which list it was met in: variables of one list can be told apart by their order."""


class Names:
    """Names of the variables of one compressor, which are told apart by identity."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Any, str, str]] = {}
        self.met: list[Met] = []
        """All of them, in order."""

    def meet(self, variables: Sequence[Any], paths: Sequence[str] = ()) -> None:
        """Name those that have none yet; what is no variable is passed over.

        Args:
            variables: In an order that is the same on all ranks.
            paths: What rules and reports call them, where their own names do not tell them apart.
        """
        listed = self.met[-1].listed + 1 if self.met else 0
        for place, variable in enumerate(variables):
            known = self._names.get(id(variable))
            if isinstance(variable, tf.Variable) and (known is None or known[0]() is not variable):
                name = f"{len(self.met)}.{last_part(variable.name)}"
                path = (paths[place] if paths else variable.name).split(":")[0]
                self.met.append(Met(name, str(variable.shape), listed))
                self._names[id(variable)] = weakref.ref(variable), name, path

    def of(self, variable: Any) -> str:
        """Return the name of a variable that has been met, as in ``0.kernel``."""
        return self._names[id(variable)][1]

    def path(self, variable: Any) -> str:
        """Return what rules call a variable that has been met, as in ``dense_3/kernel``."""
        return self._names[id(variable)][2]

    def label(self, variable: Any) -> str:
        """Return what tells a user which variable it is, as in ``0.dense_3/kernel``."""
        if not isinstance(variable, tf.Variable):
            return ""
        return f"{self.of(variable).split('.')[0]}.{self.path(variable)}"

    def describe(self, variables: Sequence[Any]) -> str:
        """Return one word for variables that have been met, alike where they are."""
        known = [v for v in variables if isinstance(v, tf.Variable)]
        named = [(self.of(v), str(v.shape), v.dtype.name) for v in known]
        digest = hashlib.sha256(repr(named).encode()).hexdigest()[:8]
        return f"{len(variables)} of digest {digest}"


def last_part(name: str) -> str:
    """Return the part of a variable's name that Keras does not number."""
    part = re.sub(r"_\d+$", "", name.split(":")[0].split("/")[-1])
    return re.sub(r"[^A-Za-z0-9_-]", "_", part)
