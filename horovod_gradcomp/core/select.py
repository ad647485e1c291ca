"""The k elements of largest magnitude, ties by lowest position, the same in both frameworks.

Magnitudes are compared as integers (the bits of a float32 without its sign), so subnormals and
NaN have their place in the order and no framework's flushing or NaN rule can change it.

A full selection costs tens of passes, with compiled kernels five. The sampled one estimates a
threshold a little below the k-th magnitude from a strided sample, keeps the few elements above it,
and selects exactly among these. A threshold that proves too high is noticed (fewer than k are left)
and the full selection runs, so both give the same positions.
"""

from __future__ import annotations

import math
from typing import Any

from .codec import Tensor

STRIDE = 101
"""One element in 101 is sampled; a prime, so that rows of even length do not alias."""

SMALLEST = 65_536
"""Below this many elements the full selection is as cheap."""


def largest(xp: Any, x: Tensor, k: int, *, sampled: bool) -> Tensor:
    """Return the positions of the k largest ``|x|``.

    Args:
        xp: An operations module.
        x: Shape ``(n,)``, float32.
        k: ``1 <= k <= n``.
        sampled: Whether a sample may spare the full selection.

    Returns:
        Shape ``(k,)``, int64, ascending, unique, whatever the values.
    """
    n = xp.numel(x)
    if k == n:
        return xp.arange(0, n, "int64", x)
    rank = _sample_rank(n, k) if sampled else 0
    kernels = xp.kernels(x)
    if kernels:
        return kernels.largest(x, k, rank, STRIDE)
    if not rank:
        return xp.fix_size(_full(xp, x, k), k)
    sample = xp.magnitude(xp.strided(x, STRIDE))
    limit = _below(xp, xp.kth_largest(sample, rank))
    found = xp.positions_above(x, limit)
    return xp.fix_size(
        xp.cond(
            xp.length(found) >= k,
            lambda: _narrow(xp, x, found, k),
            # Fewer than k elements differ from zero, or the sample was not like the rest.
            lambda: xp.cond(limit == 0, lambda: _fill(xp, found, k), lambda: _full(xp, x, k)),
        ),
        k,
    )


def above(xp: Any, x: Tensor, bits: int, k: int) -> Tensor:
    """Return k positions: first of all those where the bits of ``|x|`` are above a limit.

    Of more than k the largest are returned; where there is none, the largest of all. What is left
    of the k places goes to the lowest positions. One pass over ``x`` is all it takes, except
    where there are too many or none.

    Args:
        xp: An operations module.
        x: Shape ``(n,)``, float32.
        bits: Of the limit, as :meth:`Ops.magnitude` gives them.
        k: ``1 <= k <= n``.

    Returns:
        Shape ``(k,)``, int64, ascending, unique, whatever the values.
    """
    kernels = xp.kernels(x)
    if kernels:
        return kernels.above(x, bits, k, _sample_rank(xp.numel(x), k), STRIDE)
    found = xp.positions_above(x, bits)
    return xp.fix_size(
        xp.cond(
            xp.length(found) > k,
            lambda: largest(xp, x, k, sampled=True),
            lambda: xp.cond(
                xp.length(found) > 0,
                lambda: _fill(xp, found, k),
                lambda: _fill(xp, largest(xp, x, 1, sampled=True), k),
            ),
        ),
        k,
    )


def _sample_rank(n: int, k: int) -> int:
    """Return which of the sample's magnitudes lies below the k-th of all, in all likelihood.

    0 where a sample does not pay.
    """
    expected = k / STRIDE
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 2)
    return rank if n >= SMALLEST and rank < n // STRIDE // 2 else 0


def _below(xp: Any, bits: Tensor) -> Tensor:
    # Zero stays zero: exact zeros are never worth a search, they are filled in by position.
    return xp.where(xp.less(bits, 1), bits, bits - 1)


def _full(xp: Any, x: Tensor, k: int) -> Tensor:
    kth = xp.kth_largest(xp.magnitude(x), k)
    found = xp.positions_above(x, _below(xp, kth))
    return xp.cond(
        xp.length(found) >= k,
        lambda: _narrow(xp, x, found, k),
        lambda: _fill(xp, found, k),
    )


def _narrow(xp: Any, x: Tensor, found: Tensor, k: int) -> Tensor:
    """Keep the k largest of the found positions, ties by lowest position."""
    bits = xp.magnitude(xp.take(x, found))
    kth = xp.kth_largest(bits, k)
    above = xp.less(kth, bits)
    tied = xp.equal(bits, kth)
    room = k - xp.count_true(above)
    kept = xp.logical_or(above, xp.logical_and(tied, xp.less(xp.running_count(tied), room + 1)))
    return xp.take(found, xp.positions_of(kept))


def _fill(xp: Any, found: Tensor, k: int) -> Tensor:
    """Complete at most k positions with the lowest ones that are not among them."""
    return xp.cond(xp.length(found) == k, lambda: found, lambda: _filled(xp, found, k))


def _filled(xp: Any, found: Tensor, k: int) -> Tensor:
    # Of the first k positions at most len(found) are taken, so enough are free.
    low = xp.less(found, k)
    taken = xp.mark(k, xp.take(found, xp.positions_of(low)))
    # Up to the last of the free ones that are due every position is chosen.
    end = xp.positions_of(xp.logical_not(taken))[k - xp.length(found) - 1] + 1
    chosen = xp.logical_or(taken, xp.less(xp.arange(0, k, "int64", found), end))
    high = xp.take(found, xp.positions_of(xp.logical_not(low)))
    return xp.concat([xp.positions_of(chosen), high], axis=0)
