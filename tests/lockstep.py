"""Several simulated ranks in one process: exchanges driven in lock step, as Horovod would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from horovod_gradcomp.core import exchange
from horovod_gradcomp.core.codec import Call, Codec
from horovod_gradcomp.core.exchange import Gather, Outcome, Reply, Scatter, Scope, Sum
from horovod_gradcomp.core.hierarchical import Nodes
from horovod_gradcomp.core.memory import Done, Memory
from horovod_gradcomp.testing.frameworks import Framework
from tests import table

NAME = "layer.weight"


def drive(
    fw: Framework,
    runs: Sequence[exchange.Exchange],
    *,
    average: bool = True,
    nodes: Nodes | None = None,
    spoil: Callable[[int, list[np.ndarray]], None] = lambda turn, sent: None,
) -> list[Any]:
    """Run one exchange a rank to the end and return the outcomes in rank order.

    Every rank gets payloads in storage of its own, as from a network.

    Args:
        fw: A framework.
        runs: Exchanges that have not begun.
        average: Whether Horovod averages.
        nodes: Where the ranks are.
        spoil: Called in each round with its number and what all ranks send, to be changed.
    """
    turns = itertools.count()
    requests = [next(run) for run in runs]
    while True:
        kinds = {
            (type(r), r.scope if hasattr(r, "sizes") else fw.array(r.payload).shape)
            for r in requests
        }
        assert len(kinds) == 1, f"ranks ask for different collectives: {kinds}"
        sent = [fw.array(request.payload) for request in requests]
        spoil(next(turns), sent)
        size = len(sent)
        groups = _groups(requests[0], size, nodes)
        if isinstance(requests[0], Gather):
            scale = 1 / size if average else 1.0
            replies = []
            for group, request in zip(groups, requests):
                assert list(request.sizes) == [sent[r].size for r in group]
                replies.append(Reply([fw.tensor(sent[r]) for r in group], scale))
        elif isinstance(requests[0], Scatter):
            replies = []
            for rank, request in enumerate(requests):
                turn = groups[rank].index(rank)
                end = np.cumsum(request.sent)[turn]
                parts = [sent[r][end - request.sent[turn] : end] for r in groups[rank]]
                assert list(request.sizes) == [part.size for part in parts]
                replies.append(Reply([fw.tensor(part) for part in parts]))
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                total = sent[0]
                for other in sent[1:]:
                    total = total + other
                scale = 1.0
                if average and isinstance(requests[0], Sum):
                    scale = 1 / size
                elif average:
                    total = total * total.dtype.type(1 / size)
            replies = [Reply([fw.tensor(total)], scale) for _ in sent]
        ended, requests = [], []
        for run, reply in zip(runs, replies):
            try:
                requests.append(run.send(reply))
            except StopIteration as end:
                ended.append(end.value)
        assert not (ended and requests), "some ranks ended, others ask for another collective"
        if ended:
            return ended


def _groups(request: Any, size: int, nodes: Nodes | None) -> list[Sequence[int]]:
    """Return whom each rank exchanges with."""
    scope = getattr(request, "scope", Scope.ALL)
    if scope is Scope.ALL:
        return [range(size)] * size
    return [nodes.inside(r) if scope is Scope.NODE else nodes.across(r) for r in range(size)]


@dataclass
class Ranks:
    """Simulated ranks that train together.

    Attributes:
        held: The memory's state on each rank.
        shared: The codec's shared state, which each rank works out by itself.
    """

    fw: Framework
    codec: Codec
    memory: Memory
    size: int
    numel: int
    average: bool = True
    held: list[tuple[Any, ...]] = field(default_factory=list)
    shared: list[tuple[Any, ...]] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        call, like = self._call(0, 0), self.fw.tensor(np.zeros(1, np.float32))
        self.shared = [self.codec.initial(self.fw.xp, call, like) for _ in range(self.size)]
        zero = np.zeros(self.numel, np.float32)
        slots = len(self.memory.slots)
        self.held = [tuple(self.fw.tensor(zero) for _ in range(slots)) for _ in range(self.size)]

    def step(self, number: int, grads: Sequence[np.ndarray]) -> list[Outcome]:
        """Reduce one gradient a rank; a bad step leaves the memory as it was."""
        xp, want, memory = self.fw.xp, True, self.memory
        grads = [self.fw.tensor(grad) for grad in grads]
        notes = [
            memory.note(xp, grad, state, 1.0, None) if memory.notes else None
            for grad, state in zip(grads, self.held)
        ]
        runs = [
            exchange.start(
                xp,
                self.codec,
                memory.compensate(xp, grad, state, None, note=notes[rank]),
                replace(self._call(number, rank), step=self.turn, shared=self.shared[rank]),
                want_error=want,
                name=NAME,
                own=memory.references,
            )
            for rank, (grad, state) in enumerate(zip(grads, self.held))
        ]
        outcomes = drive(self.fw, runs, average=self.average)
        means: list[Any] = [None] * self.size
        if memory.references:
            factor = 1 if self.average else self.size
            means = [xp.scale_(xp.copy(o.total), 1 / factor) for o in outcomes]
            outcomes = [
                o._replace(total=xp.scale_(memory.reduced(xp, mean, state), factor))
                for o, mean, state in zip(outcomes, means, self.held)
            ]
        if all(float(self.fw.array(o.bad)) == 0 for o in outcomes):
            self.held = [
                memory.update(xp, state, Done(o.error, note, o.kept, mean))
                for state, o, note, mean in zip(self.held, outcomes, notes, means)
            ]
            self.shared = [o.shared for o in outcomes]
            self.turn += 1
        return outcomes

    def _call(self, step: int, rank: int) -> Call:
        return table.call(table.mixed(self.numel), size=self.size, step=step, rank=rank)
