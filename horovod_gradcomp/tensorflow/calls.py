"""Who is calling: what Horovod's slot does not say.

A caller of this package says it, by :func:`explicit`; of Horovod's own it is read off the frames.
Horovod calls ``compress`` from ``allreduce_grads``, most often once a trace and through autograph,
which renames functions but keeps their module. The tensor that arrives **is** one of the
``grads`` there, which gives its variable; the position of the call is no key, as gradients may be
missing in another trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.process_sets import ProcessSet

from .apart import keep_apart

_ALLREDUCE = ("allreduce", "tf__allreduce", "grouped_allreduce", "tf__grouped_allreduce")
_REDUCTION = ("allreduce_grads", "tf__allreduce_grads")
_LOOK_BACK = 12
"""Frames between a hash of the compressor and Horovod's optimizer, at most."""


class Call(NamedTuple):
    """One tensor of one reduction of gradients."""

    grads: Sequence[Any]
    """All gradients of the reduction: tensors, ``tf.IndexedSlices`` or None."""

    variables: Sequence[Any]
    """The variable of each."""

    places: tuple[int, ...]
    """Where in ``grads`` the tensor is; several variables may share one gradient tensor."""

    process_set: Any
    op: int
    name: str
    """Of Horovod's own operation: alike on all ranks, and no other has it at the same time."""

    names: Sequence[str] = ()
    """Of the variables, for rules and reports, where TensorFlow's do not tell them apart."""

    branches: bool = True
    """Whether each tensor is traced in a branch of its own, as Horovod does it."""

    groups: Sequence[Mapping[str, Any]] = ()
    """Of the optimizer, where the caller knows it."""

    facts: Mapping[str, str] = MappingProxyType({})
    """What else must be alike on all ranks, by the names of arguments, where they are known."""

    @property
    def settings(self) -> dict[str, str]:
        """What all ranks must call with, by the names of arguments."""
        op = {hvd.Average: "Average", hvd.Sum: "Sum"}.get(self.op, str(self.op))
        return {"op": op, **self.facts}


_EXPLICIT: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


@contextlib.contextmanager
def explicit(call: Call) -> Iterator[None]:
    """Say which tensor of which reduction the calls of ``compress`` inside are for."""
    token = _EXPLICIT.set(call)
    try:
        yield
    finally:
        _EXPLICIT.reset(token)


def find(tensor: Any) -> Call | None:
    """Return the reduction of gradients that ``compress`` is called from, or None."""
    said = _EXPLICIT.get()
    if said is not None:
        return said
    allreduce: dict[str, Any] = {}
    for frame in _horovod_frames():
        function = frame.f_code.co_name
        if function in _ALLREDUCE and not allreduce:
            allreduce = frame.f_locals
        if function in _REDUCTION:
            call = _call(tensor, frame.f_locals, allreduce)
            if call is not None:
                keep_apart(frame, [v for v in call.variables if isinstance(v, tf.Variable)])
            return call
    return None


def _call(tensor: Any, reduction: dict[str, Any], allreduce: dict[str, Any]) -> Call | None:
    grads, variables = reduction.get("grads"), reduction.get("vars")
    process_set, op, name = (allreduce.get(key) for key in ("process_set", "op", "name"))
    if not isinstance(op, int) or not isinstance(process_set, ProcessSet):
        return None
    if not isinstance(grads, (list, tuple)) or not isinstance(variables, (list, tuple)):
        return None
    places = tuple(i for i, grad in enumerate(grads) if grad is tensor)
    if not places or len(grads) != len(variables):
        return None
    if name is None and not tf.executing_eagerly():
        name = tensor.name
    return Call(grads, variables, places, process_set, op, re.sub(r"\W", "_", name or ""))


def optimizer() -> Any | None:
    """Return the Keras optimizer, wrapped by Horovod, that a reduction is called from, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "horovod._keras":
            found = frame.f_locals.get("self")
            if hasattr(found, "get_config"):
                return found
        frame = frame.f_back
    return None


def _horovod_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "horovod.tensorflow":
            yield frame
        frame = frame.f_back


def compiled_by_xla() -> bool:
    """Return whether the code that is being traced is to be compiled by XLA."""
    try:
        from tensorflow.python.ops import control_flow_util
    except ImportError:  # no public way to ask
        return False
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def constructing_keras_3_optimizer() -> bool:
    """Return whether Horovod is wrapping a Keras 3 optimizer, whose gradients it never reduces."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_LOOK_BACK):
        if frame is None:
            return False
        if (
            frame.f_globals.get("__name__") == "horovod._keras"
            and frame.f_code.co_name == "__init__"
        ):
            kinds = type(frame.f_locals.get("self")).__mro__
            return _keras_version() >= 3 and any(
                kind.__module__.split(".")[0] == "keras" for kind in kinds
            )
        frame = frame.f_back
    return False


def _keras_version() -> int:
    version = str(getattr(sys.modules.get("keras"), "__version__", "0"))
    return int(version.split(".")[0])
