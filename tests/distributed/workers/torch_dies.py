"""Rank 1 ends in the middle of a step: rank 0 must not hang, nor go on with a wrong gradient."""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import Compression

hvd.init()
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=0.1),
    named_parameters=net.named_parameters(),
    compression=Compression.topk(ratio=0.1),
)
for step in range(10):
    if hvd.rank() == 1 and step == 5:
        os._exit(3)
    optimizer.zero_grad()
    net(torch.ones(3, 64)).sum().backward()
    optimizer.step()
raise SystemExit("rank 0 went on alone")
