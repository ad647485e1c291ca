"""Cyclic local top-k: one rank's choice serves all, and travels one step ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import positions, random
from ..core.codec import Bias, Call, Extent, Shape, Tensor, check_fraction, numels
from ..core.projection import Kept, Projection, Sent, scaled
from ..core.select import largest


@dataclass(frozen=True)
class CLTK(Projection):
    """Send ``k = clip(round(ratio * n), 1, n)`` values at positions that one rank has chosen.

    ``Q(x)_i = x_i`` at the positions of this step, else 0. On step t of N ranks the positions are
    the k largest magnitudes (ties by lowest position) of what rank ``t mod N`` had left after step
    t - 1, so every rank leads in turn. They are the same on all ranks, so values are summed. The
    next choice travels inside the same sum: its leader adds it to the payload, all others add
    zeros, and a mark of the leader's, 1, tells what the reduction made of it.

    =========  =======  ==================  =======================================
    tensor     dtype    shape               bytes
    =========  =======  ==================  =======================================
    values     float32  (k,)                4 k
    positions  float32  (k,)                4 k, within blocks of 65,536 elements
    counts     float32  (ceil(n / 65536),)  4 for each block: how many lie in it
    mark       float32  (1,)                4
    =========  =======  ==================  =======================================

    Combine: SUM, so Horovod fuses and reduces the payload itself. Bias: CONTRACTION.

    The first step's positions are random. The state, k positions, is equal on all ranks. Where no
    valid choice arrives (its leader has joined, say) the positions stay.

    Family: sparsification.

    When to use: with many ranks whose gradients are alike. The payload of ``topk``, gathered from
    every rank, grows with their number; this one does not. Without a memory the choice of a step
    leaves out what was sent in the step before.

    Args:
        ratio: Fraction of elements kept, 0 < ratio <= 1; smaller compresses more.
        then: Nothing: no codec may follow, since positions must arrive as they are.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("cltk:ratio=0.01").wire_bytes(1_000_000)
        80068

    Reference:
        Chen, Ni, Lu, Cui, Chen, Sun, Wang, Venkataramani, Srinivasan, Zhang, Gopalakrishnan,
        "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
        Training", NeurIPS 2020, arXiv:2104.11125.

    Differs from the paper: the leader chooses one step ahead, from what is left for the next step,
    so that no broadcast has to come before the sum; no low-pass filter on the memory.
    """

    summable: ClassVar[bool] = True
    composes: ClassVar[bool] = False
    slots: ClassVar[tuple[str, ...]] = ("positions",)

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_fraction("cltk", "ratio", self.ratio)
        super().__post_init__()

    @property
    def own_bias(self) -> Bias:
        return Bias.CONTRACTION

    def count(self, numel: int) -> int:
        """Return k."""
        return min(max(round(self.ratio * numel), 1), numel)

    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        numel = sum(numels(extents))
        k = self.count(numel)
        return (k,), (k,), (positions.blocks(numel),), (1,)

    def initial(self, xp: Any, call: Call, like: Tensor) -> tuple[Tensor, ...]:
        numel = sum(numels(call.shapes))
        return (random.strata(xp, call.key, numel, self.count(numel), like)[0],)

    def project(self, xp: Any, x: Tensor, call: Call) -> Kept:
        (where,) = call.shared
        numel = xp.numel(x)
        rest = sum(numels(self.kept((numel,)))) - self.count(numel)
        ahead = xp.cond(
            (call.step + 1) % call.size == call.rank,
            lambda: self._choose(xp, x, where),
            lambda: xp.zeros(rest, "float32", x),
        )
        return Kept(xp.concat([xp.take(x, where), ahead], axis=0))

    def left(self, xp: Any, x: Tensor, kept: Kept, sent: Tensor, call: Call) -> Tensor:
        (where,) = call.shared
        values = sent[: self.count(xp.numel(x))]
        return xp.put_(x, where, xp.sub(xp.take(x, where), values))

    def positions(self, xp: Any, kept: Kept, call: Call) -> tuple[Tensor, Tensor | None] | None:
        return call.shared[0], None

    def expand(
        self, xp: Any, sent: Sequence[Sent], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        values = sent[0].values[: self.count(numel)]
        return xp.put_(
            xp.zeros(numel, "float32", values), call.shared[0], scaled(xp, values, scale)
        )

    def share(self, xp: Any, values: Tensor, call: Call) -> tuple[Tensor, ...]:
        (before,) = call.shared
        numel = sum(numels(call.shapes))
        k, blocks = self.count(numel), positions.blocks(numel)
        mark = values[-1:]
        # What happened to the leader's mark happened to its choice, whatever the reduction was.
        choice = xp.div(values[k:-1], xp.where(xp.equal(mark, 0.0), 1.0, mark))
        choice = xp.round_(choice)  # (k + blocks,)
        sane = xp.logical_and(xp.less(-1.0, choice), xp.less(choice, positions.BLOCK + 1.0))
        choice = xp.cast(xp.where(sane, choice, 0.0), "int64")  # NaN is no number of any kind
        ends = xp.running_sum(choice[k:])  # (blocks,)
        block = xp.search(ends, xp.arange(1, k, "int64", values))  # (k,)
        where = xp.add(xp.scale_(block, positions.BLOCK), choice[:k])
        valid = xp.logical_and(xp.equal(xp.count_true(sane), k + blocks), xp.equal(ends[-1], k))
        valid = xp.logical_and(valid, xp.equal(xp.count_true(xp.less(where, numel)), k))
        rising = xp.count_true(xp.less(where[:-1], where[1:]))
        valid = xp.logical_and(valid, xp.equal(rising, k - 1))
        return (xp.where(valid, where, before),)

    def _choose(self, xp: Any, x: Tensor, where: Tensor) -> Tensor:
        """Return positions, counts and mark of a choice from what will be left."""
        numel, sent = xp.numel(x), xp.take(x, where)
        left = xp.put_(x, where, xp.zeros_like(sent))
        best = largest(xp, left, self.count(numel), sampled=True)
        xp.put_(left, where, sent)  # where that was x itself, it is as it was
        counts, within = positions.split(xp, best, numel)
        mark = xp.add(xp.zeros(1, "float32", x), 1.0)
        return xp.concat([xp.cast(within, "float32"), xp.cast(counts, "float32"), mark], axis=0)
