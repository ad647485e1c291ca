"""What is encoded and sent in one go: a bucket of parameters, or a single one for SUM codecs.

A unit owns the memory of its parameters as flat tensors, and one exchange a step. The candidate
for the next memory is worked out in scratch storage and takes the memory's place only when the
whole step is committed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ..core import exchange, random
from ..core.codec import Call
from ..core.errors import ExchangeError, explain
from ..core.plan import Bucket
from ..core.settings import Settings
from ..core.stats import UnitStats
from ..ops import torch as xp

Tensor = torch.Tensor


class Unit:
    """State of one bucket, and its exchange in the running step."""

    def __init__(self, bucket: Bucket, settings: Settings, device: torch.device) -> None:
        self.bucket = bucket
        self.stats = UnitStats()
        self.device = device
        self.state: tuple[Tensor, ...] = ()
        self.expected = len(bucket.members)
        self._settings = settings
        self._input: Tensor | None = None
        self._spare: Tensor | None = None
        self._arrived: set[int] = set()
        self._held: set[int] = set()
        self._exchange: exchange.Exchange | None = None
        self._handle: int | None = None
        self._factor: float | None = None
        self._nbytes = 0
        self._summing = False
        self._round = 0
        self._rounds = settings.codec.round_count(bucket.shapes)
        self._outcome: exchange.Outcome | None = None
        self.state = tuple(
            torch.zeros(bucket.numel, dtype=torch.float32, device=device)
            for _ in settings.memory.slots
        )
        key = random_key(settings, bucket.name, 0)
        start = Call(shapes=bucket.shapes, key=key)
        self.shared = settings.codec.initial(xp, start, torch.empty(0, device=device))

    # One step ---------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """Whether no member has arrived in this step."""
        return not self._arrived

    @property
    def full(self) -> bool:
        """Whether every member that will arrive has arrived."""
        return len(self._arrived) >= self.expected

    def add(self, index: int, grad: Tensor, *, frozen: bool) -> None:
        """Take in one member's gradient.

        Args:
            index: Of the member.
            grad: Any strides, any float dtype, of the member's shape.
            frozen: Whether the parameter no longer trains: it sends zero and keeps its memory,
                which would move its weights otherwise.
        """
        if self._input is None:
            self._input = self._spare
            self._spare = None
            if self._input is None:
                self._input = torch.empty(
                    self.bucket.numel, dtype=torch.float32, device=self.device
                )
        part = self._part(self._input, index)
        self._arrived.add(index)
        if frozen:
            self._held.add(index)
            part.zero_()
            return
        state = tuple(self._part(s, index) for s in self.state)
        self._settings.memory.compensate(xp, grad.detach(), state, part)
        self.stats.raw_bytes += grad.numel() * grad.element_size()

    def encode(self, step: int, size: int, rank: int) -> exchange.Request:
        """Encode what has arrived; what has not counts as zero and keeps its memory.

        Args:
            step: Equal on all ranks.
            size: How many ranks take part.
            rank: Which of them this is.
        """
        assert self._input is not None
        for index in range(len(self.bucket.members)):
            if index not in self._arrived:
                self._held.add(index)
                self._part(self._input, index).zero_()
        self._exchange = exchange.start(
            xp,
            self._settings.codec,
            self._input,
            Call(
                size=size,
                shapes=self.bucket.shapes,
                key=random_key(self._settings, self.bucket.name, step),
                step=step,
                rank=rank,
                shared=self.shared,
            ),
            want_error=self._settings.memory.wants_error,
            name=self.bucket.name,
        )
        self.stats.numel = self.bucket.numel
        return self._counted(next(self._exchange))

    @property
    def sent(self) -> bool:
        """Whether this step's exchange has begun."""
        return self._exchange is not None

    @property
    def name(self) -> str:
        """Part of the names of the unit's own collectives, equal on all ranks."""
        return f"{self.bucket.name}.{self._round}" if self._round else self.bucket.name

    def start(self, request: exchange.Request, prefix: str, process_set: Any) -> None:
        """Start the own collective that the exchange asks for."""
        payload, name = request.payload, f"{prefix}.{self.name}"
        self._summing = isinstance(request, exchange.Sum)
        if self._summing:
            self._handle = hvd.allreduce_async(
                payload, name=f"{name}.sum", op=hvd.Sum, process_set=process_set
            )
        else:
            self._nbytes = payload.numel()
            self._handle = hvd.allgather_async(
                payload, name=f"{name}.gather", process_set=process_set
            )

    def advance(self, round_number: int) -> exchange.Request | None:
        """Wait for the own collective of a round and return what the next one sends.

        Args:
            round_number: Counted from 0. The last round is left to :meth:`finish_own`, which knows
                the factor on the result.

        Returns:
            None where the unit has no further round.
        """
        if round_number + 1 >= self._rounds or self._exchange is None:
            return None
        with self.stats.timed("wait_ms"):
            handle, self._handle = self._handle, None
            summed = hvd.synchronize(handle)
        self._round = round_number + 1
        with self.stats.timed("decode_ms"):
            return self._counted(self._exchange.send(exchange.Reply((summed,))))

    def finish_own(self, factor: float, size: int) -> None:
        """Wait for the last own collective and decode, once a step."""
        if self._outcome is not None:
            if factor != self._factor:
                raise ExchangeError(
                    explain(
                        got=f"factors {self._factor} and {factor} within '{self.bucket.name}'",
                        expected="one reduction op for all parameters of an optimizer",
                    )
                )
            return
        self._factor = factor
        with self.stats.timed("wait_ms"):
            handle, self._handle = self._handle, None
            gathered = hvd.synchronize(handle)
        if self._summing:
            with self.stats.timed("decode_ms"):
                self._finish(exchange.Reply((gathered,), scale=factor / size))
            return
        if gathered.numel() != size * self._nbytes:
            raise ExchangeError(
                explain(
                    got=f"{gathered.numel()} bytes for '{self.bucket.name}' from {size} ranks",
                    expected=f"{size} x {self._nbytes} bytes",
                    why="the size follows from the settings and the shape, so some rank has others",
                    do="give every rank the same compression and the same model",
                )
            )
        with self.stats.timed("decode_ms"):
            payloads = gathered.view(size, -1).unbind(0)
            self._finish(exchange.Reply(payloads, scale=factor / size))

    def finish_reduce(self, reduced: Tensor) -> None:
        """Decode what Horovod reduced."""
        with self.stats.timed("decode_ms"):
            self._finish(exchange.Reply((reduced.view(-1),)))

    def result(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return one member's reduced gradient, detached, in storage that nobody else changes."""
        assert self._outcome is not None
        part = self._part(self._outcome.total, index)
        if index in self._held:
            part = part.zero_().add_(self._outcome.bad)
        return part.to(dtype)

    @property
    def bad(self) -> Tensor:
        """0, or NaN where any rank's input was not finite."""
        assert self._outcome is not None
        bad: Tensor = self._outcome.bad
        return bad

    def commit(self) -> None:
        """Let the candidate take the memory's place."""
        assert self._outcome is not None
        self.shared = self._outcome.shared
        old, error = self.state, self._outcome.error
        self.state = self._settings.memory.update(old, error)
        for index in self._held:
            for after, before in zip(self.state, old):
                self._part(after, index).copy_(self._part(before, index))
        spare = [t for t in (*old, self._input) if t is not None]
        self._end(next((t for t in spare if all(t is not s for s in self.state)), None))

    def drop(self) -> None:
        """Forget the candidate; the memory stays as it was."""
        self._end(self._input)

    def abandon(self) -> None:
        """Drop a step that was never decompressed, once the own collective is over."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            # If Horovod is going down or starting anew: nothing of this step counts anyway.
            with contextlib.suppress(HorovodInternalError):
                hvd.synchronize(handle)
        self.drop()

    # Inside -----------------------------------------------------------------------------------
    def _counted(self, request: exchange.Request) -> exchange.Request:
        payload = request.payload
        self.stats.wire_bytes += payload.numel() * payload.element_size()
        return request

    def _finish(self, reply: exchange.Reply) -> None:
        assert self._exchange is not None
        try:
            self._exchange.send(reply)
        except StopIteration as stop:
            self._outcome = stop.value
            return
        raise AssertionError("an exchange asked for more rounds than its codec says")

    def _end(self, spare: Tensor | None) -> None:
        self._spare, self._input = spare, None
        self._arrived.clear()
        self._held.clear()
        self._exchange = self._outcome = self._factor = None
        self._round = 0

    def _part(self, flat: Tensor, index: int) -> Tensor:
        member = self.bucket.members[index]
        return flat[member.start : member.start + member.numel].view(member.shape)


def random_key(settings: Settings, name: str, step: int) -> tuple[int, int]:
    """Return the key of a unit's random draws in a step, equal on all ranks."""
    return random.fold(settings.options.seed, name, step)
