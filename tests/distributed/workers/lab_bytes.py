"""On each host: what the interface counts over some steps, beside what the compressor counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import Compression

STEPS = 4
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        (model(torch.ones(1, 1024)) ** 2).sum().backward()
        optimizer.step()
    hvd.allreduce(torch.zeros(1), name="all have ended")


def main():
    hvd.init()
    found = {}
    for form in sys.argv[1:]:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
        compression = Compression.from_string(form)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-4),
            named_parameters=model.named_parameters(),
            compression=compression,
        )
        steps(model, optimizer, 1)  # binding and agreement
        told, counted = compression.stats()["wire_bytes"], int(SENT.read_text())
        steps(model, optimizer, STEPS)
        told, counted = compression.stats()["wire_bytes"] - told, int(SENT.read_text()) - counted
        found[form] = {"told": told, "counted": counted}
    sys.stdout.write(json.dumps({"size": hvd.size(), "steps": STEPS, "found": found}) + "\n")


if __name__ == "__main__":
    main()
