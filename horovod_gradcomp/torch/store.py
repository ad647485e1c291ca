"""What one rank remembers of a bucket, and the input that it makes of a step's gradients.

The candidate for the next memory is worked out in scratch storage and takes the memory's place
only when the whole step is committed.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.clip import clipped
from ..core.memory import Done
from ..core.plan import Bucket
from ..core.settings import Settings
from ..ops import torch as xp

Tensor = torch.Tensor


class Store:
    """The memory of one bucket, as flat tensors, and its storage in the running step.

    Args:
        bucket: Whose parameters are laid out one after the other.
        settings: Of the bucket.
        device: Of the parameters.
    """

    def __init__(self, bucket: Bucket, settings: Settings, device: torch.device) -> None:
        self.memory = settings.memory
        self._bucket = bucket
        self._options = settings.options
        self.device = device
        self._dtype: torch.dtype = getattr(torch, settings.options.state_dtype)
        self.state = tuple(self._zeros(self._dtype) for _ in settings.memory.slots)
        self.nbytes = sum(s.nbytes for s in self.state)
        """Bytes that are remembered."""
        self._base = self.state
        self._spares: list[Tensor] = []
        self._numels = [m.numel for m in bucket.members]
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._into: list[Tensor] = []
        self._from: list[list[Tensor]] = []
        self._held: set[int] = set()
        self._note: Tensor | None = None
        self.input: Tensor | None = None
        """What is to be encoded, flat float32; None until a step begins."""
        self.refreshing = False
        """Whether this step sends everything, as if nothing were remembered."""

    @property
    def owed(self) -> float:
        """Squared norm of what has not been sent and will be."""
        held = dict(zip(self.memory.slots, self.state)).get("residual")
        return 0.0 if held is None else float(torch.linalg.vector_norm(held.float())) ** 2

    def begin(self, step: int) -> None:
        """Make room for a step's gradients."""
        memory = self.memory
        self.input = self._storage()
        self._note = self._storage() if memory.notes else None
        self.refreshing = memory.refreshes(step)
        self._base = self.state
        if self.refreshing:
            self._base = tuple(self._zeros(torch.float32) for _ in self.state)
        self._into = self._parts(self.input)
        self._from = [self._parts(s) for s in self._base]

    def take(self, index: int, grad: Tensor, *, lift: Any, size: int) -> None:
        """Take in one member's gradient.

        Args:
            index: Of the member.
            grad: Any strides, any float dtype, of the member's shape.
            lift: What gradients are multiplied by, a number or a float32 scalar tensor; the
                memory is held without it, so that it may change from step to step.
            size: How many ranks take part.
        """
        memory = self.memory
        grad, gain = clipped(xp, grad, 1 / lift, self._options, size)
        state = tuple([parts[index].float() for parts in self._from])
        note = None
        if self._note is not None:
            note = memory.note(xp, grad, state, gain, self._parts(self._note)[index])
        memory.compensate(xp, grad, state, self._into[index], gain=gain, note=note)

    def take_back(self, part: slice, owed: Tensor, size: int) -> None:
        """Remember as a rank what this one owed as a reducing side; between two steps.

        Args:
            part: Of the bucket.
            owed: In units of means.
            size: How many ranks there are: what one of them remembers counts so much less.
        """
        for slot, state in zip(self.memory.slots, self.state):
            if slot == "residual":
                state[part].add_(owed, alpha=size)
            if slot == "own":  # the reference of all is behind by it
                state[part].sub_(owed, alpha=size * self.memory.rate)

    def wanted(self) -> Tensor:
        """Return what the step's payload stands for, flat float32, before it is encoded."""
        wanted = self._note if self.memory.references else self.input
        assert wanted is not None
        return wanted

    def hold(self, index: int) -> None:
        """Let a member send zero in this step, and keep its memory."""
        self._held.add(index)
        self._into[index].zero_()
        if self._note is not None:
            self._parts(self._note)[index].copy_(self._from[0][index])

    @property
    def holds(self) -> bool:
        """Whether any member sends zero in this step."""
        return bool(self._held)

    def silence(self, total: Tensor, bad: Tensor) -> None:
        """Put 0, or NaN in a bad step, where members send zero in this step."""
        for index in self._held:
            self.part(total, index).zero_().add_(bad)

    def held(self, index: int) -> bool:
        """Return whether a member sends zero in this step."""
        return index in self._held

    def reduced(self, mean: Tensor) -> Tensor:
        """Return the mean gradient, from the mean of what was sent."""
        gradient: Tensor = self.memory.reduced(xp, mean, self._base)
        return gradient

    def commit(
        self,
        error: Tensor | None,
        kept: tuple[Tensor, Tensor | None] | None,
        mean: Tensor | None,
    ) -> None:
        """Let the candidate take the memory's place; see :class:`~..core.memory.Done`."""
        done = Done(error, self._note, kept, mean, self.refreshing)
        old, new = self.state, self.memory.update(xp, self._base, done)
        if not self.memory.references:  # what is held sent zero and stays; references saw that, too
            for index in self._held:
                for after, before in zip(new, old):
                    self.part(after, index).copy_(self.part(before, index))
        if self._dtype == torch.float32:
            self.state = new
            self.end(*old)
        else:
            for narrow, made in zip(old, new):
                narrow.copy_(made)
            self.end(*new)

    def end(self, *more: Tensor) -> None:
        """Keep what is no longer needed as storage of the next step."""
        taken = {t.data_ptr() for t in self.state}
        every = (*self._spares, *more, self.input, self._note)
        free = {t.data_ptr(): t for t in every if t is not None}
        spares = [t for at, t in free.items() if at not in taken]
        self._spares = spares[: 1 + self.memory.notes]
        self.input = self._note = None
        self._base, self._into, self._from = self.state, [], []
        if len(self._views) > len(taken) + len(self._spares):
            kept = taken.union(t.data_ptr() for t in self._spares)
            self._views = {key: views for key, views in self._views.items() if key[0] in kept}
        self._held.clear()

    def part(self, flat: Tensor, index: int) -> Tensor:
        """Return one member's part of a flat tensor, in its shape, sharing storage."""
        member = self._bucket.members[index]
        return flat[member.start : member.start + member.numel].view(member.shape)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return all members' parts of a flat tensor, in their shapes, sharing storage."""
        if len(self._numels) == 1:
            return [flat.view(self._bucket.members[0].shape)]
        pieces = flat.split_with_sizes(self._numels)
        return [piece.view(m.shape) for piece, m in zip(pieces, self._bucket.members)]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Return :meth:`split`, once for storage that is used in many steps."""
        key = flat.data_ptr(), flat.dtype
        if key not in self._views:
            self._views[key] = self.split(flat)
        return self._views[key]

    def _storage(self) -> Tensor:
        if self._spares:
            return self._spares.pop()
        return torch.empty(self._bucket.numel, dtype=torch.float32, device=self.device)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._bucket.numel, dtype=dtype, device=self.device)
