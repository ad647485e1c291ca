"""Nodes as Horovod knows them, and the process sets inside and across them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import _basics

from ..core.environment import elastic, number
from ..core.errors import ExchangeError, SettingsError, explain
from ..core.exchange import Scope
from ..core.hierarchical import Nodes, arrange
from ..core.options import Options
from ..core.route import Team
from .unit import Unit

_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class NodeSets(NamedTuple):
    """Nodes, and this rank's process sets."""

    nodes: Nodes
    sets: Mapping[Scope, Any]
    every: Mapping[tuple[int, ...], Any]
    """The process sets of all nodes and columns, by their ranks."""

    @property
    def gone(self) -> bool:
        """Whether Horovod, initialized anew, has them no longer; on all ranks alike."""
        try:
            known = _basics._get_process_set_ids_and_ranks()
        except ValueError:  # shut down, perhaps by another rank: Horovod itself will say so
            return False
        return any(
            tuple(sorted(known.get(one.process_set_id, ()))) != ranks
            for ranks, one in self.every.items()
        )


def node_process_sets(ranks_per_node: int | None = None, size: int | None = None) -> list[Any]:
    """Return the process sets of the hierarchical exchange, for ``hvd.init``.

    ``hvd.init(process_sets=node_process_sets())``: each node, then for each place on a node the
    ranks that have it. Not needed with ``HOROVOD_DYNAMIC_PROCESS_SETS=1``.

    Args:
        ranks_per_node: Consecutive ranks that share a node; default: as the launcher's environment
            says (``HOROVOD_LOCAL_SIZE``, or that of Open MPI or MPICH).
        size: Number of ranks; default: likewise (``HOROVOD_SIZE``).

    Returns:
        An empty list where there is one node, or one rank on each, or where nodes differ in size:
        then there is no such exchange.

    Raises:
        SettingsError: A number is out of range, or the environment does not tell it.
    """
    size = _told("size", size, _SIZES)
    local = _told("ranks_per_node", ranks_per_node, _LOCAL_SIZES)
    nodes = arrange([rank // local for rank in range(size)])
    if _lacking(nodes):
        return []
    return [hvd.ProcessSet(list(ranks)) for ranks in (*nodes.members, *nodes.columns)]


def _told(name: str, given: int | None, variables: Sequence[str]) -> int:
    found = next((v for v in variables if v in os.environ), None)
    value: Any = given if given is not None or found is None else number(found, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        why = f"so says the environment's {found}"
        if found is None:
            why = f"none of {', '.join(variables)} is set"
        raise SettingsError(
            explain(
                got=f"{name}={value!r}",
                expected="a whole number, at least 1",
                why="" if given is not None else why,
                do=f"give {name}=",
            )
        )
    return value


def place() -> dict[str, Any]:
    """Return what a rank tells the others of where it is."""
    return {
        "node": hvd.cross_rank(),
        "dynamic": number("HOROVOD_DYNAMIC_PROCESS_SETS", 0) > 0,
        "elastic": elastic(),
        "joins": number("HOROVOD_CACHE_CAPACITY", 1024) <= 0,
    }


def settle(
    places: Sequence[Mapping[str, Any]], options: Options, units: Sequence[Unit], process_set: Any
) -> NodeSets | None:
    """Return the nodes that an optimizer's units use, or None.

    Args:
        places: What each rank has told, in rank order.
        options: Of the compressor.
        units: Of the optimizer.
        process_set: Of the reductions.

    Raises:
        SettingsError: As of :func:`find`.
    """
    if len(places) == 1 or not units or options.exchange not in ("auto", "hierarchical"):
        return None
    return find(
        places,
        forced=options.exchange == "hierarchical",
        ranks_per_node=options.ranks_per_node,
        process_set=process_set,
        wanted=lambda nodes: any(unit.takes_nodes(Team(len(places), 0, nodes)) for unit in units),
    )


def find(
    places: Sequence[Mapping[str, Any]],
    *,
    forced: bool,
    ranks_per_node: int | None,
    process_set: Any,
    wanted: Any,
) -> NodeSets | None:
    """Return nodes with their process sets, or None where there is no hierarchical exchange.

    All ranks come to the same answer.

    Args:
        places: What each rank has told, in rank order.
        forced: Whether there must be one.
        ranks_per_node: Consecutive ranks that are to count as a node; None for Horovod's.
        process_set: Of the reductions.
        wanted: Called with the nodes: whether anything would take the exchange there.

    Raises:
        SettingsError: ``forced``, and there is none; with the reason.
    """
    ids = [one["node"] for one in places]
    if ranks_per_node is not None:
        ids = [rank // ranks_per_node for rank in range(len(places))]
    nodes = arrange(ids)
    for lacking in _reasons(places, nodes, process_set, forced=forced):
        if forced:
            raise SettingsError(explain(**lacking))
        return None
    if not forced and not wanted(nodes):
        return None
    every = [*nodes.members, *nodes.columns]
    known = _known()
    missing = [ranks for ranks in every if ranks not in known]
    if missing and not all(one["dynamic"] for one in places):
        if forced:
            raise SettingsError(_no_sets(missing, ranks_per_node))
        return None
    for ranks in missing:  # all ranks alike, also those outside
        known[ranks] = hvd.add_process_set(list(ranks))
    mine = hvd.rank()
    sets = {Scope.NODE: known[nodes.inside(mine)], Scope.COLUMN: known[nodes.across(mine)]}
    return NodeSets(nodes, sets, {ranks: known[ranks] for ranks in every})


def _reasons(
    places: Sequence[Mapping[str, Any]], nodes: Nodes, process_set: Any, *, forced: bool
) -> Iterator[dict[str, str]]:
    """Yield what stands against a hierarchical exchange, as :func:`explain` takes it."""
    got = "exchange='hierarchical'"
    if any(one["elastic"] for one in places):
        yield {
            "got": f"{got} in elastic training",
            "expected": "ranks that stay",
            "why": "process sets do not follow ranks that come and go",
            "do": "leave exchange= out",
        }
    if any(one["joins"] for one in places) and not forced:
        yield {"got": got, "expected": "ranks that do not join"}
    if process_set.process_set_id != 0:
        yield {
            "got": f"{got} over the process set of ranks {process_set.ranks}",
            "expected": "a reduction over all ranks",
            "do": "leave exchange= out",
        }
    if _lacking(nodes):
        sizes = [len(node) for node in nodes.members]
        yield {
            "got": f"{got} with {_short(sizes)} ranks on {nodes.hosts} node(s)",
            "expected": _lacking(nodes),
            "do": "leave exchange= out, or name consecutive ranks that share a fast link by "
            "ranks_per_node=",
        }


def _lacking(nodes: Nodes) -> str:
    if nodes.hosts < 2 or max(map(len, nodes.members)) < 2:
        return "several nodes of several ranks each"
    return "" if nodes.even else "nodes of equal sizes"


def _short(sizes: Sequence[int]) -> str:
    text = ", ".join(map(str, sizes[:4]))
    return f"{text}, ..." if len(sizes) > 4 else text


def _no_sets(missing: Sequence[tuple[int, ...]], ranks_per_node: int | None) -> str:
    told = "" if ranks_per_node is None else str(ranks_per_node)
    return explain(
        got=f"exchange='hierarchical' without a process set of ranks {list(missing[0])}"
        + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
        expected="one for each node, and one for each place on a node",
        why="Horovod makes process sets in hvd.init, unless HOROVOD_DYNAMIC_PROCESS_SETS=1",
        do="from horovod_gradcomp.torch import node_process_sets; "
        f"hvd.init(process_sets=node_process_sets({told})), or set that variable on all ranks",
    )


def _known() -> dict[tuple[int, ...], Any]:
    """Return Horovod's process sets by their ranks, whoever made them."""
    out = {}
    for made_as, ranks in _basics._get_process_set_ids_and_ranks().items():
        made = hvd.ProcessSet(list(ranks))
        made.process_set_id = made_as
        out[tuple(sorted(ranks))] = made
    return out


class RollCall:
    """Whether all ranks take part in a step.

    A collective of a node never ends while one of its ranks has joined (``hvd.join``): Horovod
    knows of that for reductions over all ranks only. So one such reduction goes first.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def start(self, prefix: str) -> None:
        """Begin, once a step; nothing is waited for."""
        self._handle = hvd.allreduce_async(torch.ones(1), name=f"{prefix}.present", op=hvd.Sum)

    def check(self) -> None:
        """Wait for the answer.

        Raises:
            ExchangeError: Some rank has joined.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return
        present = round(hvd.synchronize(handle).item())
        if present != hvd.size():
            raise ExchangeError(
                explain(
                    got=f"{present} of {hvd.size()} ranks in a step with exchange='hierarchical'",
                    expected="all of them",
                    why="the others have joined (hvd.join), and what a node exchanges needs all "
                    "of its ranks",
                    do="give all ranks as many batches, or use exchange='allgather' and "
                    "compression.join()",
                )
            )

    def drain(self) -> None:
        """Wait for an answer that nobody wants."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(HorovodInternalError):
                hvd.synchronize(handle)

    def forget(self) -> None:
        """Leave it."""
        self._handle = None
