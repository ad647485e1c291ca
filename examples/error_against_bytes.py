"""Draw how much of real gradients each codec loses in one step, against the bytes it sends.

    python examples/error_against_bytes.py docs/error_against_bytes.png

Two nets of the convergence runs are trained uncompressed for some steps by one process. Then the
gradient of each weight matrix and kernel is sent through every codec, at several settings. Errors
of a single, first step: what a memory gives back later, and bases that ``acp``, ``tucker`` and
``powersgd`` improve from step to step, are not in this picture. A batch of 16 makes gradients of
fully connected layers of rank 16 at most, which 16 columns hold without an error.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
import typer
from convergence_table import TASKS
from convergence_worker import KINDS
from rich.progress import track

from horovod_gradcomp.testing import roundtrip

FAMILIES: dict[str, list[str]] = {
    "casts": ["fp16", "bf16", "fp8"],
    "linear": [f"linear:bits={bits}" for bits in (8, 6, 4, 3, 2)],
    "logarithmic": [f"logarithmic:bits={bits}" for bits in (8, 6, 4)],
    "qsgd": [f"qsgd:bits={bits}" for bits in (8, 6, 4, 2)],
    "natural, terngrad": ["natural", "terngrad"],
    "sign, onebit": ["onebit", "sign"],
    "topk": [f"topk:ratio={ratio}" for ratio in (0.3, 0.1, 0.03, 0.01, 0.001)],
    "threshold": [f"threshold:value={value}" for value in (0.001, 0.003, 0.01)],
    "dgc": ["dgc:ratio=0.01", "dgc:ratio=0.001"],
    "topk+linear": [f"topk:ratio={ratio}+linear:bits=8" for ratio in (0.1, 0.03, 0.01, 0.001)],
    "randomk": [f"randomk:ratio={ratio}" for ratio in (0.3, 0.1, 0.03, 0.01)],
    "bernoulli, cltk": ["bernoulli:p=0.1", "cltk:ratio=0.1", "cltk:ratio=0.01"],
    "acp": [f"acp:rank={rank}" for rank in (16, 4, 1)],
    "powersgd": [f"powersgd:rank={rank}" for rank in (16, 4, 1)],
    "svd": [f"svd:rank={rank}" for rank in (16, 4, 1)],
    "tucker": [f"tucker:ranks={rank}" for rank in (16, 4, 1)],
}
"""By label in the picture: settings that are joined by a line, most bytes first."""


def gradients(name: str, steps: int) -> list[Any]:
    """Return the gradients of a net's weights after some steps, as arrays."""
    task = next(t for t in TASKS if t.name == name)
    torch.manual_seed(1)
    data = KINDS[task.kind](task)
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), task.lr, task.momentum)
    for step, (x, y) in zip(range(steps + 1), data.batches(seed=1)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step < steps:
            optimizer.step()
    return [p.grad.numpy() for p in model.parameters() if p.dim() > 1]


def point(codec: str, grads: list[Any]) -> tuple[float, float]:
    """Return payload bytes over float32 bytes, and the relative error of all gradients."""
    lost = sent = 0.0
    for grad in grads:
        arrived, nbytes = roundtrip(codec, grad)
        lost, sent = lost + float(np.square(arrived - grad).sum()), sent + nbytes
    whole = sum(float(np.square(grad).sum()) for grad in grads)
    return sent / sum(grad.nbytes for grad in grads), math.sqrt(lost / whole)


def main(
    picture: Path = typer.Argument(help="Write this file, PNG or SVG."),
    steps: int = typer.Option(100, help="Uncompressed steps before the gradient is taken."),
    task: list[str] = typer.Option(["digits", "text"], help="Tasks of the convergence runs."),
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    hvd.init()
    torch.set_num_threads(1)
    size = (5 * len(task) + 2, 4.5)
    figure, panels = plt.subplots(1, len(task), figsize=size, sharey=True, squeeze=False)
    for axes, name in zip(panels[0], task):
        grads = gradients(name, steps)
        for number, (label, forms) in enumerate(
            track(FAMILIES.items(), description=name, transient=True)
        ):
            points = [point(form, grads) for form in forms]
            look = {"color": plt.get_cmap("tab20")(number), "marker": "osD^v"[number % 5]}
            axes.plot(*zip(*points), label=label, linewidth=1, markersize=5, **look)
            for form, (share, error) in zip(forms, points):
                print(f"{name:10} {form:32} bytes {share:.4f} error {error:.4f}")
        axes.set(xscale="log", yscale="log", title=f"{name}, gradient after {steps} steps")
        axes.set_ylim(1e-4, 1.6)
        axes.set_xlabel("bytes sent, of those of float32")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("error of one step, of the gradient's norm")
    panels[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    typer.run(main)
