"""One compressed variable: its memory, its step count, and its exchange.

The state is read in ``compress`` and written in ``decompress``, in the same branch of the graph,
and only where every rank found the whole step good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..core import damage, exchange, random
from ..core.codec import Call, Combine
from ..core.errors import explain
from ..core.exchange import Carrier
from ..core.memory import Done
from ..core.payload import FLAG_BYTES
from ..core.settings import Settings
from ..ops import tensorflow as xp
from . import calls
from .traced import TracedCodec, fold, judge

Tensor = Any


@dataclass
class Ticket:
    """What ``decompress`` gets back as the context."""

    unit: Unit
    dtype: Any
    state: tuple[Tensor, ...]
    agreed: Tensor
    exchange: exchange.Exchange
    note: Tensor | None = None
    gathered: Tensor | None = None
    carrier: Carrier | None = None


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
        self._shapes = (tuple(variable.shape.as_list()),)
        self._settings = settings
        codec = settings.codec
        label = variable.name.split(":")[0]
        with tf.device(variable.device):
            for slot in settings.memory.slots:
                zeros = tf.zeros([self.numel], tf.float32)
                setattr(self, slot, tf.Variable(zeros, trainable=False, name=f"{label}/{slot}"))
            start = Call(shapes=self._shapes, key=random.fold(settings.options.seed, name, 0))
            for slot, value in zip(codec.slots, codec.initial(xp, start, tf.zeros([0]))):
                setattr(self, slot, tf.Variable(value, trainable=False, name=f"{label}/{slot}"))
        with tf.device("CPU:0"):
            self.step = tf.Variable(0, trainable=False, dtype=tf.int64, name=f"{label}/step")

    def wire_bytes(self) -> int:
        """Return the bytes handed to Horovod a step."""
        codec = self._settings.codec
        nbytes = codec.wire_bytes(*self._shapes)
        if codec.combine is Combine.GATHER:
            nbytes += FLAG_BYTES
        return nbytes if self._settings.by_horovod else nbytes + 4 * Carrier.WIDTH

    def send(self, tensor: Tensor, agreed: Tensor, call: calls.Call) -> tuple[Tensor, Ticket]:
        """Encode a gradient and start its exchange; see :meth:`Compressor.compress`."""
        settings, process_set = self._settings, call.process_set
        codec: Any = TracedCodec(settings.codec)
        memory = settings.memory
        state = self._read(settings.memory.slots)
        step = self.step.read_value()
        ranks = list(process_set.ranks or range(process_set.size()))
        # A rank outside the set traces this, too, and never runs it.
        rank = ranks.index(hvd.rank()) if hvd.rank() in ranks else 0
        # The gradient's own shape may be unknown, the variable's is not.
        grad = tf.reshape(tensor, [self.numel])
        note = memory.note(xp, grad, state, 1.0, None) if memory.notes else None
        running = exchange.start(
            xp,
            codec,
            memory.compensate(xp, grad, state, None, note=note),
            Call(
                size=process_set.size(),
                shapes=self._shapes,
                key=fold(settings.options.seed, self.key, step),
                step=step,
                rank=rank,
                shared=self._read(settings.codec.slots),
            ),
            want_error=memory.wants_error,
            own=not settings.by_horovod,
            name=self.key,
            agreed=agreed,
        )
        request = next(running)
        ticket = Ticket(self, tensor.dtype, state, agreed, running, note)
        if isinstance(request, exchange.Reduce):
            return request.payload, ticket
        ticket.carrier = Carrier(process_set.ranks or range(process_set.size()))
        for number in range(settings.codec.round_count(self._shapes)):
            if number:
                request = running.send(exchange.Reply((ticket.gathered,)))
            ticket.gathered = self._collective(request, number, call)
        return tf.constant(Carrier.row(hvd.rank()), tf.float32), ticket

    def receive(self, reduced: Tensor, ticket: Ticket) -> Tensor:
        """Finish the exchange and keep the new state; see :meth:`Compressor.decompress`."""
        if ticket.carrier is None:
            reply = exchange.Reply((reduced,))
        else:
            reply = self._collect(reduced, ticket, ticket.carrier)
        try:
            ticket.exchange.send(reply)
        except StopIteration as stop:
            outcome = stop.value
        else:
            raise AssertionError("an exchange asked for more rounds than its codec says")
        total, agreed = whole(outcome, ticket.agreed, self.key)
        ticket.agreed, mean = agreed, None
        if self._settings.memory.references:
            assert ticket.carrier is not None
            factor = reply.scale * float(len(ticket.carrier.ranks))
            mean = total / factor
            total = self._settings.memory.reduced(xp, mean, ticket.state) * factor
        self._commit(ticket, Done(outcome.error, ticket.note, outcome.kept, mean), outcome.shared)
        return tf.cast(tf.reshape(total, self._shape), ticket.dtype)

    def _read(self, slots: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(getattr(self, slot).read_value() for slot in slots)

    def _collective(self, request: exchange.Request, number: int, call: calls.Call) -> Tensor:
        """Build the own collective of a round."""
        name = f"gradcomp.{self.key}.{call.name}" + (f".{number}" if number else "")
        options = {"name": name, "ignore_name_scope": True, "process_set": call.process_set}
        if isinstance(request, exchange.Sum):
            return hvd.allreduce(request.payload, op=hvd.Sum, **options)
        return hvd.allgather(request.payload, **options)

    def _collect(self, reduced: Tensor, ticket: Ticket, carrier: Carrier) -> exchange.Reply:
        size = len(carrier.ranks)
        scale, good = judge(carrier, tf.ensure_shape(reduced, [Carrier.WIDTH]))
        text = carrier.complaint("the values at the end of this message", self.key)
        gathered = _checked(ticket.gathered, good, text, reduced)
        if self._settings.codec.combine is not Combine.GATHER:
            return exchange.Reply((gathered,), scale=scale)
        expected = self._settings.codec.wire_bytes(*self._shapes) + FLAG_BYTES
        text = explain(
            got=f"as many bytes for '{self.key}' from all ranks as this message ends with",
            expected=f"{size} x {expected}",
            why="the size follows from the settings and the shape, so some rank has others",
            do="give every rank the same compression and the same model",
        )
        length = tf.size(gathered)
        gathered = _checked(gathered, tf.equal(length, size * expected), text, length)
        # Not by tf.reshape: from its static shape the length would be inferred, not checked.
        payloads = [
            tf.ensure_shape(gathered[rank * expected : (rank + 1) * expected], [expected])
            for rank in range(size)
        ]
        return exchange.Reply(payloads, scale=scale)

    def _commit(self, ticket: Ticket, done: Done, shared: tuple[Tensor, ...]) -> None:
        memory, codec = self._settings.memory, self._settings.codec

        def keep() -> Tensor:
            state = memory.update(xp, ticket.state, done)
            for slot, value in zip((*memory.slots, *codec.slots), (*state, *shared)):
                getattr(self, slot).assign(value)
            self.step.assign_add(1)
            return tf.constant(True)

        tf.cond(tf.equal(ticket.agreed, 0.0), keep, lambda: tf.constant(False))


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
