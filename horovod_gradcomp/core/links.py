"""How long messages take between the ranks of a cluster.

The alpha-beta model: a message of m bytes takes ``latency + m / bandwidth``, every link sends and
receives at once, and the ranks of a host share its one network interface. With N ranks and ``t(m)``
the time of a message on the slowest link of a ring, a ring allreduce of m bytes takes
``2 (N - 1) t(m / N)`` and a ring allgather of m bytes from each rank ``(N - 1) t(m)``.

References: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005; P. Patarasuk and X. Yuan, "Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations", 2009.

Not in the model: contention between hosts, stragglers, and, unless links are measured through
Horovod (:func:`fitted`), protocol overhead, the arithmetic of reductions, and the cycle in which
Horovod looks for tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import SettingsError, explain

FUSED_BYTES = 128 * 2**20
"""Most bytes of reduced or gathered tensors that Horovod packs into one message by default
(``HOROVOD_FUSION_THRESHOLD``); an alltoall it never packs."""

SHORT = 2 * 2**20
"""Bytes of a message that surely fits the buffers of a socket: Linux lets them grow to 4 MiB."""


@dataclass(frozen=True)
class Link:
    """A way between two ranks.

    Attributes:
        bandwidth: Bytes a second, in each direction.
        latency: Seconds a message.
        work: Seconds of computing that are lost for each byte that a rank sends meanwhile (copies,
            sums, the network stack), where there is no processor to spare.
    """

    bandwidth: float
    latency: float
    work: float = 0.0

    def __post_init__(self) -> None:
        check_above("bandwidth", self.bandwidth, 0.0, closed=False)
        check_above("latency", self.latency, 0.0)
        check_above("work", self.work, 0.0)

    def seconds(self, nbytes: float) -> float:
        """Return how long a message takes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, filled one after the other; the last may hold fewer.

    Attributes:
        ranks: All of them.
        per_host: Ranks on a full host.
        between: The network interface of a host, which its ranks share.
        inside: From a rank to another one of its host.
        gathers: The slowest link as gathers use it, where that was measured: Gloo's at times keep
            to one direction at a time, which halves it. None: as ``between`` and ``inside``.
        short_gathers: Likewise for messages of at most :data:`SHORT` bytes: what the buffers of a
            socket hold travels both ways at once. None: as ``gathers``.
        halves: The slowest link as Horovod's sums of float16 use it, where that was measured: on
            CPUs it adds them up in software. None: as ``between`` and ``inside``.
        copy: Bytes a second with which Horovod packs tensors into a message, and unpacks them;
            None: that is not counted.
        spare: Whether a rank has a processor beside those that it computes on; without one, what
            sending takes of a processor is taken from computing.
    """

    ranks: int
    per_host: int
    between: Link
    inside: Link
    spare: bool = True
    gathers: Link | None = None
    short_gathers: Link | None = None
    halves: Link | None = None
    copy: float | None = None

    def __post_init__(self) -> None:
        check_above("ranks", self.ranks, 1)
        check_above("per_host", self.per_host, 1)
        if self.copy is not None:
            check_above("copy", self.copy, 0.0, closed=False)

    @property
    def local(self) -> int:
        """Ranks on the fullest host."""
        return min(self.ranks, self.per_host)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return math.ceil(self.ranks / self.per_host)

    @property
    def even(self) -> bool:
        """Whether all hosts hold as many ranks."""
        return self.ranks == self.hosts * self.local

    def ring_step(self, nbytes: float) -> float:
        """Return how long it takes until every rank has sent a message to the next."""
        used = [self.between] * (self.hosts > 1) + [self.inside] * (self.local > 1)
        return max((link.seconds(nbytes) for link in used), default=0.0)


def ring_allreduce(
    cluster: Cluster, nbytes: float, messages: int = 1, *, halves: bool = False
) -> float:
    """Return the seconds of a ring allreduce: a reduce-scatter and an allgather.

    Args:
        cluster: Who takes part.
        nbytes: On each rank.
        messages: Collectives that carry them.
        halves: Whether Horovod adds up float16.
    """
    steps, part = 2 * (cluster.ranks - 1), nbytes / messages / cluster.ranks
    if halves and cluster.halves is not None:
        return messages * steps * cluster.halves.seconds(part)
    return messages * steps * cluster.ring_step(part)


def ring_allgather(cluster: Cluster, nbytes: float, messages: int = 1) -> float:
    """Return the seconds until every rank has the ``nbytes`` of every other."""
    part = nbytes / messages
    link = (part <= SHORT and cluster.short_gathers) or cluster.gathers
    step = link.seconds(part) if link else cluster.ring_step(part)
    return messages * (cluster.ranks - 1) * step


def alltoall(cluster: Cluster, nbytes: float, messages: int = 1) -> float:
    """Return the seconds until every rank has its N-th of every other's ``nbytes``.

    The ranks of a host share its interface; what stays inside the host travels meanwhile.
    """
    part, local = nbytes / messages / cluster.ranks, cluster.local
    others = cluster.ranks - local
    out, stay = cluster.between, cluster.inside
    between = others * (out.latency + local * part / out.bandwidth)
    return messages * max(between, (local - 1) * stay.seconds(part))


def fitted(ranks: int, small: tuple[float, float], large: tuple[float, float]) -> Link:
    """Return the slowest link of a ring, from two measured allreduces.

    Args:
        ranks: Who took part, at least 2.
        small: Bytes and seconds of a short one: what it takes counts as latency.
        large: Those of a long one. If it took no longer, the link has no limit that shows.
    """
    steps, (few, soon), (many, late) = 2 * (ranks - 1), small, large
    slope = (late - soon) / (many - few) / steps * ranks  # seconds a byte of a message
    bandwidth = 1 / slope if slope > 0 else math.inf
    return Link(bandwidth, max(0.0, soon / steps - few / ranks / bandwidth))


def fused(nbytes: float) -> int:
    """Return how many messages Horovod makes of what waits for a busy link."""
    return max(1, math.ceil(nbytes / FUSED_BYTES))


def check_above(name: str, value: float, least: float, *, closed: bool = True) -> None:
    """Raise :class:`SettingsError` unless ``value`` is at least, or above, ``least``."""
    good = isinstance(value, (int, float)) and (value >= least if closed else value > least)
    if not good:  # NaN is neither
        sign = ">=" if closed else ">"
        raise SettingsError(
            "cost: " + explain(got=f"{name}={value!r}", expected=f"{name} {sign} {least:g}")
        )
