"""Rank 1 fails in the middle of a run: rank 0 must not hang, nor go on with a wrong gradient.

The argument tells how: "dies", "raises", or "stalls", for longer than Horovod is told to wait.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from horovod_gradcomp.torch import Compression
from tests.distributed.launch import report

STEPS, LAST = 10, 5
STALLED = 15
"""Seconds."""
how = sys.argv[1]
hvd.init()
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=0.1),
    named_parameters=net.named_parameters(),
    compression=Compression.topk(ratio=0.1),
)


def fail(*_: Any) -> None:
    """Called in a backward pass, when one gradient is on its way and another is not."""
    if how == "dies":
        os._exit(3)
    if how == "stalls":
        time.sleep(STALLED)
        return
    raise RuntimeError("a hook of the user's")


def train() -> int:
    """Return how many steps were done."""
    for step in range(STEPS):
        if hvd.rank() == 1 and step == LAST:
            net[0].weight.register_hook(fail)
        optimizer.zero_grad()
        try:
            net(torch.ones(3, 64)).sum().backward()
            optimizer.step()
        except HorovodInternalError:
            return step
    return STEPS


begun = time.monotonic()
done = train()
if done == STEPS:
    print("rank 0 went on alone")
if how == "stalls":
    report({"steps": done - LAST, "too_long": time.monotonic() - begun > STALLED})
