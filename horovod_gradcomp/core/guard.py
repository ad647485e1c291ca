"""When to send with another codec for a while: where too much is left out, or the wrong things.

What is judged is the mean over all ranks, which comes back from Horovod with the same bits on every
rank, so all of them fall back at the same step and return at the same step, and nobody is asked.
What a rank remembers goes out with the first step of the fallback, as in any other step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .codec import Codec, check_count, check_range
from .errors import SettingsError, explain
from .telemetry import Sums

if TYPE_CHECKING:
    from .settings import Settings

_LARGEST = 1e6


@dataclass(frozen=True)
class Guard:
    """What is watched, and what is done about it.

    Args:
        fallback: The codec that is used in the meantime.
        residual_norm: Most norm of what is left out, in norms of the gradient; None for any.
        cosine: Least cosine between what was to be sent and what was; None for any.
        every: Steps from one look to the next.
        patience: Looks in a row that must find a bound crossed.
        hold: Steps of the fallback.
    """

    fallback: Codec
    residual_norm: float | None = None
    cosine: float | None = None
    every: int = 10
    patience: int = 1
    hold: int = 100

    def __post_init__(self) -> None:
        if self.residual_norm is None and self.cosine is None:
            raise SettingsError(
                explain(got="a guard without a bound", expected="residual_norm= or cosine=")
            )
        if self.residual_norm is not None:
            check_range("guarded", "residual_norm", self.residual_norm, 1e-6, _LARGEST)
        if self.cosine is not None:
            check_range("guarded", "cosine", self.cosine, -1.0, 1.0)
        for name in ("every", "patience", "hold"):
            check_count("guarded", name, getattr(self, name))

    def crossed(self, sums: Sums) -> str:
        """Return which bound is crossed, in words, or nothing; what is not finite crosses it."""
        out, bound = [], self.residual_norm
        if bound is not None and not sums.relative <= bound:
            out.append(f"residual norm {sums.relative:.4g} of the gradient's, above {bound:g}")
        if self.cosine is not None and sums.wanted != 0:
            cosine = sums.cosine
            if cosine is None or cosine < self.cosine:
                told = "not finite" if cosine is None else f"{cosine:.4g}"
                out.append(f"cosine {told}, below {self.cosine:g}")
        return " and ".join(out)

    def describe(self) -> str:
        """Return one line that names every setting."""
        bounds = f"residual_norm={self.residual_norm},cosine={self.cosine}"
        return (
            f"{self.fallback.describe()}:{bounds},every={self.every},patience={self.patience},"
            f"hold={self.hold}"
        )


class Standing(NamedTuple):
    """Where a guard stands, alike on all ranks.

    Attributes:
        over: Looks in a row that have found a bound crossed.
        until: The step with which the fallback ends; the codec itself is used from it on.
    """

    over: int = 0
    until: int = 0

    def falls_back(self, step: int) -> bool:
        """Return whether a step is one of the fallback."""
        return step < self.until

    def after(self, guard: Guard, step: int, sums: Sums, now: int) -> tuple[Standing, str]:
        """Return where it stands after a look, and why it falls back, if it does.

        Args:
            guard: The settings.
            step: That was measured.
            sums: Over all ranks.
            now: The next step.
        """
        if step < self.until:  # of the fallback itself, or from before it
            return self, ""
        why = guard.crossed(sums)
        over = self.over + 1 if why else 0
        if over < guard.patience:
            return Standing(over, self.until), ""
        return Standing(0, now + guard.hold), why


def guarded(settings: Settings, fallback: str, **bounds: float | int | None) -> Settings:
    """Return settings with a guard, which serves their rules, too.

    Args:
        settings: Without one.
        fallback: String form of the codec to fall back to.
        bounds: As of :class:`Guard`.

    Raises:
        SettingsError: A bound is out of range, or the fallback does not go with a memory.
    """
    from .settings import parse_codec

    if settings.options.exchange == "hierarchical":
        raise SettingsError(
            explain(
                got="a guard with exchange='hierarchical'",
                expected="another exchange",
                why="what is left out there is left out of a node's mean, not by a rank",
            )
        )
    codec = parse_codec(fallback)
    every = [_with(own, codec, **bounds) for own in settings.every]
    rules = iter(every[1:])
    return dataclasses.replace(
        every[0],
        exceptions=tuple(
            (pattern, None if own is None else next(rules)) for pattern, own in settings.exceptions
        ),
    )


def _with(settings: Settings, codec: Codec, **bounds: float | int | None) -> Settings:
    codec = codec.with_memory(settings.memory.wants_error)
    if not codec.identity:
        settings.memory.check(codec)
    guard = Guard(codec, **bounds)  # type: ignore[arg-type]  # checked by Guard itself
    return dataclasses.replace(settings, guard=guard)
