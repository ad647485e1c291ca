"""Truncated singular value decomposition of each rank's own matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import factors
from ..core.codec import Call, Extent, Shape, Tensor, check_count
from ..core.lowrank import LowRank, Pair, rebuild, remove
from ..core.projection import Kept, Projection, Sent, scaled


@dataclass(frozen=True)
class SVD(LowRank, Projection):
    """Send the best approximation of rank r that each rank finds of its own matrix ``M``.

    ``M`` is the gradient as a matrix (the first dimension or the last one, and all others), m x n.
    From a random orthonormal basis of r rows, ``P = orth(M Q)`` and ``Q = M' P`` are repeated, as
    in a randomised SVD; ``Q(M) = P Q'`` with P orthonormal. All ranks' factors are joined to one
    product.

    =======  =======  ================  ====================================================
    tensor   dtype    shape             bytes
    =======  =======  ================  ====================================================
    factors  float32  (r, m) + (r, n)   4 r (m + n), or as the codec after ``+`` has it
    others   float32  (numel,)          4 numel: tensors that are not factorised
    =======  =======  ================  ====================================================

    Combine: GATHER. Bias: CONTRACTION: what is sent is an orthogonal projection of M.

    Family: low rank.

    When to use: with few ranks, whose matrices differ much. They may also change from step to step,
    since nothing is shared or remembered. It sends both factors and from every rank to every rank;
    ``acp`` and ``powersgd`` send less and cost less.

    Args:
        rank: r, at least 1, cut to the matrix; smaller compresses more.
        max_rate: A matrix is factorised only if ``(m + n) r < max_rate m n``, 0 < max_rate <= 1.
        iterations: How often both factors are improved, at least 0: 0 is a random projection onto
            the range of M, more come closer to the true singular vectors and read M more often.
        then: A codec for the factors, as in ``"svd:rank=4+linear:bits=8"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("svd:rank=4").wire_bytes((1000, 500))
        24000

    Reference:
        Wang, Sievert, Liu, Charles, Papailiopoulos, Wright, "ATOMO: Communication-efficient
        Learning via Atomic Sparsification", NeurIPS 2018, arXiv:1806.04090; Halko, Martinsson,
        Tropp, "Finding Structure with Randomness", SIAM Review 2011, arXiv:0909.4061.

    Differs from the paper: the largest singular values are kept and a memory keeps the rest, where
    ATOMO samples them and scales them up.
    """

    summable: ClassVar[bool] = False
    orthogonal: ClassVar[bool] = False

    iterations: int = 1

    def __post_init__(self) -> None:
        check_count("svd", "iterations", self.iterations, minimum=0)
        super().__post_init__()

    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        out: list[Shape] = []
        for p in self.parts(extents):
            out += [(p.rank, p.rows), (p.rank, p.cols)] if p.rank else [(p.numel,)]
        return tuple(out)

    def project(self, xp: Any, x: Tensor, call: Call) -> Kept:
        out = []
        for p in self.parts(call.extents(xp.numel(x))):
            matrix = p.of(xp, x)
            if not p.rank:
                out.append(xp.copy(matrix))
                continue
            right = factors.first_basis(xp, p, p.cols, call, x)  # (r, n)
            left = factors.orthonormal(xp, factors.onto_rows(xp, matrix, right))  # (r, m)
            for _ in range(self.iterations):
                right = factors.orthonormal(xp, factors.onto_columns(xp, matrix, left))
                left = factors.orthonormal(xp, factors.onto_rows(xp, matrix, right))
            out += [left, factors.onto_columns(xp, matrix, left)]
        return Kept(factors.flatten(xp, out, x))

    def left(self, xp: Any, x: Tensor, kept: Kept, sent: Tensor, call: Call) -> Tensor:
        extents = call.extents(xp.numel(x))
        return remove(xp, self._pairs(xp, [Sent(sent, ())], extents, 1.0), x)

    def expand(
        self, xp: Any, sent: Sequence[Sent], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        return rebuild(xp, self._pairs(xp, sent, call.extents(numel), scale), numel)

    def _pairs(
        self, xp: Any, sent: Sequence[Sent], extents: Sequence[Extent], scale: Any
    ) -> list[Pair]:
        """Return the factors of all ranks one below the other, ``(ranks * r, m)`` and so on."""
        shapes = self.kept(extents)
        pieces = [iter(factors.pieces(xp, s.values, shapes)) for s in sent]

        def joined() -> Tensor:
            rows = [next(p) for p in pieces]
            return rows[0] if len(rows) == 1 else xp.concat(rows, axis=0)

        out = []
        for p in self.parts(extents):
            if p.rank:
                out.append(Pair(p, joined(), scaled(xp, joined(), scale)))
                continue
            added = next(pieces[0])
            for other in pieces[1:]:
                added = xp.add(added, next(other))
            own = xp.reshape(scaled(xp, added, scale), (p.rows, p.cols))
            out.append(Pair(p, own, None))
        return out
