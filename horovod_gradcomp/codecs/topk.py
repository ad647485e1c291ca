"""Top-k sparsification: the largest magnitudes, with positions in the cheapest form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import positions
from ..core.codec import (
    Bias,
    Call,
    Codec,
    Combine,
    Encoded,
    Tensor,
    check_choice,
    check_fraction,
    is_one,
)
from ..core.payload import Layout, Section
from ..core.select import largest

_LARGEST = 65504.0


@dataclass(frozen=True)
class TopK(Codec):
    """Send the ``k = clip(round(ratio * n), 1, n)`` values of largest magnitude.

    ``Q(x)_i = x_i`` where ``|x_i|`` is among the k largest (ties by lowest position), else 0.

    =========  ================  =====  ================================================
    tensor     dtype             shape  bytes
    =========  ================  =====  ================================================
    values     float32, float16  (k,)   4 k or 2 k
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
        values: "float32" or "float16", which compresses more; a memory keeps the rounding.

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

    combine: ClassVar[Combine] = Combine.GATHER

    ratio: float = 0.01
    select: str = "sampled"
    values: str = "float32"

    def __post_init__(self) -> None:
        check_fraction("topk", "ratio", self.ratio)
        check_choice("topk", "select", self.select, ("sampled", "exact"))
        check_choice("topk", "values", self.values, ("float32", "float16"))

    @property
    def bias(self) -> Bias:
        return Bias.CONTRACTION

    def kept(self, numel: int) -> int:
        """Return k."""
        return min(max(round(self.ratio * numel), 1), numel)

    def layout(self, numel: int) -> Layout:
        """Return where values and positions lie."""
        k = self.kept(numel)
        return Layout((Section(self.values, 1, k), *positions.sections(numel, k)))

    def wire_bytes(self, *sizes: int) -> int:
        return self.layout(sum(sizes)).nbytes

    def encode(self, xp: Any, x: Tensor, call: Call, *, want_error: bool) -> Encoded:
        numel = xp.numel(x)
        layout = self.layout(numel)
        where = largest(xp, x, self.kept(numel), sampled=self.select == "sampled")
        exact = xp.take(x, where)
        if self.values == "float16":
            values = xp.cast(xp.clamp_(xp.copy(exact), -_LARGEST, _LARGEST), "float16")
        else:
            values = exact
        payload, _ = layout.new(xp, x)
        parts = [values, *positions.encode(xp, where, numel)]
        sealed = layout.seal(xp, payload, parts)
        if not want_error:
            return Encoded(sealed, None)
        left = xp.sub_(exact, xp.cast(values, "float32"))
        return Encoded(sealed, xp.put_(x, where, left))

    def decode(
        self, xp: Any, payloads: Sequence[Tensor], numel: int, call: Call, *, scale: Any
    ) -> Tensor:
        layout, k = self.layout(numel), self.kept(numel)
        out = xp.zeros(numel, "float32", payloads[0])
        for payload in payloads:
            values, *coded = layout.open(xp, payload)
            where = positions.decode(xp, coded, numel, k)
            kept = xp.reshape(xp.cast(values, "float32"), (k,))
            out = xp.add_at_(out, where, kept if is_one(scale) else xp.scaled(kept, scale))
        return out
