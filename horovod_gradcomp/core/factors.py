"""Matrices within a flat tensor, their orthonormal bases, and products of factors.

Bases are kept as rows, ``(rank, length)``, so that every sum runs along memory. All is float32,
at any scale of the input, and takes the same steps for the same shapes, so that ranks that run the
same library on the same kind of processor get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from . import random
from .blocks import largest
from .codec import Call, Extent, Tensor

_DEPENDENT = 2.0**-13
"""A row of which no more than this is new, once the rows before it are taken out, is no new
direction: what remains is mostly rounding."""
_DOWN, _UP, _MOST = 2.0**-12, 2.0**12, 2.0**110
"""A basis is scaled down for a product, so that no sum overflows; what would be beyond 2^122 is
cut there, so that a product of factors does not either."""


class Part(NamedTuple):
    """One tensor of the flat input, as a matrix; ``rank`` 0 sends it as it is."""

    start: int
    rows: int
    cols: int
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @property
    def longer(self) -> int:
        """The longer side."""
        return max(self.rows, self.cols)

    def of(self, xp: Any, flat: Tensor) -> Tensor:
        """Return the matrix, ``(rows, cols)``, within a flat tensor."""
        return xp.reshape(flat[self.start : self.start + self.numel], (self.rows, self.cols))


class Modes(NamedTuple):
    """One tensor of the flat input with the rank of each of its modes; none sends it as it is."""

    start: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def cut(self) -> list[int]:
        """The modes that are projected to fewer coordinates."""
        return [i for i, (n, r) in enumerate(zip(self.shape, self.ranks)) if r < n]

    def projected(self, free: int) -> tuple[int, ...]:
        """Return the shape of the tensor projected in all modes but one."""
        return (*self.ranks[:free], self.shape[free], *self.ranks[free + 1 :])

    @property
    def most(self) -> int:
        """Elements of the largest such projection."""
        return max((math.prod(self.projected(i)) for i in self.cut), default=self.numel)

    def of(self, xp: Any, flat: Tensor) -> Tensor:
        """Return the tensor's elements within a flat tensor."""
        return flat[self.start : self.start + self.numel]


def modes(extents: Sequence[Extent], ranks: Sequence[int], max_rate: float) -> list[Modes]:
    """Return each tensor with the ranks of its modes.

    Modes beyond the given ranks take the last one. A tensor whose largest projection does not have
    fewer than ``max_rate`` of its elements is sent as it is.
    """
    out, start = [], 0
    for extent in extents:
        shape = (extent,) if isinstance(extent, int) else extent
        sizes = tuple(min(ranks[min(i, len(ranks) - 1)], n) for i, n in enumerate(shape))
        whole = Modes(start, shape, sizes)
        pays = len(shape) > 1 and whole.most < max_rate * whole.numel
        out.append(whole if pays else whole._replace(ranks=()))
        start += whole.numel
    return out


def parts(extents: Sequence[Extent], rank: int, max_rate: float) -> list[Part]:
    """Return each tensor as a matrix: of :func:`matrix_of`, and a vector as one row.

    A matrix whose two factors together do not have fewer than ``max_rate`` of its elements is sent
    as it is.
    """
    out, start = [], 0
    for extent in extents:
        shape = (extent,) if isinstance(extent, int) else extent
        rows, cols = matrix_of(shape) if len(shape) > 1 else (1, math.prod(shape))
        size = min(rank, rows, cols)
        pays = (rows + cols) * size < max_rate * rows * cols
        out.append(Part(start, rows, cols, size if pays else 0))
        start += rows * cols
    return out


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor of two dimensions or more, taken as a matrix.

    One side is the first dimension or the last, whichever leaves the smaller factors: kernels of
    convolutions have their output channels first in PyTorch and last in TensorFlow.
    """
    first = shape[0], math.prod(shape[1:])
    last = math.prod(shape[:-1]), shape[-1]
    return first if sum(first) <= sum(last) else last


def pieces(xp: Any, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return consecutive tensors of a flat one."""
    out, start = [], 0
    for shape in shapes:
        count = math.prod(shape)
        out.append(xp.reshape(flat[start : start + count], shape))
        start += count
    return out


def flatten(xp: Any, tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return float32 tensors as one flat one, on the device of ``like``."""
    if not tensors:
        return xp.zeros(0, "float32", like)
    flat = [xp.reshape(t, (-1,)) for t in tensors]
    return flat[0] if len(flat) == 1 else xp.concat(flat, axis=0)


def onto_rows(xp: Any, matrix: Tensor, basis: Tensor) -> Tensor:
    """Return ``basis @ matrix.T``: ``(m, n)`` and ``(r, n)`` to ``(r, m)``."""
    return _bounded(xp, xp.transpose(xp.matmul(matrix, xp.transpose(xp.scaled(basis, _DOWN)))))


def onto_columns(xp: Any, matrix: Tensor, basis: Tensor) -> Tensor:
    """Return ``basis @ matrix``: ``(m, n)`` and ``(r, m)`` to ``(r, n)``."""
    return _bounded(xp, xp.matmul(xp.scaled(basis, _DOWN), matrix))


def product(xp: Any, left: Tensor, right: Tensor, out: Any = None) -> Tensor:
    """Return ``left.T @ right``, ``(r, m)`` and ``(r, n)`` to ``(m, n)``, in ``out`` if given."""
    rows = xp.transpose(left)  # (m, r)
    (done,) = xp.map_rows(lambda _, chunk: (xp.matmul(chunk, right),), [rows], [out])
    return done


def subtract_product(xp: Any, matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``matrix - left.T @ right``; the matrix may be overwritten."""
    rows = xp.transpose(left)  # (m, r)

    def one(_: int, chunk: Tensor, factor: Tensor) -> tuple[Tensor]:
        return (xp.sub_(chunk, xp.matmul(factor, right)),)

    (done,) = xp.map_rows(one, [matrix, rows], [matrix])
    return done


def along(xp: Any, x: Tensor, shape: tuple[int, ...], mode: int, basis: Tensor) -> Tensor:
    """Return a tensor of a shape, multiplied in one mode by a ``(r, n)`` matrix.

    Args:
        xp: An operations module.
        x: As many elements as the shape says.
        shape: Of the tensor, n in the mode.
        mode: Which one.
        basis: Shape ``(r, n)``.

    Returns:
        The same tensor with r in the place of n, its elements in two or three dimensions.
    """
    rows, product, _ = _by_rows(xp, x, shape, mode, basis)
    return product(rows)


def spread(
    xp: Any,
    x: Tensor,
    shape: tuple[int, ...],
    mode: int,
    basis: Tensor,
    into: Tensor,
    put: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return what ``put(piece, product)`` makes of each piece of a flat tensor.

    Product is the same piece of :func:`along`. So only pieces of the product exist at a time; all
    of it does where x has but a few elements before the mode, and some behind it.

    Args:
        xp: An operations module.
        x: As of :func:`along`, and so are shape, mode and basis.
        shape: Of the tensor.
        mode: Which one.
        basis: Shape ``(r, n)``.
        into: As many elements as the product; may be overwritten.
        put: Returns a tensor of the shape of both; may overwrite ``piece``.
    """
    rows, product, whole = _by_rows(xp, x, shape, mode, basis)
    place = xp.reshape(into, whole)

    def one(_: int, piece: Tensor, row: Tensor) -> tuple[Tensor]:
        return (put(piece, product(row)),)

    return xp.reshape(xp.map_rows(one, [place, rows], [place])[0], (-1,))


def _by_rows(
    xp: Any, x: Tensor, shape: tuple[int, ...], mode: int, basis: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor], tuple[int, ...]]:
    """Return rows, what makes the same rows of :func:`along` of some of them, and its shape."""
    r, n = basis.shape
    before, behind = math.prod(shape[:mode]), math.prod(shape[mode + 1 :])
    if behind == 1:
        right = xp.transpose(basis)  # (n, r)
        return xp.reshape(x, (before, n)), lambda rows: xp.matmul(rows, right), (before, r)
    if before == 1:
        right = xp.reshape(x, (n, behind))
        return basis, lambda rows: xp.matmul(rows, right), (r, behind)
    rows = xp.reshape(x, (before, n, behind))
    return rows, lambda rows: xp.matmul(basis, rows), (before, r, behind)


def onto(xp: Any, x: Tensor, shape: tuple[int, ...], mode: int, basis: Tensor) -> Tensor:
    """Return :func:`along` such that no sum overflows, for a basis of orthonormal rows."""
    return _bounded(xp, along(xp, x, shape, mode, xp.scaled(basis, _DOWN)))


def unfold(xp: Any, x: Tensor, shape: tuple[int, ...], mode: int) -> Tensor:
    """Return the matrix ``(n, rest)`` of a tensor, n its size in a mode."""
    n, before = shape[mode], math.prod(shape[:mode])
    last = xp.transpose(xp.reshape(x, (before, -1)))  # (n * behind, before)
    return xp.reshape(last, (n, -1))


def refined(xp: Any, basis: Tensor, matrix: Tensor, call: Call) -> Tensor:
    """Return a basis after one step of subspace iteration towards a matrix's left singular vectors.

    Where the matrix is zero, so that it says nothing, the basis stays.

    Args:
        xp: An operations module.
        basis: Shape ``(r, n)``, orthonormal rows.
        matrix: Shape ``(n, rest)``.
        call: The step.
    """
    top = xp.view(xp.row_max(xp.magnitude(xp.reshape(matrix, (1, -1)))), "float32")  # (1, 1)
    zero = xp.equal(top, 0.0)
    matrix = xp.div(matrix, xp.where(zero, 1.0, top))
    # Orthonormal in between, or singular values would count as squares, and small ones as nothing.
    right = orthonormal(xp, xp.matmul(basis, matrix))  # (r, rest)
    rows = xp.matmul(right, xp.transpose(matrix))  # (r, n)
    return next_basis(xp, xp.where(zero, basis, rows), basis.shape[1], call)


def orthonormal(xp: Any, rows: Tensor) -> Tensor:
    """Return rows that span the same space, orthonormal, with zeros for those that add nothing.

    Gram-Schmidt, each row twice. Nothing is added to keep a division finite, so small rows are as
    good as large ones.

    Args:
        xp: An operations module.
        rows: Shape ``(r, length)``, float32.
    """
    top = largest(xp, rows)  # (r, 1)
    top = xp.where(xp.equal(top, 0.0), 1.0, top)
    rows = xp.div(rows, top)
    done: list[Tensor] = []
    for i in range(rows.shape[0]):
        row = rows[i : i + 1]  # (1, length)
        before = _norm(xp, row)
        if done:
            basis = done[0] if i == 1 else xp.concat(done, axis=0)
            for _ in range(2):
                row = xp.sub(row, xp.matmul(xp.matmul(row, xp.transpose(basis)), basis))
        after = _norm(xp, row)
        new = xp.less(xp.scaled(before, _DEPENDENT), after)
        done.append(xp.where(new, xp.div(row, xp.where(new, after, 1.0)), 0.0))
    return done[0] if len(done) == 1 else xp.concat(done, axis=0)


def next_basis(xp: Any, rows: Tensor, length: Any, call: Call) -> Tensor:
    """Return an orthonormal basis of what rows span, with new directions for rows that are zero.

    A zero row would stay zero for ever: what it projects onto is zero, too. It becomes the
    direction of one coordinate, another in every step.

    Args:
        xp: An operations module.
        rows: Shape ``(r, padded length)``, float32.
        length: Coordinates that count; a number, or an int64 scalar tensor.
        call: The step.
    """
    rank, padded = rows.shape
    limits = xp.add(xp.zeros(rank, "int64", rows), length)
    place = xp.reshape(random.below(xp, call.key, limits), (rank, 1))
    columns = xp.reshape(xp.arange(0, padded, "int64", rows), (1, padded))
    fresh = xp.cast(xp.equal(columns, place), "float32")  # (r, padded)
    rows = xp.where(xp.less(columns, length), rows, 0.0)  # an inner codec may not keep zeros
    zero = xp.equal(xp.row_max(xp.magnitude(rows)), 0)  # (r, 1)
    return orthonormal(xp, xp.where(zero, fresh, rows))


def first_basis(xp: Any, part: Part, padded: int, call: Call, like: Tensor) -> Tensor:
    """Return a random orthonormal basis, ``(rank, padded)``, zero from column ``cols`` on."""
    count = part.rank * part.cols
    drawn = random.centred(xp, call.key, part.start, xp.zeros(count, "float32", like))
    rows = orthonormal(xp, xp.reshape(drawn, (part.rank, part.cols)))
    return xp.pad_columns(rows, padded)


def _norm(xp: Any, row: Tensor) -> Tensor:
    return xp.cast(xp.row_norm(row), "float32")


def _bounded(xp: Any, factor: Tensor) -> Tensor:
    return xp.scale_(xp.clamp_(factor, -_MOST, _MOST), _UP)
