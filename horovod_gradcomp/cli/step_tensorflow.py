"""``gradcomp bench step --framework tensorflow``: its rows and its table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..core.codec import Combine
from ..core.settings import parse_codec
from .step_tensorflow_worker import GROUPED
from .step_worker import BASE
from .turns import compared

Row = dict[str, Any]


def systems(forms: Sequence[str], groups: int) -> list[str]:
    """Return what is measured: each system tensor by tensor, and in groups where asked for.

    What Horovod adds up is left out of groups, which have one dtype: payloads may have another than
    tensors that are sent as they are.
    """
    several = [form for form in forms if parse_codec(form).combine is not Combine.SUM]
    return [BASE, *forms, *(f"{name}{GROUPED}{groups}" for name in (BASE, *several) if groups)]


def row(name: str, turns: Sequence[Row], model: str, shapes: Sequence[Any]) -> Row:
    """Return the row of a system; a ratio is the median over turns of the same round."""
    mine = [turn for turn in turns if turn["system"] == name]
    told = statistics.median(turn["bytes"] for turn in mine)
    return {
        "system": name,
        "model": model,
        "framework": "tensorflow",
        "tensors": len(shapes),
        **compared(name, BASE, turns, "times_none"),
        "mb_per_step": (told or 4 * sum(map(math.prod, shapes))) / 1e6,
        "operations": mine[0]["operations"],
        "trace_s": mine[0]["trace_s"],
    }


def table(rows: Sequence[Row], shapes: Sequence[Any], ranks: int) -> Table:
    """Return the rows as a table."""
    numel = sum(map(math.prod, shapes))
    made = Table(
        title=f"{rows[0]['model']}: {len(shapes)} tensors of {numel:,} values, {ranks} ranks",
        caption="ms a step; times of Horovod alone: median, least, most; operations of the graph",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    made.add_column("system", no_wrap=True)
    for head in ("step", "times", "least", "most", "MB", "operations", "trace, s"):
        made.add_column(head, justify="right", no_wrap=True)
    for one in rows:
        made.add_row(
            one["system"],
            f"{one['step_ms']:,.0f}",
            *(f"{one[key]:.2f}" for key in ("times_none", "times_least", "times_most")),
            f"{one['mb_per_step']:.3g}",
            f"{one['operations']:,}",
            f"{one['trace_s']:.1f}",
        )
    return made
