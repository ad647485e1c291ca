"""What is encoded and sent in one go: a bucket of parameters, or a single one for SUM codecs.

A unit has the memory of its parameters in a store, the codec of the running phase with the state
that it shares with all ranks, and one exchange a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError

from ..codecs.fp16 import FP16
from ..core import exchange, hierarchical, random, twophase
from ..core.codec import Call, Codec, Combine, is_one
from ..core.errors import ExchangeError, explain
from ..core.plan import Bucket
from ..core.route import Route, Team, route
from ..core.schedule import Phase
from ..core.settings import Settings, parse_codec
from ..core.stats import Log, UnitStats
from ..ops import torch as xp
from .finite import Doubts
from .meter import Gauge
from .side import ReducingSide
from .store import Store
from .wire import Wire

Tensor = torch.Tensor
_FULL = FP16()
"""What a memory that is refreshed sends."""


class Unit:
    """State of one bucket, and its exchange in the running step."""

    def __init__(self, bucket: Bucket, settings: Settings, device: torch.device) -> None:
        self.bucket = bucket
        self.stats = UnitStats()
        self._coding, self._waiting, self._decoding = map(
            self.stats.timed, ("codec_ms", "wait_ms", "decode_ms")
        )
        self.device = device
        self.expected = len(bucket.members)
        self.memory = settings.memory
        self.by_horovod = settings.by_horovod
        self.store = Store(bucket, settings, device)
        self.side = ReducingSide(bucket, self.store)
        self.stats.state_bytes = self.store.nbytes
        self._settings = settings
        self._arrived: set[int] = set()
        self._dtypes: set[torch.dtype] = set()
        self._exchange: exchange.Exchange | None = None
        self._wire = Wire()
        self._factor: float | None = None
        self.doubts = Doubts()
        """Of the running step, alike on all ranks once its results are there."""
        self._results: dict[torch.dtype, list[Tensor]] = {}
        self._mean: Tensor | None = None
        self._round, self._rounds = 0, 1
        self._outcome: exchange.Outcome | None = None
        self.falls_back = False
        """Whether the codec of the guard is used."""
        self.gauge: Gauge | None = None
        """What measures the running step, if anything does."""
        self.route = Route("whole", None)
        """The exchange of the running step, or of the last."""
        self._routed: tuple[Any, Route] = (None, self.route)
        """What the last exchange was found for, and which it is."""
        self.phase = self._begin(settings.codec_at(0))

    @property
    def phase(self) -> tuple[Codec, tuple[Tensor, ...], int]:
        """The codec in use, the state that it shares with all ranks, and its good steps so far."""
        return self.codec, self.shared, self.turn

    @phase.setter
    def phase(self, value: tuple[Codec, tuple[Tensor, ...], int]) -> None:
        self.codec, self.shared, self.turn = value

    def prepare(self, step: int) -> None:
        """Take up the codec of a step, with the shared state that a new one begins with."""
        guard = self._settings.guard
        codec = self._settings.codec_at(step)
        if guard is not None and self.falls_back:
            codec = guard.fallback
        if codec is not self.codec:
            self.phase = self._begin(codec)

    def begin_anew(self) -> None:
        """Forget all, as before the first step."""
        self.phase = self._begin(self._settings.codec_at(0))
        for part in self.store.state:
            part.zero_()
        self.side.clear()

    def let_go(self, step: int) -> None:
        """Send all that is remembered from a step on, and everything else as it is."""
        plain = parse_codec("none").with_memory(self.memory.wants_error)
        earlier = [phase for phase in self._settings.phases if phase.first < step]
        self._settings = dataclasses.replace(
            self._settings, codec=plain, phases=(*earlier, Phase(step, plain))
        )

    def _begin(self, codec: Codec) -> tuple[Codec, tuple[Tensor, ...], int]:
        start = Call(shapes=self.bucket.shapes, key=random_key(self._settings, self.bucket.name, 0))
        return codec, codec.initial(xp, start, torch.empty(0, device=self.device)), 0

    # One step ---------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """Whether no member has arrived in this step."""
        return not self._arrived

    @property
    def full(self) -> bool:
        """Whether every member that will arrive has arrived."""
        return len(self._arrived) >= self.expected

    def add(
        self, index: int, grad: Tensor, *, step: int, team: Team, frozen: bool, lift: Any = 1.0
    ) -> None:
        """Take in one member's gradient.

        Args:
            index: Of the member.
            grad: Any strides, any float dtype, of the member's shape.
            step: Equal on all ranks.
            team: Who takes part.
            frozen: Whether the parameter no longer trains: it sends zero and keeps its memory,
                which would move its weights otherwise.
            lift: As of :meth:`Store.take`.
        """
        if not self._arrived:
            self._set_out(step, team)
        self._arrived.add(index)
        self._dtypes.add(grad.dtype)
        if frozen:
            self.store.hold(index)
            return
        with self._coding:
            self.store.take(index, grad, lift=lift, size=team.size)
        if self.gauge is not None:
            self.gauge.take(index, grad)
        self.stats.raw_bytes += grad.nbytes

    def _set_out(self, step: int, team: Team) -> None:
        self.prepare(step)
        wanted = self.codec, team, self._settings
        if self._routed[0] != wanted:
            self._routed = wanted, self.route_of(self.codec, team)
        self.route = self._routed[1]
        if self.memory.refreshes(step):  # all is sent, and what is owed is of no account
            self.route = Route("whole", None)
        else:
            self.side.move(self.route.part, team.size)
        self.store.begin(step)

    def route_of(self, codec: Codec, team: Team) -> Route:
        """Return the exchange that a codec takes."""
        how = self._settings.options.exchange
        if self._settings.guard is not None:  # inside nodes nothing is left out that could be seen
            team = team._replace(nodes=None)
        return route(how, codec, self.memory, self.bucket.shapes, team)

    def takes_nodes(self, team: Team) -> bool:
        """Return whether any of its codecs takes the hierarchical exchange."""
        routes = (self.route_of(phase.codec, team) for phase in self._settings.phases)
        return any(one.exchange == "hierarchical" for one in routes)

    def encode(self, step: int, team: Team) -> exchange.Request:
        """Encode what has arrived; what has not counts as zero and keeps its memory.

        Args:
            step: Equal on all ranks.
            team: Who takes part.
        """
        for index in range(len(self.bucket.members)):
            if index not in self._arrived:
                self.store.hold(index)
        call = Call(
            size=team.size,
            shapes=self.bucket.shapes,
            key=random_key(self._settings, self.bucket.name, step),
            step=self.turn,
            rank=team.rank,
            shared=self.shared,
            notes={},
        )
        if self.gauge is not None:
            self.gauge.keep(self.store.wanted(), consumed=not self.memory.references)
        codec, start = self._now, functools.partial(exchange.start, own=not self.by_horovod)
        self._rounds = codec.round_count(self.bucket.shapes)
        if self.route.part is not None:
            server = self.side.server(self.memory.of_server(codec), self.route.part)
            self._rounds, start = 2, functools.partial(twophase.start, server=server)
            if self.route.exchange == "hierarchical":
                assert team.nodes is not None
                self._rounds = 3
                start = functools.partial(hierarchical.start, server=server, nodes=team.nodes)
        self._exchange = start(
            xp,
            codec,
            self.store.input,
            call,
            want_error=self.memory.wants_error or self.gauge is not None,
            name=self.bucket.name,
        )
        self.stats.numel = self.bucket.numel
        with self._coding:
            request = next(self._exchange)
        return self._counted(request)

    @property
    def _now(self) -> Codec:
        """The codec of the running step."""
        return _FULL if self.store.refreshing else self.codec

    @property
    def gathers(self) -> bool:
        """Whether it asks Horovod for what it refuses while a rank has joined."""
        return self.codec.combine is Combine.GATHER

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
        self.stats.own_collectives += 1
        self._wire.start(request, f"{prefix}.{self.name}", process_set)

    def advance(self, round_number: int) -> exchange.Request | None:
        """Wait for the own collective of a round and return what the next one sends.

        Args:
            round_number: Counted from 0. The last round is left to :meth:`finish_own`, which knows
                the factor on the result.

        Returns:
            None where the unit has no further round.
        """
        if self._exchange is None or round_number + 1 >= self._rounds:
            return None
        self._round, may_refuse = round_number + 1, self._wire.needs_all
        try:
            reply = exchange.Reply(self._received())
        except HorovodInternalError:
            if not may_refuse:
                raise
            return self._decoded()  # if Horovod has failed, this fails likewise
        with self._decoding, self._coding:
            return self._counted(self._exchange.send(reply))

    def refuse(self) -> exchange.Request | None:
        """Return what to send instead if Horovod gathers nothing, as a rank has joined."""
        if not self._wire.needs_all:
            return None
        self._wire.drain()
        self._round += 1
        return self._decoded()

    def _decoded(self) -> exchange.Request:
        assert self._exchange is not None
        return self._counted(self._exchange.send(exchange.Reply(refused=True)))

    def finish_own(self, factor: float, size: int, lift: Any = 1.0) -> None:
        """Wait for the last own collective and decode, once a step.

        Args:
            factor: On the mean, from the carrier.
            size: How many ranks take part.
            lift: As of :meth:`add`.
        """
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
        references = self.memory.references
        scale = factor / size if references else factor / size * lift
        payloads = self._received()
        with self._decoding:
            self._finish(exchange.Reply(payloads, scale=scale), lift)

    def finish_reduce(self, reduced: Tensor, lift: Any = 1.0) -> None:
        """Decode what Horovod reduced."""
        with self._decoding:
            flat = reduced if reduced.dim() == 1 else reduced.view(-1)
            self._finish(exchange.Reply((flat,), scale=lift), lift)

    def result(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return one member's reduced gradient, detached, in storage that nobody else changes."""
        if dtype not in self._results:
            self._results[dtype] = self._split(dtype)
        out = self._results[dtype][index]
        if out.dtype is not dtype:  # the members' dtypes differ
            out = self._cast(out, dtype)
        return out

    def _split(self, dtype: torch.dtype) -> list[Tensor]:
        """Return all members' results: in one dtype, if that is the only one here."""
        assert self._outcome is not None
        total = self._outcome.total
        if dtype is not total.dtype and len(self._dtypes) == 1:
            total = self._cast(total, dtype)
        return self.store.split(total)

    def _cast(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        cast = total.to(dtype)
        if dtype is not torch.float64:  # a finite float32 may be too large for it
            self.doubts.look_at(cast)
        return cast

    def commit(self) -> None:
        """Let the candidate take the memory's place."""
        outcome = self._outcome
        assert outcome is not None
        if self.store.refreshing:
            self.side.clear()
        else:
            self.shared = outcome.shared
            self.turn += 1
        self.side.commit(outcome.owed)
        self.stats.state_bytes = self.store.nbytes + self.side.nbytes
        self.store.commit(outcome.error, outcome.kept, self._mean)
        self._end()

    def log_to(self, log: Log | None) -> None:
        """Take down when it is encoded, on its way and decoded; None takes down no more."""
        self.stats.log = self._wire.log = log

    def measure(self, lift: Any) -> None:
        """Measure the step that begins."""
        self.gauge = Gauge(self.bucket, self.stats, lift)

    def look(self) -> None:
        """Take note if the own collective is over."""
        self._wire.look()

    def drop(self) -> None:
        """Forget the candidate; the memory stays as it was."""
        self.store.end()
        self._end()

    def forget(self) -> None:
        """Drop a step whose own collective will never end, or has ended with Horovod itself."""
        self._wire.forget()
        self.drop()

    def abandon(self) -> None:
        """Drop a step that was never decompressed, once the own collective is over."""
        self._wire.drain()
        self.drop()

    # Inside -----------------------------------------------------------------------------------
    def _received(self) -> Sequence[Tensor]:
        with self._waiting:
            return self._wire.received(self.bucket.name)

    def _counted(self, request: exchange.Request) -> exchange.Request:
        nbytes = request.payload.nbytes
        self.stats.wire_bytes += nbytes
        if getattr(request, "scope", None) is exchange.Scope.NODE:
            self.stats.inside_bytes += nbytes
        self.stats.collectives += 1
        return request

    def _finish(self, reply: exchange.Reply, lift: Any) -> None:
        outcome = self._last_reply(reply)
        if self.gauge is not None:
            self.gauge.finish(outcome.error)
        outcome = self._outcome = self._referred(outcome, lift)
        # The sum of finite inputs may overflow, and so may the factor on it. What some rank found
        # to be bad shows in the total. What Horovod adds up is zero by itself where no rank has
        # sent anything; if some have, all ranks must get it alike.
        if self.store.holds and not self.by_horovod:
            bad = outcome.bad + xp.badness(outcome.total)
            self.doubts.add(bad)
            self.store.silence(outcome.total, bad)
        else:
            self.doubts.look_at(outcome.total)

    def _last_reply(self, reply: exchange.Reply) -> exchange.Outcome:
        assert self._exchange is not None
        with self._coding:
            try:
                self._exchange.send(reply)
            except StopIteration as stop:
                outcome: exchange.Outcome = stop.value
                return outcome
        raise AssertionError("an exchange asked for more rounds than its codec says")

    def _referred(self, outcome: exchange.Outcome, lift: Any) -> exchange.Outcome:
        """Make a gradient of a difference to a reference."""
        memory = self.memory
        if not memory.references:
            return outcome
        assert self._factor is not None
        self._mean = outcome.total
        if self._factor != 1:
            self._mean = xp.scale_(self._mean, 1 / self._factor)
        total = self.store.reduced(self._mean)
        factor = self._factor * lift
        return outcome._replace(total=total if is_one(factor) else xp.scale_(total, factor))

    def _end(self) -> None:
        self._mean = None
        self.doubts.clear()
        self._results = {}
        self._arrived.clear()
        self._dtypes.clear()
        self._exchange = self._outcome = self._factor = None
        self._round = 0


def random_key(settings: Settings, name: str, step: int) -> tuple[int, int]:
    """Return the key of a unit's random draws in a step, equal on all ranks."""
    return random.fold(settings.options.seed, name, step)
