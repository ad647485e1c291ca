"""Train on the digits until a share of those held out is read, and take the time.

Over a link of a set speed, on one machine (as root):

    gradcomp lab --hosts 2 --bandwidth 100mbit -- python examples/time_to_accuracy.py \\
        --compression dense --compression topk:ratio=0.01

Measuring the accuracy takes no part in the time.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import typer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from training import average, convolutional_net, digits

from horovod_gradcomp.torch import Compression

EVERY = 10  # steps from one look at the accuracy to the next


def train(name: str, target: float, lr: float, most: int, seed: int) -> dict[str, object]:
    """Return the seconds and steps that it took, None where the target was not reached."""
    torch.manual_seed(seed)
    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=seed, drop_last=True)
    loader = DataLoader(train_set, 32, sampler=sampler, drop_last=True)
    images, labels = (x[hvd.rank() :: hvd.size()] for x in test_set.tensors)
    model = convolutional_net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = hvd.Compression.none if name == "dense" else Compression.from_string(name)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr * hvd.size(), momentum=0.5),
        model.named_parameters(),
        compression,
    )

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean().item()
        model.train()
        return 100 * average(right, "accuracy")

    seconds, steps, reached = 0.0, 0, 0.0
    while steps < most and reached < target:
        sampler.set_epoch(steps // len(loader))
        for x, y in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seconds += time.perf_counter() - start
            steps += 1
            if steps % EVERY == 0:
                reached = accuracy()
                if reached >= target or steps >= most:
                    break
    done = reached >= target
    return {
        "compression": name,
        "target": target,
        "seconds": round(average(seconds, "seconds"), 2) if done else None,
        "steps": steps if done else None,
        "accuracy": round(reached, 2),
        "step_ms": round(1e3 * seconds / steps, 2),
    }


def main(
    compression: list[str] = typer.Option(
        ["dense", "topk:ratio=0.01"], help="'dense', or a codec's string."
    ),
    target: float = typer.Option(95.0, help="Per cent of the held-out digits."),
    lr: float = typer.Option(0.05, help="Learning rate for one rank; scaled by the world size."),
    most: int = typer.Option(1500, help="Steps after which a run is given up."),
    seed: int = typer.Option(1, help="Of weights and order of images."),
    json_file: Path = typer.Option(None, "--json", help="Write the rows to this file."),
) -> None:
    hvd.init()
    torch.set_num_threads(1)
    rows = []
    for name in compression:
        rows.append(train(name, target, lr, most, seed))
        if hvd.rank() == 0:
            print(rows[-1], flush=True)
    if json_file and hvd.rank() == 0:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
