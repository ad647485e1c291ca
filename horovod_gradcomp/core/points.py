"""The frame of codecs that turn every element into a code of its own.

No element needs another one, so there are no blocks and no headers: one code an element, uint8 or
int16. A codec gives two functions, values to codes and back; chunking, the error and the sum over
ranks are written here once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .codec import Call, Codec, Combine, Encoded, Extent, Tensor, is_one, numels
from .kernel import Kernel, elements, own_kernel
from .payload import ITEM_BYTES, Layout, Section


@dataclass(frozen=True)
class PointCodec(Codec):
    """Base of codecs that send one code an element.

    Payload:

    =======  ==============  =====  ==========
    tensor   dtype           shape  bytes
    =======  ==============  =====  ==========
    codes    uint8 or int16  (n,)   n or 2 n
    =======  ==============  =====  ==========
    """

    combine: ClassVar[Combine] = Combine.GATHER
    encodes_all: ClassVar[bool] = True
    code_dtype: ClassVar[str]
    """Dtype of a code, "uint8" or "int16"."""

    @property
    def kernel(self) -> Kernel | None:
        """The compiled kernel that gives the same bits as this class's two functions, if any."""
        return None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        own_kernel(cls, "to_codes", "from_codes")

    @abstractmethod
    def to_codes(self, xp: Any, x: Tensor, call: Call, start: int) -> Tensor:
        """Return codes, of :attr:`code_dtype`, for part of the input.

        Args:
            xp: An operations module.
            x: Shape ``(m,)``, float32; not to be changed.
            call: The step.
            start: Position of the first element in the whole input, for random draws.
        """

    @abstractmethod
    def from_codes(self, xp: Any, codes: Tensor) -> Tensor:
        """Undo :meth:`to_codes` as far as it can be undone; float32 in storage of its own."""

    def wire_bytes(self, *extents: Extent) -> int:
        return self._layout(sum(numels(extents))).nbytes

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        numel = xp.numel(x)
        layout = self._layout(numel)
        kernels = xp.kernels(x) if self.kernel else None
        if kernels:
            where = elements(numel, ITEM_BYTES[self.code_dtype])
            made = kernels.encode(
                self.kernel, where, layout.total, x, call.key, want_error=want_error
            )
            return Encoded(*made)
        payload, (view,) = layout.new(xp, x)

        def one(start: int, chunk: Tensor) -> tuple[Tensor, ...]:
            codes = self.to_codes(xp, chunk, call, start)
            if not want_error:
                return (codes,)
            return codes, xp.sub_(chunk, self.from_codes(xp, codes))

        flat = None if view is None else xp.reshape(view, (-1,))
        codes, *errors = xp.map_rows(one, [x], [flat, x][: 2 if want_error else 1])
        sealed = layout.seal(xp, payload, [codes])
        return Encoded(sealed, xp.join_flat(x, errors) if want_error else None)

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        layout = self._layout(numel)
        kernels = xp.kernels(*payloads) if self.kernel else None
        if kernels:
            where = elements(numel, ITEM_BYTES[self.code_dtype])
            factor = None if is_one(scale) else scale
            return kernels.decode(self.kernel, where, layout.nbytes, payloads, numel, scale=factor)
        out = xp.empty(numel, payloads[0])

        def one(_: int, *chunks: Tensor) -> tuple[Tensor]:
            total = None
            for codes in chunks:
                value = self.from_codes(xp, codes)
                total = value if total is None else xp.add_(total, value)
            return (total if is_one(scale) else xp.scale_(total, scale),)

        opened = [xp.reshape(layout.open(xp, p)[0], (-1,)) for p in payloads]
        return xp.join_flat(out, xp.map_rows(one, opened, [out]))

    def _layout(self, numel: int) -> Layout:
        return Layout((Section(self.code_dtype, 1, numel),))
