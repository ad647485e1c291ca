"""How long a training step takes with each exchange, from the speed of links and of codecs.

With N ranks, L of them a host, H = N / L hosts, S bytes of gradients, P bytes of payload and
``t(m)`` the time of a message of m bytes (:mod:`.links`):

================  ==================================================================
exchange          time of its messages
================  ==================================================================
``allreduce``     2 (N - 1) t(P / N): reduce-scatter, then allgather; P = S uncompressed.
                  And 2 P / c: tensors are copied into one message and out again at c bytes/s
``allgather``     (N - 1) t(P)
``two_phase``     alltoall of P / N to each rank, then (N - 1) t(P / N)
``hierarchical``  2 (L - 1) t(S / L) inside the hosts, (H - 1) t(P) between them
================  ==================================================================

A step is then the forward pass; the backward pass with encoding in between, during which what is
encoded is already sent (:func:`pipeline`); what is left to send; and decoding. Where a rank has no
processor to spare, what sending takes from computing (measured, :attr:`.Link.work`) is time of the
backward pass, too. ``t`` of gathers, and of sums of float16, may be another (:class:`.Cluster`).

Reference: S. Agarwal et al., "On the Utility of Gradient Compression in Distributed Training
Systems", arXiv:2103.00543, for the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Callable

from .codec import Combine
from .errors import SettingsError, explain
from .links import Cluster, alltoall, check_above, fused, ring_allgather, ring_allreduce


@dataclass(frozen=True)
class Speed:
    """How fast a codec is; bytes are those of the gradient, uncompressed, in float32.

    Attributes:
        encode: Bytes a second, with the update of the memory.
        decode: Bytes a second of one payload.
        decode_more: Bytes a second of each further payload of the same gradient.
    """

    encode: float = math.inf
    decode: float = math.inf
    decode_more: float = math.inf

    def __post_init__(self) -> None:
        for name in ("encode", "decode", "decode_more"):
            check_above(name, getattr(self, name), 0.0, closed=False)

    def encoding(self, nbytes: float) -> float:
        """Return the seconds to encode a gradient."""
        return nbytes / self.encode

    def decoding(self, nbytes: float, payloads: int = 1) -> float:
        """Return the seconds to decode and add up payloads of a gradient."""
        return nbytes / self.decode + (payloads - 1) * nbytes / self.decode_more


@dataclass(frozen=True)
class Job:
    """What a step has to do.

    Attributes:
        raw: Bytes of gradients a rank in float32.
        payload: Bytes of a rank's payloads, equal to ``raw`` uncompressed.
        forward: Seconds.
        backward: Seconds.
        buckets: Pieces in which gradients are encoded and sent while backward goes on.
        rounds: Sums, one after the other, of which a payload is part.
        overlap: Whether anything is sent before backward ends.
        halves: Whether payloads are float16 that Horovod adds up.
    """

    raw: float
    payload: float
    forward: float = 0.0
    backward: float = 0.0
    buckets: int = 1
    rounds: int = 1
    overlap: bool = True
    halves: bool = False

    def __post_init__(self) -> None:
        for name in ("raw", "payload", "forward", "backward"):
            check_above(name, getattr(self, name), 0.0)
        for name in ("buckets", "rounds"):
            check_above(name, getattr(self, name), 1)


@dataclass(frozen=True)
class Cost:
    """Where the time of a step goes, in seconds.

    Attributes:
        exchange: Its name in :data:`EXCHANGES`.
        encode: Encoding during backward.
        early: Messages that may travel during backward.
        late: Messages that need all of it.
        decode: Everything computed after backward.
        host_bytes: Bytes that a full host sends to others.
        step: The whole step.
    """

    exchange: str
    encode: float
    early: float
    late: float
    decode: float
    host_bytes: float
    step: float

    @property
    def transfer(self) -> float:
        """Seconds of all messages, hidden behind backward or not."""
        return self.early + self.late


def pipeline(compute: float, transfer: float, pieces: int, work: float = 0.0) -> float:
    """Return when the last of equal pieces has been sent, where each is sent once it is made.

    Piece i of K is made at ``i / K * compute`` and takes ``transfer / K`` on a link that carries
    one at a time: the last ends at ``max(compute + transfer / K, compute / K + transfer)``. Where
    sending takes ``work`` from the processor that computes, that of all pieces but the last is
    part of ``compute`` in the first of both.
    """
    made = compute + (1 - 1 / pieces) * min(work, transfer)
    return max(made + transfer / pieces, compute / pieces + transfer)


# The exchanges ---------------------------------------------------------------------------------
_Parts = tuple[float, float, float, float, float]
"""Encode, early, late, decode and host_bytes of :class:`Cost`."""


def _allreduce(job: Job, cluster: Cluster, speed: Speed) -> _Parts:
    part = job.payload / job.rounds
    moved = ring_allreduce(cluster, part, fused(part), halves=job.halves)
    if cluster.copy and cluster.ranks > 1:
        moved += 2 * part / cluster.copy
    late = (job.rounds - 1) * moved
    out = 2 * (cluster.ranks - 1) / cluster.ranks * job.payload
    return speed.encoding(job.raw), moved, late, speed.decoding(job.raw), out


def _allgather(job: Job, cluster: Cluster, speed: Speed) -> _Parts:
    moved = ring_allgather(cluster, job.payload, fused(cluster.ranks * job.payload))
    decode = speed.decoding(job.raw, cluster.ranks)
    return speed.encoding(job.raw), moved, 0.0, decode, (cluster.ranks - 1) * job.payload


def _two_phase(job: Job, cluster: Cluster, speed: Speed) -> _Parts:
    ranks, local = cluster.ranks, cluster.local
    first = alltoall(cluster, job.payload, job.buckets)
    second = ring_allgather(cluster, job.payload / ranks, fused(job.payload))
    # The rank's own part of every payload, encoded once more; then all parts.
    decode = speed.decoding(job.raw / ranks, ranks) + speed.encoding(job.raw / ranks)
    decode += speed.decoding(job.raw)
    out = (local * (ranks - local) + ranks - 1) / ranks * job.payload
    return speed.encoding(job.raw), first, second, decode, out


def _hierarchical(job: Job, cluster: Cluster, speed: Speed) -> _Parts:
    hosts, local = cluster.hosts, cluster.local
    near, far = fused(job.raw), fused(hosts * job.payload)
    # An alltoall of what is dense, added up by each rank; at the end a gather.
    first, last = (
        messages * (local - 1) * cluster.inside.seconds(job.raw / messages / local)
        for messages in (job.buckets, near)
    )
    # All ranks of a host send their parts of the payload at once.
    between = far * (hosts - 1) * cluster.between.seconds(job.payload / far)
    after = speed.encoding(job.raw / local) + speed.decoding(job.raw / local, hosts)
    return 0.0, first, between + last, after, (hosts - 1) * job.payload


EXCHANGES: dict[str, Callable[[Job, Cluster, Speed], _Parts]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "two_phase": _two_phase,
    "hierarchical": _hierarchical,
}
"""By name: the time of each part of a step."""


def exchanges(combine: Combine, cluster: Cluster) -> tuple[str, ...]:
    """Return which exchanges the front ends have for payloads that combine so.

    ``two_phase`` needs two ranks, ``hierarchical`` several hosts of as many ranks each.
    """
    if combine is not Combine.GATHER:
        return ("allreduce",)
    if cluster.hosts > 1 and cluster.local > 1 and cluster.even:
        return ("allgather", "two_phase", "hierarchical")
    return ("allgather", "two_phase") if cluster.ranks > 1 else ("allgather",)


def cost(exchange: str, job: Job, cluster: Cluster, speed: Speed) -> Cost:
    """Return the time of a step with one exchange.

    Raises:
        SettingsError: There is no such exchange.
    """
    if exchange not in EXCHANGES:
        raise SettingsError(
            explain(got=f"exchange={exchange!r}", expected=f"one of {', '.join(EXCHANGES)}")
        )
    encode, early, late, decode, sent = EXCHANGES[exchange](job, cluster, speed)
    compute = job.backward + encode
    ended = compute + early
    if job.overlap:
        ended = pipeline(compute, early, job.buckets, _work(job, cluster, sent, early, late))
    step = job.forward + ended + late + decode
    if cluster.hosts == 1:
        sent = 0.0
    return Cost(exchange, encode, early, late, decode, sent, step)


def _work(job: Job, cluster: Cluster, sent: float, early: float, late: float) -> float:
    """Return what messages during backward take from a rank's computing."""
    if cluster.spare or not early:
        return 0.0
    link = cluster.between if cluster.hosts > 1 else cluster.inside
    link = (job.halves and cluster.halves) or link
    return link.work * sent / cluster.local * early / (early + late)


def dense(job: Job, cluster: Cluster) -> Cost:
    """Return the time of a step in which Horovod reduces gradients as they are."""
    plain = replace(job, payload=job.raw, rounds=1, halves=False)
    return cost("allreduce", plain, cluster, Speed())


def cheapest(names: Sequence[str], job: Job, cluster: Cluster, speed: Speed) -> Cost:
    """Return the shortest step among exchanges, such as :func:`exchanges` names."""
    return min((cost(name, job, cluster, speed) for name in names), key=lambda each: each.step)
