"""Elastic training: state that follows ranks as they come and go, beside ``horovod.torch.elastic``.

``TorchState`` takes the place of ``hvd.elastic.TorchState`` and needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch.elastic.state import StateHandler
from horovod.torch.elastic.state import TorchState as HorovodState

from .compression import Compressor


class TorchState(HorovodState):  # type: ignore[misc]
    """``hvd.elastic.TorchState`` that also keeps what the optimizers' compressors remember.

    ``commit`` keeps a copy, ``restore`` goes back to it. When ranks change, the first step after it
    brings all of them to the same step, hands on what ranks share, and spreads what those that
    stayed had not yet sent over all. What a rank that left had not yet sent is lost; a warning
    tells its norm.

    Args:
        model: A module, as Horovod has it.
        optimizer: What ``hvd.DistributedOptimizer`` returned.
        kwargs: As Horovod has it; more optimizers may be among them.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        for number, compressor in enumerate(_following([optimizer, *kwargs.values()])):
            self._handlers[f"_compression_{number}"] = CompressorStateHandler(compressor)

    def commit(self) -> None:
        """Keep a copy of everything; all ranks must call it at the same step."""
        for compressor in self._compressors:
            compressor.tell_norms()
        super().commit()

    def reset(self) -> None:
        """Meet the ranks anew in the next step."""
        for compressor in self._compressors:
            compressor.meet_again()
        super().reset()

    @property
    def _compressors(self) -> list[Compressor]:
        every = self._handlers.values()
        return [h.value for h in every if isinstance(h, CompressorStateHandler)]


class CompressorStateHandler(StateHandler):  # type: ignore[misc]
    """Keeps what a compressor remembers from commit to commit."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor)
        self.save()

    def save(self) -> None:
        """Keep a copy."""
        self._saved = self.value.snapshot()

    def restore(self) -> None:
        """Go back to the copy."""
        self.value.rewind(self._saved)

    def sync(self) -> None:
        """Leave it to the next step, which all ranks begin in the same way."""


def _following(values: Iterable[Any]) -> list[Compressor]:
    """Return the compressors of Horovod's optimizers, told to follow resets."""
    found: list[Compressor] = []
    for optimizer in values:
        compressor: Any = getattr(optimizer, "_compression", None)
        if callable(getattr(compressor, "_instance", None)):  # Compression.topk, uncalled
            compressor = compressor._instance()
        if isinstance(compressor, Compressor):
            compressor.follow_resets(optimizer)
            if all(compressor is not other for other in found):
                found.append(compressor)
    return found
