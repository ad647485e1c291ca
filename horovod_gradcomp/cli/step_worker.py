"""What ``gradcomp bench step`` runs on every rank: steps of each system in turns.

Gradients are drawn once and handed to autograd, so that a step is what Horovod and the compressor
do of it. Rank 0 prints one JSON line for each turn.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any, Callable

from .models import shapes_of

MARK = "gradcomp-step "
BASE = "none"
"""Horovod without compression, which others are compared with."""

WATCHED = " with telemetry"
"""What follows the name of a codec whose steps are recorded."""

_WARM = 3


class System:
    """Parameters that are reduced in one way.

    Args:
        name: :data:`BASE`, or the string form of a codec, or one with :data:`WATCHED`.
        model: A name that :func:`shapes_of` knows.
        every: Steps from one record to the next.
    """

    def __init__(self, name: str, model: str, every: int) -> None:
        import horovod.torch as hvd
        import torch

        from ..torch import Compression

        gen = torch.Generator().manual_seed(hvd.rank())
        shapes = shapes_of(model)
        self.name = name
        self.params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.grads = [torch.randn(shape, generator=gen) for shape in shapes]
        plain = torch.optim.SGD(self.params, lr=0.0)
        self.compression = hvd.Compression.none
        self.spent, self.measured_ms = 0.0, 0.0
        if name != BASE:
            self.compression = Compression.from_string(name.removesuffix(WATCHED))
            if name.endswith(WATCHED):
                self.compression.telemetry(self._take_down, every=every)
            self._time("compress")
            self._time("decompress")
        self.optimizer = hvd.DistributedOptimizer(
            plain,
            named_parameters=[(f"p{i}", p) for i, p in enumerate(self.params)],
            compression=self.compression,
        )

    def step(self) -> None:
        """Reduce all gradients once; every one of them is there from the start."""
        import torch

        self.optimizer.zero_grad()
        torch.autograd.backward(self.params[::-1], self.grads[::-1])
        self.optimizer.synchronize()

    def rest(self) -> None:
        """Let go of gradients, so that systems that wait take less memory."""
        self.optimizer.zero_grad()

    def told(self) -> dict[str, float]:
        """Return what has been counted so far."""
        if self.name == BASE:
            return {}
        stats = self.compression.stats()
        steps = stats["steps"]
        inside = ("encode_ms", "wait_ms", "decode_ms", "codec_ms")
        return {
            "bytes": stats["wire_bytes"],
            "collectives": stats["compressed"]["collectives_per_step"] * steps,
            "spent_ms": 1e3 * self.spent,
            "measured_ms": self.measured_ms,
            **{key: stats[f"{key}_per_step"] * steps for key in inside},
        }

    def _take_down(self, record: dict[str, Any]) -> None:
        """Do with a record what a file would, and add up what measuring took."""
        self.measured_ms += record["telemetry_ms"]
        json.dumps(record)

    def _time(self, name: str) -> None:
        """Add up the time of a method of the compressor."""
        run = getattr(self.compression, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args)
            finally:
                self.spent += time.perf_counter() - start

        setattr(self.compression, name, timed)


def turn(system: System, steps: int, wait: Callable[[], None]) -> dict[str, Any]:
    """Return what some steps took, a step; ``wait`` returns once all ranks are there."""
    wait()
    before = system.told()
    start = time.perf_counter()
    for _ in range(steps):
        system.step()
    wait()
    seconds = time.perf_counter() - start
    after = system.told()
    system.rest()
    counted = {key: (after[key] - before[key]) / steps for key in after}
    return {"step_ms": 1e3 * seconds / steps, **counted}


def main() -> None:
    """Run the turns that the JSON on the command line asks for."""
    import horovod.torch as hvd
    import torch

    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    number = itertools.count()

    def wait() -> None:
        hvd.allreduce(torch.zeros(1), name=f"turn {next(number)}")

    def say(**what: Any) -> None:
        if hvd.rank() == 0:
            sys.stdout.write(MARK + json.dumps(what) + "\n")
            sys.stdout.flush()

    systems = []
    for name in wanted["systems"]:
        system = System(name, wanted["model"], wanted["telemetry"])
        turn(system, _WARM, wait)
        systems.append(system)
    for _ in range(wanted["rounds"]):
        for system in systems:
            say(system=system.name, **turn(system, wanted["steps"], wait))


if __name__ == "__main__":
    main()
