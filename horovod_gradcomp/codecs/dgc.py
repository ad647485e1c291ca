"""The selection of Deep Gradient Compression."""

from __future__ import annotations

from dataclasses import dataclass

from .topk import TopK


@dataclass(frozen=True)
class DGC(TopK):
    """Send the ``k = clip(round(ratio * n), 1, n)`` values of largest magnitude, 0.1 % by default.

    ``Q(x)_i = x_i`` where ``|x_i|`` is among the k largest (ties by lowest position), else 0. A
    sample gives a threshold, and of the few values above it the k largest are selected.

    =========  ================  =====  ================================================
    tensor     dtype             shape  bytes
    =========  ================  =====  ================================================
    values     float32           (k,)   4 k, or as the codec after ``+`` has it
    positions  int32             (k,)   4 k, or
    positions  int16 + counts    (k,)   2 k + 4 for each 65,536 elements, or
    positions  bitmap            n / 8  n / 8; the cheapest of the three for this n and k
    =========  ================  =====  ================================================

    Combine: GATHER. Bias: CONTRACTION. Its memory is ``momentum``, with m = 0.9 and masking.

    Family: sparsification.

    When to use: on slow links, for long runs of SGD with momentum. 0.1 % of the values is enough
    once training has settled; begin with more, as in ``ratio=ramp(0.25, 0.001, 4 * epoch)`` with
    steps an epoch, or ``"dgc:ratio=0.25..0.001@4000"``. The optimizer's own momentum must be 0, the
    memory has it.

    Args:
        ratio: Fraction of elements kept, 0 < ratio <= 1; smaller compresses more.
        select: "sampled" finds the same elements as "exact" by way of a sampled threshold, in a
            fraction of the time on large tensors.
        then: A codec for the kept values, as in ``"dgc:ratio=0.001+fp16"``.

    Raises:
        SettingsError: A setting is out of range.

    Example:
        >>> from horovod_gradcomp.codecs import build
        >>> build("dgc").wire_bytes(1_000_000)
        6064

    Reference:
        Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth
        for Distributed Training", ICLR 2018, arXiv:1712.01887.

    Differs from the paper: exactly the k largest are found, where the paper's sampled threshold may
    keep some more or fewer; clipping and warm-up are settings of their own.
    """

    ratio: float = 0.001

    @property
    def default_memory(self) -> str:
        return "momentum"
