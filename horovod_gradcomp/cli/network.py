"""``gradcomp bench network``: training steps over real, limited links, against other systems."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..core.errors import GradCompError, explain
from ..core.settings import parse_codec
from ..lab import Cluster
from . import units
from .network_worker import DDP, HOROVOD, MARK, layers

Row = dict[str, Any]
Turn = dict[str, Any]

BASE = HOROVOD[0]
"""What others are compared with."""

FORMS = ("fp16", "linear", "linear:bits=4", "sign", "topk", "topk:ratio=0.001", "acp", "powersgd")
"""Codecs that are measured where none is named."""


def network(
    bandwidth: str = typer.Option("100mbit,1gbit,10gbit", help="Of each host's link; commas."),
    hosts: int = typer.Option(2, min=2, help="Hosts of one rank each."),
    model: str = typer.Option("mlp12x1024", help="Layers and width of a perceptron."),
    batch: int = typer.Option(32, min=1, help="Samples of a step on each rank."),
    steps: int = typer.Option(2, min=1, help="Steps of a turn."),
    rounds: int = typer.Option(3, min=1, help="Turns of each system, of which medians count."),
    codec: Optional[list[str]] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, help="A codec's string form; several times for several."
    ),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write the rows to this file."
    ),
) -> None:
    """Train over links of a set speed on this machine: Horovod, torch's DDP and our codecs.

    Needs root, as 'gradcomp lab' does. All systems take turns within one run, on one thread a rank;
    a ratio is the median over rounds of two turns of the same round.
    """
    layers(model)
    forms = list(codec or FORMS)
    for form in forms:
        parse_codec(form)  # a mistake in the last shows before the first is measured
    speeds = [units.bandwidth(text, "--bandwidth") for text in bandwidth.split(",")]
    systems = [*HOROVOD, *DDP, *(f"gradcomp {form}" for form in forms)]
    wanted = {"model": model, "batch": batch, "steps": steps, "rounds": rounds}
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(speeds) * len(systems) * (rounds + 1))

        for speed in speeds:
            shown = units.show_rate(speed)

            def done(name: str, at: str = shown) -> None:
                progress.update(task, advance=1, description=f"{at}, {name}")

            with Cluster(hosts=hosts, bandwidth=speed) as cluster:
                turns = _measure(cluster, {**wanted, "systems": systems}, done)
            about = {"bandwidth": shown, "hosts": hosts, "model": model}
            rows += [_row(name, turns, about) for name in systems]
    console = Console(width=500)
    for name in dict.fromkeys(row["bandwidth"] for row in rows):
        console.print("", _table([row for row in rows if row["bandwidth"] == name]), sep="\n")
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


def _measure(cluster: Cluster, wanted: dict[str, Any], done: Callable[[str], None]) -> list[Turn]:
    turns: list[Turn] = []
    said: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=12))

    def say(rank: int, line: str) -> None:
        if not line.startswith(MARK):
            said[rank].append(f"[{rank}] {line}")
            return
        turn = json.loads(line[len(MARK) :])
        if "warm" not in turn:
            turns.append(turn)
        done(turn["system"])

    command = [sys.executable, "-m", "horovod_gradcomp.cli.network_worker", json.dumps(wanted)]
    code = cluster.run(command, say=say, env={"OMP_NUM_THREADS": "1"})
    if code:
        tail = "\n".join(line for rank in sorted(said) for line in said[rank])
        raise GradCompError(f"{tail}\n{explain(got=f'code {code} from a rank', expected='0')}")
    return turns


def _row(name: str, turns: Sequence[Turn], about: dict[str, Any]) -> Row:
    base, mine = ([t for t in turns if t["system"] == one] for one in (BASE, name))
    told = [turn["mb_per_step"] for turn in mine if turn["mb_per_step"] is not None]
    ratios = [a["step_ms"] / b["step_ms"] for a, b in zip(base, mine)]
    return {
        "system": name,
        **about,
        "step_ms": statistics.median(turn["step_ms"] for turn in mine),
        "speedup_vs_none": statistics.median(ratios),
        "speedup_least": min(ratios),
        "speedup_most": max(ratios),
        "mb_per_step": statistics.median(told) if told else None,
        "iface_mb_per_step": statistics.median(turn["iface_mb_per_step"] for turn in mine),
    }


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    table = Table(
        title=f"{first['model']}, {first['hosts']} hosts, {first['bandwidth']}",
        caption=f"times as fast as {BASE}: median, least and most of the rounds;\n"
        "MB handed over by a rank as it counts, and as the interface does",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("system", no_wrap=True)
    for head in ("step, ms", "times\nas fast", "least", "most", "MB/step\ntold", "MB/step\nsent"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        told = row["mb_per_step"]
        table.add_row(
            row["system"],
            f"{row['step_ms']:,.0f}",
            *(f"{row[key]:.2f}" for key in ("speedup_vs_none", "speedup_least", "speedup_most")),
            "-" if told is None else f"{told:.3f}",
            f"{row['iface_mb_per_step']:.3f}",
        )
    return table
