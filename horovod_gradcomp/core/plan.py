"""How parameters are laid out in flat buckets, so that many tensors make one message."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .codec import Shape


@dataclass(frozen=True)
class Member:
    """One parameter in a bucket."""

    name: str
    shape: Shape
    start: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are encoded and sent together."""

    name: str
    members: tuple[Member, ...]

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements of all members."""
        return sum(m.numel for m in self.members)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shape of each member."""
        return tuple(m.shape for m in self.members)


def buckets(
    entries: Sequence[tuple[str, Shape]], most_bytes: int, *, together: bool
) -> list[Bucket]:
    """Lay out parameters in the order given.

    Args:
        entries: Name and shape of each, in the order in which gradients are expected.
        most_bytes: Most float32 bytes a bucket; a larger parameter gets one of its own.
        together: False gives every parameter its own bucket.

    Returns:
        Buckets named by what they hold first, so that a name never depends on other buckets.
    """
    out: list[Bucket] = []
    members: list[Member] = []
    start = 0

    def close() -> None:
        nonlocal members, start
        if members:
            more = f"+{len(members) - 1}" if len(members) > 1 else ""
            out.append(Bucket(members[0].name + more, tuple(members)))
        members, start = [], 0

    for name, shape in entries:
        numel = math.prod(shape)
        if members and (not together or 4 * (start + numel) > most_bytes):
            close()
        members.append(Member(name, shape, start, numel))
        start += numel
    close()
    return out
