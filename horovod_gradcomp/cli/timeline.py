"""A picture of a trace: on each rank, one step with what was encoded, on its way and decoded."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ..core.errors import GradCompError, explain
from .plots import pyplot, save

Span = dict[str, Any]

_COLOURS = {"encode": "#d95f02", "exchange": "#7570b3", "wait": "#cccccc", "decode": "#1b9e77"}
_HEIGHT = 0.8


def is_trace(source: Path) -> bool:
    """Return whether a file looks like a trace in Chrome's format."""
    try:
        with source.open(encoding="utf-8") as file:
            return '"traceEvents"' in file.read(200)
    except (OSError, UnicodeDecodeError):
        return False  # the error is told by who reads it whole


def draw(source: Path, target: Path, step: int | None = None) -> None:
    """Draw one step of a trace, with a row for the calling thread and one for each bucket.

    Args:
        source: What :meth:`Compressor.trace` wrote.
        target: The picture.
        step: Number of the step; default: one in the middle of the trace.

    Raises:
        GradCompError: The file is no trace of whole steps, or the picture cannot be made.
    """
    rows, steps = _read(source)
    numbers = sorted({number for number, _ in steps})
    if not numbers or (step is not None and step not in numbers):
        raise GradCompError(
            explain(
                got=f"{source} with steps {numbers or 'of none'}",
                expected="a trace with at least one whole step"
                if step is None
                else f"a trace with step {step}",
            )
        )
    chosen = numbers[len(numbers) // 2] if step is None else step
    ranks = sorted(rank for number, rank in steps if number == chosen)
    plt = pyplot()
    high = max(len(rows[rank]) for rank in ranks)
    figure, every = plt.subplots(
        len(ranks), 1, sharex=True, squeeze=False, figsize=(9, 1.2 + 0.32 * high * len(ranks))
    )
    first = min(steps[chosen, rank]["ts"] for rank in ranks)
    for axes, rank in zip(every[:, 0], ranks):
        _draw_rank(axes, rows[rank], steps[chosen, rank], first)
        axes.set_title(f"rank {rank}, step {chosen}", fontsize=9, loc="left")
    every[-1, 0].set_xlabel("ms since the step's first gradient")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "frameon": False}
    every[0, 0].legend(handles, list(_COLOURS), fontsize=8, ncol=4, **above)
    figure.tight_layout()
    save(figure, target)


def _draw_rank(axes: Any, rows: dict[str, list[Span]], step: Span, first: float) -> None:
    names = list(rows)
    for at, name in enumerate(names):
        for span in rows[name]:
            kind = span["name"].split()[0]
            if kind in _COLOURS and _inside(span, step):
                bar = ((span["ts"] - first) / 1e3, span["dur"] / 1e3)
                axes.broken_barh([bar], (at - _HEIGHT / 2, _HEIGHT), color=_COLOURS[kind])
    begun, length = (step["ts"] - first) / 1e3, step["dur"] / 1e3
    axes.axvspan(begun, begun + length, color="0.95", zorder=0)
    axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=7)
    axes.invert_yaxis()


def _inside(span: Span, step: Span) -> bool:
    return bool(step["ts"] <= span["ts"] <= step["ts"] + step["dur"])


def _short(row: str) -> str:
    kind, _, name = row.partition(" ")
    return "calls" if kind == "steps" else name if len(name) <= 28 else f"{name[:25]}..."


def _read(source: Path) -> tuple[dict[int, dict[str, list[Span]]], dict[tuple[int, int], Span]]:
    """Return the spans of each rank by row, and whole steps by number and rank."""
    try:
        events = json.loads(source.read_text(encoding="utf-8"))["traceEvents"]
        named = {
            (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        rows: dict[int, dict[str, list[Span]]] = defaultdict(dict)
        for (rank, _), name in named.items():
            rows[rank][name] = []
        steps: dict[tuple[int, int], Span] = {}
        for event in (e for e in events if e["ph"] == "X"):
            rows[event["pid"]][named[event["pid"], event["tid"]]].append(event)
            kind, _, number = event["name"].partition(" ")
            if kind == "step" and not event["args"].get("aborted"):
                steps[int(number), event["pid"]] = event
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise GradCompError(
            explain(
                got=f"{source}: {type(error).__name__}: {error}",
                expected="a trace that compression.trace(path) wrote",
            )
        ) from None
    return rows, steps
