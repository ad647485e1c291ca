"""Whether anything of a step was not finite, found out once for all its tensors."""

from __future__ import annotations

import torch

from ..ops import torch as xp

Tensor = torch.Tensor

_ALONE = 65_536
"""Elements from which a tensor is looked at by itself: a copy of it costs more than a call."""


class Doubts:
    """Flags and tensors of one step.

    Many small tensors are looked at together, at the end: one by one the calls cost more than the
    work. They must not change until then.
    """

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._small: list[Tensor] = []

    def add(self, flag: Tensor) -> None:
        """Take in 0, or NaN for something that was not finite."""
        self._flags.append(flag)

    def look_at(self, tensor: Tensor) -> None:
        """Take in a tensor that may hold what is not finite."""
        if tensor.numel() < _ALONE:
            self._small.append(tensor)
        else:
            self._flags.append(xp.badness(tensor))

    def take(self, other: Doubts) -> None:
        """Take in what others have."""
        self._flags += other._flags
        self._small += other._small

    def any(self) -> bool:
        """Return whether there was any: the one place where a step waits for the device."""
        kinds: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for small in self._small:
            flat = small if small.dim() == 1 else small.reshape(-1)
            kinds.setdefault((small.get_device(), small.dtype), []).append(flat)
        flags = [*self._flags, *(xp.badness(torch.cat(group)) for group in kinds.values())]
        devices: dict[torch.device, list[Tensor]] = {}
        for flag in flags:
            devices.setdefault(flag.device, []).append(flag)
        return any(torch.stack(group).sum().item() != 0 for group in devices.values())

    def clear(self) -> None:
        """Begin another step."""
        self._flags.clear()
        self._small.clear()
