"""Settings that every compressor takes, whatever its codec."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .codec import LARGEST, check_choice, check_count, check_range
from .errors import SettingsError, explain
from .memory import Memory

EXCHANGES = ("auto", "allgather", "two_phase", "hierarchical")
SMALLEST = 1e-30
"""Least limit to clip at."""


@dataclass(frozen=True)
class Options:
    """What every compressor takes beside its codec's settings.

    Args:
        memory: "residual", "none", "residual:decay=0.9", a :class:`Memory`, or None for the
            codec's default.
        seed: Of the random codecs; equal on all ranks.
        min_numel: Tensors with fewer elements are sent uncompressed.
        skip_1d: Whether biases and other tensors of one dimension are sent uncompressed.
        bucket_bytes: Most bytes (float32) of parameters that are packed into one message. Below
            32 MiB, from where on the C library returns freed storage to the system at once and
            every step pays again for fresh pages.
        start_after: Steps that ``start_with`` is used for, before the codec itself.
        start_with: String form of the codec to start with.
        rules: Pairs of a regular expression for whole parameter names and a string form, or None
            for uncompressed: ``[("embed.*", None), ("fc.*", "powersgd:rank=8")]``. The first that
            matches a name decides, whatever the parameter's size; what none matches is compressed
            as all else says.
        clip_norm: Greatest Euclidean norm of a tensor's own gradient, times the square root of the
            number of ranks, before the memory sees it; see :mod:`horovod_gradcomp.core.clip`.
            Tensors that are sent uncompressed are not clipped.
        clip_value: Greatest absolute value of its elements, likewise; not with ``clip_norm``.
        state_dtype: "float32", or "bfloat16" to hold the memory in half the storage, rounded by up
            to 2**-9 of each value at every step.
        exchange: How packed payloads travel: "allgather", "two_phase" (see
            :mod:`horovod_gradcomp.core.twophase`), "hierarchical" (dense inside nodes, packed
            between them, see :mod:`horovod_gradcomp.core.hierarchical`), or "auto" for the one that
            brings fewer bytes by the rules written there.
        ranks_per_node: Consecutive ranks that count as a node in the hierarchical exchange; None
            for those of a host, as Horovod tells.
    """

    memory: str | Memory | None = None
    seed: int = 0
    min_numel: int = 1024
    skip_1d: bool = True
    bucket_bytes: int = 25 * 2**20
    start_after: int = 0
    start_with: str = "none"
    rules: tuple[tuple[str, str | None], ...] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    state_dtype: str = "float32"
    exchange: str = "auto"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        check_count("compressor", "min_numel", self.min_numel, minimum=0)
        check_count("compressor", "bucket_bytes", self.bucket_bytes, minimum=4)
        check_count("compressor", "start_after", self.start_after, minimum=0)
        object.__setattr__(self, "rules", _checked_rules(self.rules))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise SettingsError(explain(got=f"seed={self.seed!r}", expected="a whole number"))
        if not isinstance(self.skip_1d, bool):
            raise SettingsError(explain(got=f"skip_1d={self.skip_1d!r}", expected="True or False"))
        for name in ("clip_norm", "clip_value"):
            if getattr(self, name) is not None:
                check_range("compressor", name, getattr(self, name), SMALLEST, LARGEST)
        if self.clip_norm is not None and self.clip_value is not None:
            raise SettingsError(explain(got="clip_norm= and clip_value=", expected="one of them"))
        check_choice("compressor", "state_dtype", self.state_dtype, ("float32", "bfloat16"))
        check_choice("compressor", "exchange", self.exchange, EXCHANGES)
        if self.ranks_per_node is not None:
            check_count("compressor", "ranks_per_node", self.ranks_per_node)


def _checked_rules(rules: Any) -> tuple[tuple[str, str | None], ...]:
    expected = "pairs of a regular expression and a string form or None"
    out = []
    if isinstance(rules, (str, bytes)) or not isinstance(rules, Sequence):
        raise SettingsError(explain(got=f"rules={rules!r}", expected=expected))
    for rule in rules:
        pair = tuple(rule) if isinstance(rule, (list, tuple)) else ()
        texts = (
            len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], (str, type(None)))
        )
        try:
            if not texts:
                raise ValueError
            re.compile(pair[0])
        except (ValueError, re.error):
            raise SettingsError(explain(got=f"rules={rules!r}", expected=expected)) from None
        out.append(pair)
    return tuple(out)
