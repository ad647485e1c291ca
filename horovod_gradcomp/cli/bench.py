"""``gradcomp bench``: figures as multiples of a copy measured in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..codecs import REGISTRY
from ..core.errors import SettingsError, explain

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep ``bench`` a group with named commands."""


@app.command()
def codecs(
    codec: Optional[list[str]] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, help="A codec's string form; several times for several. Default: all, as they come."
    ),
    numel: list[int] = typer.Option([25_000_000], help="Float32 values; several for several."),
    threads: int = typer.Option(1, help="CPU threads of the framework."),
    framework: str = typer.Option("torch", help="torch or tensorflow."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    repeat: int = typer.Option(5, help="Runs of each, of which the median counts."),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write the rows to this file."
    ),
) -> None:
    """Encode (with the memory's update) and decode each codec, against a copy of the tensor."""
    from .measure import measure

    for name, value, allowed in (
        ("framework", framework, ("torch", "tensorflow")),
        ("device", device, ("cpu", "cuda")),
    ):
        if value not in allowed:
            raise SettingsError(explain(got=f"--{name} {value}", expected=" or ".join(allowed)))
    names = codec or list(REGISTRY)
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names) * len(numel))
        for count in numel:
            for name in names:
                progress.update(task, description=f"{name}, {count:,}")
                rows.append(measure(name, count, threads, framework, device, repeat))
                progress.advance(task)
    Console().print(_table(rows, f"{framework}, {device}, {threads} thread(s)"))
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, caption="times in copies of the tensor", box=SIMPLE_HEAD)
    heads = ("codec", "values", "encode", "decode", "bytes per\nvalue", "extra\nMB")
    for i, head in enumerate((*heads, "error", "error,\nheavy")):
        justify: Literal["right", "left"] = "right" if i else "left"
        table.add_column(
            head, justify=justify, overflow="fold", no_wrap=i > 0, min_width=0 if i else 14
        )
    for row in rows:
        table.add_row(
            row["codec"],
            f"{row['numel']:,}",
            f"{row['encode_x']:.1f}",
            f"{row['decode_x']:.1f}",
            f"{row['bytes_per_elem']:.4f}",
            f"{row['peak_extra_bytes'] / 1e6:.1f}",
            f"{row['rel_error']:.4f}",
            f"{row['rel_error_heavy']:.4f}",
        )
    return table
