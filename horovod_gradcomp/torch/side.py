"""The reducing side of a rank: the part of a bucket whose mean it encodes again and sends on."""

from __future__ import annotations

import torch

from ..core.memory import Memory
from ..core.plan import Bucket
from ..core.twophase import Part, Server
from .store import Store

Tensor = torch.Tensor


class ReducingSide:
    """What this rank has not yet sent of the means that it reduces.

    Args:
        bucket: Whose part it reduces.
        store: Of the bucket, which says whose parameters send zero in a step.
    """

    def __init__(self, bucket: Bucket, store: Store) -> None:
        self._bucket, self._store = bucket, store
        self.owed: Tensor | None = None
        """In units of means, flat float32; None until there is something to remember."""
        self.part = slice(0, 0)
        """The elements of the bucket that this rank reduces."""

    @property
    def nbytes(self) -> int:
        """Bytes that are remembered."""
        return 0 if self.owed is None else self.owed.numel() * self.owed.element_size()

    def set(self, start: int, values: Tensor) -> None:
        """Take up what is owed of the elements from ``start`` on."""
        self.owed = values.to(self._store.device)
        self.part = slice(start, start + values.numel())

    def clear(self) -> None:
        """Owe nothing, of no part."""
        self.owed, self.part = None, slice(0, 0)

    def norm(self, size: int) -> float:
        """Return the norm of what is owed, as a part of what one of ``size`` ranks owes."""
        return 0.0 if self.owed is None else size * float(torch.linalg.vector_norm(self.owed))

    def move(self, part: Part | None, size: int) -> None:
        """Go over to another part, before a step: what is owed of the old one goes to the store.

        Args:
            part: What this rank reduces in the step; None for nothing.
            size: How many ranks take part.
        """
        if self.owed is not None and (part is None or self.part != slice(part.start, part.stop)):
            self._store.take_back(self.part, self.owed, size)
            self.clear()

    def server(self, memory: Memory, part: Part) -> Server:
        """Return what the exchange of a step needs; what is held sends nothing."""
        if memory.slots and self.owed is None:
            self.set(part.start, torch.zeros(part.numel))
        if self.owed is None:
            return Server(memory, ())
        owed, held = self.owed, self._held()
        if held:
            owed = owed.clone()
            for piece in held:
                owed[piece] = 0
        return Server(memory, (owed,))

    def commit(self, owed: Tensor | None) -> None:
        """Let what the exchange has left out take the place of what was owed."""
        if owed is not None and self.owed is not None:
            for piece in self._held():
                owed[piece] = self.owed[piece]
            self.owed = owed

    def _held(self) -> list[slice]:
        """Return the parts of :attr:`owed` whose parameters send zero in this step."""
        out = []
        for index, m in enumerate(self._bucket.members):
            first, last = max(self.part.start, m.start), min(self.part.stop, m.start + m.numel)
            if first < last and self._store.held(index):
                out.append(slice(first - self.part.start, last - self.part.start))
        return out
