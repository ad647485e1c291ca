"""Alternating low rank: one factor a step, reduced by Horovod itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, ClassVar

from ..core import factors
from ..core.codec import Call, Extent, Shape, Tensor
from ..core.lowrank import LowRank, Pair, rebuild, remove, take
from ..core.projection import Kept, Projection, Sent, scaled


@dataclass(frozen=True)
class ACP(LowRank, Projection):
    """Send one of the two factors of ``M ~ P Q'`` in each step, and use the other from before.

    ``M`` is the gradient as a matrix (the first dimension or the last one, and all others), m x n.
    All ranks share an orthonormal ``Q`` (n x r) in even steps: ``P = M Q`` is sent and
    ``Q(M) = P Q'``. In odd steps they share ``P``, the orthonormal form of the last step's sum:
    ``Q = M' P`` is sent and ``Q(M) = P Q'``. So each step is half of a power iteration on the
    ranks' mean gradient, and since the payload is linear in M, Horovod reduces it, fused and
    overlapped with all others.

    =======  =======  ===========  ==========================================================
    tensor   dtype    shape        bytes
    =======  =======  ===========  ==========================================================
    factor   float32  (r, longer)  4 r max(m, n), in every step, so that sizes never change
    others   float32  (numel,)     4 numel: tensors that are not factorised
    =======  =======  ===========  ==========================================================

    Combine: SUM; GATHER with a codec after ``+`` that is gathered. Bias: CONTRACTION: what is sent
    is an orthogonal projection of M.

    A direction that turns to zero is replaced by that of one coordinate, drawn anew. The state,
    r * max(m, n) values a matrix, is equal on all ranks.

    Family: low rank.

    When to use: on slow links, for models of large matrices. The payload grows with the side of a
    matrix, not with its size, and arithmetic is two thin matrix products. Not for small or very
    thin matrices, where factors are as large as the matrix.

    Args:
        rank: r, at least 1, cut to the matrix; smaller compresses more.
        max_rate: A matrix is factorised only if ``(m + n) r < max_rate m n``, 0 < max_rate <= 1.
        then: A codec for the factor, as in ``"acp:rank=4+fp16"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("acp:rank=4").wire_bytes((1000, 500))
        16000

    Reference:
        Zhang, Shi, Wang, Chu, "Evaluation and Optimization of Gradient Compression for Distributed
        Deep Learning", ICDCS 2023, arXiv:2306.08881.

    Differs from the paper: directions that were lost are replaced; the shorter factor is padded to
    the longer one's size.
    """

    summable: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("basis",)

    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        return tuple((p.rank, p.longer) if p.rank else (p.numel,) for p in self.parts(extents))

    def initial(self, xp: Any, call: Call, like: Tensor) -> tuple[Tensor, ...]:
        parts = self.matrices(call.shapes)
        if call.step % 2:  # where it does not start at 0, as in a test
            parts = [p._replace(rows=p.cols, cols=p.rows) for p in parts]
        bases = [factors.first_basis(xp, p, p.longer, call, like) for p in parts]
        return (factors.flatten(xp, bases, like),)

    def project(self, xp: Any, x: Tensor, call: Call) -> Kept:
        def values(even: bool) -> Tensor:
            out, bases = [], self._bases(xp, call)
            for p in self.parts(call.extents(xp.numel(x))):
                factor = matrix = p.of(xp, x)
                if p.rank and even:
                    factor = factors.onto_rows(xp, matrix, next(bases)[:, : p.cols])  # (r, m)
                elif p.rank:
                    factor = factors.onto_columns(xp, matrix, next(bases)[:, : p.rows])  # (r, n)
                out.append(xp.pad_columns(factor, p.longer) if p.rank else xp.copy(factor))
            return factors.flatten(xp, out, x)

        return Kept(xp.cond(call.step % 2 == 0, lambda: values(True), lambda: values(False)))

    def left(self, xp: Any, x: Tensor, kept: Kept, sent: Tensor, call: Call) -> Tensor:
        pairs = self._pairs(xp, sent, xp.numel(x), call)
        return xp.cond(
            call.step % 2 == 0,
            lambda: remove(xp, pairs(True), x),
            lambda: remove(xp, pairs(False), x),
        )

    def expand(
        self, xp: Any, sent: Sequence[Sent], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        pairs = self._pairs(xp, scaled(xp, sent[0].values, scale), numel, call)
        return xp.cond(
            call.step % 2 == 0,
            lambda: rebuild(xp, pairs(True), numel),
            lambda: rebuild(xp, pairs(False), numel),
        )

    def share(self, xp: Any, values: Tensor, call: Call) -> tuple[Tensor, ...]:
        extents, odd, out = call.shapes, call.step % 2, []
        for p, piece in zip(self.parts(extents), factors.pieces(xp, values, self.kept(extents))):
            if p.rank:  # as long as a column after even steps, as a row after odd ones
                out.append(factors.next_basis(xp, piece, p.rows + (p.cols - p.rows) * odd, call))
        return (factors.flatten(xp, out, values),)

    def _bases(self, xp: Any, call: Call) -> Iterator[Tensor]:
        shapes = [(p.rank, p.longer) for p in self.matrices(call.shapes)]
        return iter(factors.pieces(xp, call.shared[0], shapes))

    def _pairs(
        self, xp: Any, values: Tensor, numel: int, call: Call
    ) -> Callable[[bool], list[Pair]]:
        """Return what gives the factors of a step, by whether it is even."""
        extents = call.extents(numel)

        def pairs(even: bool) -> list[Pair]:
            out, bases = [], self._bases(xp, call)
            sent = iter(factors.pieces(xp, values, self.kept(extents)))
            for p in self.parts(extents):
                piece = take(sent, xp, p)
                if not p.rank:
                    out.append(Pair(p, piece, None))
                    continue
                basis = next(bases)
                left, right = (piece, basis) if even else (basis, piece)
                out.append(Pair(p, left[:, : p.rows], right[:, : p.cols]))
            return out

        return pairs
