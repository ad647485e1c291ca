"""Two ranks train a few steps on GPUs: run by ``check.sh`` under horovodrun.

The ranks share one GPU where there is only one. That works over Gloo with a Horovod built
without NCCL, which copies gradients to the CPU; NCCL itself wants a GPU for each rank.
"""

from __future__ import annotations

import hashlib
import os

import horovod.torch as hvd
import torch
from torch import nn

from horovod_gradcomp.torch import Compression

CODECS = (
    "topk:ratio=0.01",
    "linear:bits=4",
    "sign",
    "randomk:ratio=0.05",
    "fp16",
    "powersgd:rank=2",
)


def train(text: str, device: torch.device) -> tuple[float, float, float, bool]:
    """Return the first and last loss, the ratio of bytes, and whether weights are equal."""
    torch.manual_seed(1)
    x = torch.randn(64, 256)
    y = x @ torch.randn(256, 8)
    mine = slice(hvd.rank() * 32, hvd.rank() * 32 + 32)
    x, y = x[mine].to(device), y[mine].to(device)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 8)).to(device)
    compression = Compression.from_string(text)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach().cpu(), name="loss")))
    state = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    equal = len(set(hvd.allgather_object(hashlib.sha256(state).hexdigest()))) == 1
    sent = compression.stats()["wire_bytes_per_step"]
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    return losses[0], losses[-1], sent / dense, equal


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    device = torch.device(os.environ.get("GRADCOMP_TEST_DEVICE", "cuda"))
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    failed = []
    for text in CODECS:
        first, last, ratio, equal = train(text, device)
        if hvd.rank() == 0:
            print(
                f"{text}: loss {first:.3f} to {last:.3f}, {ratio:.1%} of the bytes,"
                f" weights equal: {equal}"
            )
        if not equal or not last < first:
            failed.append(text)
    if failed:
        raise SystemExit(f"wrong: {', '.join(failed)}")


if __name__ == "__main__":
    main()
