"""Which tensors are compressed; decided by shape and dtype alone, so alike on every rank."""

from __future__ import annotations

import math

from .codec import Shape
from .settings import Options


def compresses(options: Options, shape: Shape) -> bool:
    """Return whether a float tensor of this shape is compressed.

    Small tensors and, by default, those of one dimension (biases, norms) are a tiny part of the
    bytes and a large part of the accuracy, so they ride along uncompressed.
    """
    numel = math.prod(shape)
    if numel == 0 or numel < options.min_numel:
        return False
    return len(shape) > 1 or not options.skip_1d
