"""What telemetry records of a step, and the sums that its figures are worked out from.

Four sums say how well what is sent stands for what was to be sent. They add up over elements,
parameters and ranks, so that the figures of a layer, of a model and of a cluster are the same
formulas of the same sums. They ride on carriers, which Horovod reduces anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .stats import UnitStats

Record = dict[str, Any]

FORMAT = 1
"""Of records."""
WIDTH = 5
"""Floats of a parameter on a carrier: how many ranks have measured it, and :class:`Sums`."""
COUNTED = ("raw_bytes", "wire_bytes", "encode_ms", "wait_ms", "decode_ms", "codec_ms")
"""What is counted all the time, and given as the mean of the steps since the last record."""


class Sums(NamedTuple):
    """Of a parameter, or of several."""

    gradient: float
    """Squared norm of the gradient, in units of unscaled ones, before any clipping."""
    wanted: float
    """Squared norm of what was to be sent: gradient and memory; with a memory that is a reference,
    the gradient."""
    left: float
    """Squared norm of what was left out of it."""
    overlap: float
    """Scalar product of both."""

    @property
    def cosine(self) -> float | None:
        """Between what was to be sent and what was; None where nothing was to be sent."""
        sent = self.wanted - 2 * self.overlap + self.left
        if not self.wanted > 0:
            return None
        if sent <= 0:
            return 0.0
        value = _finite((self.wanted - self.overlap) / math.sqrt(self.wanted * sent))
        return None if value is None else max(-1.0, min(1.0, value))

    @property
    def relative(self) -> float:
        """Norm of what was left out, in norms of the gradient."""
        if self.left == 0:
            return 0.0
        return math.sqrt(self.left / self.gradient) if self.gradient > 0 else math.inf

    def figures(self, ranks: float = 1.0) -> Record:
        """Return norms, root mean squares over ``ranks``, and the cosine."""
        return {
            "grad_norm": _root(self.gradient / ranks),
            "residual_norm": _root(self.left / ranks),
            "cosine": _short(self.cosine),
        }


NOTHING: Record = {"grad_norm": None, "residual_norm": None, "cosine": None}
"""Figures of what was not measured."""


def total(parts: Iterable[Sums]) -> Sums | None:
    """Return the sums of several parameters together; None of none."""
    every = list(parts)
    return Sums(*(sum(column) for column in zip(*every))) if every else None


class Heard(NamedTuple):
    """What all ranks together have measured."""

    ranks: int
    """How many of them have."""
    layers: Mapping[str, Sums]
    """Sums over them."""

    @classmethod
    def of(cls, size: int, factor: float, rows: Mapping[str, Sequence[float]]) -> Heard | None:
        """Return what reduced carriers bring; None where no rank has measured anything.

        Args:
            size: How many ranks there are.
            factor: Of the reduction on a mean.
            rows: The words of :data:`WIDTH`, reduced, by parameter.
        """
        layers, ranks = {}, 0
        for name, row in rows.items():
            count, *sums = (size * value / factor for value in row)
            if count > 0.5:
                ranks = max(ranks, round(count))
                layers[name] = Sums(*sums)
        return cls(ranks, layers) if layers else None

    def figures(self) -> Record:
        """Return means over the ranks that have measured."""
        whole = total(self.layers.values())
        assert whole is not None
        each = {name: sums.figures(self.ranks) for name, sums in self.layers.items()}
        return {"ranks": self.ranks, **whole.figures(self.ranks), "layers": each}


class Since:
    """What has been counted since it was last asked for."""

    def __init__(self, stats: UnitStats) -> None:
        self._stats = stats
        self._before = self._now()

    def take(self) -> dict[str, float]:
        """Return how much each of :data:`COUNTED` has grown, and begin anew."""
        before, self._before = self._before, self._now()
        return {key: self._before[key] - before[key] for key in COUNTED}

    def _now(self) -> dict[str, float]:
        return {key: getattr(self._stats, key) for key in COUNTED}


def a_step(counts: Mapping[str, float], steps: int, share: float = 1.0) -> Record:
    """Return the means of one step, and the ratio.

    Args:
        counts: Of several steps.
        steps: How many.
        share: Which part of them is meant.
    """
    raw = counts["raw_bytes"]
    known = {key: share * counts[key] / max(1, steps) for key in COUNTED if key in counts}
    means = {key: _short(known.get(key)) for key in COUNTED}
    return {**means, "ratio": _short(counts["wire_bytes"] / raw) if raw else None}


def added(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return several counts together."""
    every = list(counts)
    return {key: sum(one[key] for one in every) for key in COUNTED if all(key in o for o in every)}


class Clock:
    """What records of one optimizer begin with, from one to the next.

    Args:
        steps: Done so far.
        bad: Of them.
        optimizer: Its name in records; "" where it is the only one.
        settings: Of the compressor.
    """

    def __init__(self, steps: int, bad: int, optimizer: str, settings: str) -> None:
        self._steps, self._bad = steps, bad
        self._optimizer, self.settings = optimizer, settings
        self._begun = time.perf_counter()

    def skip(self, steps: int) -> None:
        """Count none of these steps, which were done elsewhere."""
        self._steps += steps

    def since(self, steps: int) -> int:
        """Return how many steps there were since the last record."""
        return steps - self._steps

    def head(self, steps: int, bad: int, *, rank: int, size: int, spent_ms: float) -> Record:
        """Return what a record begins with.

        Args:
            steps: Done so far.
            bad: Of them.
            rank: Whose record it is.
            size: How many ranks there are.
            spent_ms: What measuring has taken.
        """
        now, count = time.perf_counter(), self.since(steps)
        head = {
            "gradcomp": FORMAT,
            "step": steps - 1,
            "steps": count,
            "time": round(time.time(), 3),
            "step_ms": _short(1e3 * (now - self._begun) / max(1, count)),
            "optimizer": self._optimizer,
            "rank": rank,
            "world_size": size,
            "settings": self.settings,
            "bad_steps": bad - self._bad,
            "telemetry_ms": _short(spent_ms),
        }
        self._steps, self._bad, self._begun = steps, bad, now
        return head


def _root(square: float) -> float | None:
    return _short(math.sqrt(square)) if square >= 0 else None


def _short(value: float | None) -> float | None:
    """Return six digits of a number; None for what JSON has no word for."""
    found = None if value is None else _finite(value)
    return None if found is None else float(f"{found:.6g}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
