"""The two-phase exchange: every rank reduces a part of the tensor.

Each rank cuts its tensor into one part a rank, encodes each and sends it to the rank that reduces
it. That rank decodes and averages what it gets, adds what it owes from earlier steps, encodes the
sum again and sends it to all. Whatever the number of ranks N, a rank receives about two payloads,
where an allgather of whole payloads brings it N - 1. What the second encoding leaves out is kept on
the reducing rank, in a memory of its own, so that nothing is lost.

Reference:
    Tang, Yu, Lian, Zhang, Liu, "DoubleSqueeze: Parallel Stochastic Gradient Descent with
    Double-Pass Error-Compensated Compression", ICML 2019, arXiv:1905.05957; with the parts spread
    over all workers as in Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import damage, random
from .codec import Call, Codec, Combine, Shape, Tensor
from .exchange import (
    Exchange,
    Gather,
    Outcome,
    Scatter,
    check_sizes,
    flags,
    reduce_decoded,
)
from .memory import Memory
from .payload import FLAG_BYTES

_LEAST = 256
"""Elements that a part has at least."""
LATENCY_BYTES = 2**16
"""Bytes that a link carries in the time that a message takes to set out: 50 us at 10 Gbit/s."""


class Part(NamedTuple):
    """What one rank reduces."""

    start: int
    stop: int
    shapes: tuple[Shape, ...]
    """Of the tensors, or pieces of tensors, in it; a codec never mixes two of them."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Server(NamedTuple):
    """The reducing side of this rank."""

    memory: Memory
    state: tuple[Tensor, ...]
    """One tensor a slot, of its part's size."""


def able(codec: Codec) -> bool:
    """Return whether a codec's payloads may be reduced and encoded again, part by part."""
    return (
        codec.combine is Combine.GATHER and codec.additive and not codec.slots and not codec.mixes
    )


def misfit(codec: Codec, memory: Memory) -> str:
    """Return why a codec with a memory cannot travel so, or nothing."""
    if not able(codec):
        return "Horovod itself adds its payloads up, or it sees a tensor as a whole"
    if memory.references and not codec.feeds_back:
        return "what is left out of a mean would be missing from the reference for good"
    return ""


def pays(codec: Codec, extents: Sequence[Shape], size: int) -> bool:
    """Return whether two phases are the better exchange, from shapes and ranks alone.

    With payloads of P bytes an allgather brings a rank ``(N - 1) P`` bytes, two phases bring
    ``2 (N - 1) / N P`` with ``N - 1`` more messages. They pay where ``P (1 - 2 / N)`` is more than
    a link carries in the time of a message, taken as 64 KiB; and only with a codec that encodes
    every value, since the few values that the others keep are spread over more positions by every
    rank, and would not survive a second selection.
    """
    if not able(codec) or not codec.encodes_all or not fits(extents, size):
        return False
    return size > 2 and codec.wire_bytes(*extents) * (1 - 2 / size) > LATENCY_BYTES


def fits(extents: Sequence[Shape], size: int) -> bool:
    """Return whether there is enough to give every rank a part."""
    return size > 1 and sum(map(math.prod, extents)) >= _LEAST * size


def parts(extents: Sequence[Shape], size: int) -> tuple[Part, ...]:
    """Cut tensors that lie one after the other into one part a rank, of equal sizes."""
    return _cut(tuple(extents), size)


@functools.lru_cache(maxsize=1024)  # asked for twice a step and bucket, ranks times tensors of work
def _cut(extents: tuple[Shape, ...], size: int) -> tuple[Part, ...]:
    numels = [math.prod(shape) for shape in extents]
    total = sum(numels)
    out = []
    for rank in range(size):
        start, stop = rank * total // size, (rank + 1) * total // size
        pieces, at = [], 0
        for numel in numels:
            length = min(stop, at + numel) - max(start, at)
            if length > 0:
                pieces.append((length,))
            at += numel
        out.append(Part(start, stop, tuple(pieces)))
    return tuple(out)


def start(
    xp: Any,
    codec: Codec,
    x: Tensor,
    call: Call,
    *,
    want_error: bool,
    name: str,
    server: Server,
) -> Exchange:
    """Return the exchange; arguments as of :func:`horovod_gradcomp.core.exchange.start`.

    Args:
        xp: An operations module.
        codec: One that is :func:`able`.
        x: Flat float32 input; consumed.
        call: The step.
        want_error: Whether the memory needs what is left out.
        name: Of the tensor or bucket, for messages.
        server: The reducing side of this rank.
    """
    every = parts(call.extents(xp.numel(x)), call.size)
    mine = every[call.rank]
    sizes = [codec.wire_bytes(*part.shapes) + FLAG_BYTES for part in every]
    flag = xp.badness(x)
    encoded = [
        codec.encode(xp, x[part.start : part.stop], part_call(call, part, i), want_error=want_error)
        for i, part in enumerate(every)
    ]
    reply = yield Scatter(
        xp.concat([xp.set_flag_(one.payload, flag) for one in encoded], 0),
        sizes,
        [sizes[call.rank]] * call.size,
    )
    error = xp.concat([one.error for one in encoded], 0) if want_error else None
    kept = _kept(xp, encoded, every)
    if reply.refused:
        decoded = [
            codec.finish(xp, [one.payload], part.numel, part_call(call, part, i), scale=1.0).total
            for i, (one, part) in enumerate(zip(encoded, every))
        ]
        whole = xp.concat(decoded, 0)
        return (yield from reduce_decoded(xp, codec, whole, flag, error, kept, name))
    check_sizes(xp, reply.payloads, [sizes[call.rank]] * call.size, name)
    bad = flags(xp, reply.payloads)
    own = part_call(call, mine, call.rank)
    done = codec.finish(xp, reply.payloads, mine.numel, own, scale=1.0 / call.size)
    bad = damage.settle(xp, name, done.damage, bad)
    owed = server.memory.compensate(xp, done.total, server.state, None)
    bad = xp.add(bad, xp.badness(owed))
    again = codec.encode(
        xp, owed, part_call(call, mine, call.size + call.rank), want_error=server.memory.wants_error
    )
    reply = yield Gather(xp.set_flag_(again.payload, bad), sizes)
    check_sizes(xp, reply.payloads, sizes, name)
    bad = flags(xp, reply.payloads)
    scale = reply.scale * call.size  # each payload is a mean already
    ended = [
        codec.finish(xp, [payload], part.numel, part_call(call, part, call.size + i), scale=scale)
        for i, (part, payload) in enumerate(zip(every, reply.payloads))
    ]
    bad = damage.settle(xp, name, damage.joined(xp, [one.damage for one in ended]), bad)
    total = xp.concat([one.total for one in ended], 0)
    return Outcome(xp.spoil_(total, bad), error, bad, (), kept, again.error)


def part_call(call: Call, part: Part, turn: int) -> Call:
    """Return the call of a part, with random draws of its own."""
    return dataclasses.replace(
        call, shapes=part.shapes, key=random.advance(*call.key, turn), shared=(), notes=None
    )


def _kept(xp: Any, encoded: Sequence[Any], every: Sequence[Part]) -> Any:
    """Return the positions of what this rank sent, in the whole tensor."""
    if any(one.kept is None for one in encoded):
        return None
    where = [xp.add(one.kept[0], part.start) for one, part in zip(encoded, every)]
    inside = [one.kept[1] for one in encoded]
    mask = None if any(m is None for m in inside) else xp.concat(inside, 0)
    return xp.concat(where, 0), mask
