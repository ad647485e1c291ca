"""What the conformance suite runs over: settings, sizes and values. A new codec is one row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, Callable

import numpy as np

from horovod_gradcomp import SettingsError
from horovod_gradcomp.core.codec import Call, Codec
from horovod_gradcomp.core.options import Options
from horovod_gradcomp.core.random import fold
from horovod_gradcomp.core.settings import Settings, assemble, make, parse_codec

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "none": [{}],
    "fp16": [{}],
    "bf16": [{}],
    "fp8": [{}, {"format": "e5m2", "block": 24}],
    "linear": [
        {},
        {"bits": 2},
        {"bits": 3},
        {"bits": 4},
        {"bits": 5, "block": 24},
        {"bits": 6, "block": 8},
        {"bits": 7, "block": 65_536},
        {"rounding": "stochastic"},
        {"bits": 2, "block": 64, "rounding": "stochastic"},
    ],
    "logarithmic": [
        {},
        {"bits": 2, "range": 1000.0},
        {"bits": 5, "block": 24, "range": 1},
        {"bits": 3, "range": None},
    ],
    "qsgd": [
        {},
        {"bits": 2},
        {"bits": 3, "block": 24, "norm": "l2"},
        {"bits": 8, "block": 65_536},
    ],
    "terngrad": [{}, {"clip_sigma": None}, {"block": 24, "clip_sigma": 1.0}],
    "natural": [{}],
    "sign": [{}, {"block": 24}, {"scale": "rms", "block": 65_536}, {"vote": True}],
    "onebit": [{}, {"block": 24}],
    "topk": [
        {},
        {"ratio": 1e-4},
        {"ratio": 0.1},
        {"ratio": 0.5},
        {"ratio": 1.0},
        {"select": "exact"},
        {"then": "fp16"},
        {"ratio": 0.1, "then": "linear:bits=4,block=64", "select": "exact"},
    ],
    "threshold": [
        {},
        {"value": 1.0, "max_ratio": 0.5},
        {"value": 100.0, "max_ratio": 0.01},
        {"value": 0.1, "max_ratio": 1.0, "then": "fp16"},
    ],
    "dgc": [{}, {"ratio": 0.05, "select": "exact", "then": "fp8"}],
    "randomk": [
        {},
        {"ratio": 0.3},
        {"ratio": 1.0},
        {"ratio": 0.05, "block": 4},
        {"ratio": 0.5, "block": 1000},
        {"ratio": 0.1, "rescale": "yes"},
        {"ratio": 0.1, "rescale": "no"},
        {"ratio": 0.1, "then": "fp16"},
        {"ratio": 0.1, "block": 4, "then": "linear:bits=3"},
    ],
    "bernoulli": [
        {},
        {"p": 1e-4},
        {"p": 0.3, "rescale": "yes"},
        {"p": 1.0, "rescale": "no"},
        {"p": 0.2, "then": "linear:bits=3"},
        {"p": 0.1, "then": "fp16"},
    ],
    "cltk": [{}, {"ratio": 0.2}, {"ratio": 1.0, "then": None}],
    "acp": [{}, {"rank": 1}, {"rank": 20, "max_rate": 1.0}, {"then": "fp16"}, {"then": "sign"}],
    "powersgd": [{}, {"rank": 2, "max_rate": 0.1}, {"warm_start": False}, {"then": "fp16"}],
    "svd": [{}, {"rank": 1, "iterations": 0}, {"max_rate": 0.2}, {"then": "linear:bits=8"}],
    "tucker": [
        {},
        {"ranks": 1, "max_rate": 1.0},
        {"ranks": (6, 3, 2)},
        {"then": "fp16"},
        {"ranks": 2, "then": "linear:bits=8"},
    ],
}
"""By registry name: settings, the default first."""

Shapes = "tuple[tuple[int, ...], ...]"


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


MATRICES: Shapes = ((40, 30), (0, 7), (), (7,), (12, 6, 3, 3), (3, 500))

SHAPES: tuple[Shapes, ...] = (
    *map(whole, (1, 7, 8, 9, 1001, 1024, 1025, 4097, 65_537, 70_003)),
    *map(split, (9, 1024, 4097, 70_003)),
    ((64, 33),),
    ((300, 17),),
    MATRICES,
)
"""Of the tensors that make up the flat input; their sum of elements is its size."""

FEW_SHAPES: tuple[Shapes, ...] = (split(4097), MATRICES)
"""For what is slow."""

COMPARED: tuple[Shapes, ...] = (*map(whole, (1, 1001)), *map(split, (1024, 70_003)))
"""On which the frameworks are compared, by few kinds of values."""

FEW_COMPARED: tuple[Shapes, ...] = (MATRICES, split(70_003))
"""By all kinds of values."""


def numel(shapes: Shapes) -> int:
    """Return the elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes)


def forms() -> dict[str, Codec]:
    """Return every codec of the table, with and without a memory where it matters, by a label."""
    out: dict[str, Codec] = {}
    for name, rows in SETTINGS.items():
        for row in rows:
            label = f"{name}({','.join(f'{k}={v}' for k, v in row.items())})"
            codec = make(name, row).codec
            kept, bare = codec.with_memory(True), codec.with_memory(False)
            if kept == bare:
                out[label] = kept
            else:
                out[f"{label}+memory"], out[f"{label}+bare"] = kept, bare
    return out


FORMS = forms()

MEMORIES = ("none", "residual", "momentum:m=0.5", "ef21", "differential")
TOGETHER = ("topk:ratio=0.1+linear:bits=4", "acp+fp16", "randomk:ratio=0.1+linear:bits=8")
"""Compositions that train on real ranks."""


def legal(codecs: Mapping[str, Codec]) -> dict[str, Settings]:
    """Return each codec with every memory that suits it, by both names.

    A differential memory follows slowly where the codec's noise asks for it.
    """
    out: dict[str, Settings] = {}
    for label, codec in codecs.items():
        for name in MEMORIES:
            noisy = name == "differential" and not codec.with_memory(True).feeds_back
            memory = "differential:alpha=0.1" if noisy else name
            with contextlib.suppress(SettingsError):  # refused at construction, see test_memory.py
                out[f"{label} {memory}"] = assemble(codec, Options(memory=memory))
    return out


def all_pairs() -> dict[str, Settings]:
    """Return every row of the table with every memory that suits it."""
    codecs = [make(name, row).codec for name, rows in SETTINGS.items() for row in rows]
    return legal({codec.describe(): codec for codec in codecs})


def trained_pairs() -> dict[str, Settings]:
    """Return every codec but ``none`` as its name alone sets it, and a few compositions, likewise.

    Labels are string forms.
    """
    return legal({text: parse_codec(text) for text in (*SETTINGS, *TOGETHER) if text != "none"})


def call(
    shapes: Shapes, *, size: int = 3, step: int = 5, name: str = "layer.weight", rank: int = 0
) -> Call:
    """Return the call that a codec sees at a step, without shared state."""
    return Call(size=size, shapes=shapes, key=fold(0, name, step), step=step, rank=rank)


def rng(n: int) -> np.random.Generator:
    """Return the generator of the test data of ``n`` elements."""
    return np.random.default_rng(n)


def _gaussian(n: int) -> np.ndarray:
    return rng(n).standard_normal(n)


def _heavy(n: int) -> np.ndarray:
    return rng(n).standard_t(1.5, n) * 1e-3


def _spike(n: int) -> np.ndarray:
    x = rng(n).standard_normal(n) * 1e-6
    x[n // 2] = -1e6
    return x


def _sparse(n: int) -> np.ndarray:
    x = rng(n).standard_normal(n)
    x[rng(n).permutation(n)[: n // 3]] = 0.0
    return x


def _subnormal(n: int) -> np.ndarray:
    return rng(n).integers(-9000, 9000, n) * 2.0**-149


def _largest(n: int) -> np.ndarray:
    x = rng(n).uniform(-3e38, 3e38, n)
    x[0], x[-1] = -3.4e38, 3.4e38
    return x


def _ties(n: int) -> np.ndarray:
    return rng(n).choice([-2.0, -1.0, -0.25, 0.0, 0.25, 1.0, 2.0], n)


VALUES: dict[str, Callable[[int], np.ndarray]] = {
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

FEW_KINDS = ("gaussian", "ties")
"""For what depends little on the values."""


def values(name: str, n: int) -> np.ndarray:
    """Return ``n`` values of a kind as float32."""
    return VALUES[name](n).astype(np.float32)
