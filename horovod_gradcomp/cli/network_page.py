"""A page and a picture of what ``gradcomp bench network`` measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import network_check
from .costs import Costs
from .network_worker import ALONE, AUTO, HOROVOD

Row = dict[str, Any]

_HEAD = """\
# Training over limited links

Real training steps of every system in turns within one run: ranks are processes in network
namespaces of one machine, joined by links of the speed named, as
[`gradcomp lab`](choosing.md) makes them; one rank a host, one thread a rank. "times"
is the step of Horovod without compression over that of the system, of turns in the same round:
median, and in brackets the least and the most of the rounds. MB are those that a rank's network
interface sent in a step. "{alone}" trains without exchanging anything: what computing takes. `auto`
is `Compression.auto()`, with its choice.

Measured by `{command}` on {machine}, {date}; load when it began: {load}. The ranks share the
processors of this machine, with whatever else ran on it.

![times as fast as Horovod without compression, over the bandwidth]({picture})
"""

_MODEL = """\

## The cost model

What the model of `gradcomp advise` (`core/cost.py`) predicts for these rows, in milliseconds, from
the links that the same run measured before its first turn, from the speed of a copy (the median of
all turns), from the steps without an exchange, and from the packaged costs of codecs. It does not
know that ranks wait for one another where a machine has other work to do: there, steps take longer.

{summary}.

"""


def write(path: Path, content: dict[str, Any], costs: Costs) -> None:
    """Write the page, and its picture beside it.

    Args:
        path: Of the page.
        content: What ``--json`` writes.
        costs: Of codecs, for the predictions.

    Raises:
        GradCompError: There is no matplotlib.
    """
    from .network import parts
    from .plots import speedups

    picture = path.with_suffix(".png")
    speedups(picture, content["rows"], leave_out=(ALONE, HOROVOD[0]))
    text = _HEAD.format(alone=ALONE, picture=picture.name, **content["about"])
    for rows in parts(content["rows"]):
        first = rows[0]
        text += f"\n## {first['model']}, {first['hosts']} hosts, {first['bandwidth']}\n\n"
        text += _markdown(("system", "step, ms", "times", "MB"), [_cells(row) for row in rows])
    checked = network_check.check(content, costs)
    text += _MODEL.format(summary=network_check.summary(checked))
    text += _markdown(
        ("model", "link", "system", *network_check.HEADS),
        [
            (one.row["model"], one.row["bandwidth"], one.row["system"], *network_check.cells(one))
            for one in checked
        ],
        words=3,
    )
    path.write_text(text, encoding="utf-8")


def _cells(row: Row) -> Sequence[str]:
    name = row["system"]
    if name == AUTO:
        name = (
            f"`auto`: {'`' + row['choice'] + '`' if row['choice'] != 'none' else 'not to compress'}"
        )
    elif name.startswith("gradcomp "):
        name = f"`{name.removeprefix('gradcomp ')}`"
    spread = f"({row['speedup_least']:.2f} to {row['speedup_most']:.2f})"
    times = f"{row['speedup_vs_none']:.2f} {spread}"
    return name, f"{row['step_ms']:,.0f}", times, f"{row['iface_mb_per_step']:.2f}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a table, all columns but the first ones aligned to the right."""
    rule = [*["---"] * words, *["---:"] * (len(heads) - words)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))
