"""Rank 1 is set otherwise than rank 0: every rank must say so, by name and value."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import Compression, SettingsError
from tests.distributed.launch import report

CASES = {
    "ratio": lambda r: Compression.topk(ratio=0.1 / (1 + r)),
    "codec": lambda r: Compression.fp16() if r else Compression.topk(),
    "memory": lambda r: Compression.linear(memory="none" if r else "residual"),
    "seed": lambda r: Compression.randomk(seed=r),
    "start": lambda r: Compression.acp(start_after=10 * r),
    "model": lambda r: Compression.topk(),
    "op": lambda r: Compression.topk(),
    "predivide": lambda r: Compression.topk(),
}

hvd.init()
out = {}
for case, make in CASES.items():
    net = torch.nn.Linear(64, 64 + hvd.rank() * (case == "model"))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        named_parameters=net.named_parameters(),
        compression=make(hvd.rank()),
        op=hvd.Sum if case == "op" and hvd.rank() else hvd.Average,
        gradient_predivide_factor=2.0 if case == "predivide" and hvd.rank() else 1.0,
    )
    try:
        net(torch.ones(3, 64)).sum().backward()
        optimizer.step()
        out[case] = "none was raised"
    except SettingsError as error:
        out[case] = str(error)
report(out)
