"""Ranks come, and go again: nothing of those that stay is lost, and what left is told."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import Compression, resize_state
from horovod_gradcomp.torch.elastic import TorchState
from tests.distributed.launch import FOLDER, report
from tests.distributed.workers.torch_laws import Net, backward, make, mean, reduce, same_everywhere

KINDS = {
    "topk": lambda: Compression.topk(ratio=0.05, bucket_bytes=8192),
    "acp": lambda: Compression.acp(rank=2, max_rate=1.0),
    "ef21": lambda: Compression.topk(ratio=0.2, memory="ef21"),
    # Always falls back; the rank that comes is told that this is so.
    "guarded": lambda: Compression.guarded("powersgd", cosine=1.0, every=2, hold=5, max_rate=1.0),
}
HOSTS = Path(os.environ[FOLDER]) / "hosts"
BEFORE, AFTER = 4, 6
"""Steps with two ranks, and with three."""


def set_hosts(text: str) -> None:
    if hvd.rank() == 0:
        new = HOSTS.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, HOSTS)


def owed(compression: object) -> dict[str, torch.Tensor]:
    """Return the mean over ranks of what has not been sent."""
    (mine,) = resize_state(hvd.allgather_object(compression.state_dict()), 1)
    return mine["optimizers"][0]["memory"].get("residual", {})


def off(state: TorchState, kind: str) -> dict[str, torch.Tensor]:
    """Return by what the books of each compressed tensor are wrong."""
    left = owed(state.compressors[kind])
    return {n: state.true[n] - state.applied[kind][n] - left[n].double() for n in left}


def dies(state: TorchState) -> None:
    """End the last rank in the middle of a step, which the others then take back."""
    net, optimizer = state.nets["topk"], state.topk
    optimizer.zero_grad()
    backward(net, state.step)
    if hvd.rank() == 2:
        os._exit(1)
    optimizer.synchronize()


@hvd.elastic.run
def train(state: TorchState) -> None:
    while state.phase != "end":
        if state.phase == "two" and state.step >= BEFORE:
            set_hosts("localhost:2\n127.0.0.1:1\n")
        if state.phase == "two" and hvd.size() == 3:
            state.phase, state.until = "three", state.step + AFTER
        if state.phase == "three" and state.step >= state.until:
            for kind in ("topk", "acp"):
                for n, wrong in off(state, kind).items():
                    assert wrong.abs().max() < 2e-6 * state.true[n].abs().max(), (kind, n)
            state.phase = "leaving"
            state.commit()
            if sys.argv[1] == "leaves":
                set_hosts("localhost:2\n")
        if state.phase == "leaving" and hvd.size() == 2:
            state.phase, state.until = "again", state.step + 3
        if state.phase == "again" and state.step >= state.until:
            state.phase = "end"
            return
        if state.phase == "leaving" and sys.argv[1] == "dies":
            dies(state)
        if state.phase == "leaving" or (state.phase == "two" and state.step >= BEFORE):
            time.sleep(0.3)
            state.commit()  # and look whether hosts have changed
            continue
        for kind in KINDS:
            net, optimizer = state.nets[kind], getattr(state, kind)
            grads = reduce(net, optimizer, state.step)
            same_everywhere(grads.values())
            for n, grad in grads.items():
                state.applied[kind][n] = state.applied[kind].get(n, 0.0) + grad.double()
        for n, p in state.nets["topk"].named_parameters():
            state.true[n] = state.true.get(n, 0.0) + mean(n, p, state.step)
        state.step += 1
        state.commit()


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    warnings.simplefilter("always")
    nets = {kind: Net() for kind in KINDS}
    compressors = {kind: build() for kind, build in KINDS.items()}
    optimizers = {kind: make(nets[kind], compressors[kind], lr=0.0) for kind in KINDS}
    state = TorchState(
        **optimizers, step=0, until=0, phase="two", true={}, applied={k: {} for k in KINDS}
    )
    state.nets, state.compressors = nets, compressors
    with warnings.catch_warnings(record=True) as said:
        train(state)
    told = [str(w.message) for w in said if "left with them" in str(w.message)]
    wrong = off(state, "topk")
    steps = [c.state_dict()["optimizers"][0]["step"] for c in compressors.values()]
    for compressor in compressors.values():
        (entry,) = compressor.state_dict()["optimizers"]
        for table in (*entry["shared"].values(), entry["memory"].get("mean", {})):
            same_everywhere(table.values())
    report(
        {
            "size": hvd.size(),
            "steps": steps,
            "told": told,
            "lost": [c.stats()["lost_norm"] for c in compressors.values()],
            "off": 3 * float(torch.cat([w.view(-1) for w in wrong.values()]).norm()),
        }
    )


if __name__ == "__main__":
    main()
    sys.exit(0)
