"""How payloads get from rank to rank, without knowing how a front end sends anything.

An exchange is a generator that *requests* collectives and receives their results. The front ends
drive it over Horovod; tests drive N of them in one process, in lock step.

Horovod's slot says nothing of the reduction that it runs between ``compress`` and ``decompress``.
For GATHER payloads it is given a :class:`.carrier.Carrier` of three floats to reduce instead of the
gradient, and what comes back tells.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from . import damage, mark
from .codec import Call, Codec, Combine, Tensor, is_one
from .errors import ExchangeError, explain
from .payload import FLAG_BYTES


# N * float32(1 / N) is not 1 for N = 41, 47, ..., and a sum of N predivided ones rounds N times.
class Scope(enum.Enum):
    """Which ranks a request is for."""

    ALL = "all"
    NODE = "node"
    """Those of the same node, see :mod:`.hierarchical`."""
    COLUMN = "column"
    """One of each node."""


class Gather(NamedTuple):
    """Request: give every rank every rank's uint8 payload."""

    payload: Tensor
    sizes: Sequence[int]
    """Bytes from each rank."""
    scope: Scope = Scope.ALL


class Scatter(NamedTuple):
    """Request: send each rank a part of a uint8 payload of its own."""

    payload: Tensor
    sent: Sequence[int]
    """Bytes for each rank, one part after the other."""
    sizes: Sequence[int]
    """Bytes from each rank."""
    scope: Scope = Scope.ALL


class Reduce(NamedTuple):
    """Request: let Horovod reduce this float payload as it would the gradient."""

    payload: Tensor


class Sum(NamedTuple):
    """Request: give every rank the sum of all ranks' float payloads."""

    payload: Tensor


Request = Union[Gather, Scatter, Reduce, Sum]


@dataclass(frozen=True)
class Reply:
    """What a request returns.

    Attributes:
        payloads: All payloads in rank order, or the one reduced payload.
        scale: What the sum of decoded payloads is to be multiplied by. Where there are several
            rounds only the last one's counts.
    """

    payloads: Sequence[Tensor] = ()
    scale: Any = 1.0
    refused: bool = False
    """Whether payloads cannot be gathered or scattered in this step, as some rank has joined."""


class Outcome(NamedTuple):
    """What an exchange ends with."""

    total: Tensor
    """The reduced gradient, flat float32; not finite if ``bad``."""

    error: Tensor | None
    """What this rank's payload left out, where it was asked for."""

    bad: Tensor
    """0, or NaN where any rank's input was not finite; equal on all ranks."""

    shared: tuple[Tensor, ...] = ()
    """The codec's next shared state; worthless if ``bad``."""

    kept: tuple[Tensor, Tensor | None] | None = None
    """See :attr:`horovod_gradcomp.core.codec.Encoded.kept`."""

    owed: Tensor | None = None
    """What the reducing side of this rank left out, where it has a memory."""

    damage: Tensor | None = None
    """What is wrong with each payload, where it could not be read here, see :mod:`.damage`."""


Exchange = Generator[Request, Reply, Outcome]


def start(
    xp: Any,
    codec: Codec,
    x: Tensor,
    call: Call,
    *,
    want_error: bool,
    name: str,
    agreed: Tensor | None = None,
    own: bool = False,
) -> Exchange:
    """Return the exchange that suits how a codec's payloads combine.

    Args:
        xp: An operations module.
        codec: The codec.
        x: Flat float32 input; consumed.
        call: The step.
        want_error: Whether the memory needs what is left out.
        name: Of the tensor or bucket, for messages.
        agreed: 0 or NaN, equal on all ranks, where a front end agrees on bad steps by itself;
            without it the badness of ``x`` rides with the payload.
        own: Whether payloads are to be summed by a collective of the package's own where Horovod
            could reduce them, since only then the factor on the result is known.
    """
    run = {Combine.SUM: _reduce, Combine.GATHER: _gather, Combine.ROUNDS: _rounds}[codec.combine]
    if own and codec.combine is Combine.SUM:
        run = _sum
    return run(xp, codec, x, call, want_error, name, agreed)


def _gather(
    xp: Any,
    codec: Codec,
    x: Tensor,
    call: Call,
    want_error: bool,
    name: str,
    agreed: Tensor | None,
) -> Exchange:
    numel, flag = xp.numel(x), xp.badness(x) if agreed is None else None
    payload, error, kept = codec.encode(xp, x, call, want_error=want_error)
    sizes = [codec.wire_bytes(*call.extents(numel)) + FLAG_BYTES] * call.size
    reply = yield Gather(payload if flag is None else xp.set_flag_(payload, flag), sizes)
    if reply.refused:
        decoded = codec.finish(xp, [payload], numel, call, scale=1.0).total
        return (yield from reduce_decoded(xp, codec, decoded, flag, error, kept, name))
    check_sizes(xp, reply.payloads, sizes, name)
    done = codec.finish(xp, reply.payloads, numel, call, scale=reply.scale)
    bad = flags(xp, reply.payloads) if agreed is None else agreed
    bad = damage.settle(xp, name, done.damage, bad)
    return Outcome(xp.spoil_(done.total, bad), error, bad, done.shared, kept, None, done.damage)


def reduce_decoded(
    xp: Any,
    codec: Codec,
    decoded: Tensor,
    flag: Tensor,
    error: Tensor | None,
    kept: tuple[Tensor, Tensor | None] | None,
    name: str,
) -> Exchange:
    """Let Horovod add up what each rank has decoded of its own payload, at full size.

    It brings the same sum as a gather would; Horovod gathers nothing while a rank has joined.
    """
    if not codec.additive:
        raise ExchangeError(
            explain(
                got=f"hvd.join with '{codec.describe()}', for '{name}'",
                expected="a codec whose decoded payloads add up",
                why="while a rank has joined Horovod can only add",
                do="give every rank the same number of batches",
            )
        )
    reply = yield Sum(xp.spoil_(decoded, flag))
    (total,) = reply.payloads
    bad = xp.badness(total)
    if not is_one(reply.scale):
        total = xp.scale_(total, reply.scale)
    return Outcome(xp.spoil_(total, bad), error, bad, (), kept)


def check_sizes(
    xp: Any,
    payloads: Sequence[Tensor],
    sizes: Sequence[int],
    name: str,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise :class:`ExchangeError` unless every rank has sent as many bytes as it must.

    Args:
        xp: An operations module.
        payloads: As received.
        sizes: Bytes that each must have.
        name: Of the tensor or bucket, for messages.
        ranks: Who has sent them; default: all, in order.
    """
    for rank, payload, expected in zip(ranks or range(len(sizes)), payloads, sizes):
        if xp.numel(payload) != expected:
            raise ExchangeError(
                explain(
                    got=f"{xp.numel(payload)} bytes for '{name}' from rank {rank}",
                    expected=f"{expected} bytes",
                    why="the size follows from the settings and the shape, so that rank has others",
                    do="give every rank the same compression and the same model",
                )
            )


def flags(xp: Any, payloads: Sequence[Tensor]) -> Tensor:
    """Return 0, or NaN where any payload says that its input was not finite.

    Whatever is not 0 says so.
    """
    each = xp.concat([xp.reshape(xp.flag_of(payload), (1,)) for payload in payloads], 0)
    return xp.badness(xp.where(xp.equal(each, 0.0), each, float("nan")))


def _reduce(
    xp: Any,
    codec: Codec,
    x: Tensor,
    call: Call,
    want_error: bool,
    name: str,
    agreed: Tensor | None,
    request: type[Reduce | Sum] = Reduce,
) -> Exchange:
    numel, flag = xp.numel(x), xp.badness(x) if agreed is None else None
    payload, error, kept = codec.encode(xp, x, call, want_error=want_error)
    if flag is not None:
        payload = xp.poison_(payload, flag)
    marked, wrong = request is Reduce and not codec.timeless, None
    reply = yield request(mark.attach(xp, payload, call) if marked else payload)
    (reduced,) = reply.payloads
    if marked:
        reduced, wrong = mark.detach(xp, reduced, call)
    bad = xp.badness(reduced[:1]) if agreed is None else agreed
    bad = damage.settle(xp, name, wrong, bad, tell=mark.complaint)
    done = codec.finish(xp, [reduced], numel, call, scale=reply.scale)
    return Outcome(xp.spoil_(done.total, bad), error, bad, done.shared, kept, None, wrong)


_sum = functools.partial(_reduce, request=Sum)


def _rounds(
    xp: Any,
    codec: Codec,
    x: Tensor,
    call: Call,
    want_error: bool,
    name: str,
    agreed: Tensor | None,
) -> Exchange:
    flag, bad = xp.badness(x) if agreed is None else None, agreed
    run = codec.rounds(xp, x, call, want_error=want_error)
    payload = next(run)
    if flag is not None:
        payload = xp.poison_(payload, flag)
    while True:
        reply = yield Sum(payload)
        (summed,) = reply.payloads
        if bad is None:
            bad = xp.badness(summed[:1])
        try:
            payload = run.send(summed)
        except StopIteration as end:
            done, error = end.value
            break
    total = done.total if is_one(reply.scale) else xp.scale_(done.total, reply.scale)
    return Outcome(xp.spoil_(total, bad), error, bad, done.shared)
