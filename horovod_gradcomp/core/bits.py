"""Packing of small codes into bytes.

A row of codes of b bits becomes b / 8 of its length in bytes, for every b from 1 to 8. A width
that divides 8 is packed by laying the row's segments over one another, which keeps every access
contiguous; 3, 5, 6 and 7 bits are sent as their binary parts (5 = 4 + 1), one after the other.
"""

from __future__ import annotations

from typing import Any

from .codec import Tensor

ROW_MULTIPLE = 8
"""Rows are padded to this many codes before they are packed."""


def parts(bits: int) -> tuple[int, ...]:
    """Return the widths, each dividing 8, that make up ``bits``."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def packed_width(width: int, bits: int) -> int:
    """Return the bytes that a row of ``width`` codes takes."""
    return padded_width(width) * bits // 8


def padded_width(width: int) -> int:
    """Return ``width`` rounded up to a whole number of packing groups."""
    return -(-width // ROW_MULTIPLE) * ROW_MULTIPLE


def pack(xp: Any, codes: Tensor, bits: int) -> Tensor:
    """Pack rows of codes.

    Args:
        xp: An operations module.
        codes: Shape ``(rows, width)``, uint8, each below ``2**bits``; width a multiple of 8.
        bits: 1 to 8.

    Returns:
        Shape ``(rows, width * bits / 8)``, uint8.
    """
    packed, shift = [], 0
    for part in parts(bits):
        piece = codes if part == bits else xp.bit_and(xp.shift_right(codes, shift), 2**part - 1)
        packed.append(_overlay(xp, piece, part))
        shift += part
    return packed[0] if len(packed) == 1 else xp.concat(packed, axis=1)


def unpack(xp: Any, packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack`; ``(rows, width * bits / 8)`` uint8 to ``(rows, width)`` uint8."""
    width = packed.shape[1] * 8 // bits
    codes, shift, at = None, 0, 0
    for part in parts(bits):
        step = width * part // 8
        piece = _spread(xp, packed[:, at : at + step], part)
        piece = xp.shift_left(piece, shift) if shift else piece
        codes = piece if codes is None else xp.bit_or(codes, piece)
        shift += part
        at += step
    return codes


def _overlay(xp: Any, codes: Tensor, bits: int) -> Tensor:
    # The right half over the left one, until a byte is full: fewer operations than one a segment.
    out = codes
    for shift in (4, 2, 1):
        if shift >= bits:
            half = out.shape[1] // 2
            out = xp.bit_or_(xp.shift_left(out[:, half:], shift), out[:, :half])
    return out


def _spread(xp: Any, packed: Tensor, bits: int) -> Tensor:
    out = packed
    for shift in (1, 2, 4):
        if shift >= bits:
            mask = sum(2**bits - 1 << at for at in range(0, 8, 2 * shift))
            right = xp.shift_right(out, shift)
            right = right if shift == 4 else xp.bit_and_(right, mask)
            out = xp.concat([xp.bit_and(out, mask), right], axis=1)
    return out
