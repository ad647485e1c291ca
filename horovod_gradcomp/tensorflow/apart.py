"""A trace of Horovod's reduction for each list of variables.

Called eagerly, Horovod reduces in a ``tf.function`` that it keeps for each compressor, and
TensorFlow takes what it has traced for any other variables of the same shapes and dtypes, with the
memories of the first ones in it. So that function is made to look at the variables that it is
called with. A user's function is left alone, and only noticed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

_FUNCTION: Any = type(tf.function(lambda: None))


class _Trace(NamedTuple):
    variables: tuple[Any, ...]
    """Weak references: a variable that is gone may have given its id to another."""

    function: Any
    """That has been traced for them; None for Horovod's own."""

    @property
    def gone(self) -> bool:
        """Whether any of them is gone."""
        return any(own() is None for own in self.variables)

    def fits(self, variables: Sequence[Any]) -> bool:
        return all(own() is other for own, other in zip(self.variables, variables))


class _Apart(_FUNCTION):  # type: ignore[misc]
    """A ``tf.function`` of Horovod that is traced anew for other variables."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = tf.nest.flatten((args, kwargs))
        variables = [one for one in given if isinstance(one, tf.Variable)]
        traces, key = self._gradcomp_traces, tuple(map(id, variables))
        if key not in traces or not traces[key].fits(variables):
            for old in [k for k, trace in traces.items() if trace.gone]:
                del traces[old]
            traces[key] = _Trace(_weak(variables), self._gradcomp_anew())
        function = traces[key].function
        return (super().__call__ if function is None else function)(*args, **kwargs)

    def _gradcomp_anew(self) -> Any:
        reduce, number = self.python_function, self._gradcomp_number
        self._gradcomp_number += 1

        def within(*args: Any, **kwargs: Any) -> Any:
            # Names on the wire follow from it: one function may call several of these.
            with tf.name_scope(f"variables_{number}"):
                return reduce(*args, **kwargs)

        return tf.function(within)


def keep_apart(frame: FrameType | None, variables: Sequence[Any]) -> None:
    """Tell traces apart from now on, where Horovod's reduction is traced by itself.

    Args:
        frame: Of ``allreduce_grads``.
        variables: Which it is traced for.
    """
    reduces = frame.f_code.co_name.removeprefix("tf__") if frame is not None else ""
    while frame is not None:
        function = frame.f_locals.get("self")
        if isinstance(function, _FUNCTION):
            # Where it is not, the function is the user's, and Horovod's is a plain one.
            own = _is_horovods(function) and function.python_function.__name__ == reduces
            if own and not isinstance(function, _Apart):
                first = tuple(map(id, variables))
                function._gradcomp_traces = {first: _Trace(_weak(variables), None)}
                function._gradcomp_number = 1
                function.__class__ = _Apart
            return
        frame = frame.f_back


def handed_over(variables: Sequence[Any]) -> bool:
    """Return whether a ``tf.function`` of the user's is being traced that got some as arguments."""
    mine = set(map(id, variables))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        function = frame.f_locals.get("self")
        if isinstance(function, _FUNCTION) and not _is_horovods(function):
            given = [frame.f_locals.get(name) for name in ("args", "kwds")]
            if not mine.isdisjoint(map(id, tf.nest.flatten(given))):
                return True
        frame = frame.f_back
    return False


def _is_horovods(function: Any) -> bool:
    module: str = function.python_function.__module__
    return module == "horovod.tensorflow" or module == __name__


def _weak(variables: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(weakref.ref(variable) for variable in variables)
