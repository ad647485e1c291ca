"""Top-k sparsification: the largest magnitudes, with positions in the cheapest form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.codec import Call, Tensor, check_choice, check_fraction
from ..core.select import largest
from ..core.sparse import Selection


@dataclass(frozen=True)
class TopK(Selection):
    """Send the ``k = clip(round(ratio * n), 1, n)`` values of largest magnitude.

    ``Q(x)_i = x_i`` where ``|x_i|`` is among the k largest (ties by lowest position), else 0.

    =========  ================  =====  ================================================
    tensor     dtype             shape  bytes
    =========  ================  =====  ================================================
    values     float32           (k,)   4 k, or as the codec after ``+`` has it
    positions  int32             (k,)   4 k, or
    positions  int16 + counts    (k,)   2 k + 4 for each 65,536 elements, or
    positions  bitmap            n / 8  n / 8; the cheapest of the three for this n and k
    =========  ================  =====  ================================================

    Family: sparsification.

    Combine: GATHER. Bias: CONTRACTION.

    In the torch front end n counts a whole bucket of parameters, so a layer with small gradients
    waits until its residual has grown; in TensorFlow n is one variable.

    When to use: for large models on slow links. Of all that keep k values it loses least, all the
    more where few values are large. Start mildly, dense or with a larger ratio, and keep the
    memory. Not with many ranks: every rank receives all payloads, and adds them all. Not with Adam
    from the first step: error feedback is reported not to converge there as it does with SGD.

    Args:
        ratio: Fraction of elements kept, 0 < ratio <= 1; smaller compresses more.
        select: "sampled" finds the same elements as "exact" by way of a sampled threshold, in a
            fraction of the time on large tensors.
        then: A codec for the kept values, as in ``"topk:ratio=0.01+linear:bits=8"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("topk:ratio=0.01").wire_bytes(1_000_000)
        60064

    Reference:
        Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
        arXiv:1704.05021; Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
        arXiv:1809.07599.

    Differs from the paper: exactly k values are sent, where Aji and Heafield send what lies above a
    threshold that they estimate from a sample; the sample here only narrows the search.
    """

    ratio: float = 0.01
    select: str = "sampled"

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        check_fraction(name, "ratio", self.ratio)
        check_choice(name, "select", self.select, ("sampled", "exact"))
        super().__post_init__()

    def count(self, numel: int) -> int:
        return min(max(round(self.ratio * numel), 1), numel)

    def choose(self, xp: Any, x: Tensor, call: Call) -> Tensor:
        return largest(xp, x, self.count(xp.numel(x)), sampled=self.select == "sampled")
