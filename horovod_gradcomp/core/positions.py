"""Positions of kept elements, in the cheapest of three forms.

Which form follows from n and k alone, so the payload's size never depends on values:

- 32 bit: 4 bytes a position;
- 16 bit: 2 bytes a position within its block of 65,536, and 4 bytes a block for how many it holds;
- bitmap: one bit for each of the n elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import bits, damage
from .codec import Tensor
from .payload import Section

BLOCK = 65_536


def sections(numel: int, k: int) -> tuple[Section, ...]:
    """Return the payload sections that hold k ascending positions below ``numel``."""
    wide = (Section("int32", 1, k),)
    split = (Section("int32", 1, blocks(numel)), Section("int16", 1, k))
    bitmap = (Section("uint8", 1, bits.packed_width(numel, 1)),)
    return min((wide, split, bitmap), key=lambda form: sum(s.nbytes for s in form))


def encode(xp: Any, where: Tensor, numel: int) -> list[Tensor]:
    """Return the contents of :func:`sections` for ascending int64 positions, shape ``(k,)``."""
    form = sections(numel, xp.numel(where))
    if form[0].dtype == "uint8":
        mask = xp.cast(xp.mark(bits.padded_width(numel), where), "uint8")
        return [bits.pack(xp, xp.reshape(mask, (1, -1)), 1)]
    if len(form) == 1:
        return [xp.cast(where, "int32")]
    counts, within = split(xp, where, numel)
    return [xp.cast(counts, "int32"), xp.cast(within, "int16")]


def blocks(numel: int) -> int:
    """Return into how many blocks of 65,536 the elements fall."""
    return -(-numel // BLOCK)


def split(xp: Any, where: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return how many of ascending positions each block holds, and where they lie within theirs.

    Args:
        xp: An operations module.
        where: Shape ``(k,)``, int64, ascending.
        numel: Number of elements.

    Returns:
        ``(blocks,)`` and ``(k,)``, int64.
    """
    # (blocks + 1,): how many positions lie below the start of each block
    edges = xp.scale_(xp.arange(0, blocks(numel) + 1, "int64", where), BLOCK)
    below = xp.search(where, edges)
    return xp.sub(below[1:], below[:-1]), xp.bit_and(where, BLOCK - 1)


def decode(xp: Any, parts: Sequence[Tensor], numel: int, k: int) -> tuple[Tensor, Tensor]:
    """Return positions, and what is wrong with the parts they were in.

    Args:
        xp: An operations module.
        parts: Contents of :func:`sections`, or whatever arrived in their place.
        numel: Number of elements.
        k: Number of positions.

    Returns:
        ``(k,)``, int64, each below ``numel`` whatever the parts hold, and ascending where nothing
        is wrong; the damage, ``(1,)``, see :mod:`.damage`.
    """
    form = sections(numel, k)
    counted = None
    if form[0].dtype == "uint8":
        mask = xp.reshape(bits.unpack(xp, parts[0], 1), (-1,))
        found, fits = xp.fit(xp.positions_of(xp.cast(mask, "bool")), k)
        counted = damage.unless(xp, fits, damage.COUNTS)
    elif len(form) == 1:
        found = xp.cast(xp.reshape(parts[0], (k,)), "int64")
    else:
        counts, counted = _sane(xp, xp.cast(xp.reshape(parts[0], (-1,)), "int64"), k)
        starts = xp.scale_(xp.arange(0, form[0].width, "int64", counts), BLOCK)
        base = xp.repeat(starts, counts, k)
        found = xp.add(base, xp.bit_and(xp.cast(xp.reshape(parts[1], (k,)), "int64"), BLOCK - 1))
    # Where they ascend only the ends can be out of range.
    rising = xp.equal(xp.count_true(xp.less(found[:-1], found[1:])), k - 1)
    inside = xp.logical_and(xp.logical_not(xp.less(found[0], 0)), xp.less(found[-1], numel))
    wrong = damage.unless(xp, xp.logical_and(rising, inside), damage.POSITIONS)
    return xp.confine_(found, numel, wrong), damage.added(xp, wrong, counted)


def _sane(xp: Any, counts: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return counts that add up to k, the given ones if they do, and the damage of those."""
    few = xp.logical_and(xp.logical_not(xp.less(counts, 0)), xp.less(counts, BLOCK + 1))
    total = xp.running_sum(counts)[-1]
    whole = xp.logical_and(xp.equal(xp.count_true(few), xp.numel(counts)), xp.equal(total, k))
    first = xp.cast(xp.less(xp.arange(0, xp.numel(counts), "int64", counts), 1), "int64")
    return xp.where(whole, counts, xp.scale_(first, k)), damage.unless(xp, whole, damage.COUNTS)
