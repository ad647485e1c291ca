"""One optimizer's parameters, buckets and running step.

A **step** is one reduction of everything: all ``compress`` calls, then all ``decompress`` calls.
Nothing in ``compress`` waits. The first ``decompress`` sends what has not been sent; the last one
decides, from what every tensor of the step brought back, whether all memories are kept or none.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.torch as hvd
import torch

from ..core.environment import elastic
from ..core.errors import BindingError, explain
from ..core.exchange import Reduce, Request, Scope
from ..core.route import Team
from ..core.settings import Settings
from ..core.stats import Stats
from ..core.telemetry import WIDTH
from .agreement import agree
from .carriers import Carriers
from .finite import Doubts
from .layout import Place, clear_away, lay_out
from .meter import Listener, Meter
from .nodes import NodeSets, RollCall, place, settle
from .regroup import Past, meet
from .trace import Recorder
from .unit import Unit
from .watch import Watch

if TYPE_CHECKING:
    from .auto import Tuner

Tensor = torch.Tensor

_numbers = itertools.count()
_CARRIABLE = (torch.float16, torch.float32, torch.float64)


class Ticket(NamedTuple):
    """What ``decompress`` gets back as the context."""

    binding: Binding
    parameter: int
    dtype: torch.dtype
    step: int
    frozen: bool


class Binding:
    """State of one optimizer under one compressor."""

    def __init__(
        self,
        settings: Settings,
        stats: Stats,
        named: Sequence[tuple[str, Tensor]],
        process_set: Any,
        optimizer: Any,
        grad_scaler: Any = None,
        label: str = "",
    ) -> None:
        self.settings, self.stats = settings, stats
        self._label = label
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.process_set = process_set
        self.optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self.grad_scaler = grad_scaler
        self.facts: Mapping[str, str] = {}
        """What else must be alike on all ranks, by name."""
        self.number = next(_numbers)
        self.world = (1, 0)
        """Number of ranks and this rank, when it last met them."""
        self.lock = threading.RLock()
        """To be held in ``compress`` and ``decompress``: autograd has a thread for each device."""
        self.step = 0
        self.units, self._where = lay_out(settings, self.names, self.params, stats)
        self.remembers = any(unit.store.state for unit in self.units)
        self.fingerprint = _fingerprint(self.names, self.params)
        self._ids = {id(p): i for i, p in enumerate(self.params)}
        self._follows = [*range(1, len(named)), 0] if named else []
        self._last = 0
        self._arrived = [False] * len(named)
        self._open = 0
        self._handles: Any = None
        self._lift: Any = 1.0
        self._sending = True
        self._doubts = Doubts()
        self.follows_resets = False
        """Whether :meth:`meet_again` will be called whenever elastic training changes the ranks."""
        self.begins: Callable[[Binding], None] | None = None
        """What is to be done first in every step, where it was bound by hand."""
        self.tuner: Tuner | None = None
        """What chooses the settings, where that is left to the first steps."""
        self.recorder: Recorder | None = None
        """What takes down the steps, while a trace runs."""
        self.meter: Meter | None = None
        """What measures some steps, while anybody listens."""
        self._on_mean = 1.0
        self.watch: Watch | None = None
        """What lets all ranks fall back to another codec, where that is wanted."""
        if settings.guard is not None:
            self.meter = Meter(self.names)
            self.watch = Watch(settings.guard, self, self.meter)
            self.meter.listeners.append(self.watch)
        self._past = Past(0, ())
        self._carriers = Carriers((), self.prefix, process_set)
        self._ranks: tuple[int, ...] = ()
        self._team = Team(1, 0)
        self._nodes: NodeSets | None = None
        self._roll = RollCall()

    @property
    def prefix(self) -> str:
        """Start of the names of its own collectives, alike on all ranks and no other binding's."""
        return f"gradcomp.{self.fingerprint}{self._label}"

    # Identity ---------------------------------------------------------------------------------
    def index_of(self, tensor: Tensor) -> int | None:
        """Return which parameter's gradient ``tensor`` is, or None."""
        if not self.params:
            return None
        guess: int = self._follows[self._last]
        if self.params[guess].grad is not tensor:
            grads = {id(p.grad): i for i, p in enumerate(self.params) if p.grad is not None}
            found = grads.get(id(tensor))
            if found is None:
                return None
            guess = found
            self._follows[self._last] = found
        self._last = guess
        return guess

    def stands_for(self, named: Sequence[tuple[str, Tensor]], process_set: Any) -> bool:
        """Return whether it was bound by hand to these parameters."""
        return (
            self.optimizer is None
            and self.process_set is process_set
            and self.names == [name for name, _ in named]
            and all(own is p for own, (_, p) in zip(self.params, named))
        )

    def index_of_parameter(self, p: Tensor) -> int | None:
        """Return the position of a bound parameter, or None."""
        return self._ids.get(id(p))

    def place_of(self, p: Tensor) -> Place | None:
        """Return the unit of a parameter and where it is in it; None if it has none here."""
        index = self.index_of_parameter(p)
        return None if index is None else self._where[index]

    # The slot ---------------------------------------------------------------------------------
    def compress(self, index: int, tensor: Tensor) -> tuple[Tensor, Ticket]:
        """Take in a gradient; see :meth:`Compressor.compress`."""
        if self._arrived[index] or not self._sending or (self._open and self._given_up()):
            self._abandon()
        if not self._open:
            if self.begins is not None:
                self.begins(self)
            self._handles = self._awaited()
            self._refresh_ranks()
            self._lift = loss_scale(self.grad_scaler)
            if self.recorder is not None:
                self.recorder.begin(self.step)
            if self.watch is not None:
                self.watch.begin(self.step)
            if self.meter is not None and self.meter.due(self.step):
                for unit in self.units:
                    unit.measure(self._lift)
        elif self.recorder is not None:
            self.recorder.look()
        self._arrived[index] = True
        self._open += 1
        if self.tuner is not None:
            self.tuner.arrived(first=self._open == 1)
        frozen = not self.params[index].requires_grad
        ticket = Ticket(self, index, tensor.dtype, self.step, frozen)
        place = self._where[index]
        if place is None:
            return self._bypass(tensor), ticket
        unit, member = place
        self._check(index, tensor)
        start, stats = time.perf_counter(), unit.stats
        unit.add(member, tensor, step=self.step, team=self._team, frozen=frozen, lift=self._lift)
        if unit.by_horovod:
            payload = self._send(unit)
        else:
            if unit.full:
                self._send(unit)
            payload = self._carrier(index, frozen=frozen)
            stats.wire_bytes += payload.nbytes
            stats.collectives += 1
        stats.encode_ms += 1e3 * (time.perf_counter() - start)
        return payload, ticket

    def decompress(self, reduced: Tensor, ticket: Ticket) -> Tensor:
        """Return a reduced gradient; see :meth:`Compressor.decompress`."""
        if ticket.step != self.step:
            raise BindingError(
                explain(
                    got=f"a gradient of '{self.names[ticket.parameter]}' from an aborted step",
                    expected="every decompress before the next step's compress",
                )
            )
        if self.recorder is not None:
            self.recorder.look()
        if self._sending:
            self._flush()
        place = self._where[ticket.parameter]
        if place is None:
            out = reduced if reduced.dtype is ticket.dtype else reduced.to(ticket.dtype)
            if self.remembers and reduced.is_floating_point():
                self._doubts.look_at(reduced)
        else:
            unit, member = place
            if unit.by_horovod:
                if self.recorder is not None:
                    self.recorder.arrived(unit)
                unit.finish_reduce(reduced, self._lift)
            else:
                words = reduced.tolist()
                factor = self._factor(words, ticket)
                if self._carriers.wide and self.meter is not None and words[-WIDTH]:
                    self.meter.hear(ticket.parameter, words[-WIDTH:])
                unit.finish_own(factor, len(self._ranks), self._lift)
            out = unit.result(member, ticket.dtype)
        self._open -= 1
        if self._open == 0:
            self._end()
        return out

    def listen(self, listener: Listener) -> None:
        """Measure the steps that a listener wants, from the next one on."""
        self.meter = self.meter or Meter(self.names)
        self.meter.listeners.insert(0, listener)  # before the guard, which tells events

    def ignore(self, listener: Listener) -> None:
        """Measure no more for a listener."""
        if self.meter is not None:
            self.meter.listeners.remove(listener)
            self.meter = self.meter if self.meter.listeners else None

    def _awaited(self) -> Any:
        """Return the table of what Horovod's optimizer waits for, another one once it is reset."""
        optimizer = None if self.optimizer is None else self.optimizer()
        return getattr(optimizer, "_handles", None)

    def _given_up(self) -> bool:
        """Return whether the optimizer was reset within the step."""
        return self._awaited() is not self._handles

    # Other bindings by hand -------------------------------------------------------------------
    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open > 0

    def settle(self, unit: Unit) -> None:
        """Let a unit remember as a rank all that this one owes as a reducing side."""
        unit.side.move(None, self._team.size)
        unit.stats.state_bytes = unit.store.nbytes

    def go_on_from(self, other: Binding) -> None:
        """Begin the next step where another binding is, with a guard that stands where its does."""
        skipped, self.step = other.step - self.step, other.step
        if self.watch is not None and other.watch is not None:
            self.watch.stand(other.watch.standing, self.step)
        if self.meter is not None:
            self.meter.skip(skipped)

    # Inside a step ----------------------------------------------------------------------------
    def _carrier(self, index: int, *, frozen: bool) -> Tensor:
        meter, carriers = self.meter, self._carriers
        if not carriers.filled:
            told = meter.row if meter is not None else None
            carriers.fill(self.step, len(self.params), told, measures=meter is not None)
        return carriers.row(index, frozen=frozen)

    def _bypass(self, tensor: Tensor) -> Tensor:
        stats = self.stats.bypassed
        payload = tensor
        if tensor.dtype not in _CARRIABLE and tensor.is_floating_point():
            payload = tensor.to(torch.float32)  # Horovod cannot carry bfloat16
        if not payload.is_contiguous():
            payload = payload.contiguous()
        stats.raw_bytes += tensor.nbytes
        stats.wire_bytes += payload.nbytes
        stats.collectives += 1
        return payload

    def _send(self, unit: Unit) -> Tensor:
        start = time.perf_counter()
        request = unit.encode(self.step, self._team)
        if unit.stats.log is not None:
            unit.stats.log("encode", start, time.perf_counter())
        if not isinstance(request, Reduce):
            self._start(unit, request)
        elif self.recorder is not None:
            self.recorder.sent(unit)
        payload: Tensor = request.payload
        return payload

    def _start(self, unit: Unit, request: Request) -> None:
        scope = getattr(request, "scope", Scope.ALL)
        unit.start(request, self.prefix, self._set_of(scope))

    def _start_all(self, requests: Sequence[tuple[Unit, Request | None]]) -> bool:
        """Start what units ask for, and return whether any of them asks for anything."""
        asked = [(unit, request) for unit, request in requests if request is not None]
        for unit, request in asked:
            self._start(unit, request)
        return bool(asked)

    def _flush(self) -> None:
        """Send what has not been sent, and finish all rounds but the last, of all units together.

        Nothing is started after a wait that another rank may reach in another order: every unit's
        round is started before the first unit's is waited for, in the same order on every rank.
        """
        self._sending = False
        used = [unit for unit in self.units if not unit.idle and not unit.by_horovod]
        for unit in used:
            if not unit.sent:
                with unit.stats.timed("encode_ms"):
                    self._send(unit)
        self._roll.check()
        for number in itertools.count():
            if not self._start_all([(unit, unit.advance(number)) for unit in used]):
                return

    def _factor(self, values: list[float], ticket: Ticket) -> float:
        """Return the factor on the mean, from a reduced carrier."""
        begun, name = self._carriers.some_joined, self.names[ticket.parameter]
        factor = self._carriers.factor(values, self.step, name, frozen=ticket.frozen)
        if self._carriers.some_joined and not begun:
            self._decode_alone()
        self._on_mean = factor
        return factor

    def _decode_alone(self) -> None:
        """Let what cannot be gathered be added up, all of it started before any is waited for."""
        self._start_all([(unit, unit.refuse()) for unit in self.units if unit.sent])
        self.stats.joined_steps += 1
        if self.stats.joined_steps == 1:
            warnings.warn(
                "horovod_gradcomp: a rank has joined (hvd.join), so that Horovod gathers nothing; "
                "what was to be gathered is sent at full size",
                stacklevel=2,
            )

    def _end(self) -> None:
        used = [unit for unit in self.units if not unit.idle]
        for unit in used:
            self._doubts.take(unit.doubts)
        bad = self._doubts.any()
        self.stats.steps += 1
        self.stats.bad_steps += bad
        if self.meter is not None:
            gauges = [unit.gauge for unit in used if unit.gauge is not None]
            size = len(self._ranks)
            self.meter.end(self.step, gauges, bad=bad, size=size, factor=self._on_mean)
        for unit in used:
            unit.drop() if bad else unit.commit()
        if self.recorder is not None:
            self.recorder.end(bad=bad)
        self._next_step()
        if self.tuner is not None:
            self.tuner.ended(bad=bad)

    def take_up(self, settings: Settings) -> None:
        """Go on with other settings; between two steps, while nothing is remembered."""
        clear_away(self.units, self._where, self.names, self.params, self.stats)
        self.settings = settings
        self.units, self._where = lay_out(settings, self.names, self.params, self.stats)
        self.remembers = any(unit.store.state for unit in self.units)
        if self.recorder is not None:
            self.recorder.follow(self.units)
        for listener in self.meter.listeners if self.meter is not None else ():
            listener.follow()
        self._past = Past(0, ())
        self._carriers = Carriers((), self.prefix, self.process_set)

    def _abandon(self) -> None:
        for unit in self.units:
            if not unit.idle:
                unit.abandon()
        self._roll.drain()
        self._carriers.next_step(reuse=False)
        if self.meter is not None:
            self.meter.forget()
        if self.recorder is not None:
            self.recorder.end(aborted=True)
        self._next_step()

    # Ranks that come and go ---------------------------------------------------------------------
    def meet_again(self) -> None:
        """Meet the ranks anew in the next step; the running one counts for nothing.

        Nothing is waited for: what was on its way is over once Horovod has been shut down.
        """
        for unit in self.units:
            if not unit.idle:
                unit.forget()
        self._roll.forget()
        if self.meter is not None:
            self.meter.forget()
        self._next_step()
        self._carriers = Carriers((), self.prefix, self.process_set)

    def tell_norms(self) -> None:
        """Let all ranks know what each has not yet sent, in case one leaves."""
        size = len(self.process_set.ranks or range(hvd.size()))
        squares = [unit.store.owed + unit.side.norm(size) ** 2 for unit in self.units]
        norm = torch.tensor([math.sqrt(sum(squares))])
        norms = hvd.allgather(norm, name=f"{self.prefix}.norms", process_set=self.process_set)
        self._past = self._past._replace(norms=tuple(norms.tolist()))

    def _meet(self, ranks: tuple[int, ...]) -> None:
        if self.units and not self.follows_resets and elastic():
            raise BindingError(
                explain(
                    got="elastic training with hvd.elastic.TorchState",
                    expected="horovod_gradcomp.torch.elastic.TorchState",
                    why="ranks that come must learn what the others share, and what those that "
                    "stay have not yet sent must be kept",
                    do="make the state with it; arguments and use are the same",
                )
            )
        model = f"{len(self.params)} of digest {self.fingerprint}"
        facts = {**self.settings.facts(), **self.facts, "parameters": model}
        turns = [unit.turn for unit in self.units]
        stands = self.watch.standing if self.watch is not None else ()
        past = self._past._replace(step=self.step, turns=turns, stands=stands)
        more = {"past": past._asdict(), "place": place()}
        if self.tuner is not None:
            facts["auto"] = str(self.tuner.choice)
        told = agree(facts, more, ranks, self.process_set)
        self._find_nodes([one["place"] for one in told], ranks)
        self.stats.lost_norm += meet(self, [one["past"] for one in told], ranks)
        self._past = Past(0, (), len(ranks), ranks.index(hvd.rank()))
        self._carriers = Carriers(ranks, self.prefix, self.process_set)
        self._carriers.wide = self.watch is not None

    def _find_nodes(self, places: Sequence[Mapping[str, Any]], ranks: tuple[int, ...]) -> None:
        found = settle(places, self.settings.options, self.units, self.process_set)
        self._nodes = found
        self._team = Team(len(ranks), ranks.index(hvd.rank()), found and found.nodes)
        self.world = hvd.size(), hvd.rank()

    def _next_step(self) -> None:
        for unit in self.units:
            unit.gauge = None
        self.step += 1
        self._sending = True
        self._open = 0
        self._arrived = [False] * len(self.params)
        self._doubts.clear()
        self._carriers.next_step()
        self._ranks = ()

    def _refresh_ranks(self) -> None:
        """Ask anew each step: elastic training changes the ranks between steps."""
        ranks = tuple(self.process_set.ranks or range(hvd.size()))
        if self._carriers.ranks != ranks:
            self._meet(ranks)
        elif self._nodes is not None and self._nodes.gone:
            told = agree(self.settings.facts(), {"place": place()}, ranks, self.process_set)
            self._find_nodes([one["place"] for one in told], ranks)
        self._ranks = ranks
        if self.by_nodes:
            self._roll.start(self.prefix)
            self.units[0].stats.wire_bytes += 4
            self.units[0].stats.collectives += 1

    def _set_of(self, scope: Scope) -> Any:
        sets = {} if self._nodes is None else self._nodes.sets
        return sets.get(scope, self.process_set)

    @property
    def by_nodes(self) -> bool:
        """Whether anything takes the hierarchical exchange."""
        return self._team.nodes is not None

    def _check(self, index: int, tensor: Tensor) -> None:
        expected = self.params[index].shape
        if tensor.requires_grad or tensor.shape != expected:
            raise BindingError(
                explain(
                    got=f"a gradient of '{self.names[index]}' of shape {tuple(tensor.shape)}, "
                    f"requires_grad={tensor.requires_grad}",
                    expected=f"shape {tuple(expected)} without a graph of its own",
                    do="detach it; call backward without create_graph",
                )
            )


def loss_scale(grad_scaler: Any) -> Any:
    """Return what gradients are multiplied by; a tensor where reading it would wait."""
    if grad_scaler is None or not grad_scaler.is_enabled():
        return 1.0
    scale = grad_scaler._get_scale_async()
    if scale is None:  # nothing has been scaled so far
        return 1.0
    return scale.item() if scale.device.type == "cpu" else scale.detach().clone()


def _fingerprint(names: list[str], params: list[Tensor]) -> str:
    """Return a name for an optimizer's own collectives, alike on all ranks.

    It depends on names and shapes only, never on what was bound before: the order in which objects
    die differs between ranks. Two optimizers that share it cannot meet, since Horovod refuses two
    reductions of one parameter name at a time.
    """
    text = repr([(n, tuple(p.shape)) for n, p in zip(names, params)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]
