"""The bytes of one GATHER payload.

A payload is one flat uint8 tensor: the codec's sections, each a matrix of one dtype, padded to a
multiple of 4 bytes, and at the end one float32 word of the exchange's own (the bad-step flag).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .codec import Tensor

ITEM_BYTES = {"float32": 4, "int32": 4, "float16": 2, "int16": 2, "uint8": 1}
FLAG_BYTES = 4


@dataclass(frozen=True)
class Section:
    """A matrix inside a payload."""

    dtype: str
    rows: int
    width: int
    align: int = 1
    """Bytes, a power of two; at least an item's."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.rows * self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Where each section lies; follows from settings and shape alone, never from values."""

    sections: tuple[Section, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the codec's own part."""
        return -(-sum(s.nbytes for s in self.sections) // 4) * 4

    @property
    def total(self) -> int:
        """Bytes of the whole payload, flag included."""
        return self.nbytes + FLAG_BYTES

    def order(self) -> list[int]:
        """Indices of the sections as they lie: wide dtypes first, so that each is aligned."""
        items = [max(ITEM_BYTES[s.dtype], s.align) for s in self.sections]
        return sorted(range(len(items)), key=lambda i: -items[i])

    def offsets(self) -> list[int]:
        """First byte of each section."""
        out, at = [0] * len(self.sections), 0
        for i in self.order():
            out[i] = at
            at += self.sections[i].nbytes
        return out

    def new(self, xp: Any, like: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return storage to fill and a view of each section, or Nones where views are unknown."""
        made: tuple[Tensor | None, list[Tensor | None]] = xp.new_payload(self, like)
        return made

    def seal(self, xp: Any, payload: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
        """Return the payload that holds ``parts``; what is in its view already is not copied."""
        return xp.seal_payload(self, payload, parts)

    def open(self, xp: Any, payload: Tensor) -> list[Tensor]:
        """Return the sections of a payload, without a copy where the framework allows."""
        return [
            xp.section(payload, at, s.dtype, s.rows, s.width)
            for at, s in zip(self.offsets(), self.sections)
        ]
