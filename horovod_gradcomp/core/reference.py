"""Memories that keep a *reference*, on all ranks alike, and send only the difference to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, ClassVar

from .codec import Codec, Tensor, check_count, check_fraction
from .errors import SettingsError, explain
from .memory import Done, Memory, refuse_noise, scaled


@dataclass(frozen=True)
class EF21(Memory):
    """Send the difference to a reference that follows the gradient.

    Each rank keeps its own reference ``h`` and all keep the mean ``H`` of them:
    ``send Q(g - h); h' = h + Q(g - h)``, and the gradient is ``H' = H + mean(Q)``. Where gradients
    change little from step to step the differences are small, and so is what a codec loses of them.

    Nothing that was left out is added later, so the books of :class:`Residual` do not apply; the
    gradient itself is followed more and more closely. State is twice the size of the gradients.

    Reference:
        Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically
        Faster Error Feedback", NeurIPS 2021, arXiv:2106.05203.
    """

    slots: ClassVar[tuple[str, ...]] = ("own", "mean")
    notes: ClassVar[bool] = True
    references: ClassVar[bool] = True

    def note(self, xp: Any, grad: Tensor, state: tuple[Tensor, ...], gain: Any, out: Any) -> Tensor:
        return scaled(xp, grad, gain, out)

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
        return xp.sub_(xp.to_float32(note, out), state[0])

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        # h + Q(g - h) is the gradient less the error.
        return xp.sub_(done.note, done.error), xp.add(state[1], done.mean)

    def reduced(self, xp: Any, mean: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return xp.add(state[1], mean)

    def check(self, codec: Codec) -> None:
        super().check(codec)
        refuse_noise("ef21", codec)


@dataclass(frozen=True)
class Differential(EF21):
    """As :class:`EF21`, with references that follow at a rate; DIANA with an unbiased codec.

    ``send Q(g - h); h' = h + alpha Q(g - h); H' = H + alpha mean(Q)``, and the gradient is
    ``H + mean(Q)``.

    Every ``refresh_every`` steps the gradient itself is sent, as float16 (beyond 65504 it is cut),
    and takes the place of all references: what sums have lost to rounding goes no further, and
    references that have gone astray are put right.

    Args:
        alpha: 0 < alpha <= 1: how fast references follow; 1 suits codecs that are contractions,
            ``1 / (1 + w)`` unbiased ones whose variance is w times the squared input.
        refresh_every: Steps from one full gradient to the next; 0 for never.

    Reference:
        Mishchenko, Gorbunov, Takac, Richtarik, "Distributed Learning with Compressed Gradient
        Differences", arXiv:1901.09269.
    """

    alpha: float = 1.0
    refresh_every: int = 100

    def __post_init__(self) -> None:
        check_fraction("differential", "alpha", self.alpha)
        check_count("differential", "refresh_every", self.refresh_every, minimum=0)

    @property
    def rate(self) -> float:
        return self.alpha

    @property
    def may_refresh(self) -> bool:
        return self.refresh_every > 0

    def refreshes(self, step: Any, all_of: Callable[..., Any] = all) -> Any:
        return self.may_refresh and all_of([step % self.refresh_every == 0, step > 0])

    def update(self, xp: Any, state: tuple[Tensor, ...], done: Done) -> tuple[Tensor, ...]:
        if self.alpha == 1 or done.refreshed:
            return super().update(xp, state, done)
        moved = xp.sub_(xp.sub_(done.note, done.error), state[0])
        own = xp.add_(xp.scale_(moved, self.alpha), state[0])
        return own, xp.add_scaled(state[1], done.mean, self.alpha, None)

    def check(self, codec: Codec) -> None:
        Memory.check(self, codec)
        if not codec.feeds_back and self.alpha == 1:
            raise SettingsError(
                explain(
                    got=f"alpha=1 with the unbiased or noisy codec '{codec.describe()}'",
                    expected="alpha below 1",
                    why="its noise may be larger than the difference, and a "
                    "reference that takes all of it runs away",
                    do="set alpha, as in memory='differential:alpha=0.1'",
                )
            )
