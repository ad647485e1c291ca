"""``gradcomp bench``: figures as multiples of a copy measured in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..core.errors import SettingsError, explain
from ..core.settings import parse_codec
from . import costs
from .network import network
from .step import step

FORMS = (
    "none",
    "fp16",
    "bf16",
    "fp8",
    "linear",
    "linear:bits=4",
    "logarithmic",
    "qsgd",
    "terngrad",
    "natural",
    "sign",
    "onebit",
    "topk",
    "topk:ratio=0.001",
    "topk:select=exact",
    "threshold:value=2.5",
    "dgc",
    "randomk",
    "bernoulli",
    "cltk",
    "acp",
    "powersgd",
    "svd",
    "tucker",
    "topk+linear",
)
"""What is measured where nothing is named: every codec, and settings that cost otherwise."""

Row = dict[str, Any]

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


app.command("costs")(costs.write)
app.command()(network)
app.command()(step)


@app.command()
def codecs(
    codec: Optional[list[str]] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None,
        help="A codec's string form; several times for several. Default: every codec.",
    ),
    numel: list[int] = typer.Option(
        [25_001_984],
        min=1,
        help="Float32 values, rounded down to fill a matrix; several times for several.",
    ),
    threads: int = typer.Option(1, min=1, help="CPU threads of the framework."),
    framework: list[str] = typer.Option(
        ["torch"], help="torch or tensorflow; twice for both, side by side."
    ),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    ranks: int = typer.Option(
        1, min=1, help="Gathered payloads to decode; payloads that Horovod sums are one."
    ),
    repeat: int = typer.Option(5, min=1, help="Runs of each, of which the median counts."),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write the rows to this file."
    ),
) -> None:
    """Encode (with the memory's update) and decode each codec, against a copy of the tensor."""
    _check("framework", framework, ("torch", "tensorflow"))
    _check("device", [device], ("cpu", "cuda"))
    from .measure import measure

    labs, forms = list(dict.fromkeys(framework)), codec or FORMS
    for form in forms:
        parse_codec(form)  # a mistake in the last shows before the first is measured
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(numel) * len(forms) * len(labs))
        for count in numel:
            for form in forms:
                for lab in labs:
                    progress.update(task, description=f"{form}, {count:,}, {lab}")
                    row = measure(
                        form,
                        count,
                        framework=lab,
                        device=device,
                        threads=threads,
                        ranks=ranks,
                        repeat=repeat,
                    )
                    rows.append(row)
                    progress.advance(task)
    # Wider than any table, so that none is cut, whatever the width of the terminal.
    console = Console(width=500)
    for shown in dict.fromkeys(row["numel"] for row in rows):
        console.print("", _table([row for row in rows if row["numel"] == shown], labs), sep="\n")
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


def _check(option: str, values: list[str], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise SettingsError(explain(got=f"--{option} {value}", expected=" or ".join(allowed)))


def _cell(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)


def _table(rows: list[Row], labs: list[str]) -> Table:
    """Return the rows of one size; what frameworks have in common comes from the first."""
    first = rows[0]
    title = f"{first['numel']:,} float32 values, {first['device']}, {first['threads']} thread(s)"
    if first["ranks"] > 1:
        title += f", decode of {first['ranks']} ranks"
    copies = sorted(row["copy_ms"] for row in rows)
    spread = max(row["spread"] for row in rows)
    table = Table(
        title=f"{title}\n{' and '.join(labs)}",
        caption=f"times in copies of the tensor ({copies[0]:.2f} to {copies[-1]:.2f} ms); "
        f"spread of one row's up to {100 * spread:.0f} %",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 2 - len(labs), 0, 0),  # both side by side just fit into 80 columns
    )
    table.add_column("codec", no_wrap=True)
    columns: list[Callable[[dict[str, Row]], str]] = []

    def column(head: str, key: str, form: str, *, each: bool = True, unit: float = 1.0) -> None:
        for lab in labs if each else labs[:1]:
            short = {"tensorflow": "tf"}.get(lab, lab)
            below = f"\n{short}" if each and len(labs) > 1 else ""
            table.add_column(head + below, justify="right", no_wrap=True)
            columns.append(lambda by, lab=lab: _cell(by[lab][key], unit, form))  # type: ignore[misc]

    column("encode", "encode_x", ".1f")
    column("decode", "decode_x", ".1f")
    column("bytes/\nvalue", "bytes_per_elem", ".4f", each=False)
    column("extra\nMB" if len(labs) == 1 else "MB", "peak_extra_bytes", ".1f", unit=1e6)
    column("error", "rel_error", ".4f", each=False)
    column("error,\nheavy", "rel_error_heavy", ".4f", each=False)
    for start in range(0, len(rows), len(labs)):
        by = {row["framework"]: row for row in rows[start : start + len(labs)]}
        table.add_row(rows[start]["codec"], *(cell(by) for cell in columns))
    return table
