"""``gradcomp bench step``: what a step costs with the tensors of well-known models."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..core.errors import GradCompError, SettingsError, explain
from ..core.settings import parse_codec
from . import overhead_worker, step_tensorflow, step_tensorflow_worker, step_worker
from .local import launcher, run
from .models import MODELS, shapes_of
from .step_worker import BASE, MARK, WATCHED
from .turns import compared

Row = dict[str, Any]

_SHOWN = ("encode", "wait", "decode")
_TIMES = (*(f"{key}_ms" for key in _SHOWN), "codec_ms")

FORMS = ("fp16", "linear", "topk", "randomk", "powersgd")
"""Codecs that are measured where none is named."""


def step(
    model: str = typer.Option("resnet50", help=f"Whose tensors: {', '.join(MODELS)}."),
    framework: str = typer.Option("torch", help="torch or tensorflow."),
    groups: int = typer.Option(
        0, min=0, help="TensorFlow: measure again with gradients in so many groups; 0: do not."
    ),
    ranks: int = typer.Option(2, min=2, help="Ranks on this machine."),
    steps: int = typer.Option(3, min=1, help="Steps of a turn."),
    rounds: int = typer.Option(5, min=1, help="Turns of each system, of which medians count."),
    codec: Optional[list[str]] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, help="A codec's string form; several times for several."
    ),
    telemetry: int = typer.Option(
        0, min=0, help="Measure each codec again with a record every so many steps; 0: do not."
    ),
    timeout: float = typer.Option(900.0, min=1.0, help="Seconds until the ranks are ended."),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write the rows to this file."
    ),
) -> None:
    """Reduce gradients of a model's shapes on local ranks over Gloo, in turns with Horovod alone.

    "Calls" is what compress and decompress take beside the work of codec and memory, and beside
    waiting, in microseconds a tensor: the price of many tensors. It is measured in one process with
    small tensors, as many as the model has; the least of 20 steps counts, and of nine of these the
    median. The file also has the time of codec and memory, and what calls take in the steps of all
    ranks ("own": without taking gradients in and without looking for what is not finite, which are
    work there). With --telemetry give as many --steps, or a multiple, so that every turn has its
    share of records. All ranks share this machine, so that no step shows what a slow link would.

    TensorFlow's steps are those of a gradient tape in a traced function; its rows have the
    operations of that graph and the seconds of tracing it, and no times of parts.
    """
    shapes = shapes_of(model)
    forms = list(codec or FORMS)
    for form in forms:
        parse_codec(form)  # a mistake in the last shows before the first is measured
    _check(framework, groups, telemetry)
    if framework == "tensorflow":
        _step_of_tensorflow(model, forms, groups, ranks, steps, rounds, timeout, json_file)
        return
    watched = [form + WATCHED for form in forms] if telemetry else []
    systems = [BASE, *(name for pair in zip(forms, watched or forms) for name in pair)]
    systems = list(dict.fromkeys(systems))  # in turns, a codec and the same with telemetry
    wanted = {"model": model, "systems": systems, "steps": steps, "rounds": rounds}
    wanted["telemetry"] = telemetry
    console = Console()
    turns = _turns(step_worker.__name__, wanted, ranks, timeout)
    calls = {one["system"]: one for one in _calls(model, forms, timeout)}
    rows = [{**_row(name, turns, model, shapes), **calls.get(name, {})} for name in systems]
    console.print(_table([row for row in rows if row["system"] not in watched], shapes, ranks))
    for form in forms if telemetry else ():
        rows.append(_compared(form, turns, telemetry))
        console.print(_told(rows[-1]), highlight=False)
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


def _check(framework: str, groups: int, telemetry: int) -> None:
    if framework not in ("torch", "tensorflow"):
        expected = "torch or tensorflow"
        raise SettingsError(explain(got=f"--framework {framework}", expected=expected))
    if groups and framework == "torch":
        raise SettingsError(explain(got="--groups with torch", expected="--framework tensorflow"))
    if telemetry and framework == "tensorflow":
        why = "a graph shows no times of parts"
        raise SettingsError(
            explain(got="--telemetry with tensorflow", expected="--framework torch", why=why)
        )


def _turns(worker: str, wanted: Row, ranks: int, timeout: float) -> list[Row]:
    """Return what a worker prints of its turns."""
    found = launcher()
    if found is None:
        raise GradCompError("there is no horovodrun here; gradcomp doctor says what mends it")
    command = [found, "--gloo", "--disable-cache", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    command += [sys.executable, "-m", worker, json.dumps(wanted)]
    text = f"{wanted['model']}: {wanted['rounds']} turns of {len(wanted['systems'])} systems"
    with Console(stderr=True).status(text):
        code, output = run(command, timeout)
    return _lines(code, output, MARK)


def _step_of_tensorflow(
    model: str,
    forms: Sequence[str],
    groups: int,
    ranks: int,
    steps: int,
    rounds: int,
    timeout: float,
    json_file: Path | None,
) -> None:
    systems = step_tensorflow.systems(forms, groups)
    wanted = {"model": model, "systems": systems, "steps": steps, "rounds": rounds}
    turns = _turns(step_tensorflow_worker.__name__, wanted, ranks, timeout)
    shapes = shapes_of(model)
    rows = [step_tensorflow.row(name, turns, model, shapes) for name in systems]
    Console(width=120).print(step_tensorflow.table(rows, shapes, ranks))
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


def _calls(model: str, forms: Sequence[str], timeout: float) -> list[Row]:
    """Return what compress and decompress themselves take, measured in one process."""
    wanted = {"model": model, "systems": forms, "steps": 20, "rounds": 9}
    command = [sys.executable, "-m", overhead_worker.__name__, json.dumps(wanted)]
    with Console(stderr=True).status(f"{model}: calls of {len(forms)} systems"):
        code, output = run(command, timeout)
    return _lines(code, output, overhead_worker.MARK)


def _lines(code: int | None, output: str, mark: str) -> list[Row]:
    if code != 0:
        raise GradCompError(f"{output[-3000:]}\nwhat was measured ended with code {code}")
    return [json.loads(line.split(mark, 1)[1]) for line in output.splitlines() if mark in line]


def _row(name: str, turns: Sequence[Row], model: str, shapes: Sequence[Any]) -> Row:
    mine = [turn for turn in turns if turn["system"] == name]
    row: Row = {
        "system": name,
        "model": model,
        "tensors": len(shapes),
        **compared(name, BASE, turns, "times_none"),
    }
    if name == BASE:
        nbytes = 4 * sum(map(math.prod, shapes))
        return {**row, "mb_per_step": nbytes / 1e6, "collectives_per_step": len(shapes)}

    def median(key: str) -> float:
        return float(statistics.median(turn[key] for turn in mine))

    own = [t["spent_ms"] - t["encode_ms"] - t["wait_ms"] - t["decode_ms"] for t in mine]
    return {
        **row,
        "mb_per_step": median("bytes") / 1e6,
        "collectives_per_step": median("collectives"),
        **{f"{key}_per_step": median(key) for key in _TIMES},
        "own_us_per_tensor": 1e3 * statistics.median(own) / len(shapes),
    }


def _compared(form: str, turns: Sequence[Row], every: int) -> Row:
    """Return how long a codec's steps take with telemetry, in steps without."""
    plain, watched = ([t for t in turns if t["system"] == one] for one in (form, form + WATCHED))
    return {
        **compared(form + WATCHED, form, turns, "times_without"),
        "step_ms": statistics.median(t["step_ms"] for t in plain),
        "measuring_ms_a_record": every * statistics.median(t["measured_ms"] for t in watched),
        "telemetry_of": form,
        "every": every,
    }


def _told(row: Row) -> str:
    ends = " to ".join(f"{row[key]:.4f}" for key in ("times_least", "times_most"))
    return (
        f"{row['telemetry_of']}, a record every {row['every']} steps: {row['times_without']:.4f} "
        f"times the step without ({ends}); measuring takes {row['measuring_ms_a_record']:.3g} ms a "
        f"record, a step {row['step_ms']:,.0f} ms"
    )


def _table(rows: Sequence[Row], shapes: Sequence[Any], ranks: int) -> Table:
    numel = sum(map(math.prod, shapes))
    table = Table(
        title=f"{rows[0]['model']}: {len(shapes)} tensors of {numel:,} values, {ranks} ranks",
        caption="ms a step; times of Horovod alone: median, least, most; calls: us a tensor",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("system", no_wrap=True)
    for head in ("step", "times", "least", "most", "MB", *_SHOWN, "calls"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        inside = [row.get(f"{key}_ms_per_step") for key in _SHOWN]
        inside.append(row.get("calls_us_per_tensor"))
        table.add_row(
            row["system"],
            f"{row['step_ms']:,.0f}",
            *(f"{row[key]:.2f}" for key in ("times_none", "times_least", "times_most")),
            f"{row['mb_per_step']:.3g}",
            *("-" if value is None else f"{value:.3g}" for value in inside),
        )
    return table
