"""What the tensors of one step share: one decision on bad steps, one loss scale, and counting.

Horovod traces each tensor in a branch of its own, and a variable written in two branches makes
them wait for one another. So what concerns the whole step is built once, in the graph around the
branches: that all ranks are set alike, whether every gradient on every rank is finite (one named
reduction of one float), the loss scale, and the count of executed steps.

What a step does to memories is decided in the branch of its last tensor. Results are alike on all
ranks, so that each branch can tell whether its own is finite; it notes that in a variable, and the
last branch, which reads all notes, keeps every new state or drops every one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from ..core.carrier import Carrier
from ..core.environment import elastic
from ..core.stats import Stats, UnitStats
from ..ops import tensorflow as xp
from . import settled
from .calls import Call
from .outside import outside
from .scaling import LossScale

if TYPE_CHECKING:
    from .unit import Unit

Tensor = Any
T = TypeVar("T")

FLAG = "bad-step flag"
"""Under which name ``stats()`` counts the four bytes that a step's agreement takes."""


@dataclass(frozen=True)
class Plan:
    """What is to be done with the gradients of one reduction.

    Attributes:
        units: One for each gradient; None where it is sent as it is, or not by the compressor.
        labels: One for each gradient, for ``stats()``.
        facts: What must be alike on all ranks.
        scale: The loss scale, or None.
    """

    units: Sequence[Unit | None]
    labels: Sequence[str]
    facts: Mapping[str, str]
    scale: LossScale | None = None


class Record:
    """Counts and notes of all steps that reduce the same gradients.

    Args:
        arrivals: Tensors that Horovod will hand over in a step.
        changing: Labels of the variables whose bytes change from step to step.
    """

    def __init__(self, arrivals: int, changing: Sequence[str]) -> None:
        with tf.device("CPU:0"):
            self.steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="gradcomp_steps")
            self.bad = tf.Variable(0, trainable=False, dtype=tf.int64, name="gradcomp_bad_steps")
            self.alike = tf.Variable(False, trainable=False, name="gradcomp_alike")
            row = tf.constant(Carrier.row(hvd.rank()), tf.float32)
            self.carrier = tf.Variable(row, trainable=False, name="gradcomp_carrier")
            self.flags = [
                tf.Variable(0.0, trainable=False, name="gradcomp_flag") for _ in range(arrivals)
            ]
            self.counters = {
                label: tf.Variable(0, trainable=False, dtype=tf.int64, name="gradcomp_bytes")
                for label in changing
            }
        self.units: dict[str, tuple[int, int, int | None]] = {}
        self.bypassed: dict[str, tuple[int | None, int]] = {}
        """Elements and bytes of a step; None, and bytes of an element, where elements change."""

    def bypass(self, label: str, variable: Any, payload: Tensor) -> None:
        """Count a gradient that is sent as it is; where its size is not known, when it is run."""
        numel, size = variable.shape.num_elements(), payload.dtype.size
        if numel is None:
            self.counters[label].assign_add(tf.size(payload, tf.int64))
        self.bypassed[label] = (numel, size) if numel is None else (numel, numel * size)

    def add_to(self, stats: Stats) -> None:
        """Add what was counted, as totals over the executed steps."""
        steps = int(self.steps.numpy())
        stats.steps += steps
        stats.bad_steps += int(self.bad.numpy())
        for name, (numel, raw, wire) in self.units.items():
            unit = stats.units.setdefault(name, UnitStats())
            unit.numel = numel
            unit.raw_bytes += steps * raw
            unit.wire_bytes += int(self.counters[name].numpy()) if wire is None else steps * wire
        for name, (fixed, nbytes) in self.bypassed.items():
            if fixed is None:
                elements = int(self.counters[name].numpy())
                total, count = elements * nbytes, elements // max(steps, 1)
            else:
                total, count = steps * nbytes, fixed
            if name not in stats.bypassed_names:
                stats.bypassed_names.append(name)
                stats.bypassed.numel += count
            stats.bypassed.raw_bytes += total
            stats.bypassed.wire_bytes += total


class Step:
    """One reduction of gradients, in the graph that calls Horovod or eagerly."""

    def __init__(self, call: Call, plan: Plan, record: Record, graph: Any) -> None:
        self.record = record
        self.process_set = call.process_set
        self._plan = plan
        self._used = [unit for unit in plan.units if unit]
        self._name = call.name
        self._graph = weakref.ref(graph) if graph is not None else None
        self._taken: dict[int, int] = {}
        self._made: dict[str, Any] = {}
        self._arrived = 0
        self.active = bool(self.process_set.included()) and self.process_set.size() > 1
        # A rank that joins an elastic run would ask the others, who have long been answered.
        self._asks = self.active and not elastic()
        if self.active:
            self._around(lambda: record.steps.assign_add(1))

    def place(self, call: Call) -> int:
        """Return the position of the tensor among the gradients, each position once."""
        first = call.places[0]
        turn = self._taken[first] = self._taken.get(first, -1) + 1
        return call.places[turn % len(call.places)]

    def unit(self, place: int) -> tuple[Unit | None, str]:
        """Return what compresses the gradient at a position, or None, and its label."""
        return self._plan.units[place], self._plan.labels[place]

    def gated(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is there once all ranks are known to be set alike."""
        if not self._asks:
            return tensor
        alike = tf.identity(self._shared("alike", self._settle))
        with tf.control_dependencies([alike]):
            return tf.identity(tensor)

    def carrier(self) -> Tensor:
        """Return what Horovod is to reduce in place of a gradient that travels by itself.

        It is no constant: TensorFlow takes Horovod's operations for pure functions, and would run
        that of a constant only once, while it optimizes the graph.
        """
        return self.gated(self.record.carrier.read_value())

    def agreed(self, grads: Sequence[Any]) -> Tensor:
        """Return 0 if all gradients on all ranks are finite, else NaN, equal on all ranks."""
        if not self.active:
            return tf.constant(0.0)  # traced, but never run
        return self._shared("agreed", lambda: self._agree(grads))

    def lift(self) -> Any:
        """Return what gradients are multiplied by: 1.0, or a float32 scalar tensor."""
        scale = self._plan.scale
        return 1.0 if scale is None else self._shared("lift", scale.read)

    def arrive(self, result: Tensor) -> None:
        """Note whether a reduced gradient is finite; the last one ends the step."""
        if not self._used or not self.active:
            return
        self.record.flags[self._arrived].assign(xp.badness(result))
        self._arrived += 1
        if self._arrived == len(self.record.flags):
            self._end()

    def _end(self) -> None:
        units = self._used
        bad = tf.not_equal(tf.add_n([flag.read_value() for flag in self.record.flags]), 0.0)

        def keep() -> Tensor:
            for unit in units:
                unit.keep()
            return tf.constant(0, tf.int64)

        def drop() -> Tensor:
            for unit in units:
                unit.drop()
            return tf.constant(1, tf.int64)

        self.record.bad.assign_add(tf.cond(bad, drop, keep))
        for unit in units:
            unit.step.assign_add(1)

    def _settle(self) -> Tensor:
        # Never a constant, see carrier(): where nothing is compressed no step is ever bad.
        steps = [unit.step.read_value() for unit in self._used] or [self.record.bad.read_value()]
        return settled.settle(
            self.record.alike, self._plan.facts, steps, self._name, self.process_set
        )

    def _agree(self, grads: Sequence[Any]) -> Tensor:
        own = [xp.badness(v) for v in map(values, grads) if v is not None]
        flag = hvd.allreduce(
            self.gated(tf.reshape(tf.add_n(own), [1])),
            op=hvd.Sum,
            name=f"gradcomp.flag.{self._name}",
            ignore_name_scope=True,
            process_set=self.process_set,
        )[0]
        self.record.units[FLAG] = (0, 0, 4)
        return flag

    def _shared(self, what: str, build: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the whole step, built on first use."""
        if what not in self._made:
            made = self._around(build)
            # A tensor would keep the graph alive, and this object is found through the graph.
            self._made[what] = made if self._graph is None else made.name
        graph = self._graph() if self._graph is not None else None
        made = self._made[what]
        return made if graph is None else graph.get_tensor_by_name(made)

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

    def find(self, call: Call, plan: Callable[[Call], Plan]) -> Step:
        """Return the step of a call, made on the first call of the step or trace.

        Args:
            call: Of one tensor.
            plan: Says what is to be done in a step that has just begun.
        """
        if tf.executing_eagerly():
            return self._find_eager(call, plan)
        branch = tf.compat.v1.get_default_graph()
        around = getattr(branch, "outer_graph", None)
        inside = call.branches and hasattr(around, "outer_graph")  # not a function: no branch
        graph = around if inside else branch
        steps: dict[Any, Step] = self._in_graphs.setdefault(graph, {})
        key = tuple(getattr(values(grad), "name", None) for grad in call.grads)
        if key not in steps:
            steps[key] = self._begin(call, plan(call), graph)
        return steps[key]

    def _find_eager(self, call: Call, plan: Callable[[Call], Plan]) -> Step:
        first = next(v for v in map(values, call.grads) if v is not None)
        if self._eager is not None:
            known, tensor, step = self._eager
            if known == id(call.grads) and tensor() is first:
                return step
        step = self._begin(call, plan(call), None)
        self._eager = (id(call.grads), weakref.ref(first), step)
        return step

    def _begin(self, call: Call, plan: Plan, graph: Any) -> Step:
        # By label, which is a variable's own for ever; its id goes on to another when it is gone.
        kinds = [
            (label or id(variable), type(grad).__name__, getattr(grad, "dtype", None))
            for label, variable, grad in zip(plan.labels, call.variables, call.grads)
        ]
        key = (call.process_set.process_set_id, *kinds)
        if key not in self.records:
            arrivals = sum(map(dense, call.grads))
            changing = [
                label
                for unit, label, variable in zip(plan.units, plan.labels, call.variables)
                if (unit.wire_bytes() if unit else variable.shape.num_elements()) is None
            ]
            record = self.records[key] = outside(lambda: Record(arrivals, changing))
            for label, variable, grad in zip(plan.labels, call.variables, call.grads):
                if isinstance(grad, tf.IndexedSlices):
                    record.bypassed[label] = int(variable.shape.num_elements() or 0), 0
        return Step(call, plan, self.records[key], graph)


def values(grad: Any) -> Any:
    """Return the float tensor whose finiteness counts, or None."""
    found = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return found if found is not None and found.dtype.is_floating else None


def dense(grad: Any) -> bool:
    """Return whether Horovod hands a gradient to the compressor, which then takes note of it."""
    return not isinstance(grad, tf.IndexedSlices) and values(grad) is not None
