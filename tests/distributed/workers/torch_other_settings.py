"""Rank 1 compresses more than rank 0: every rank must say so."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import Compression, ExchangeError
from tests.distributed.launch import report

hvd.init()
net = torch.nn.Linear(64, 64)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=0.1),
    named_parameters=net.named_parameters(),
    compression=Compression.topk(ratio=0.1 / (1 + hvd.rank())),
)
try:
    net(torch.ones(3, 64)).sum().backward()
    optimizer.step()
    report({"error": "none was raised"})
except ExchangeError as error:
    report({"error": str(error)})
