"""One optimizer's parameters, buckets and running step.

A **step** is one reduction of everything: all ``compress`` calls, then all ``decompress`` calls.
Nothing in ``compress`` waits. The first ``decompress`` sends what has not been sent; the last one
decides, from what every tensor of the step brought back, whether all memories are kept or none.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ..core import policy
from ..core.errors import BindingError, ExchangeError, explain
from ..core.exchange import Carrier, Reduce, Request
from ..core.plan import buckets
from ..core.settings import Settings
from ..core.stats import Stats
from ..ops import torch as xp
from .agreement import agree
from .regroup import Past, meet
from .unit import Unit

Tensor = torch.Tensor

_numbers = itertools.count()
_PROBE_SECONDS = 20
"""How long to wait before a reduction over other ranks is taken for what it is."""
_CARRIABLE = (torch.float16, torch.float32, torch.float64)


class Ticket(NamedTuple):
    """What ``decompress`` gets back as the context."""

    binding: Binding
    parameter: int
    dtype: torch.dtype
    step: int


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
    ) -> None:
        self.settings, self.stats = settings, stats
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.process_set = process_set
        self.optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self.grad_scaler = grad_scaler
        self.number = next(_numbers)
        self.step = 0
        self._where: list[tuple[Unit, int] | None] = [None] * len(named)
        self.units = self._plan()
        self._remembers = any(unit.store.state for unit in self.units)
        self._fingerprint = _fingerprint(self.names, self.params)
        self._ids = {id(p): i for i, p in enumerate(self.params)}
        self._follows = [*range(1, len(named)), 0] if named else []
        self._last = 0
        self._arrived = [False] * len(named)
        self._open = 0
        self._lift: Any = 1.0
        self._sending = True
        self._bad: list[Tensor] = []
        self.follows_resets = False
        """Whether :meth:`meet_again` will be called whenever elastic training changes the ranks."""
        self._past = Past(0, ())
        self._carrier: Carrier | None = None
        self._ranks: tuple[int, ...] = ()
        self._rows: Any = None
        self._joined: bool | None = None

    @property
    def prefix(self) -> str:
        """Start of the names of its own collectives, alike on all ranks and no other binding's."""
        return f"gradcomp.{self._fingerprint}"

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

    def index_of_parameter(self, p: Tensor) -> int | None:
        """Return the position of a bound parameter, or None."""
        return self._ids.get(id(p))

    # The slot ---------------------------------------------------------------------------------
    def compress(self, index: int, tensor: Tensor) -> tuple[Tensor, Ticket]:
        """Take in a gradient; see :meth:`Compressor.compress`."""
        if self._arrived[index] or not self._sending:
            self._abandon()
        self._refresh_ranks()
        if not self._open:
            self._lift = loss_scale(self.grad_scaler)
        self._arrived[index] = True
        self._open += 1
        ticket = Ticket(self, index, tensor.dtype, self.step)
        place = self._where[index]
        if place is None:
            return self._bypass(tensor), ticket
        unit, member = place
        self._check(index, tensor)
        with unit.stats.timed("encode_ms"):
            frozen = not self.params[index].requires_grad
            size = len(self._ranks)
            unit.add(member, tensor, step=self.step, size=size, frozen=frozen, lift=self._lift)
            if unit.by_horovod:
                return self._send(unit), ticket
            if unit.full:
                self._send(unit)
            carrier = self._next_carrier()
            unit.stats.wire_bytes += carrier.numel() * carrier.element_size()
            unit.stats.collectives += 1
        return carrier, ticket

    def decompress(self, reduced: Tensor, ticket: Ticket) -> Tensor:
        """Return a reduced gradient; see :meth:`Compressor.decompress`."""
        if ticket.step != self.step:
            raise BindingError(
                explain(
                    got=f"a gradient of '{self.names[ticket.parameter]}' from an aborted step",
                    expected="every decompress before the next step's compress",
                )
            )
        if self._sending:
            self._flush()
        place = self._where[ticket.parameter]
        if place is None:
            out = reduced.to(ticket.dtype)
            if self._remembers and reduced.is_floating_point():
                self._bad.append(xp.badness(reduced))
        else:
            unit, member = place
            if unit.by_horovod:
                unit.finish_reduce(reduced, self._lift)
            else:
                factor = self._factor(reduced.tolist(), self.names[ticket.parameter])
                unit.finish_own(factor, len(self._ranks), self._lift)
            out = unit.result(member, ticket.dtype)
            if unit.by_horovod:
                self._bad.append(unit.bad)
        self._open -= 1
        if self._open == 0:
            self._end()
        return out

    # Inside a step ----------------------------------------------------------------------------
    def _bypass(self, tensor: Tensor) -> Tensor:
        stats = self.stats.bypassed
        payload = tensor
        if tensor.dtype not in _CARRIABLE and tensor.is_floating_point():
            payload = tensor.to(torch.float32)  # Horovod cannot carry bfloat16
        if not payload.is_contiguous():
            payload = payload.contiguous()
        stats.raw_bytes += tensor.numel() * tensor.element_size()
        stats.wire_bytes += payload.numel() * payload.element_size()
        stats.collectives += 1
        return payload

    def _send(self, unit: Unit) -> Tensor:
        request = unit.encode(self.step, len(self._ranks), self._ranks.index(hvd.rank()))
        if not isinstance(request, Reduce):
            self._start(unit, request)
        payload: Tensor = request.payload
        return payload

    def _start(self, unit: Unit, request: Request) -> None:
        unit.start(request, self.prefix, self.process_set)

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
        for number in itertools.count():
            requests = [(unit, unit.advance(number)) for unit in used]
            for unit, request in requests:
                if request is not None:
                    self._start(unit, request)
            if all(request is None for _, request in requests):
                return

    def _factor(self, values: list[float], name: str) -> float:
        """Return the factor on the mean, from a reduced carrier."""
        assert self._carrier is not None
        *values, mark = values
        factor = self._carrier.joined(values)
        if factor is None or not self._join_begins(values, name):
            factor = self._carrier.factor(values, name)
        present = values[0] * len(self._ranks) / factor
        expected = factor * _mark(self.step) * present / len(self._ranks)
        if abs(mark - expected) > 1e-4 * expected:
            raise ExchangeError(
                explain(
                    got=f"ranks at different steps, for '{name}'; this one has done {self.step}",
                    expected="the same step on all ranks",
                    why="after hvd.join the ranks that had joined are behind",
                    do="call compression.join() in place of hvd.join()",
                )
            )
        return factor

    def _join_begins(self, values: list[float], name: str) -> bool:
        """Return whether some rank has joined, once found out for this step.

        Then what cannot be gathered is added up instead, for all units before any is waited for.
        """
        if self._joined is None:
            probe = hvd.allgather_async(
                torch.ones(1), name=f"{self.prefix}.probe", process_set=self.process_set
            )
            until = time.monotonic() + _PROBE_SECONDS
            while not hvd.poll(probe):
                if time.monotonic() > until:
                    return False
                time.sleep(0.001)
            try:
                hvd.synchronize(probe)
                self._joined = False
            except HorovodInternalError:
                self._joined = True
                requests = [(unit, unit.refuse()) for unit in self.units if unit.sent]
                for unit, request in requests:
                    if request is not None:
                        self._start(unit, request)
                self.stats.joined_steps += 1
                if self.stats.joined_steps == 1:
                    warnings.warn(
                        "horovod_gradcomp: a rank has joined (hvd.join), so that Horovod gathers "
                        "nothing; what was to be gathered is sent at full size",
                        stacklevel=2,
                    )
        return self._joined

    def _end(self) -> None:
        used = [unit for unit in self.units if not unit.idle]
        self._bad += [unit.bad for unit in used if not unit.by_horovod]
        bad = _any_bad(self._bad)
        for unit in used:
            unit.drop() if bad else unit.commit()
        self.stats.steps += 1
        self.stats.bad_steps += bad
        self._next_step()

    def _abandon(self) -> None:
        for unit in self.units:
            if not unit.idle:
                unit.abandon()
        self._next_step()

    # Ranks that come and go ---------------------------------------------------------------------
    def meet_again(self) -> None:
        """Meet the ranks anew in the next step; the running one counts for nothing.

        Nothing is waited for: what was on its way is over once Horovod has been shut down.
        """
        for unit in self.units:
            if not unit.idle:
                unit.forget()
        self._next_step()
        self._carrier = None

    def tell_norms(self) -> None:
        """Let all ranks know what each has not yet sent, in case one leaves."""
        size = len(self.process_set.ranks or range(hvd.size()))
        norm = torch.tensor([math.sqrt(sum(unit.owed_norm(size) for unit in self.units))])
        norms = hvd.allgather(norm, name=f"{self.prefix}.norms", process_set=self.process_set)
        self._past = self._past._replace(norms=tuple(norms.tolist()))

    def _meet(self, ranks: tuple[int, ...]) -> None:
        if self.units and not self.follows_resets and int(os.environ.get("HOROVOD_ELASTIC", "0")):
            raise BindingError(
                explain(
                    got="elastic training with hvd.elastic.TorchState",
                    expected="horovod_gradcomp.torch.elastic.TorchState",
                    why="ranks that come must learn what the others share, and what those that "
                    "stay have not yet sent must be kept",
                    do="make the state with it; arguments and use are the same",
                )
            )
        model = f"{len(self.params)} of digest {self._fingerprint}"
        facts = {**self.settings.facts(), "parameters": model}
        turns = [unit.turn for unit in self.units]
        past = self._past._replace(step=self.step, turns=turns)
        told = agree(facts, past._asdict(), ranks, self.process_set)
        self.stats.lost_norm += meet(self, told, ranks)
        self._past = Past(0, (), len(ranks), ranks.index(hvd.rank()))
        self._carrier = Carrier(ranks)

    def _next_step(self) -> None:
        self.step += 1
        self._sending = True
        self._open = 0
        self._arrived = [False] * len(self.params)
        self._bad = []
        self._rows = None
        self._joined = None
        self._ranks = ()

    def _next_carrier(self) -> Tensor:
        if self._rows is None:  # one matrix a step: Horovod reduces each row in place
            row = torch.tensor([(*Carrier.row(hvd.rank()), _mark(self.step))], dtype=torch.float32)
            self._rows = iter(row.repeat(len(self.params), 1).unbind(0))
        mine: Tensor = next(self._rows)
        return mine

    def _refresh_ranks(self) -> None:
        """Ask anew each step: elastic training changes the ranks between steps."""
        if self._ranks:
            return
        ranks = tuple(self.process_set.ranks or range(hvd.size()))
        if self._carrier is None or self._carrier.ranks != ranks:
            self._meet(ranks)
        self._ranks = ranks

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

    # Layout -----------------------------------------------------------------------------------
    def _plan(self) -> list[Unit]:
        groups: dict[tuple[Any, ...], tuple[Settings, list[int]]] = {}
        for i in reversed(range(len(self.params))):  # gradients arrive last layer first
            p = self.params[i]
            chosen = None
            if p.is_floating_point():
                chosen = policy.choose(self.settings, self.names[i], tuple(p.shape))
            if chosen is None:
                self.stats.bypassed.numel += p.numel()
                self.stats.bypassed_names.append(self.names[i])
            else:
                groups.setdefault((p.device, id(chosen)), (chosen, []))[1].append(i)
        units = []
        for (device, _), (settings, indices) in groups.items():
            entries = [(self.names[i], tuple(self.params[i].shape)) for i in indices]
            together = not settings.by_horovod
            at = iter(indices)
            for bucket in buckets(entries, self.settings.options.bucket_bytes, together=together):
                unit = Unit(bucket, settings, device)
                for member in range(len(bucket.members)):
                    self._where[next(at)] = (unit, member)
                units.append(unit)
                self.stats.units[self._stats_name(bucket.name)] = unit.stats
        return units

    def _stats_name(self, name: str) -> str:
        count, unique = 1, name
        while unique in self.stats.units:
            count += 1
            unique = f"{name}#{count}"
        return unique


def _mark(step: int) -> float:
    """Return what tells one step from others, in a carrier; no mean of marks is a third one's."""
    word = step * 0x9E3779B1 % 2**32
    return 1.0 + (word ^ word >> 15) % 4096 / 4096


def loss_scale(grad_scaler: Any) -> Any:
    """Return what gradients are multiplied by; a tensor where reading it would wait."""
    if grad_scaler is None or not grad_scaler.is_enabled():
        return 1.0
    scale = grad_scaler._get_scale_async()
    if scale is None:  # nothing has been scaled so far
        return 1.0
    return scale.item() if scale.device.type == "cpu" else scale.detach().clone()


def _any_bad(flags: list[Tensor]) -> bool:
    """Return whether any flag is not 0: the one place where a step waits for the device."""
    devices: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        devices.setdefault(flag.device, []).append(flag)
    return any(torch.stack(group).sum().item() != 0 for group in devices.values())


def _fingerprint(names: list[str], params: list[Tensor]) -> str:
    """Return a name for an optimizer's own collectives, alike on all ranks.

    It depends on names and shapes only, never on what was bound before: the order in which objects
    die differs between ranks. Two optimizers that share it cannot meet, since Horovod refuses two
    reductions of one parameter name at a time.
    """
    text = repr([(n, tuple(p.shape)) for n, p in zip(names, params)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]
