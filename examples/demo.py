"""Run an example on local ranks, dense against compressed, and show one table.

    python examples/demo.py --np 2 --json rows.json

Any example that takes ``--compression`` several times, prints ``<name>: epoch 1/12, ...`` on rank
0 and writes its rows with ``--json`` can be shown so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
ROWS = ["dense", "fp16", "topk:ratio=0.01", "linear:bits=4", "randomk:ratio=0.05"]
EPOCH = re.compile(r"(?:^|>:)(?P<name>[^\s<>]+): epoch (?P<done>\d+)/(?P<of>\d+)")


def run(command: list[str], names: list[str], console: Console) -> None:
    """Run the ranks and turn their epoch lines into a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    log: list[str] = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("starting ranks", total=None)
        ranks = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            assert ranks.stdout is not None
            for line in ranks.stdout:
                log.append(line)
                found = EPOCH.search(line)
                if found and found["name"] in names:
                    done, of = int(found["done"]), int(found["of"])
                    progress.update(
                        task,
                        description=found["name"],
                        completed=names.index(found["name"]) * of + done,
                        total=len(names) * of,
                    )
            code = ranks.wait()
        finally:
            if ranks.poll() is None:
                os.killpg(ranks.pid, signal.SIGTERM)
                ranks.wait()
    if code:
        console.print("".join(log[-40:]), markup=False)
        raise SystemExit(f"the ranks ended with exit code {code}")


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
    horovodrun = Path(sys.executable).with_name("horovodrun")
    if not horovodrun.exists():
        raise SystemExit(f"{horovodrun} is not there: run docker/install_horovod.sh first")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        command = [str(horovodrun), "--gloo", "-np", str(np), "-H", f"localhost:{np}"]
        command += [sys.executable, str(script), "--json", str(result)]
        command += [part for name in compression for part in ("--compression", name)]
        command += ["--epochs", str(epochs)] if epochs is not None else []
        command += ["--momentum", str(momentum)] if momentum is not None else []
        run(command, compression, console)
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
