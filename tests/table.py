"""What the conformance suite runs over: settings, sizes and values. A new codec is one row."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from horovod_gradcomp import SettingsError
from horovod_gradcomp.core.codec import Codec
from horovod_gradcomp.core.options import Options
from horovod_gradcomp.core.settings import Settings, assemble, make, parse_codec
from horovod_gradcomp.testing.inputs import (
    VALUES,
    Shapes,
    call,
    mixed,
    numel,
    rng,
    split,
    values,
    whole,
)

__all__ = [
    "COMPARED",
    "FEW_COMPARED",
    "FEW_KINDS",
    "FEW_SHAPES",
    "FORMS",
    "MATRICES",
    "MEMORIES",
    "SETTINGS",
    "SHAPES",
    "TOGETHER",
    "VALUES",
    "Shapes",
    "all_pairs",
    "call",
    "forms",
    "legal",
    "mixed",
    "numel",
    "rng",
    "split",
    "trained_pairs",
    "values",
    "whole",
]

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


FEW_KINDS = ("gaussian", "ties")
"""For what depends little on the values."""
