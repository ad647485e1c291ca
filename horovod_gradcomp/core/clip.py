"""Clipping of one tensor's gradient on its own rank, before anything is remembered.

Clipping after the reduction would come too late for what is left out: a spike would sit in the
memory for many steps.
"""

from __future__ import annotations

import math
from typing import Any

from .codec import LARGEST, Tensor, is_one
from .options import Options


def clipped(xp: Any, grad: Tensor, gain: Any, options: Options, size: int) -> tuple[Tensor, Any]:
    """Return a gradient and the factor on it, such that their product is clipped.

    With ``clip_norm=c`` the product's Euclidean norm is at most ``c / sqrt(size)``: that of the
    mean over ranks whose gradients do not depend on one another is then at most ``c / size``. With
    ``clip_value=c`` no element is beyond ``[-c, c]``. What is not finite stays so.

    Args:
        xp: An operations module.
        grad: Any float dtype; not changed.
        gain: Factor on the gradient, a number or a float32 scalar tensor.
        options: With ``clip_norm``, ``clip_value`` or neither.
        size: How many ranks take part.

    Reference:
        Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887.
    """
    if options.clip_norm is not None:
        flat = xp.reshape(xp.to_float32(grad, None), (1, -1))
        norm = xp.reshape(xp.cast(xp.row_norm(flat), "float32"), ())
        limit = options.clip_norm / math.sqrt(size)
        return grad, gain / xp.maximum(xp.minimum(norm, LARGEST) * (gain / limit), 1.0)
    if options.clip_value is not None:
        made = xp.to_float32(grad, None)
        made = made if is_one(gain) else xp.scale_(made, gain)
        bad = xp.badness(made)
        limit = options.clip_value
        return xp.spoil_(xp.clamp_(made, -limit, limit), bad), 1.0
    return grad, gain
