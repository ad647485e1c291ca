"""On each host: what the interface counts over some steps, beside what the compressor counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import Compression, node_process_sets

STEPS = 4
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        (model(torch.ones(1, 1024)) ** 2).sum().backward()
        optimizer.step()
    hvd.allreduce(torch.zeros(1), name="all have ended")


def main():
    hvd.init(process_sets=node_process_sets())
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
        told, counted = compression.stats()["between_bytes"], int(SENT.read_text())
        steps(model, optimizer, STEPS)
        counted = int(SENT.read_text()) - counted
        stats = compression.stats()
        told = stats["between_bytes"] - told
        found[form] = {"told": told, "counted": counted, "inside": stats["inside_bytes"]}
    place = {"size": hvd.size(), "host": hvd.cross_rank()}
    sys.stdout.write(json.dumps({**place, "steps": STEPS, "found": found}) + "\n")


if __name__ == "__main__":
    main()
