"""The frame that all block quantisers share.

The flat input is cut into rows of ``block`` elements, with a shorter last row of its own so that
padding never enters a scale. A quantiser gives two functions, rows to (header, codes) and back;
chunking, packing, the error and the sum over ranks are written here once.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Sequence

from . import bits as packing
from .codec import Call, Codec, Combine, Encoded, Tensor, is_one
from .payload import Layout, Section


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
    headers: ClassVar[int] = 1

    @property
    @abstractmethod
    def code_bits(self) -> int:
        """Bits an element."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Elements a block, a multiple of 8."""

    @abstractmethod
    def quantize(self, xp: Any, rows: Tensor, call: Call, start: int) -> tuple[Tensor, Tensor]:
        """Quantise rows.

        Args:
            xp: An operations module.
            rows: Shape ``(r, width)``, float32; not to be changed.
            call: The step.
            start: Position of the first element in the whole input, for random draws.

        Returns:
            Headers ``(r, headers)`` float32 and codes ``(r, width)`` uint8.
        """

    @abstractmethod
    def dequantize(self, xp: Any, headers: Tensor, codes: Tensor) -> Tensor:
        """Undo :meth:`quantize` as far as it can be undone; ``(r, width)`` float32."""

    def layout(self, numel: int) -> Layout:
        """Return where the headers and codes of ``numel`` elements lie."""
        full, tail = divmod(numel, self.block_size)
        return Layout(
            (
                Section("float32", full, self.headers),
                Section("float32", 1 if tail else 0, self.headers),
                Section("uint8", full, packing.packed_width(self.block_size, self.code_bits)),
                Section("uint8", 1 if tail else 0, packing.packed_width(tail, self.code_bits)),
            )
        )

    def wire_bytes(self, numel: int) -> int:
        return self.layout(numel).nbytes

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        layout = self.layout(xp.numel(x))
        payload, views = layout.new(xp, x)
        parts: list[Tensor | None] = list(views)
        errors: list[Tensor] = []
        for slot, start, rows in self._split(xp, x):

            def one(first: int, chunk: Tensor, start: int = start) -> tuple[Tensor, ...]:
                width = chunk.shape[1]
                head, codes = self.quantize(xp, chunk, call, start + first * width)
                padded = xp.pad_columns(codes, packing.padded_width(width))
                packed = packing.pack(xp, padded, self.code_bits)
                if not want_error:
                    return head, packed
                return head, packed, xp.sub_(chunk, self.dequantize(xp, head, codes))

            into = [views[slot], views[slot + 2], rows][: 3 if want_error else 2]
            parts[slot], parts[slot + 2], *rest = xp.map_rows(one, [rows], into)
            errors += rest
        sealed = layout.seal(xp, payload, parts)
        return Encoded(sealed, xp.join_flat(x, errors) if want_error else None)

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        layout = self.layout(numel)
        opened = [layout.open(xp, payload) for payload in payloads]
        out = xp.empty(numel, payloads[0])
        pieces = []
        for slot, _, rows in self._split(xp, out):

            def one(_: int, *chunks: Tensor, width: int = rows.shape[1]) -> tuple[Tensor]:
                total = None
                for head, packed in zip(chunks[::2], chunks[1::2]):
                    codes = packing.unpack(xp, packed, self.code_bits)
                    value = self.dequantize(xp, head, codes[:, :width])
                    total = value if total is None else xp.add_(total, value)
                return (total if is_one(scale) else xp.scale_(total, scale),)

            inputs = [part for sections in opened for part in (sections[slot], sections[slot + 2])]
            pieces += xp.map_rows(one, inputs, [rows])
        return xp.join_flat(out, pieces)

    def _split(self, xp: Any, x: Tensor) -> list[tuple[int, int, Tensor]]:
        """Return (slot, first position, rows): the full blocks, slot 0, and the last, slot 1."""
        numel, block = xp.numel(x), self.block_size
        cut = numel // block * block
        out = []
        if cut:
            out.append((0, 0, xp.reshape(x[:cut], (cut // block, block))))
        if cut < numel:
            out.append((1, cut, xp.reshape(x[cut:], (1, numel - cut))))
        return out
