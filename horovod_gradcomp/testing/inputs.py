"""Inputs of codecs: shapes, values of many kinds, and the call of a step."""

from __future__ import annotations

import math
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

from ..core.codec import Call
from ..core.random import fold

Array = NDArray[Any]
Shapes = tuple[tuple[int, ...], ...]


def whole(n: int) -> Shapes:
    """Return the shapes of one tensor of ``n`` elements."""
    return ((n,),)


def split(n: int) -> Shapes:
    """Return the shapes of three tensors of ``n`` elements in all, one of them a scalar."""
    if n < 3:
        return whole(n)
    first = n // 3
    return ((first,), (), (n - first - 1, 1))


def mixed(n: int) -> Shapes:
    """Return the shapes of a matrix, a scalar and a vector of ``n`` elements in all."""
    rows = math.isqrt(2 * n // 3)
    if rows < 2:
        return whole(n)
    cols = 2 * n // 3 // rows
    return ((rows, cols), (), (n - rows * cols - 1,))


def numel(shapes: Shapes) -> int:
    """Return the elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes)


def call(
    shapes: Shapes, *, size: int = 3, step: int = 5, name: str = "layer.weight", rank: int = 0
) -> Call:
    """Return the call that a codec sees at a step, without shared state."""
    return Call(size=size, shapes=shapes, key=fold(0, name, step), step=step, rank=rank)


def rng(n: int) -> np.random.Generator:
    """Return the generator of the test data of ``n`` elements."""
    return np.random.default_rng(n)


def _gaussian(n: int) -> Array:
    return rng(n).standard_normal(n)


def _heavy(n: int) -> Array:
    return rng(n).standard_t(1.5, n) * 1e-3


def _spike(n: int) -> Array:
    x = rng(n).standard_normal(n) * 1e-6
    x[n // 2] = -1e6
    return x


def _sparse(n: int) -> Array:
    x = rng(n).standard_normal(n)
    x[rng(n).permutation(n)[: n // 3]] = 0.0
    return x


def _subnormal(n: int) -> Array:
    return rng(n).integers(-9000, 9000, n) * 2.0**-149


def _largest(n: int) -> Array:
    x = rng(n).uniform(-3e38, 3e38, n)
    x[0], x[-1] = -3.4e38, 3.4e38
    return x


def _ties(n: int) -> Array:
    return rng(n).choice([-2.0, -1.0, -0.25, 0.0, 0.25, 1.0, 2.0], n)


VALUES: dict[str, Callable[[int], Array]] = {
    "gaussian": _gaussian,
    "heavy": _heavy,
    "zeros": np.zeros,
    "minus_zeros": lambda n: np.full(n, -0.0),
    "positive": lambda n: np.full(n, 0.3),
    "negative": lambda n: np.full(n, -7e-5),
    "spike": _spike,
    "third_zeros": _sparse,
    "subnormal": _subnormal,
    "tiny": lambda n: _gaussian(n) * 1e-30,
    "tiny_and_large": lambda n: np.where(np.arange(n) % 2, 1e-38, 1.0) * _gaussian(n),
    "huge": lambda n: _gaussian(n) * 1e30,
    "largest": _largest,
    "ties": _ties,
    "ramp": lambda n: np.arange(n) - n / 3,
    "rank_one": lambda n: _gaussian(n)[np.arange(n) // 33] * _gaussian(n)[np.arange(n) % 33 % n],
}
"""By name: what makes ``n`` finite values."""


def values(name: str, n: int) -> Array:
    """Return ``n`` values of a kind as float32."""
    return VALUES[name](n).astype(np.float32)
