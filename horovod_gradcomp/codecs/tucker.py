"""Alternating Tucker decomposition: one small tensor a step, reduced by Horovod itself."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Union

from ..core import factors
from ..core.codec import Bias, Call, Extent, Shape, Tensor, check_fraction
from ..core.errors import SettingsError, explain
from ..core.factors import Modes, Part
from ..core.projection import Kept, Projection, Sent, scaled


@dataclass(frozen=True)
class Tucker(Projection):
    """Send a tensor's projection in all of its modes but one, another one in each step.

    ``G`` is the gradient, n_1 x ... x n_d, and ``U_i`` an orthonormal basis of r_i rows for mode i,
    ``r_i = min(rank_i, n_i)``, shared by all ranks. Of the modes with ``r_i < n_i`` another one is
    free in each step, f, in turn; ``T = G x_i U_i`` over all ``i != f`` is sent, and
    ``Q(G) = T x_i U_i'``. From the sum of T over ranks, unfolded to n_f rows, U_f is improved by
    one step of subspace iteration. T is linear in G, so Horovod reduces it, fused and overlapped.

    =======  =======  =======  ===============================================================
    tensor   dtype    shape    bytes
    =======  =======  =======  ===============================================================
    T        float32  (size,)  4 max_f n_f prod_{i != f} r_i, in every step, so that sizes never
                               change
    others   float32  (numel,) 4 numel: tensors that are not factorised
    =======  =======  =======  ===============================================================

    Combine: SUM; GATHER with a codec after ``+`` that is gathered. Bias: CONTRACTION: what is sent
    is an orthogonal projection of G.

    A direction that turns to zero is replaced by that of one coordinate, drawn anew. The state,
    the bases of a tensor, is equal on all ranks.

    Family: low rank.

    When to use: for convolution kernels, whose modes are each of low rank. The payload is far
    smaller than that of ``acp``, which sees a matrix. For matrices the two are alike.

    Args:
        ranks: Most coordinates kept in each mode, at least 1: a whole number for all modes, or one
            for each, as (16, 16, 3) or in string form ``"tucker:ranks=16x16x3"``; modes beyond
            those given take the last one. Smaller compresses more.
        max_rate: A tensor is factorised only if the largest T has fewer than ``max_rate`` of its
            elements, 0 < max_rate <= 1.
        then: A codec for T, as in ``"tucker:ranks=4+fp16"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("tucker:ranks=16x16x3").wire_bytes((256, 128, 3, 3))
        147456

    Reference:
        Tucker, "Some Mathematical Notes on Three-Mode Factor Analysis", Psychometrika 1966;
        De Lathauwer, De Moor, Vandewalle, "On the Best Rank-1 and Rank-(R1, R2, ..., RN)
        Approximation of Higher-Order Tensors", SIAM J. Matrix Anal. Appl. 2000. The alternation
        over steps is that of ACP-SGD, arXiv:2306.08881.

    Differs from the paper: one mode is improved in each step and on another gradient, by one step
    of subspace iteration, where the papers decompose one fixed tensor until nothing changes.
    """

    summable: ClassVar[bool] = True
    bit_equal: ClassVar[bool] = False
    mixes: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("bases",)

    ranks: Union[int, tuple[int, ...]] = 4  # noqa: UP007 - read at run time on Python 3.9
    max_rate: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks(self.ranks))
        check_fraction("tucker", "max_rate", self.max_rate)
        super().__post_init__()

    @property
    def own_bias(self) -> Bias:
        return Bias.CONTRACTION

    def parts(self, extents: Sequence[Extent]) -> list[Modes]:
        """Return every tensor with the ranks of its modes."""
        ranks = (self.ranks,) if isinstance(self.ranks, int) else self.ranks
        return factors.modes(extents, ranks, self.max_rate)

    def kept(self, extents: Sequence[Extent]) -> tuple[Shape, ...]:
        return tuple((p.most if p.ranks else p.numel,) for p in self.parts(extents))

    def initial(self, xp: Any, call: Call, like: Tensor) -> tuple[Tensor, ...]:
        out, at = [], 0
        for rank, n in self._shapes(call.shapes):
            out.append(factors.first_basis(xp, Part(at, 1, n, rank), n, call, like))
            at += rank * n
        return (factors.flatten(xp, out, like),)

    def project(self, xp: Any, x: Tensor, call: Call) -> Kept:
        out = []
        for p, bases in self._with_bases(xp, call, xp.numel(x)):
            whole = p.of(xp, x)
            if not p.ranks:
                out.append(xp.copy(whole))
                continue

            def values(free: int, p: Modes = p, t: Tensor = whole, bases: Any = bases) -> Tensor:
                shape = p.shape
                for mode, basis in bases.items():
                    if mode != free:
                        t = factors.onto(xp, t, shape, mode, basis)
                        shape = (*shape[:mode], p.ranks[mode], *shape[mode + 1 :])
                return xp.pad_columns(xp.reshape(t, (1, -1)), p.most)

            out.append(_in_turn(xp, call.step, p.cut, values))
        return Kept(factors.flatten(xp, out, x))

    def left(self, xp: Any, x: Tensor, kept: Kept, sent: Tensor, call: Call) -> Tensor:
        return self._spread(xp, sent, x, call, xp.sub_)

    def expand(
        self, xp: Any, sent: Sequence[Sent], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        values = scaled(xp, sent[0].values, scale)
        return self._spread(xp, values, xp.empty(numel, values), call, lambda _, new: new)

    def share(self, xp: Any, values: Tensor, call: Call) -> tuple[Tensor, ...]:
        out = []
        for (p, bases), piece in self._with_values(xp, values, call, sum(call.sizes(0))):
            if not p.ranks:
                continue

            def better(free: int, p: Modes = p, t: Tensor = piece, bases: Any = bases) -> Tensor:
                shape = p.projected(free)
                matrix = factors.unfold(xp, t[: math.prod(shape)], shape, free)
                new = {free: factors.refined(xp, bases[free], matrix, call)}
                return factors.flatten(xp, list({**bases, **new}.values()), values)

            out.append(_in_turn(xp, call.step, p.cut, better))
        return (factors.flatten(xp, out, values),)

    def _spread(
        self,
        xp: Any,
        values: Tensor,
        into: Tensor,
        call: Call,
        put: Callable[[Tensor, Tensor], Any],
    ) -> Tensor:
        """Return what ``put`` makes of each piece of a tensor, and of what values stand for."""
        out = []
        for (p, bases), piece in self._with_values(xp, values, call, xp.numel(into)):
            place = p.of(xp, into)
            if not p.ranks:
                (done,) = xp.map_rows(lambda _, a, b: (put(a, b),), [place, piece], [place])
                out.append(done)
                continue

            def whole(
                free: int, p: Modes = p, t: Tensor = piece, bases: Any = bases, place: Any = place
            ) -> Tensor:
                shape = p.projected(free)
                t = t[: math.prod(shape)]
                *others, last = [mode for mode in bases if mode != free]
                for mode in others:
                    t = factors.along(xp, t, shape, mode, xp.transpose(bases[mode]))
                    shape = (*shape[:mode], p.shape[mode], *shape[mode + 1 :])
                return factors.spread(xp, t, shape, last, xp.transpose(bases[last]), place, put)

            out.append(_in_turn(xp, call.step, p.cut, whole))
        return xp.join_flat(into, out)

    def _shapes(self, extents: Sequence[Extent]) -> list[tuple[int, int]]:
        """Return the shapes of all bases, as they lie one after the other."""
        return [(p.ranks[i], p.shape[i]) for p in self.parts(extents) if p.ranks for i in p.cut]

    def _with_bases(self, xp: Any, call: Call, numel: int) -> list[tuple[Modes, dict[int, Tensor]]]:
        """Return each tensor, and the bases of its modes that are cut."""
        extents = call.extents(numel)
        shapes = self._shapes(extents)
        bases = iter(factors.pieces(xp, call.shared[0], shapes) if shapes else ())
        return [
            (p, {i: next(bases) for i in p.cut} if p.ranks else {}) for p in self.parts(extents)
        ]

    def _with_values(
        self, xp: Any, values: Tensor, call: Call, numel: int
    ) -> list[tuple[tuple[Modes, dict[int, Tensor]], Tensor]]:
        pieces = factors.pieces(xp, values, self.kept(call.extents(numel)))
        return list(zip(self._with_bases(xp, call, numel), pieces))


def _in_turn(xp: Any, step: Any, modes: Sequence[int], fn: Callable[[int], Tensor]) -> Tensor:
    """Return ``fn`` of the mode whose turn it is; the step may be a tensor."""

    def choose(turn: Any, rest: Sequence[int]) -> Tensor:
        if len(rest) == 1:
            return fn(rest[0])
        return xp.cond(turn == 0, lambda: fn(rest[0]), lambda: choose(turn - 1, rest[1:]))

    return choose(step % len(modes), modes)


def _ranks(value: Any) -> int | tuple[int, ...]:
    """Return ranks as they are kept; the string form comes as a string."""
    numbers = value
    if isinstance(value, str) and re.fullmatch(r"\d+(x\d+)+", value):
        numbers = tuple(map(int, value.split("x")))
    each = numbers if isinstance(numbers, tuple) else (numbers,)
    if not each or any(isinstance(r, bool) or not isinstance(r, int) or r < 1 for r in each):
        expected = "whole numbers >= 1: one for all modes, or one for each, as (16, 16, 3)"
        raise SettingsError("tucker: " + explain(got=f"ranks={value!r}", expected=expected))
    return each if len(each) > 1 else each[0]
