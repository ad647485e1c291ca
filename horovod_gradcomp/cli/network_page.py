"""A page and a picture of what ``gradcomp bench network`` measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import network_check
from .costs import Costs
from .network_content import Row, grouped, part, parts
from .network_worker import ALONE, AUTO, HOROVOD

_HEAD = """\
# Training over limited links: {models}, {hosts} hosts

Real training steps of every system in turns within one run: ranks are processes in network
namespaces of one machine, joined by links of the speed named, as
[`gradcomp lab`](choosing.md) makes them; one rank a host, one thread a rank. "times"
is the step of Horovod without compression over that of the system, of turns in the same round:
median, and in brackets the least and the most of the rounds. MB are those that a rank's network
interface sent in a step. "{alone}" trains without exchanging anything: what computing takes. `auto`
is `Compression.auto()`, with its choice.

Measured on {machine}, by

{taken}

The ranks share the processors of this machine, with whatever else ran on it.

![times as fast as Horovod without compression, over the bandwidth]({picture})
"""

_SCALING = """\

## More hosts

The ranks of all hosts share {machine}, so computing takes longer with each, and where there are
more ranks than processors, those that wait keep others from running. "ms" is the median of a step,
"predicted" what the cost model below says.

"""

_MODEL = """\

## The cost model

What the model of `gradcomp advise` (`core/cost.py`) predicts for these rows, in milliseconds, from
the links that the same run measured before its first turn, from the speed of a copy (the median of
all turns), from the steps without an exchange, and from the packaged costs of codecs. It knows of
no other work on the machine, for which ranks wait for one another, so it is held against the
quietest turn of each system; the tables above have the median.

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
    from .plots import speedups

    picture = path.with_suffix(".png")
    rows = content["rows"]
    speedups(picture, rows, leave_out=(ALONE, HOROVOD[0]))
    machine, taken = content["machine"], "\n".join(_taken(content["facts"]))
    text = _HEAD.format(
        models=_each(rows, "model"),
        hosts=_each(rows, "hosts"),
        alone=ALONE,
        picture=picture.name,
        machine=machine,
        taken=taken,
    )
    for some in parts(rows):
        first = some[0]
        text += f"\n## {first['model']}, {first['hosts']} hosts, {first['bandwidth']}\n\n"
        text += _markdown(("system", "step, ms", "times", "MB"), [_cells(row) for row in some])
    checked = network_check.check(content, costs)
    scaled = [_over_hosts(some, checked) for some in _scaled(rows)]
    if scaled:
        text += _SCALING.format(machine=machine) + "\n".join(scaled)
    text += _MODEL.format(summary=network_check.summary(checked))
    text += _markdown(
        (*network_check.WHICH, *network_check.HEADS),
        [(*network_check.which(one), *network_check.cells(one)) for one in checked],
        words=len(network_check.WHICH),
    )
    path.write_text(text, encoding="utf-8")


def _taken(facts: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each command: what it was, when, and how busy the machine was."""
    for command in dict.fromkeys(one["command"] for one in facts):
        mine = [one for one in facts if one["command"] == command]
        loads = ", ".join(one["load"] for one in mine)
        yield f"- `{command}`, {mine[-1]['date']}; load before each part: {loads}"


def _scaled(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each model and bandwidth that was measured with several hosts."""
    alike = grouped(rows, ("model", "bandwidth"))
    return [some for some in alike if len({row["hosts"] for row in some}) > 1]


def _over_hosts(rows: Sequence[Row], checked: Sequence[network_check.Checked]) -> str:
    """Return a table of the steps of systems that were measured with more than one of the hosts."""
    hosts = sorted({row["hosts"] for row in rows})
    predicted = {(one.row["system"], *part(one.row)): one.step_ms for one in checked}
    body = []
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = [f"`{system.removeprefix('gradcomp ')}`" if "gradcomp" in system else system]
        mine = {row["hosts"]: row for row in rows if row["system"] == system}
        for count in hosts:
            row = mine.get(count)
            known = row and predicted.get((system, *part(row)))
            cells += [f"{row['step_ms']:,.0f}" if row else "", f"{known:,.0f}" if known else ""]
        if len(mine) > 1:
            body.append(cells)
    heads = ["system", *(head for n in hosts for head in (f"{n} hosts, ms", "predicted"))]
    return f"{rows[0]['model']}, {rows[0]['bandwidth']}:\n\n" + _markdown(heads, body)


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


def _each(rows: Sequence[Row], key: str) -> str:
    return ", ".join(dict.fromkeys(str(row[key]) for row in rows))
