"""The frame that all block quantisers share.

Each tensor of the flat input is cut into rows of ``block`` elements, with a shorter last row of its
own: a scale never spans two tensors and padding never enters one. A quantiser gives two functions,
rows to (header, codes) and back; chunking, packing, the error and the sum over ranks are written
here once.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from . import bits as packing
from . import damage
from .codec import (
    LARGEST,
    Call,
    Codec,
    Combine,
    Encoded,
    Extent,
    Finished,
    Tensor,
    is_one,
    numels,
)
from .errors import explain
from .kernel import Kernel, Span, own_kernel, spans
from .payload import Layout, Section

SMALLEST = 2.0**-80
"""A block whose scale is smaller counts as zeros: it is far from subnormals, which frameworks treat
differently, and from any gradient that matters."""


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Base of codecs that send a few float32 header values and ``bits`` an element per block.

    Payload, for n elements in ``r = ceil(n / block)`` rows:

    =======  =======  ==============  =======================
    tensor   dtype    shape           bytes
    =======  =======  ==============  =======================
    headers  float32  (r, headers)    4 * headers * r
    codes    uint8    packed rows     n * bits / 8, rounded up
    =======  =======  ==============  =======================
    """

    combine: ClassVar[Combine] = Combine.GATHER
    encodes_all: ClassVar[bool] = True
    headers: ClassVar[int] = 1
    ranges: ClassVar[tuple[tuple[float, float], ...]] = ((0.0, LARGEST),)
    """Least and greatest value of each header that :meth:`quantize` returns of finite values."""

    @property
    @abstractmethod
    def code_bits(self) -> int:
        """Bits an element."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Elements a block, a multiple of 8."""

    @property
    def header_count(self) -> int:
        """Header values a block, with the present settings."""
        return self.headers

    @property
    def kernel(self) -> Kernel | None:
        """The compiled kernel that gives the same bits as this class's two functions, if any."""
        return None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        own_kernel(cls, "quantize", "dequantize")
        if len(cls.ranges) != cls.headers:
            raise TypeError(
                explain(
                    got=f"{cls.__name__} with headers = {cls.headers} and {len(cls.ranges)} ranges",
                    expected="a least and a greatest value of each header",
                )
            )

    @abstractmethod
    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        """Quantise rows.

        Args:
            xp: An operations module.
            rows: Shape ``(r, width)``, float32; not to be changed.
            call: The step.
            start: Position of the first element in the whole input, for random draws.

        Returns:
            Headers ``(r, headers)`` float32 and codes ``(r, width)``, uint8, int32 or whole
            float32, whichever is at hand.
        """

    @abstractmethod
    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        """Undo :meth:`quantize` as far as it can be undone; ``(r, width)`` float32.

        ``codes`` are uint8, or as :meth:`quantize` returned them; they may be overwritten.
        """

    def wire_bytes(self, *extents: Extent) -> int:
        return self._plan(tuple(numels(extents))).layout.nbytes

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        parts, layout, where = self._plan(call.sizes(xp.numel(x)))
        kernel = self.kernel
        kernels = xp.kernels(x) if kernel else None
        if kernels:
            made = kernels.encode(kernel, where, layout.total, x, call.key, want_error=want_error)
            return Encoded(*made)
        payload, (head, codes) = layout.new(xp, x)
        heads: list[Tensor] = []
        packs: list[Tensor] = []
        errors: list[Tensor] = []
        for part in parts:
            rows = part.rows_of(xp, x)

            def one(first: int, chunk: Tensor, part: _Part = part) -> tuple[Tensor, ...]:
                at = part.start + first * part.width
                header, levels = self.quantize(xp, chunk, call, at)
                small = xp.cast(levels, "uint8")
                padded = xp.pad_columns(small, packing.padded_width(part.width))
                packed = packing.pack(xp, padded, self.code_bits)
                if not want_error:
                    return header, packed
                return header, packed, xp.sub_(chunk, self.dequantize(xp, header, levels))

            into = [None, None] if head is None else [part.head_of(head), part.codes_of(xp, codes)]
            done = xp.map_rows(one, [rows], [*into, rows] if want_error else into)
            heads.append(done[0])
            packs.append(xp.reshape(done[1], (1, -1)))
            errors += done[2:]
        if head is None:
            head, codes = xp.concat(heads, axis=0), xp.concat(packs, axis=1)
        sealed = layout.seal(xp, payload, [head, codes])
        return Encoded(sealed, xp.join_flat(x, errors) if want_error else None)

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        parts, layout, where = self._plan(call.sizes(numel))
        kernel = self.kernel
        kernels = xp.kernels(*payloads) if kernel else None
        if kernels:
            factor = None if is_one(scale) else scale
            return kernels.decode(kernel, where, layout.nbytes, payloads, numel, scale=factor)
        opened = [layout.open(xp, payload) for payload in payloads]
        out = xp.empty(numel, payloads[0])
        pieces = []
        for part in parts:
            heads = [part.head_of(head) for head, _ in opened]
            packs = [part.codes_of(xp, codes) for _, codes in opened]

            def one(_: int, *chunks: Tensor, width: int = part.width) -> tuple[Tensor]:
                total = None
                for header, packed in zip(chunks[::2], chunks[1::2]):
                    levels = packing.unpack(xp, packed, self.code_bits)
                    value = self.dequantize(xp, header, levels[:, :width])
                    total = value if total is None else xp.add_(total, value)
                return (total if is_one(scale) else xp.scale_(total, scale),)

            inputs = [tensor for pair in zip(heads, packs) for tensor in pair]
            pieces += xp.map_rows(one, inputs, [part.rows_of(xp, out)])
        return xp.join_flat(out, pieces)

    def finish(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Finished:
        total = self.decode(xp, payloads, numel, call, scale=scale)
        _, layout, _ = self._plan(call.sizes(numel))
        wrong = [self._damage(xp, layout.open(xp, payload)[0]) for payload in payloads]
        return Finished(total, (), damage.joined(xp, wrong))

    def _damage(self, xp: Any, head: Tensor) -> Tensor | None:
        """Return what is wrong with a payload's headers."""
        if not self.header_count:
            return None
        outside = None
        for i, (low, high) in enumerate(self.ranges):
            column = head[:, i : i + 1]
            # NaN equals nothing, whatever it is cut to.
            one = xp.logical_not(xp.equal(xp.clamp_(xp.copy(column), low, high), column))
            outside = one if outside is None else xp.logical_or(outside, one)
        return damage.unless(xp, xp.equal(xp.count_true(outside), 0), damage.HEADERS)

    def _plan(self, sizes: tuple[int, ...]) -> _Plan:
        return _plan(sizes, self.block_size, self.code_bits, self.header_count)


def largest(xp: Any, rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row, ``(r, 1)`` float32."""
    return xp.view(xp.row_max(xp.magnitude(rows)), "float32")


class _Part(NamedTuple):
    """Rows of equal width within one tensor, and where they lie in the payload."""

    start: int
    rows: int
    width: int
    row: int
    byte: int
    packed: int

    def rows_of(self, xp: Any, x: Tensor) -> Tensor:
        flat = x[self.start : self.start + self.rows * self.width]
        return xp.reshape(flat, (self.rows, self.width))

    def head_of(self, head: Tensor) -> Tensor:
        return head[self.row : self.row + self.rows]

    def codes_of(self, xp: Any, codes: Tensor) -> Tensor:
        flat = codes[0, self.byte : self.byte + self.rows * self.packed]
        return xp.reshape(flat, (self.rows, self.packed))


class _Plan(NamedTuple):
    """Where everything lies."""

    parts: list[_Part]
    layout: Layout
    spans: array[int]
    """The parts, as kernels read them."""


@functools.lru_cache(maxsize=1024)
def _plan(sizes: tuple[int, ...], block: int, bits: int, headers: int) -> _Plan:
    """Return the rows of each tensor: its full blocks, then its last short one."""
    parts: list[_Part] = []
    start = row = byte = 0
    for size in sizes:
        full, tail = divmod(size, block)
        for rows, width in ((full, block), (1 if tail else 0, tail)):
            if rows:
                packed = packing.packed_width(width, bits)
                parts.append(_Part(start, rows, width, row, byte, packed))
                start, row, byte = start + rows * width, row + rows, byte + rows * packed
    layout = Layout((Section("float32", row, headers), Section("uint8", 1, byte)))
    head, codes = layout.offsets()
    each = [
        Span(p.start, p.rows, p.width, head + 4 * headers * p.row, codes + p.byte, p.packed)
        for p in parts
    ]
    return _Plan(parts, layout, spans(each))
