"""The hierarchical exchange: dense inside a node, compressed between nodes.

The ranks of a node add their gradients as they are, in float32, each of them a part (a *shard*). A
rank then adds what its shard owes from earlier steps, encodes it, and gathers it among the ranks of
all nodes that hold the same shard (a *column*). Each of these decodes and averages it, and the
ranks of a node gather their shards again. Between nodes only payloads travel, once a node instead
of once a rank: a node sends ``(H - 1) P`` bytes with H nodes and payloads of P bytes.

What the one encoding leaves out is kept on the rank that holds the shard, as on the reducing side
of :mod:`.twophase`; the ranks themselves leave nothing out.

Reference:
    Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision: Training
    ImageNet in Four Minutes", arXiv:1807.11205, for the hierarchical sum. There all is dense; here
    what travels between nodes is encoded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import damage, twophase
from .codec import Call, Codec, Shape, Tensor, is_one
from .exchange import Exchange, Gather, Outcome, Scatter, Scope, check_sizes, flags
from .memory import Memory
from .payload import FLAG_BYTES, Layout, Section

INSIDE_SPEED = 10
"""Bytes that travel inside a node while one travels between nodes, as :func:`pays` takes it."""


class Nodes(NamedTuple):
    """Which ranks share a node."""

    members: tuple[tuple[int, ...], ...]
    """The ranks of each node, ascending."""

    @property
    def hosts(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @property
    def local(self) -> int:
        """Ranks on the first node, and on every one where they are :attr:`even`."""
        return len(self.members[0])

    @property
    def even(self) -> bool:
        """Whether all nodes hold as many ranks."""
        return len({len(node) for node in self.members}) == 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.members))

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same shard, ascending, for each shard."""
        return tuple(tuple(sorted(column)) for column in zip(*self.members))

    def inside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's node, in the order of their shards."""
        return next(node for node in self.members if rank in node)

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's column."""
        return self.columns[self.inside(rank).index(rank)]


def arrange(nodes: Sequence[int]) -> Nodes:
    """Return which ranks share a node, from the number of each rank's node."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return Nodes(tuple(sorted(map(tuple, found.values()))))


def misfit(codec: Codec, memory: Memory) -> str:
    """Return why a codec with a memory cannot travel so, or nothing."""
    if memory.is_momentum and twophase.able(codec) and not codec.encodes_all:
        return "a rank does not learn which of its values its node has sent"
    return twophase.misfit(codec, memory)


def fits(extents: Sequence[Shape], nodes: Nodes) -> bool:
    """Return whether there is enough to give every rank of a node a shard."""
    return twophase.fits(extents, nodes.local)


def pays(codec: Codec, extents: Sequence[Shape], nodes: Nodes) -> bool:
    """Return whether this is the better exchange, from shapes and nodes alone.

    With N ranks, L on each of H nodes, S bytes of float32 gradients and payloads of P bytes, a node
    sends ``(H - 1) P`` bytes to others, where an allgather sends ``(N - 1) P`` and two phases
    ``(L (N - L) + N - 1) / N P``, whichever :func:`.twophase.pays` would choose. For that
    ``2 (L - 1) / L S`` bytes travel inside the node. It pays where the bytes saved between nodes
    are more than a tenth of those inside and what a link between nodes carries in the time of a
    message, taken as 64 KiB; and only with a codec that encodes every value.
    """
    if not twophase.able(codec) or not codec.encodes_all or not fits(extents, nodes):
        return False
    size, local = nodes.size, nodes.local
    payload = codec.wire_bytes(*extents)
    others = float(size - 1)
    if twophase.pays(codec, extents, size):
        others = (local * (size - local) + size - 1) / size
    saved = (others - (nodes.hosts - 1)) * payload
    inside = 2 * (local - 1) / local * 4 * sum(map(math.prod, extents))
    return saved > inside / INSIDE_SPEED + twophase.LATENCY_BYTES


def start(
    xp: Any,
    codec: Codec,
    x: Tensor,
    call: Call,
    *,
    want_error: bool,
    name: str,
    server: twophase.Server,
    nodes: Nodes,
) -> Exchange:
    """Return the exchange; arguments as of :func:`horovod_gradcomp.core.exchange.start`.

    A bad step needs no flag in the first round: a sum over what is not finite is not finite, and
    the two other rounds tell it to all columns.

    Args:
        xp: An operations module.
        codec: One that is :func:`.twophase.able`.
        x: Flat float32 input; consumed.
        call: The step; its size and rank are those of all ranks.
        want_error: Whether the memory needs what is left out: nothing.
        name: Of the tensor or bucket, for messages.
        server: The memory of this rank's shard, in units of means.
        nodes: Of equal sizes.
    """
    inside, across = nodes.inside(call.rank), nodes.across(call.rank)
    shards = twophase.parts(call.extents(xp.numel(x)), len(inside))
    turn = inside.index(call.rank)
    mine = shards[turn]
    own = twophase.part_call(call, mine, turn)
    own = dataclasses.replace(own, size=len(across), rank=across.index(call.rank))

    sizes = [4 * mine.numel] * len(inside)
    dense = xp.reshape(xp.view(x, "uint8"), (4 * xp.numel(x),))
    reply = yield Scatter(dense, [4 * shard.numel for shard in shards], sizes, Scope.NODE)
    check_sizes(xp, reply.payloads, sizes, name, inside)
    first, *others = (_opened(xp, payload, mine.numel) for payload in reply.payloads)
    total = xp.copy(first)
    for other in others:  # in rank order, so that a run repeats to the bit
        total = xp.add_(total, other)
    mean = xp.scale_(total, 1.0 / call.size)
    owed = server.memory.compensate(xp, mean, server.state, None)
    bad = xp.badness(owed)
    sent = codec.encode(xp, owed, own, want_error=server.memory.wants_error)

    sizes = [codec.wire_bytes(*mine.shapes) + FLAG_BYTES] * len(across)
    reply = yield Gather(xp.set_flag_(sent.payload, bad), sizes, Scope.COLUMN)
    check_sizes(xp, reply.payloads, sizes, name, across)
    done = codec.finish(xp, reply.payloads, mine.numel, own, scale=1.0)
    bad = damage.settle(xp, name, done.damage, flags(xp, reply.payloads), across)

    sizes = [4 * shard.numel + FLAG_BYTES for shard in shards]
    reply = yield Gather(_packed(xp, done.total, bad), sizes, Scope.NODE)
    check_sizes(xp, reply.payloads, sizes, name, inside)
    bad = flags(xp, reply.payloads)
    pieces = [_opened(xp, p, shard.numel) for p, shard in zip(reply.payloads, shards)]
    whole, scale = xp.concat(pieces, 0), reply.scale * call.size  # shards of a mean
    whole = whole if is_one(scale) else xp.scale_(whole, scale)
    error = xp.zeros_like(x) if want_error else None
    return Outcome(xp.spoil_(whole, bad), error, bad, (), None, sent.error)


def _packed(xp: Any, shard: Tensor, flag: Tensor) -> Tensor:
    """Return the bytes of a shard, and the flag."""
    layout = Layout((Section("float32", 1, xp.numel(shard)),))
    storage, _ = layout.new(xp, shard)
    return xp.set_flag_(layout.seal(xp, storage, [shard]), flag)


def _opened(xp: Any, payload: Tensor, numel: int) -> Tensor:
    return xp.reshape(xp.section(payload, 0, "float32", 1, numel), (numel,))
