"""What becomes of the memory when ranks come and go, as they do in elastic training.

What is owed to the model is the mean of what ranks remember. After a change every rank goes on
from the sum of what the ranks that stayed remember, divided by the number of ranks that there
were: nothing of theirs is lost or counted twice. A rank that has left takes its part with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.torch as hvd
import torch

from ..core import environment
from ..core.agreement import check
from ..core.errors import BindingError, explain

if TYPE_CHECKING:
    from .binding import Binding


class Past(NamedTuple):
    """What a rank tells of itself when it meets the others.

    Attributes:
        step: Steps so far.
        turns: Good steps of each unit's codec.
        size: How many ranks there were at its last step; 0 if it has met nobody.
        rank: Its place among them.
        norms: Of what each of them remembered, when that was last told.
        stands: Where its guard stands, if it has one.
    """

    step: int
    turns: Sequence[int]
    size: int = 0
    rank: int = 0
    norms: Sequence[float] = ()
    stands: Sequence[int] = ()


def meet(binding: Binding, told: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> float:
    """Bring a binding to where the others are.

    Args:
        binding: Of this rank.
        told: The :class:`Past` of all ranks.
        ranks: Their numbers, in the same order.

    Returns:
        The norm of what has been lost with ranks that left, as far as it is known.

    Raises:
        SettingsError: Ranks meet for the first time and are at different steps.
    """
    if len(told) < 2 and not told[0]["size"]:
        return 0.0
    every = [Past(**one) for one in told]
    stayed = [place for place, past in enumerate(every) if past.size]
    if not stayed:
        check({rank: {"steps so far": str(past.step)} for rank, past in zip(ranks, every)})
        return 0.0
    root = stayed[0]
    guide = every[root]
    if binding.watch is not None:
        binding.watch.stand(guide.stands, guide.step)
    for unit, turn in zip(binding.units, guide.turns):
        unit.prepare(max(guide.step - 1, 0))
        unit.turn = turn
    mine = every[list(ranks).index(hvd.rank())].size > 0
    _merge(binding, mine, guide.size, len(stayed), ranks[root])
    binding.step = guide.step
    gone = sorted(set(range(guide.size)) - {every[place].rank for place in stayed})
    return _mourn(gone, guide.norms, told=hvd.rank() == ranks[root])


def join(bindings: Sequence[Binding], device: int) -> int:
    """Do what :meth:`Compressor.join` says.

    Args:
        bindings: Of the compressor.
        device: As of ``hvd.join``.
    """
    _refuse_join(bindings)
    last = int(hvd.join(device))
    for binding in sorted(bindings, key=lambda b: b.prefix):
        catch_up(binding, last)
    return last


def _refuse_join(bindings: Sequence[Binding]) -> None:
    if any(b.process_set is not hvd.global_process_set for b in bindings):
        raise BindingError(
            explain(
                got="join() with a process set",
                expected="gradients that all ranks reduce",
                why="Horovod's join is one of all ranks",
            )
        )
    if any(b.tuner is not None and not b.tuner.settled for b in bindings):
        raise BindingError(
            explain(
                got="join() before Compression.auto has chosen",
                expected="more steps on every rank, or a codec",
                why="all ranks choose together",
            )
        )
    if any(b.by_nodes for b in bindings):
        raise BindingError(
            explain(
                got="join() with exchange='hierarchical'",
                expected="exchange='allgather' or 'two_phase'",
                why="what a node exchanges needs all of its ranks",
            )
        )
    votes = next((u for b in bindings for u in b.units if u.gathers and not u.codec.additive), None)
    if votes is not None:
        raise BindingError(
            explain(
                got=f"join() with '{votes.codec.describe()}'",
                expected="a codec whose decoded payloads add up",
                why="while a rank has joined Horovod can only add",
                do="give every rank the same number of batches",
            )
        )
    cached = environment.number("HOROVOD_CACHE_CAPACITY", 1024) > 0
    if cached and any(unit.gathers for b in bindings for unit in b.units):
        raise BindingError(
            explain(
                got="join() with Horovod's response cache",
                expected="HOROVOD_CACHE_CAPACITY=0 in the environment of all ranks",
                why="Horovod 0.28.1 ends when a rank that has joined meets a gather that it "
                "has done before",
                do="set it, or choose a codec whose payloads Horovod adds up, such as randomk",
            )
        )


def catch_up(binding: Binding, root: int) -> None:
    """Bring all ranks to where one of them is, each with what it has not yet sent itself.

    Args:
        binding: Of this rank.
        root: The rank that has done all steps.
    """
    told = torch.tensor([binding.step, *(unit.turn for unit in binding.units)])
    told = hvd.broadcast(told, root, name=f"{binding.prefix}.step")
    binding.step, *turns = told.tolist()
    if binding.meter is not None:
        binding.meter.forget()
    if binding.watch is not None:  # it judges only what all ranks have measured, so all stand alike
        binding.watch.stand(binding.watch.standing, binding.step)
    for number, (unit, turn) in enumerate(zip(binding.units, turns)):
        unit.prepare(max(binding.step - 1, 0))
        unit.turn = turn
        tensors = dict(zip(unit.codec.slots, unit.shared))
        if unit.memory.references:  # the reference of all; each rank keeps its own
            tensors["mean"] = unit.store.state[1]
        for slot, tensor in tensors.items():
            name = f"{binding.prefix}.{number}.{slot}"
            tensor.copy_(hvd.broadcast(tensor, root, name=name))


def _merge(binding: Binding, mine: bool, size: int, stayed: int, root: int) -> None:
    """Let every rank go on from what those that stayed remember and share."""
    for number, unit in enumerate(binding.units):
        name = f"{binding.prefix}.{number}"
        for slot, flat in zip(unit.memory.slots, unit.store.state):
            part = flat.float() if mine else torch.zeros_like(flat, dtype=torch.float32)
            part = part / (stayed if unit.memory.references else size)
            if slot == "residual" and mine and unit.side.owed is not None:
                part[unit.side.part] += unit.side.owed
            total = hvd.allreduce(
                part, op=hvd.Sum, name=f"{name}.{slot}", process_set=binding.process_set
            )
            flat.copy_(total)
        unit.side.clear()  # told to all above; those who share a reference begin at its mean
        if unit.memory.references:  # the mean of references that are now alike
            own, mean = unit.store.state
            mean.copy_(own)
        for slot, shared in zip(unit.codec.slots, unit.shared):
            told = hvd.broadcast(
                shared, root, name=f"{name}.{slot}", process_set=binding.process_set
            )
            shared.copy_(told)


def _mourn(gone: Sequence[int], norms: Sequence[float], *, told: bool) -> float:
    known = [norms[rank] for rank in gone if rank < len(norms)]
    lost = math.sqrt(sum(norm * norm for norm in known))
    if told and (lost or len(known) < len(gone)):
        norm = f"of norm {lost:.6g} at the last commit" if known else "of unknown norm"
        which = ", ".join(map(str, gone))
        warnings.warn(
            f"horovod_gradcomp: what rank(s) {which} had not yet sent, {norm}, left with them",
            stacklevel=2,
        )
    return lost
