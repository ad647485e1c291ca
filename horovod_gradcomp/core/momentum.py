"""Momentum correction: momentum that is gathered before anything is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .codec import Codec, Tensor, check_choice, check_range
from .memory import Done, Memory, refuse_noise, scaled, scaled_sum


@dataclass(frozen=True)
class Momentum(Memory):
    """Momentum correction: momentum is gathered by each rank, before anything is left out.

    ``u' = m u + g; v' = v + u'; send Q(v')``; ``v`` keeps what was not sent. With ``masking`` u is
    cleared where a value was sent, so that old momentum does not push further what has just been
    moved. With ``nesterov``: ``u' = m (u + g); v' = v + u' + g``.

    It takes the place of the optimizer's own momentum, which must then be 0: momentum of the
    sparse sums would count old gradients as new ones. Masking needs a codec that keeps elements
    (``topk``, ``randomk``, ...); with others u is never cleared.

    Args:
        m: Momentum, 0 <= m < 1.
        nesterov: Whether to look one step ahead.
        masking: Whether to clear u where a value was sent.

    Reference:
        Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887.
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum", "residual")
    notes: ClassVar[bool] = True
    is_momentum: ClassVar[bool] = True

    m: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        check_range("momentum", "m", self.m, 0.0, 1.0 - 2.0**-20)
        check_choice("momentum", "nesterov", self.nesterov, (True, False))
        check_choice("momentum", "masking", self.masking, (True, False))

    def note(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], gain: Any, out: Any) -> Tensor:
        if self.nesterov:
            return xp.scale_(xp.add_(scaled(xp, grad, gain, out), state[0]), self.m)
        return scaled_sum(xp, grad, gain, state[0], self.m, out)

    def compensate(
        self,
        xp: Any,
        grad: Tensor,
        state: tuple[Tensor, ...],
        out: Any,
        *,
        gain: Any = 1.0,
        note: Tensor | None = None,
    ) -> Tensor:
        if self.nesterov:
            return xp.add_(xp.add_(scaled(xp, grad, gain, out), note), state[1])
        return xp.add_(xp.to_float32(note, out), state[1])

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        speed = done.note
        if self.masking and done.kept is not None:
            where, inside = done.kept
            gone = xp.take(speed, where)
            gone = gone if inside is None else xp.where(inside, gone, 0.0)
            speed = xp.add_at_(speed, where, xp.sub(xp.zeros_like(gone), gone))
        return speed, done.error

    def check(self, codec: Codec) -> None:
        super().check(codec)
        refuse_noise("momentum", codec)
