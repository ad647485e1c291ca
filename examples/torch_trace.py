"""Trace a few training steps, to see what travels while backward goes on.

    horovodrun -np 2 python examples/torch_trace.py --compression linear --output trace.json
    gradcomp plot trace.json

The net has twelve layers of 1024 x 1024. Over a link of a set speed (as root):

    gradcomp lab --hosts 2 --bandwidth 1gbit -- python examples/torch_trace.py --output trace.json
"""

from __future__ import annotations

from pathlib import Path

import horovod.torch as hvd
import torch
import typer

from horovod_gradcomp.torch import Compression

WARM = 3  # steps before the trace


def main(
    compression: str = typer.Option("linear", help="A codec's string form."),
    output: Path = typer.Option("trace.json", help="Where rank 0 writes the trace."),
    steps: int = typer.Option(3, help="How many are traced."),
    batch: int = typer.Option(64, help="Samples of a step on each rank."),
) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(layer for _ in range(12) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU()))
    )
    compressor = Compression.from_string(compression, bucket_bytes=4 * 2**20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compressor
    )

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(batch, 1024)).square().mean().backward()
            optimizer.step()

    train(WARM)
    with compressor.trace(output):
        train(steps)


if __name__ == "__main__":
    typer.run(main)
