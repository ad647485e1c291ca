"""Every codec with every memory that suits it trains on real ranks, under torch.

Of each pair: the books, equal ranks, a bad step on one rank, and a run that is resumed.
"""

from __future__ import annotations

import copy
import traceback
from typing import Any

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import Compression
from tests import table
from tests.distributed.launch import report
from tests.distributed.workers.torch_laws import (
    SMALL,
    Net,
    digest,
    make,
    mean,
    reduce,
    same_everywhere,
    total_residual,
    whole_state,
)
from tests.distributed.workers.waits import leave_cores_to_others

STEPS = 4
HALF = 1e-3
"""Of sums that Horovod forms in float16; others are off by no more than rounding of float32."""


def build(label: str) -> Any:
    text, memory = label.rsplit(" ", 1)
    return Compression.from_string(text, memory=memory, **SMALL)


def slot(compression: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the mean over ranks of what is held under a name."""
    (entry,) = compression.state_dict()["optimizers"]
    held = sorted(entry["memory"].get(name, {}).items())
    return {n: hvd.allreduce(v.double(), name=f"{name}.{n}") for n, v in held}


class Run:
    """A net that is trained, with its books."""

    def __init__(self, label: str) -> None:
        self.net, self.compression = Net(), build(label)
        self.optimizer = make(self.net, self.compression)
        self.settings = table.trained_pairs()[label]
        self.applied = {n: p.new_zeros(p.shape).double() for n, p in self.net.named_parameters()}
        self.taken = copy.deepcopy(self.applied)
        self.largest = dict.fromkeys(self.taken, 0.0)

    def step(self, step: int, **how: Any) -> dict[str, torch.Tensor]:
        memory = self.settings.memory
        speed = slot(self.compression, "momentum") if memory.is_momentum and step else {}
        grads = reduce(self.net, self.optimizer, step, **how)
        same_everywhere(grads.values())
        for n, p in self.net.named_parameters():
            self.applied[n] += grads[n].double()
            true = mean(n, p, step)
            self.taken[n] += true + getattr(memory, "m", 0.0) * speed.get(n, 0.0)
            self.largest[n] = max(self.largest[n], true.abs().max().item())
        return grads

    def check_books(self) -> None:
        """Law 1, as each kind of memory has it."""
        memory, codec = self.settings.memory, self.settings.codec
        half = "fp16" in codec.describe() and codec.combine.name != "GATHER"
        limit = HALF if half else 4e-6
        if memory.references:
            own, shared = slot(self.compression, "own"), slot(self.compression, "mean")
            assert set(own) == set(shared) != set()
            for n in own:
                off = (own[n] - shared[n]).abs().max().item() / self.largest[n]
                assert off < limit, f"references of {n} are off by {off:.2e}"
        elif memory.slots:
            left = total_residual(self.compression)
            assert set(left) == {"a", "b", "kernel", "wide"}, sorted(left)
            for n in self.taken:
                off = (self.applied[n] + left.get(n, 0.0) - self.taken[n]).abs().max()
                off /= self.taken[n].abs().max()
                assert off < limit, f"books of {n} are off by {off:.2e}"


def laws(label: str) -> None:
    run = Run(label)
    for step in range(STEPS):
        run.step(step)
    same_everywhere(run.net.parameters())
    run.check_books()

    before = {n: v.clone() for n, v in whole_state(run.compression).items()}
    last = hvd.rank() == hvd.size() - 1
    grads = reduce(run.net, run.optimizer, STEPS, spoil="kernel" if last else "")
    assert not grads["kernel"].isfinite().all(), "the bad step looks good here"
    after = whole_state(run.compression)
    assert set(before) == set(after)
    assert all(torch.equal(v, after[n]) for n, v in before.items()), "a bad step left a trace"
    assert run.compression.stats()["bad_steps"] == 1

    run.net.load_state_dict(Net().state_dict())  # the bad step made weights NaN, too
    saved = copy.deepcopy(run.compression.state_dict())
    again = Run(label)
    again.compression.load_state_dict(saved)
    for each in (run, again):
        for step in range(STEPS + 1, STEPS + 3):
            assert all(g.isfinite().all() for g in each.step(step).values()), "still bad"
    assert digest(run.net.parameters()) == digest(again.net.parameters()), "resumed otherwise"
    assert digest(whole_state(run.compression).values()) == digest(
        whole_state(again.compression).values()
    ), "resumed with another memory"


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    leave_cores_to_others()
    for label in table.trained_pairs():
        try:
            laws(label)
            report({label: "ok"})
        except AssertionError:
            report({label: traceback.format_exc()})
            traceback.print_exc()  # where the other ranks see no fault the run will not end


if __name__ == "__main__":
    main()
