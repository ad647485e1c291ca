"""What the examples share whatever the framework: their command line and the rows of one table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


def row(
    name: str,
    *,
    accuracy: float,
    seconds: float,
    steps: list[float],
    dense: int,
    compression: Any,
    equal: bool,
) -> dict[str, object]:
    """Return one row: ``accuracy`` from 0 to 1, ``dense`` bytes of gradients, seconds of steps."""
    sent = dense if name == "dense" else compression.stats()["wire_bytes_per_step"]
    return {
        "compression": name,
        "accuracy": round(100 * accuracy, 2),
        "seconds": round(seconds, 2),
        "step_ms": round(1e3 * statistics.median(steps), 2),
        "mb_per_step": round(sent / 1e6, 5),
        "ratio": round(sent / dense, 4),
        "weights_equal": equal,
    }


def run(train: Callable[..., dict[str, object]], hvd: Any) -> None:
    """Train once for each kind of compression on the command line, and write the rows."""

    def main(
        compression: list[str] = typer.Option(
            ["topk:ratio=0.01"], help="'dense', or a codec's string."
        ),
        epochs: int = typer.Option(12, help="Passes over the training images."),
        batch: int = typer.Option(32, help="Images a rank and step."),
        lr: float = typer.Option(
            0.05, help="Learning rate for one rank; scaled by the world size."
        ),
        momentum: float = typer.Option(0.5, help="Of SGD, as in Horovod's own MNIST example."),
        seed: int = typer.Option(1, help="Of weights and order of images."),
        telemetry: Path = typer.Option(
            None, help="Record steps to this file, for gradcomp plot; the last codec's stay."
        ),
        json_file: Path = typer.Option(None, "--json", help="Write the rows to this file."),
    ) -> None:
        rows = [train(name, epochs, batch, lr, momentum, seed, telemetry) for name in compression]
        if hvd.rank() == 0:
            for row in rows:
                print(row, flush=True)
            if json_file:
                json_file.write_text(json.dumps(rows, indent=2) + "\n")

    hvd.init()
    typer.run(main)
