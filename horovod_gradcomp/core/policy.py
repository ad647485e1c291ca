"""Which tensors are compressed, and how: by name, shape and dtype, so alike on all ranks."""

from __future__ import annotations

import math

from .codec import Shape
from .settings import Settings


def choose(settings: Settings, name: str, shape: Shape) -> Settings | None:
    """Return the settings of a float tensor; None where it is sent uncompressed.

    Small tensors and, by default, those of one dimension (biases, norms) are a tiny part of the
    bytes and a large part of the accuracy, so they ride along uncompressed. A rule that names a
    codec goes before that.
    """
    numel, own = math.prod(shape), settings.of(name)
    if own is None or numel == 0 or own.identity:
        return None
    if own is settings:
        options = settings.options
        if numel < options.min_numel or (len(shape) < 2 and options.skip_1d):
            return None
    return own
