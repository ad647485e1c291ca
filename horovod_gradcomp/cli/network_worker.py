"""What ``gradcomp bench network`` runs on every rank: training steps of every system in turns.

All systems live side by side and take turns, round after round, so that all meet the same machine.
Rank 0 prints one JSON line for each turn.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from ..core.errors import SettingsError, explain

MARK = "gradcomp-network "
HOROVOD = "horovod none", "horovod fp16"
DDP = "ddp", "ddp fp16", "ddp powersgd"
_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
_WARM = 4
"""Steps before any is timed: DDP lays out its buckets anew in the second, and its PowerSGD hook
begins in the third."""

_ONE_BUCKET_MB = 100_000
"""For DDP's PowerSGD hook: over Gloo it starts the later sums of several buckets in an order that
differs between ranks, which ends in "Received data size doesn't match expected size"."""

Told = Callable[[], float]


def layers(model: str) -> tuple[int, int]:
    """Return the number of layers and their width of a name such as ``mlp12x1024``.

    Raises:
        SettingsError: It is no such name.
    """
    found = re.fullmatch(r"mlp(\d+)x(\d+)", model)
    if not found or not int(found[1]) or not int(found[2]):
        raise SettingsError(
            explain(got=f"--model {model}", expected="mlp, layers, x, width: mlp12x1024")
        )
    return int(found[1]), int(found[2])


class System:
    """A model that trains in one way.

    Args:
        name: One of :data:`HOROVOD` or :data:`DDP`, or "gradcomp" and the string form of a codec.
        model: A name that :func:`layers` knows.
        batch: Samples a step.
    """

    def __init__(self, name: str, model: str, batch: int) -> None:
        import torch

        torch.manual_seed(1)
        count, width = layers(model)
        blocks = [part for _ in range(count) for part in (torch.nn.Linear(width, width), _relu())]
        self.name, self.model = name, torch.nn.Sequential(*blocks)
        self.data = torch.randn(batch, width)
        self.optimizer, self.told = self._wrapped()

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        (self.model(self.data) ** 2).mean().backward()
        self.optimizer.step()

    def rest(self) -> None:
        """Let go of gradients, so that systems that wait take less memory."""
        self.optimizer.zero_grad()

    def _wrapped(self) -> tuple[Any, Told | None]:
        import torch

        plain = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        if self.name in DDP:
            self.model = _ddp(self.model, self.name)
            return plain, None
        return _horovod(plain, self.model, self.name)


def _relu() -> Any:
    import torch

    return torch.nn.ReLU()


def _ddp(model: Any, name: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    powersgd = name == "ddp powersgd"
    wrapped = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB if powersgd else None)
    if name == "ddp fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if powersgd:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def _horovod(optimizer: Any, model: Any, name: str) -> tuple[Any, Told | None]:
    import horovod.torch as hvd

    from ..torch import Compression

    if name in HOROVOD:
        compression = getattr(hvd.Compression, name.split()[1])
        told = None
    else:
        compression = Compression.from_string(name.partition(" ")[2])
        told = lambda: float(compression.stats()["wire_bytes"])  # noqa: E731
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    return wrapped, told


def turn(system: System, steps: int, wait: Callable[[], None]) -> Mapping[str, float | None]:
    """Return time and bytes a step of some steps; ``wait`` returns once all ranks are there."""
    wait()
    told, counted = system.told and system.told(), int(_COUNTER.read_text())
    start = time.perf_counter()
    for _ in range(steps):
        system.step()
    wait()
    seconds = time.perf_counter() - start
    counted = int(_COUNTER.read_text()) - counted
    system.rest()
    return {
        "step_ms": 1e3 * seconds / steps,
        "mb_per_step": (system.told() - told) / steps / 1e6
        if system.told and told is not None
        else None,
        "iface_mb_per_step": counted / steps / 1e6,
    }


def main() -> None:
    """Run the turns that the JSON on the command line asks for."""
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist

    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    number = itertools.count()

    def wait() -> None:
        hvd.allreduce(torch.zeros(1), name=f"turn {next(number)}")

    def say(**what: Any) -> None:
        if hvd.rank() == 0:
            sys.stdout.write(MARK + json.dumps(what) + "\n")

    systems = []
    for name in wanted["systems"]:
        system = System(name, wanted["model"], wanted["batch"])
        turn(system, _WARM, wait)
        systems.append(system)
        say(system=name, warm=True)
    for _ in range(wanted["rounds"]):
        for system in systems:
            say(system=system.name, **turn(system, wanted["steps"], wait))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
