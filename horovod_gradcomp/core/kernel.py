"""How a codec says which compiled kernel does what its tensor operations do.

A codec declares a kernel, or none; whether one is there for the tensors at hand is for the
operations module to say (``xp.kernels``). Without one the codec's own tensor operations run, and
give the same bits.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

SPAN = 6
"""Numbers a span."""


class Span(NamedTuple):
    """Rows of equal width: where they lie in a flat input and, in bytes, in a payload."""

    start: int
    """First element."""
    rows: int
    width: int
    """Elements a row."""
    head: int
    """First byte of the header values, ``(rows, headers)`` float32."""
    codes: int
    """First byte of the codes, ``(rows, row_bytes)``."""
    row_bytes: int


def spans(each: Iterable[Span]) -> array[int]:
    """Return spans as the kernels read them, int64."""
    return array("q", (number for span in each for number in span))


@functools.lru_cache(maxsize=1024)
def elements(numel: int, nbytes: int) -> array[int]:
    """Return the spans of a codec without blocks: a row is an element, its code ``nbytes``."""
    return spans([Span(0, numel, 1, 0, 0, nbytes)])


class Kernel:
    """A compiled kernel by name, with its settings.

    Attributes:
        name: Of the kernel, see ``horovod_gradcomp/native/level.h``.
        bits: Bits a code.
        headers: Float32 header values a row.
        numbers: Settings, in the order in which the kernel names them.
        tables: What the kernel looks up, float32.
    """

    __slots__ = ("bits", "headers", "name", "numbers", "tables")

    def __init__(
        self,
        name: str,
        bits: int,
        headers: int = 0,
        numbers: Sequence[float] = (),
        tables: Sequence[float] = (),
    ) -> None:
        self.name, self.bits, self.headers = name, bits, headers
        self.numbers, self.tables = array("d", numbers), array("f", tables)


def own_kernel(cls: Any, *rules: str) -> None:
    """Take from a class that overrides one of these functions the kernel of the class above it.

    What is compiled is the rule of the class that declares it, and no other.
    """
    if "kernel" not in vars(cls) and any(rule in vars(cls) for rule in rules):
        cls.kernel = None
