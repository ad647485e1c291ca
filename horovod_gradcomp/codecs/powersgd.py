"""PowerSGD: both factors in every step, in two rounds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import factors
from ..core.codec import (
    Call,
    Combine,
    Encoded,
    Extent,
    Finished,
    Rounds,
    Shape,
    Tensor,
    check_choice,
    numels,
)
from ..core.errors import SettingsError, explain
from ..core.lowrank import LowRank, Pair, rebuild, remove
from ..core.projection import inner_call


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Send both factors of ``M ~ P Q'``, first P, and from the orthonormal form of its sum Q.

    ``M`` is the gradient as a matrix (the first dimension or the last one, and all others), m x n,
    and Q the factor of the last step. ``P = M Q`` is summed over ranks and orthonormalised, then
    ``Q = M' P`` is summed, and ``Q(M) = P Q'``: one whole power iteration a step on the ranks' mean
    gradient.

    =======  =======  ========  ==============================================
    tensor   dtype    shape     bytes
    =======  =======  ========  ==============================================
    P        float32  (r, m)    4 r m, in the first round
    others   float32  (numel,)  4 numel: tensors that are not factorised
    Q        float32  (r, n)    4 r n, in the second round
    =======  =======  ========  ==============================================

    Combine: ROUNDS, two sums of the package's own. Bias: CONTRACTION: what is sent is an orthogonal
    projection of M.

    A direction that turns to zero is replaced by that of one coordinate, drawn anew. The state,
    r * n values a matrix, is equal on all ranks.

    Family: low rank.

    When to use: as ``acp``, where the gradient must be followed more closely. One whole power
    iteration a step does that, for both factors on the wire. Both rounds wait for one another, so
    on fast links with high latency ``acp`` is the better choice.

    Args:
        rank: r, at least 1, cut to the matrix; smaller compresses more.
        max_rate: A matrix is factorised only if ``(m + n) r < max_rate m n``, 0 < max_rate <= 1.
        warm_start: Whether to start from the last step's Q, or from a random one in every step.
        then: fp16, as in ``"powersgd:rank=4+fp16"``, for both factors.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("powersgd:rank=4").wire_bytes((1000, 500))
        24000

    Reference:
        Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization", NeurIPS 2019, arXiv:1905.13727.

    Differs from the paper: each rank's memory keeps its own error, ``M - P (M' P)'``, not the
    difference to the mean; Q is orthonormalised, too, which leaves its span as it is.
    """

    slots: ClassVar[tuple[str, ...]] = ("basis",)

    warm_start: bool = True

    def __post_init__(self) -> None:
        check_choice("powersgd", "warm_start", self.warm_start, (True, False))
        super().__post_init__()
        if self.then is not None and self.then.combine is not Combine.SUM:
            expected = "a codec whose payloads are summed, such as fp16"
            raise SettingsError(
                "powersgd: " + explain(got=f"'+ {self.then.describe()}'", expected=expected)
            )

    @property
    def combine(self) -> Combine:
        return Combine.ROUNDS

    def round_count(self, extents: Sequence[Extent]) -> int:
        return 2 if self.matrices(extents) else 1

    def wire_bytes(self, *extents: Extent) -> int:
        shapes = [*self._lefts(extents), *self._rights(extents)]
        return 4 * sum(numels(shapes)) if self.then is None else self.then.wire_bytes(*shapes)

    def initial(self, xp: Any, call: Call, like: Tensor) -> tuple[Tensor, ...]:
        parts = self.matrices(call.shapes)
        return (factors.flatten(xp, self._fresh(xp, parts, call, like), like),)

    def rounds(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Rounds:
        extents = call.extents(xp.numel(x))
        parts, matrices = self.parts(extents), self.matrices(extents)
        bases = iter(
            factors.pieces(xp, call.shared[0], self._rights(extents))
            if self.warm_start
            else self._fresh(xp, matrices, call, x)
        )
        first = [
            factors.onto_rows(xp, p.of(xp, x), next(bases)) if p.rank else xp.copy(p.of(xp, x))
            for p in parts
        ]
        sums, sent = yield from self._sum(xp, first, self._lefts(extents), call, want_error)
        lefts = [factors.orthonormal(xp, s) for p, s in zip(parts, sums) if p.rank]
        totals: list[Tensor] = []
        rights: list[Tensor] = []
        if matrices:
            second = [factors.onto_columns(xp, p.of(xp, x), a) for p, a in zip(matrices, lefts)]
            totals, rights = yield from self._sum(
                xp, second, self._rights(extents), call, want_error
            )
        whole = self._pairs(xp, extents, sums, lefts, totals)
        error = None
        total = rebuild(xp, whole, xp.numel(x))
        if want_error:
            error = remove(xp, self._pairs(xp, extents, sent, lefts, rights), x)
        bases_next = [factors.next_basis(xp, t, p.cols, call) for p, t in zip(matrices, totals)]
        return Finished(total, (factors.flatten(xp, bases_next, x),)), error

    def _sum(
        self,
        xp: Any,
        tensors: Sequence[Tensor],
        shapes: Sequence[Shape],
        call: Call,
        want_error: bool,
    ) -> Generator[Tensor, Tensor, tuple[list[Tensor], list[Tensor]]]:
        """Return the sums of tensors over ranks, and what this rank added to them."""
        sent = payload = factors.flatten(xp, tensors, tensors[0])
        inner = inner_call(call, shapes, call.size)
        numel = sum(numels(shapes))
        if self.then is not None:
            payload = self.then.encode(xp, xp.copy(sent), inner, want_error=False).payload
            if want_error:
                sent = self.then.decode(xp, [payload], numel, inner, scale=1.0)
        summed = yield payload
        if self.then is not None:
            summed = self.then.decode(xp, [summed], numel, inner, scale=1.0)
        return factors.pieces(xp, summed, shapes), factors.pieces(xp, sent, shapes)

    def _pairs(
        self,
        xp: Any,
        extents: Sequence[Extent],
        others: Sequence[Tensor],
        lefts: Sequence[Tensor],
        rights: Sequence[Tensor],
    ) -> list[Pair]:
        made, out = iter(zip(lefts, rights)), []
        for p, other in zip(self.parts(extents), others):
            if p.rank:
                out.append(Pair(p, *next(made)))
            else:
                out.append(Pair(p, xp.reshape(other, (p.rows, p.cols)), None))
        return out

    def _fresh(self, xp: Any, parts: Sequence[Any], call: Call, like: Tensor) -> list[Tensor]:
        return [factors.first_basis(xp, p, p.cols, call, like) for p in parts]

    def _lefts(self, extents: Sequence[Extent]) -> list[Shape]:
        return [(p.rank, p.rows) if p.rank else (p.numel,) for p in self.parts(extents)]

    def _rights(self, extents: Sequence[Extent]) -> list[Shape]:
        return [(p.rank, p.cols) for p in self.matrices(extents)]

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        raise AssertionError("powersgd has no single payload, see rounds")

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        raise AssertionError("powersgd has no single payload, see rounds")
