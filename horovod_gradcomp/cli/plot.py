"""``gradcomp plot``: a report of what telemetry recorded, or a picture of a traced step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Optional

import typer

from . import timeline
from .report import rows, write
from .runs import read


def plot(
    files: list[Path] = typer.Argument(
        ..., help="What compression.telemetry(path) wrote, or one trace."
    ),
    output: Optional[Path] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None,
        "--output",
        "-o",
        help="An .html, .png, .svg or .pdf file; default: the first file's name with .html.",
    ),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write the table of layers, and totals, to this file."
    ),
    step: Optional[int] = typer.Option(  # noqa: UP045
        None, help="Of a trace, the step to draw; default: one in the middle."
    ),
) -> None:
    """Draw curves and a table of layers from telemetry of one run, or of several to compare.

    An .html file has all in it and needs no network. Where a file repeats steps, as that of a run
    that went on from a checkpoint does, what was written later counts. Of what compression.trace
    wrote, one step is drawn, by default into a .png file.
    """
    if len(files) == 1 and timeline.is_trace(files[0]):
        target = output or files[0].with_suffix(".png")
        timeline.draw(files[0], target, step)
        typer.echo(f"wrote {target}")
        return
    runs = [run for path in files for run in read(path)]
    if json_file:
        found = [
            {"run": run.label, "step": run.last["step"], **run.last["total"], "layers": rows(run)}
            for run in runs
        ]
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if output is None and json_file:
        return
    target = output or files[0].with_suffix(".html")
    write(target, runs)
    typer.echo(f"wrote {target}")
