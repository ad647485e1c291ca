"""Which codec runs at which step: settings that move during training, and a gentle start.

Steps are reductions, so they are equal on all ranks. Sizes change in few coarse steps only: Horovod
agrees anew on every tensor whose size has changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .codec import Codec
from .errors import SettingsError, explain

_KINDS = _EXPONENTIAL, _LINEAR, _STEPS = ("exponential", "linear", "steps")
_PLATEAUS = 8
"""Values that a linear ramp takes."""
_FACTOR = 4.0
"""From one value of an exponential ramp to the next, at most."""
_MOST_STEPS = 1000
"""Whole numbers between both ends of a ramp of steps, at most: each is a codec."""
_LEAST, _MOST = 1e-30, 1e30
_TEXT = re.compile(r"([^.@]+(?:\.\d[^.@]*)?)\.\.([^@]+)@(\d{1,30})(?:/(\w+))?")


class Phase(NamedTuple):
    """A codec, and the step from which on it is used."""

    first: int
    codec: Codec


@dataclass(frozen=True)
class Ramp:
    """A setting that moves from one value to another, in a few coarse steps.

    Args:
        start: First value.
        end: Last value, reached after ``steps`` steps.
        steps: At least 1.
        kind: "exponential": in equal ratios of at most 4, as deep gradient compression warms up;
            "linear": 8 evenly spaced values; "steps": every whole number in between.

    Raises:
        SettingsError: A value is out of range.

    Example:
        >>> Ramp(0.25, 0.001, steps=4000).values()
        [(0, 0.25), (1000, 0.06287), (2000, 0.01581), (3000, 0.003976), (4000, 0.001)]

    Reference:
        Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887.
    """

    start: float
    end: float
    steps: int
    kind: str = "exponential"

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not _LEAST <= value <= _MOST:
                _refuse(name, value, f"a number, {_LEAST:g} <= {name} <= {_MOST:g}")
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not whole or not 1 <= self.steps < 2**63:
            _refuse("steps", self.steps, "a whole number, 1 <= steps < 2^63")
        if self.kind not in _KINDS:
            _refuse("kind", self.kind, f"one of {', '.join(_KINDS)}")
        if self.kind == _STEPS and not self._whole:
            _refuse("kind", self.kind, "'exponential' or 'linear' for what is no whole number")
        if self.kind == _STEPS and abs(self.end - self.start) >= _MOST_STEPS:
            both = f"{self.start} to {self.end}"
            _refuse("kind", self.kind, f"'exponential' or 'linear' from {both}")

    @property
    def _whole(self) -> bool:
        return isinstance(self.start, int) and isinstance(self.end, int)

    def values(self) -> list[tuple[int, Any]]:
        """Return each value, a whole number where both ends are, with its first step."""
        if self.kind == _STEPS:
            count = int(abs(self.end - self.start)) + 1
        elif self.kind == _LINEAR:
            count = _PLATEAUS
        else:
            ratio = abs(math.log(self.end / self.start))
            count = 1 + max(1, math.ceil(ratio / math.log(_FACTOR) - 1e-9))
        out: list[tuple[int, Any]] = []
        for i in range(count):
            share = i / max(1, count - 1)
            if self.kind == _EXPONENTIAL:
                value = self.start * (self.end / self.start) ** share
            else:
                value = self.start + (self.end - self.start) * share
            value = round(value) if self._whole else float(f"{value:.4g}")
            value = self.end if i == count - 1 else value
            if not out or out[-1][1] != value:
                out.append((round(share * self.steps), value))
        return out

    def __str__(self) -> str:
        return f"{self.start}..{self.end}@{self.steps}/{self.kind}"


def ramp(start: float, end: float, steps: int, kind: str = "exponential") -> Ramp:
    """Return a setting that moves, as in ``Compression.topk(ratio=ramp(0.25, 0.001, 4000))``.

    See :class:`Ramp`. In string forms it is ``ratio=0.25..0.001@4000``, with ``/linear`` or
    ``/steps`` for the other kinds.
    """
    return Ramp(start, end, steps, kind)


def parse_ramp(text: str) -> Ramp | None:
    """Return what ``start..end@steps`` or ``start..end@steps/kind`` stands for, or None."""
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    try:
        ends = [int(t) if re.fullmatch(r"\d{1,30}", t) else float(t) for t in found.groups()[:2]]
    except ValueError:
        return None
    return Ramp(ends[0], ends[1], int(found[3]), found[4] or "exponential")


def at(phases: Sequence[Phase], step: int) -> Codec:
    """Return the codec of a step."""
    return next(phase.codec for phase in reversed(phases) if phase.first <= step)


def describe(phases: Sequence[Phase]) -> str:
    """Return one line that names all codecs and when each begins."""
    first, *others = phases
    return first.codec.describe() + "".join(
        f", from {p.first}: {p.codec.describe()}" for p in others
    )


def _refuse(name: str, value: Any, expected: str) -> None:
    raise SettingsError("ramp: " + explain(got=f"{name}={value!r}", expected=expected))
