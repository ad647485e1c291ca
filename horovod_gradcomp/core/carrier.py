"""What Horovod reduces in place of packed gradients, and what its reduction tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import ExchangeError, explain

_SNAP = 1e-4
_LINEAR = 1e-4


class Carrier:
    """Three floats whose reduction tells what Horovod did.

    They are 1, the rank plus one and a hash of the rank. The first comes back as the factor on the
    mean (1 for Average, N for Sum); the others must come back as the linear combination over the
    expected ranks that the first implies, which Adasum, Min, Max, Product or a reduction over
    another process set do not give.
    """

    WIDTH = 3

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        rows = [self.row(rank) for rank in self._ranks]
        self._means = [sum(column) / len(rows) for column in zip(*rows)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are expected to take part."""
        return self._ranks

    @staticmethod
    def row(rank: int) -> tuple[float, float, float]:
        """Return what a rank contributes."""
        word = (rank + 1) * 0x9E3779B1 % 2**32
        return 1.0, rank + 1.0, 1.0 + (word ^ word >> 15) % 4096 / 4096

    def factor(self, values: Sequence[float], name: str) -> float:
        """Return the factor on the mean.

        Args:
            values: The reduced carrier.
            name: Of the tensor, for messages.

        Raises:
            ExchangeError: What came back is no linear reduction over the expected ranks.
        """
        known = len(values) == self.WIDTH
        factor, good = self.judge(values) if known else (1.0, False)
        if not good:
            raise ExchangeError(self.complaint(str([round(v, 5) for v in values]), name, factor))
        return float(factor)

    def judge(self, values: Sequence[Any], where: Any = None) -> tuple[Any, Any]:
        """Return the factor on the mean, and whether the reduction was one over these ranks.

        Args:
            values: The reduced carrier, as numbers or as float64 scalar tensors.
            where: For tensors, a function that chooses elementwise.
        """
        choose = where or (lambda condition, a, b: a if condition else b)
        factor, good = values[0], values[0] != 0
        for whole in (1.0, float(len(self._ranks))):
            factor = choose(abs(factor - whole) <= _SNAP * whole, whole, factor)
        for value, mean in zip(values, self._means):
            good = (abs(value - factor * mean) <= _LINEAR * abs(factor * mean)) & good
        return factor, good

    def joined(self, values: Sequence[float]) -> float | None:
        """Return the factor on the mean if only some of the ranks may have taken part, or None.

        So it looks while a rank has joined (``hvd.join``). Other misuse may look alike.
        """
        size = len(self._ranks)
        for factor in (1.0, float(size)):  # Average and Sum
            present, ranks, word = (value * size / factor for value in values[: self.WIDTH])
            count, places = round(present), round(ranks)
            near = abs(present - count) < 1e-3 and abs(ranks - places) < 1e-3 * size
            if not near or not 0 < count < size or not count <= places <= count * size:
                continue
            # A mean over an odd number of ranks looks like the sum of the middle one alone.
            alone = self.row(places - 1)[2]
            if count > 1 or abs(word - alone) <= _LINEAR * alone:
                return factor
        return None

    def complaint(self, got: str, name: str, factor: float | None = None) -> str:
        """Return the message for a carrier that :meth:`judge` does not like."""
        means = [round((1.0 if factor is None else factor) * m, 5) for m in self._means]
        return explain(
            got=f"a carrier of {got} for '{name}'",
            expected=f"{'a multiple of ' if factor is None else ''}{means} from a linear "
            f"reduction over ranks {_short(self._ranks)}",
            why="op is Adasum, Min, Max or Product, or the reduction ran over another "
            "process set, or a rank has joined; decoding would give a wrong gradient",
            do="use op=Average or op=Sum, and give the compressor the optimizer's process set",
        )


def _short(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, ..., {ranks[-1]}]"
