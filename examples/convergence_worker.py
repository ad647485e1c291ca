"""One rank of the convergence runs: every setting and seed of a task, one after the other.

Rank 0 writes each result at once into the JSON file; what is in it already is not run again.
"""

from __future__ import annotations

import json
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import typer
from convergence_table import QUICK_TASKS, TASKS, Setting, Task, key, write
from torch import nn
from training import average, convolutional_net, digits, weights_equal

from horovod_gradcomp.torch import Compression

Batch = tuple[torch.Tensor, torch.Tensor]
CURVE_POINTS = {False: 6, True: 4}  # whether the task was shrunk
WINDOW = 16  # characters that the LSTM sees at once
CHARACTERS = 97  # line feed, ASCII from space to tilde, and one for all others


class Digits:
    """The digits, and how well a net reads those held out."""

    def __init__(self, task: Task) -> None:
        train, test = digits()
        self.images, self.labels = train.tensors
        self.tests = [x[hvd.rank() :: hvd.size()] for x in test.tensors]
        self.batch = task.batch

    def model(self) -> nn.Module:
        return convolutional_net()

    def batches(self, seed: int) -> Iterator[Batch]:
        order = torch.Generator().manual_seed(seed)
        while True:  # epoch by epoch
            mine = torch.randperm(len(self.images), generator=order)[hvd.rank() :: hvd.size()]
            for part in mine.split(self.batch)[: len(mine) // self.batch]:
                yield self.images[part], self.labels[part]

    def measure(self, model: nn.Module) -> float:
        parts = zip(*(x.split(100) for x in self.tests))
        right = [(model(x).argmax(1) == y).float().mean().item() for x, y in parts]
        return 100 * average(sum(right) / len(right), "measure")


class Residual(Digits):
    def model(self) -> nn.Module:
        return residual_net(12)


class Text:
    """Top-level modules of the running Python's library; every tenth file is held out."""

    def __init__(self, task: Task) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.train = encode([f for i, f in enumerate(files) if i % 10])
        held_out = encode([f for i, f in enumerate(files) if i % 10 == 0])
        windows = held_out[: len(held_out) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
        chosen = torch.linspace(0, len(windows) - 1, 256 if task.shrink else 512).long()
        self.tests = windows[chosen][hvd.rank() :: hvd.size()]  # (windows / ranks, WINDOW + 1)
        self.batch, self.units = task.batch, 128 if task.shrink else 464

    def model(self) -> nn.Module:
        return LSTM(self.units)

    def batches(self, seed: int) -> Iterator[Batch]:
        places = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        while True:
            first = torch.randint(len(self.train) - WINDOW, (self.batch, 1), generator=places)
            window = self.train[first + torch.arange(WINDOW + 1)]  # (batch, WINDOW + 1)
            yield window[:, :-1], window[:, 1:].flatten()

    def measure(self, model: nn.Module) -> float:
        losses = [
            F.cross_entropy(model(part[:, :-1]), part[:, 1:].flatten()).item()
            for part in self.tests.split(64)
        ]
        return average(sum(losses) / len(losses), "measure") / math.log(2)


KINDS = {"digits": Digits, "residual": Residual, "text": Text}


def encode(files: list[Path]) -> torch.Tensor:
    """Return the numbers of all characters; one that is not ASCII counts as many as its bytes."""
    table = torch.zeros(256, dtype=torch.long)
    table[10], table[32:127] = 1, torch.arange(2, CHARACTERS)
    text = b"".join(f.read_bytes() for f in files)
    return table[torch.frombuffer(bytearray(text), dtype=torch.uint8).int()]


class Block(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.skip = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(inside, out, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.skip(x))


def residual_net(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
    )


class LSTM(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, 64)
        self.lstm = nn.LSTM(64, units, batch_first=True)
        self.out = nn.Linear(units, CHARACTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(x))  # (batch, WINDOW, units)
        return self.out(hidden).flatten(0, 1)  # (batch * WINDOW, CHARACTERS)


def measure(data: Any, model: nn.Module) -> float | None:
    """Return the result on held-out data, None where it is no number."""
    for name, held in model.named_buffers():
        if held.is_floating_point():  # what batch norm gathered on each rank by itself
            held.copy_(hvd.allreduce(held, name=f"buffer.{name}"))
    model.eval()
    with torch.no_grad():
        value = data.measure(model)
    model.train()
    return round(value, 4) if math.isfinite(value) else None


def train(task: Task, data: Any, setting: Setting, seed: int) -> dict[str, Any]:
    """Train once and return what the JSON file keeps of it."""
    torch.manual_seed(seed)
    model = data.model()
    codec, options, momentum = setting.resolved(task)
    if task.optimizer == "adam":
        inner: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), task.lr)
    else:
        inner = torch.optim.SGD(model.parameters(), task.lr, momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    dense = codec == "dense"
    compression = hvd.Compression.none if dense else Compression.from_string(codec, **options)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression)

    began, points = time.perf_counter(), CURVE_POINTS[task.shrink]
    curve: list[list[Any]] = []
    losses: list[float] = []
    for step, (x, y) in zip(range(task.steps), data.batches(seed)):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * (1 - step / task.steps)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) * points // task.steps > step * points // task.steps:
            curve.append([step + 1, measure(data, model)])
    stats = {} if dense else compression.stats()
    finite = math.isfinite(average(sum(losses), "losses"))
    return {
        "task": task.name,
        "setting": setting.label(task),
        "memory": "" if dense else stats["settings"].partition(" memory=")[2].split(" ")[0],
        "role": setting.role,
        "family": setting.family,
        "seed": seed,
        "result": curve[-1][1] if finite else None,
        "ratio": 1.0 if dense else round(stats["ratio"], 6),
        "seconds": round(time.perf_counter() - began, 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_equal": weights_equal(model),
        "curve": curve,
        "fixed": task.fixed(),
    }


def main(
    task_name: str = typer.Option(..., "--task", help="Name of a task."),
    seeds: int = typer.Option(..., help="How many seeds, from 1 on."),
    json_file: Path = typer.Option(..., "--json", help="Add the results to this file."),
    quick: bool = typer.Option(False, "--quick", help="The small form."),
) -> None:
    # Ranks, and Horovod's own thread in each, share the machine's cores.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "3")
    torch.set_num_threads(1)
    hvd.init()
    task = next(t for t in (QUICK_TASKS if quick else TASKS) if t.name == task_name)
    pairs = [(setting, seed) for seed in range(1, seeds + 1) for setting in task.settings]
    content = json.loads(json_file.read_text()) if hvd.rank() == 0 else None
    done = hvd.broadcast_object(
        content and sorted(k for k, run in content["runs"].items() if run["fixed"] == task.fixed()),
        name="done",
    )
    data = KINDS[task.kind](task)
    for i, (setting, seed) in enumerate(pairs):
        name = key(task, setting, seed)
        if name not in done:
            result = train(task, data, setting, seed)
            if content is not None:
                content["runs"][name] = result
                write(json_file, content)
        if hvd.rank() == 0:
            print(f"convergence: {i + 1}/{len(pairs)} {name}", flush=True)


if __name__ == "__main__":
    typer.run(main)
