"""What the tensors of one step share: agreement on bad steps, and counting.

Horovod traces each tensor in a branch of its own, and a variable written in two branches would
make them wait for one another. So what concerns the whole step is built once, in the graph around
the branches: whether every gradient on every rank is finite (one named reduction of one float),
and the count of executed steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from ..core.stats import Stats, UnitStats
from ..ops import tensorflow as xp
from .calls import Call

Tensor = Any
T = TypeVar("T")

FLAG = "bad-step flag"
"""Under which name ``stats()`` counts the four bytes that a step's agreement takes."""


class Record:
    """Counts of all steps that reduce the same gradients."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self.steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="gradcomp_steps")
            self.bad = tf.Variable(0, trainable=False, dtype=tf.int64, name="gradcomp_bad_steps")
        self.units: dict[str, tuple[int, int, int]] = {}
        self.bypassed: dict[str, tuple[int, int]] = {}

    def add_to(self, stats: Stats) -> None:
        """Add what was counted, as totals over the executed steps."""
        steps = int(self.steps.numpy())
        stats.steps += steps
        stats.bad_steps += int(self.bad.numpy())
        for name, (numel, raw, wire) in self.units.items():
            unit = stats.units.setdefault(name, UnitStats())
            unit.numel = numel
            unit.raw_bytes += steps * raw
            unit.wire_bytes += steps * wire
        for name, (numel, nbytes) in self.bypassed.items():
            if name not in stats.bypassed_names:
                stats.bypassed_names.append(name)
                stats.bypassed.numel += numel
            stats.bypassed.raw_bytes += steps * nbytes
            stats.bypassed.wire_bytes += steps * nbytes


class Step:
    """One reduction of gradients, in the graph that calls Horovod or eagerly."""

    def __init__(self, call: Call, record: Record, graph: Any) -> None:
        self.record = record
        self.process_set = call.process_set
        self._name = call.name
        self._graph = weakref.ref(graph) if graph is not None else None
        self._taken: dict[int, int] = {}
        self._agreed: Any = None
        self.active = bool(self.process_set.included()) and self.process_set.size() > 1
        if self.active:
            self._around(lambda: record.steps.assign_add(1))

    def place(self, call: Call) -> int:
        """Return the position of the tensor among the gradients, each position once."""
        first = call.places[0]
        turn = self._taken[first] = self._taken.get(first, -1) + 1
        return call.places[turn % len(call.places)]

    def agreed(self, grads: Sequence[Any]) -> Tensor:
        """Return 0 if all gradients on all ranks are finite, else NaN, equal on all ranks."""
        if not self.active:
            return tf.constant(0.0)  # traced, but never run
        if self._agreed is None:
            agreed = self._around(lambda: self._agree(grads))
            # A tensor would keep the graph alive, and this object is found through the graph.
            self._agreed = agreed if self._graph is None else agreed.name
        graph = self._graph() if self._graph is not None else None
        return self._agreed if graph is None else graph.get_tensor_by_name(self._agreed)

    def _agree(self, grads: Sequence[Any]) -> Tensor:
        own = [xp.badness(values) for values in map(_values, grads) if values is not None]
        flag = hvd.allreduce(
            tf.reshape(tf.add_n(own), [1]),
            op=hvd.Sum,
            name=f"gradcomp.flag.{self._name}",
            ignore_name_scope=True,
            process_set=self.process_set,
        )[0]
        self.record.units[FLAG] = (0, 0, 4)
        self.record.bad.assign_add(tf.cast(tf.not_equal(flag, 0.0), tf.int64))
        return flag

    def _around(self, build: Callable[[], T]) -> T:
        graph = self._graph() if self._graph is not None else None
        if graph is None:
            return build()
        with graph.as_default():
            return build()


class Steps:
    """Finds the step that a call belongs to, without keeping graphs or gradients alive."""

    def __init__(self) -> None:
        self.records: dict[Any, Record] = {}
        self._in_graphs: Any = weakref.WeakKeyDictionary()
        self._eager: tuple[int, Any, Step] | None = None

    def find(self, call: Call) -> Step:
        """Return the step of a call, made on the first call of the step or trace."""
        if tf.executing_eagerly():
            return self._find_eager(call)
        branch = tf.compat.v1.get_default_graph()
        around = getattr(branch, "outer_graph", None)
        inside = call.branches and hasattr(around, "outer_graph")  # not a function: no branch
        graph = around if inside else branch
        steps: dict[Any, Step] = self._in_graphs.setdefault(graph, {})
        key = tuple(getattr(_values(grad), "name", None) for grad in call.grads)
        if key not in steps:
            steps[key] = Step(call, self._record(call), graph)
        return steps[key]

    def _find_eager(self, call: Call) -> Step:
        first = next(v for v in map(_values, call.grads) if v is not None)
        if self._eager is not None:
            known, tensor, step = self._eager
            if known == id(call.grads) and tensor() is first:
                return step
        step = Step(call, self._record(call), None)
        self._eager = (id(call.grads), weakref.ref(first), step)
        return step

    def _record(self, call: Call) -> Record:
        key = tuple(
            (id(variable), type(grad).__name__, getattr(grad, "dtype", None))
            for variable, grad in zip(call.variables, call.grads)
        )
        if key not in self.records:
            self.records[key] = outside(Record)
        return self.records[key]


def outside(build: Callable[[], T]) -> T:
    """Return ``build()``, run outside of any function that is being traced and any name scope.

    A thread of its own has no function around it, so variables can be made while a function is
    traced anew, which ``tf.init_scope`` does not allow, and the first trace stays the only one.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(build())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="gradcomp-variables")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _values(grad: Any) -> Any:
    """Return the float tensor whose finiteness counts, or None."""
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return values if values is not None and values.dtype.is_floating else None
