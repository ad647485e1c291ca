"""Run an example on local ranks, dense against compressed, and show one table.

    python examples/demo.py --np 2 --json rows.json

Any example that takes ``--compression`` several times, prints ``<name>: epoch 1/12, ...`` on rank
0 and writes its rows with ``--json`` can be shown so.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import typer
from launch import horovodrun, run
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROWS = ["dense", "fp16", "topk:ratio=0.01", "linear:bits=4", "randomk:ratio=0.05"]
EPOCH = re.compile(r"(?:^|>:)(?P<name>[^\s<>]+): epoch (?P<done>\d+)/(?P<of>\d+)")


def progress_of(line: str, names: list[str]) -> tuple[str, int, int] | None:
    """Return which kind of compression a rank's line is about, and how far the whole run is."""
    found = EPOCH.search(line)
    if not found or found["name"] not in names:
        return None
    done, of = int(found["done"]), int(found["of"])
    return found["name"], names.index(found["name"]) * of + done, len(names) * of


def table(rows: list[dict[str, object]], title: str) -> Table:
    out = Table(title=title, box=SIMPLE_HEAD)
    for i, head in enumerate(
        ("compression", "accuracy\n%", "seconds", "step\nms", "MB per\nstep", "ratio")
    ):
        out.add_column(head, justify="right" if i else "left", no_wrap=True)
    out.add_column("weights\nequal", justify="center", no_wrap=True)
    for row in rows:
        *values, equal = row.values()
        out.add_row(*map(str, values), "yes" if equal else "NO")
    return out


def main(
    script: Path = typer.Option(HERE / "torch_mnist.py", help="The example to run."),
    np: int = typer.Option(2, help="Number of ranks on this machine."),
    compression: list[str] = typer.Option(ROWS, help="'dense', or a codec's string."),
    epochs: int = typer.Option(None, help="Passes over the training images."),
    momentum: float = typer.Option(None, help="Of SGD."),
    json_file: Path = typer.Option(None, "--json", help="Write the rows to this file."),
) -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        command = [*horovodrun(np), str(script), "--json", str(result)]
        command += [part for name in compression for part in ("--compression", name)]
        command += ["--epochs", str(epochs)] if epochs is not None else []
        command += ["--momentum", str(momentum)] if momentum is not None else []
        run(command, lambda line: progress_of(line, compression), console)
        rows = json.loads(result.read_text())
    console.print(
        table(rows, f"{script.stem}, {np} ranks: accuracy on held-out digits, MB sent by a rank")
    )
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")
    if not all(row["weights_equal"] for row in rows):
        raise SystemExit("weights differ between ranks")


if __name__ == "__main__":
    typer.run(main)
