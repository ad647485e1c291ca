"""One compressed variable: its memory, its step count, and its exchange.

The state is read in ``compress``. What it becomes is worked out in ``decompress``, in the same
branch of the graph, and put aside: the step's last branch keeps it or drops it, for all variables
together (:mod:`.steps`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..codecs.fp16 import FP16
from ..core import damage, exchange, random
from ..core.carrier import Carrier
from ..core.clip import clipped
from ..core.codec import Call, Combine, is_one
from ..core.errors import explain
from ..core.memory import Done
from ..core.settings import Settings
from ..ops import tensorflow as xp
from . import calls
from .stage import Candidates, Stage
from .traced import TracedCodec, fold, judge

if TYPE_CHECKING:
    from .steps import Step

Tensor = Any


@dataclass
class Sent:
    """What a unit keeps between ``send`` and ``receive``."""

    x: Tensor
    """What is encoded."""

    dtype: Any
    state: tuple[Tensor, ...]
    note: Tensor | None
    agreed: Tensor
    lift: Any
    call: calls.Call
    counter: Any
    running: exchange.Exchange | None = None
    """Where Horovod reduces the payload."""


class Unit(tf.Module):  # type: ignore[misc]
    """State of one variable.

    Args:
        name: Equal on all ranks and in every run; part of the random key and of names on the wire.
        variable: The trainable variable.
        settings: Of the compressor.
    """

    def __init__(self, name: str, variable: Any, settings: Settings) -> None:
        super().__init__(name="unit")
        self.key = name
        self.numel = int(variable.shape.num_elements())
        self._shape = variable.shape
        self._settings = settings
        phases = settings.phases
        # Horovod's own reduction has one name and one dtype for all steps, payloads have not.
        self._own = not settings.by_horovod or len(phases) > 1
        label = variable.name.split(":")[0]
        start = random.fold(settings.options.seed, name, 0)
        codecs = [phase.codec for phase in phases]
        self._refreshing = len(codecs) if settings.memory.may_refresh else None
        if settings.memory.may_refresh:
            codecs.append(FP16())
        with tf.device(variable.device):
            for slot in settings.memory.slots:
                zeros = tf.zeros([self.numel], tf.as_dtype(settings.options.state_dtype))
                setattr(self, slot, tf.Variable(zeros, trainable=False, name=f"{label}/{slot}"))
            self.candidates = Candidates([getattr(self, s) for s in settings.memory.slots])
            shape = tuple(variable.shape.as_list())
            self.stages = [
                Stage(codec, number, shape, start, label, own=self._own)
                for number, codec in enumerate(codecs)
            ]
        with tf.device("CPU:0"):
            self.step = tf.Variable(0, trainable=False, dtype=tf.int64, name=f"{label}/step")

    @property
    def memory_slots(self) -> list[Any]:
        """The variables that hold what this rank remembers."""
        return [getattr(self, slot) for slot in self._settings.memory.slots]

    def wire_bytes(self) -> int | None:
        """Return the bytes handed to Horovod in every step; None where that changes."""
        return self.stages[0].wire_bytes if len(self.stages) == 1 else None

    def send(self, tensor: Tensor, step: Step, call: calls.Call, counter: Any) -> tuple[Any, Sent]:
        """Encode a gradient and start its exchange; see :meth:`Compressor.compress`.

        Args:
            tensor: The gradient.
            step: That it belongs to.
            call: That brought it.
            counter: A variable that counts bytes, where their number changes from step to step.
        """
        memory, lift, options = self._settings.memory, step.lift(), self._settings.options
        state = self._state()
        # The gradient's own shape may be unknown, the variable's is not.
        grad = tf.reshape(tensor, [self.numel])
        grad, gain = clipped(xp, grad, 1.0 / lift, options, len(_ranks(call)))
        note = memory.note(xp, grad, state, gain, None) if memory.notes else None
        x = memory.compensate(xp, grad, state, None, gain=gain, note=note)
        sent = Sent(x, tensor.dtype, state, note, step.agreed(call.grads), lift, call, counter)
        if self._own:
            return step.carrier(), sent
        sent.running = self._exchange(self.stages[0], sent)
        return next(sent.running).payload, sent

    def receive(self, reduced: Tensor, sent: Sent) -> Tensor:
        """Finish the exchange and put the new state aside; see :meth:`Compressor.decompress`."""
        if sent.running is not None:
            reply = exchange.Reply((reduced,), scale=sent.lift)
            total = self._finish(self.stages[0], sent, sent.running, reply)
        else:
            carrier = Carrier(_ranks(sent.call))
            scale, good = judge(carrier, tf.ensure_shape(reduced, [Carrier.WIDTH]))
            text = carrier.complaint("the values at the end of this message", self.key)

            def checked(x: Tensor) -> Tensor:
                return _checked(x, good, text, reduced)

            runs = [functools.partial(self._run, s, sent, scale, checked) for s in self.stages]
            total = runs[0]() if len(runs) == 1 else tf.switch_case(self._phase(), runs)
        return tf.cast(tf.reshape(total, self._shape), sent.dtype)

    def keep(self) -> None:
        """Let what was put aside take the state's place, at the end of a good step."""
        self.candidates.keep()
        keeps = [functools.partial(_done, stage.keep) for stage in self.stages]
        _ = keeps[0]() if len(keeps) == 1 else tf.switch_case(self._phase(), keeps)

    def drop(self) -> None:
        """Forget what was put aside, at the end of a bad step."""
        self.candidates.drop()
        for stage in self.stages:
            stage.candidates.drop()

    def _phase(self) -> Tensor:
        """Return the number of the stage that the present step is in."""
        firsts = tf.constant([phase.first for phase in self._settings.phases[1:]], tf.int64)
        begun = tf.reduce_sum(tf.cast(firsts <= self.step.read_value(), tf.int32))
        if self._refreshing is None:
            return begun
        return tf.where(self._refreshes(), self._refreshing, begun)

    def _refreshes(self) -> Tensor:
        return self._settings.memory.refreshes(self.step.read_value(), all_of=tf.reduce_all)

    def _state(self) -> tuple[Tensor, ...]:
        """Return what is remembered, as float32; zero where all is sent anew."""

        def read() -> list[Tensor]:
            return [tf.cast(variable.read_value(), tf.float32) for variable in self.memory_slots]

        if self._refreshing is None:
            return tuple(read())
        zeros = [tf.zeros([self.numel], tf.float32)] * len(self.memory_slots)
        return tuple(tf.cond(self._refreshes(), lambda: zeros, read))

    def _exchange(self, stage: Stage, sent: Sent) -> exchange.Exchange:
        ranks = _ranks(sent.call)
        traced: Any = TracedCodec(stage.codec)
        return exchange.start(
            xp,
            traced,
            sent.x,
            Call(
                size=len(ranks),
                shapes=(tuple(self._shape.as_list()),),
                key=fold(self._settings.options.seed, self.key, self.step.read_value()),
                step=stage.turn.read_value(),
                # A rank outside the set traces this, too, and never runs it.
                rank=ranks.index(hvd.rank()) if hvd.rank() in ranks else 0,
                shared=stage.shared(),
            ),
            want_error=self._settings.memory.wants_error,
            own=self._own,
            name=self.key,
            agreed=sent.agreed,
        )

    def _run(self, stage: Stage, sent: Sent, scale: Tensor, checked: Any) -> Tensor:
        """Build a stage's whole exchange by own collectives."""
        running = self._exchange(stage, sent)
        request, gathered = next(running), None
        for number in range(stage.rounds):
            if number:
                request = running.send(exchange.Reply((gathered,)))
            gathered = _collective(request, self._wire_name(stage, number, sent), sent.call)
        payloads = [checked(gathered)]
        if stage.codec.combine is Combine.GATHER:
            payloads = self._payloads(stage, payloads[0], len(_ranks(sent.call)))
        if sent.counter is not None:
            sent.counter.assign_add(stage.wire_bytes)
        return self._finish(stage, sent, running, exchange.Reply(payloads, scale=scale))

    def _wire_name(self, stage: Stage, number: int, sent: Sent) -> str:
        parts = ["gradcomp", self.key, sent.call.name]
        parts += [f"stage{stage.number}"] * bool(stage.number) + [str(number)] * bool(number)
        return ".".join(parts)

    def _payloads(self, stage: Stage, gathered: Tensor, size: int) -> list[Tensor]:
        expected = stage.payload_bytes
        text = explain(
            got=f"as many bytes for '{self.key}' from all ranks as this message ends with",
            expected=f"{size} x {expected}",
            why="the size follows from the settings and the shape, so some rank has others",
            do="give every rank the same compression and the same model",
        )
        length = tf.size(gathered)
        gathered = _checked(gathered, tf.equal(length, size * expected), text, length)
        # Not by tf.reshape: from its static shape the length would be inferred, not checked.
        return [
            tf.ensure_shape(gathered[rank * expected : (rank + 1) * expected], [expected])
            for rank in range(size)
        ]

    def _finish(
        self, stage: Stage, sent: Sent, running: exchange.Exchange, reply: exchange.Reply
    ) -> Tensor:
        """Decode, put the next state aside and return the gradient, flat float32."""
        memory = self._settings.memory
        if sent.running is None and not memory.references:
            reply = exchange.Reply(reply.payloads, scale=_product(reply.scale, sent.lift))
        try:
            running.send(reply)
        except StopIteration as stop:
            outcome = stop.value
        else:
            raise AssertionError("an exchange asked for more rounds than its codec says")
        (total, _), mean = whole(outcome, sent.agreed, self.key), None
        if memory.references:
            factor = reply.scale * float(len(_ranks(sent.call)))
            mean = total / factor
            total = memory.reduced(xp, mean, sent.state) * _product(factor, sent.lift)
        refreshed = stage.number == self._refreshing
        done = Done(outcome.error, sent.note, outcome.kept, mean, refreshed)
        self.candidates.put(memory.update(xp, sent.state, done))
        stage.candidates.put(outcome.shared)
        return total


def _product(factor: Tensor, lift: Any) -> Tensor:
    return factor if is_one(lift) else factor * lift


def _ranks(call: calls.Call) -> list[int]:
    return list(call.process_set.ranks or range(call.process_set.size()))


def _collective(request: exchange.Request, name: str, call: calls.Call) -> Tensor:
    options = {"name": name, "ignore_name_scope": True, "process_set": call.process_set}
    if isinstance(request, exchange.Sum):
        return hvd.allreduce(request.payload, op=hvd.Sum, **options)
    return hvd.allgather(request.payload, **options)


def _done(act: Any) -> Tensor:
    """Return what a branch must return, after an act."""
    act()
    return tf.constant(True)


def whole(outcome: exchange.Outcome, agreed: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return a result and the bad-step flag, which cannot be read where a payload is damaged.

    Args:
        outcome: Of the exchange.
        agreed: 0, or NaN where the step is bad, so that payloads are of no account.
        name: Of the variable, for messages.
    """
    if outcome.damage is None:
        return outcome.total, agreed
    wrong = tf.not_equal(outcome.damage, 0.0)
    fine = tf.logical_or(tf.logical_not(tf.reduce_any(wrong)), tf.not_equal(agreed, 0.0))
    rank = tf.argmax(tf.cast(wrong, tf.int32))
    got = tf.stack([tf.cast(rank, tf.float32), tf.gather(outcome.damage, rank)])
    source = f"from the rank that this message ends with, then a sum of {damage.legend()}"
    flag = _checked(agreed, fine, damage.complaint(source, "a damaged payload", name), got)
    with tf.control_dependencies([flag]):
        return tf.identity(outcome.total), flag


def _checked(x: Tensor, condition: Tensor, text: str, got: Tensor) -> Tensor:
    """Return ``x``, which cannot be read unless a condition holds."""

    def fail() -> Tensor:
        check = tf.raw_ops.Assert(condition=False, data=[text, got])
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(x)

    return tf.cond(condition, lambda: x, fail)
