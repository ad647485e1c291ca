"""``gradcomp bench network``: training steps over real, limited links, against other systems."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..core.codec import Combine
from ..core.errors import GradCompError, SettingsError, explain
from ..core.options import Options
from ..core.settings import assemble, parse_codec
from ..core.twophase import misfit
from ..lab import Cluster
from . import network_check, network_content, network_models, network_page, units
from .costs import load
from .network_content import Row, parts
from .network_worker import ALONE, AUTO, DDP, HOROVOD, MARK, OVER
from .turns import ratios

Turn = dict[str, Any]

BASE = HOROVOD[0]
"""What others are compared with."""

FORMS = ("fp16", "linear", "linear:bits=4", "sign", "topk", "topk:ratio=0.001", "acp", "powersgd")
"""Codecs that are measured where none is named."""

_EXCHANGES = "auto", "allgather", "two_phase"
_TIMES = ("forward_ms", "backward_ms", "encode_ms", "wait_ms", "decode_ms")


def network(
    bandwidth: str = typer.Option("100mbit,1gbit,10gbit", help="Of each host's link; commas."),
    hosts: str = typer.Option("2", help="Hosts of one rank each, two or more; commas."),
    model: str = typer.Option(
        "mlp12x1024",
        help=f"Perceptron of so many layers and such a width, {', '.join(network_models.KNOWN)}; "
        "commas.",
    ),
    batch: Optional[int] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, min=1, help="Samples of a step on each rank; default: 32, all but perceptrons 4."
    ),
    steps: int = typer.Option(2, min=1, help="Steps of a turn."),
    rounds: int = typer.Option(3, min=1, help="Turns of each system, of which medians count."),
    codec: Optional[list[str]] = typer.Option(  # noqa: UP045
        None, help="A codec's string form, or auto; several times for several."
    ),
    exchange: str = typer.Option(
        "auto", help="auto, allgather or two_phase, for codecs that have the choice; commas."
    ),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write the rows to this file."
    ),
    add: bool = typer.Option(
        False, help="Keep what the file of --json holds of other models, hosts and links."
    ),
    docs: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Write a page with tables, and beside it a picture (needs matplotlib)."
    ),
    check: bool = typer.Option(False, help="Show what the cost model predicts beside each row."),
    read: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Measure nothing, and show the rows that --json wrote to this file."
    ),
    costs: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="For --check, what 'gradcomp bench codecs --json' measured; default: packaged."
    ),
) -> None:
    """Train over links of a set speed on this machine: Horovod, torch's DDP and our codecs.

    Needs root, as 'gradcomp lab' does. All systems take turns within one run, on one thread a rank;
    a ratio is the median over rounds of two turns of the same round.
    """
    models = model.split(",")
    for one in models:
        network_models.check(one)
    counts = _counts(hosts)
    systems = [ALONE, *HOROVOD, *DDP, *_ours(list(codec or (*FORMS, "auto")), exchange.split(","))]
    speeds = [units.bandwidth(text, "--bandwidth") for text in bandwidth.split(",")]
    measured = load(costs)
    if add and not json_file:
        raise SettingsError(explain(got="--add without --json", expected="a file to add to"))
    before = network_content.nothing()
    if add and json_file and json_file.exists():  # of another machine: said before measuring
        before = network_content.together(network_content.read(json_file), before)
    if read:
        content = network_content.read(read)
    else:
        wanted = {"batch": batch, "steps": steps, "rounds": rounds, "systems": systems}
        content = before
        for part in _measure_all(counts, speeds, models, wanted):
            content = network_content.together(content, part)
            if json_file:  # a part that fails loses none before it
                network_content.write(json_file, content)
    console = Console(width=500)
    for rows in parts(content["rows"]):
        console.print("", _table(rows), sep="\n")
    if check:
        console.print("", network_check.table(content, measured), sep="\n")
    if read and json_file:
        network_content.write(json_file, content)
    if docs:
        network_page.write(docs, content, measured)


def _counts(text: str) -> list[int]:
    found = text.split(",")
    if not all(one.isdecimal() and int(one) > 1 for one in found):
        raise SettingsError(explain(got=f"--hosts {text}", expected="numbers from 2, with commas"))
    return [int(one) for one in found]


def _ours(forms: Sequence[str], exchanges: Sequence[str]) -> list[str]:
    """Return the systems of codecs, with each exchange where a codec has the choice."""
    for exchange in exchanges:
        if exchange not in _EXCHANGES:
            raise SettingsError(
                explain(got=f"--exchange {exchange}", expected=f"one of {', '.join(_EXCHANGES)}")
            )
    out = []
    for form in forms:
        names = [form]
        if form != "auto":
            settings = assemble(parse_codec(form), Options())
            if settings.codec.combine is Combine.GATHER and exchanges != ["auto"]:
                alone = bool(misfit(settings.codec, settings.memory))
                names = [f"{form}{OVER}{e}" for e in exchanges if not (alone and e == "two_phase")]
        out += [f"gradcomp {name}" for name in names]
    return out


def _measure_all(
    counts: Sequence[int],
    speeds: Sequence[float],
    models: Sequence[str],
    wanted: dict[str, Any],
) -> Iterator[network_content.Content]:
    """Yield facts and rows of each model, number of hosts and bandwidth."""
    systems = wanted["systems"]
    every = [(one, hosts, speed) for one in models for hosts in counts for speed in speeds]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(every) * len(systems) * (wanted["rounds"] + 1))
        for one, hosts, speed in every:
            about = {"bandwidth": units.show_rate(speed), "hosts": hosts, "model": one}
            at = f"{one}, {hosts} hosts, {about['bandwidth']}"

            def done(name: str, at: str = at) -> None:
                progress.update(task, advance=1, description=f"{at}, {name}")

            taken = network_content.taken()
            with Cluster(hosts=hosts, bandwidth=speed) as cluster:
                facts, turns = _measure(cluster, {**wanted, "model": one}, done)
            copy = statistics.median(told["copy"] for told in turns)
            facts = {**about, **taken, **facts, "copy": copy}
            rows = [_row(name, turns, about) for name in systems]
            yield {**network_content.nothing(), "facts": [facts], "rows": rows}


def _measure(
    cluster: Cluster, wanted: dict[str, Any], done: Callable[[str], None]
) -> tuple[dict[str, Any], list[Turn]]:
    facts: dict[str, Any] = {}
    turns: list[Turn] = []
    said: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=12))

    def say(rank: int, line: str) -> None:
        if not line.startswith(MARK):
            said[rank].append(f"[{rank}] {line}")
            return
        told = json.loads(line[len(MARK) :])
        if "facts" in told:
            facts.update(told["facts"])
            return
        if "warm" not in told:
            turns.append(told)
        done(told["system"])

    command = [sys.executable, "-m", "horovod_gradcomp.cli.network_worker", json.dumps(wanted)]
    code = cluster.run(command, say=say, env={"OMP_NUM_THREADS": "1"})
    if code:
        tail = "\n".join(line for rank in sorted(said) for line in said[rank])
        raise GradCompError(f"{tail}\n{explain(got=f'code {code} from a rank', expected='0')}")
    return facts, turns


def _row(name: str, turns: Sequence[Turn], about: dict[str, Any]) -> Row:
    mine = [turn for turn in turns if turn["system"] == name]

    def median(key: str) -> float | None:
        told = [turn[key] for turn in mine if turn.get(key) is not None]
        return statistics.median(told) if told else None

    times = ratios(BASE, name, turns)
    steps = [turn["step_ms"] for turn in mine]
    return {
        "system": name,
        **about,
        "step_ms": statistics.median(steps),
        "step_ms_least": min(steps),
        "step_ms_most": max(steps),
        "speedup_vs_none": statistics.median(times),
        "speedup_least": min(times),
        "speedup_most": max(times),
        **{key: median(key) for key in ("mb_per_step", "iface_mb_per_step", *_TIMES)},
        "choice": mine[-1].get("choice"),
    }


def label(row: Row) -> str:
    """Return the name of a row's system, with what ``auto`` chose."""
    return f"{AUTO}: {row['choice']}" if row["system"] == AUTO else str(row["system"])


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
            label(row),
            f"{row['step_ms']:,.0f}",
            *(f"{row[key]:.2f}" for key in ("speedup_vs_none", "speedup_least", "speedup_most")),
            "-" if told is None else f"{told:.3f}",
            f"{row['iface_mb_per_step']:.3f}",
        )
    return table
