"""What ``gradcomp bench network`` runs on every rank: training steps of every system in turns.

All systems live side by side and take turns, round after round, so that all meet the same machine.
Rank 0 prints one JSON line for each turn, and one of what :mod:`.network_check` predicts from.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from . import network_models

MARK = "gradcomp-network "
ALONE = "no exchange"
"""Every rank trains a model of its own: what computing takes."""

HOROVOD = "horovod none", "horovod fp16"
DDP = "ddp", "ddp fp16", "ddp powersgd"
AUTO = "gradcomp auto"
OVER = " over "
"""Between a codec's string form and the exchange, where one is forced."""

_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
_WARM = 4
"""Steps before any is timed: DDP lays out its buckets anew in the second, and its PowerSGD hook
begins in the third."""

_ONE_BUCKET_MB = 100_000
"""For DDP's PowerSGD hook: over Gloo it starts the later sums of several buckets in an order that
differs between ranks, which ends in "Received data size doesn't match expected size"."""

_COPIED, _COPIES = 32 * 2**20, 4
_INSIDE = "wire_bytes", "encode_ms", "wait_ms", "decode_ms"
Told = Callable[[], Mapping[str, Any]]


class System:
    """A model that trains in one way.

    Args:
        name: :data:`ALONE`, one of :data:`HOROVOD` or :data:`DDP`, or "gradcomp" and the string
            form of a codec, with :data:`OVER` and an exchange or without.
        model: As of :func:`.network_models.build`.
        batch: Likewise.
    """

    def __init__(self, name: str, model: str, batch: int | None) -> None:
        self.name = name
        self.model, self._loss, self.batch = network_models.build(model, batch)
        self.shapes = network_models.shapes(self.model)
        self.optimizer, self.stats = self._wrapped()
        self.spent = {"forward": 0.0, "backward": 0.0}

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        start = time.perf_counter()
        loss = self._loss(self.model)
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        self.optimizer.step()
        self.spent["forward"] += middle - start
        self.spent["backward"] += end - middle

    def rest(self) -> None:
        """Let go of gradients, so that systems that wait take less memory."""
        self.optimizer.zero_grad()

    @property
    def ready(self) -> bool:
        """Whether its steps are as they will be."""
        return all(one["settled"] for one in self.stats().get("auto", ()))

    def told(self) -> dict[str, float]:
        """Return what it has counted so far: of this package bytes, and milliseconds inside."""
        stats = self.stats()
        out = {f"{key}_ms": 1e3 * value for key, value in self.spent.items()}
        if stats:
            out["wire_bytes"] = stats["wire_bytes"]
            out |= {key: stats[f"{key}_per_step"] * stats["steps"] for key in _INSIDE[1:]}
        return out

    def _wrapped(self) -> tuple[Any, Told]:
        import torch

        plain = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        if self.name in DDP:
            self.model = _ddp(self.model, self.name)
        if self.name == ALONE or self.name in DDP:
            return plain, dict
        return _horovod(plain, self.model, self.name)


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


def _horovod(optimizer: Any, model: Any, name: str) -> tuple[Any, Told]:
    import horovod.torch as hvd

    from ..torch import Compression

    stats: Told = dict
    if name in HOROVOD:
        compression = getattr(hvd.Compression, name.split()[1])
    else:
        form, _, exchange = name.partition(" ")[2].partition(OVER)
        compression = Compression.from_string(form, exchange=exchange or "auto")
        stats = compression.stats
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    return wrapped, stats


def turn(system: System, steps: int, wait: Callable[[], None]) -> Mapping[str, Any]:
    """Return time and bytes a step of some steps; ``wait`` returns once all ranks are there."""
    wait()
    copy = _copy_speed()
    wait()
    told, counted = system.told(), int(_COUNTER.read_text())
    start = time.perf_counter()
    for _ in range(steps):
        system.step()
    wait()
    seconds = time.perf_counter() - start
    counted = int(_COUNTER.read_text()) - counted
    now = system.told()
    inside = {key: (now[key] - told[key]) / steps for key in now}
    wire = inside.pop("wire_bytes", None)
    chosen = [one["choice"] for one in system.stats().get("auto", ())]
    system.rest()
    return {
        "step_ms": 1e3 * seconds / steps,
        "mb_per_step": None if wire is None else wire / 1e6,
        "iface_mb_per_step": counted / steps / 1e6,
        "copy": copy,
        **inside,
        **({"choice": chosen[0]} if chosen else {}),
    }


def _copy_speed() -> float:
    """Return the bytes a second of some copies, all of them, so that the load of all shows."""
    import torch

    source, target = torch.ones(_COPIED // 4), torch.ones(_COPIED // 4)
    start = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source)
    return _COPIED * _COPIES / (time.perf_counter() - start)


def facts(system: System) -> dict[str, Any]:
    """Return what steps can be predicted from, besides the times of :data:`ALONE`."""
    import horovod.torch as hvd
    import torch

    from ..torch import probe

    link = probe.ring("link")
    short = probe.gathers("short gathers", link, nbytes=probe.BRIEF)
    return {
        "ranks": hvd.size(),
        "spare": (os.cpu_count() or 1) >= 2 * hvd.size(),  # hosts share this machine's processors
        "crowded": (os.cpu_count() or 1) < hvd.size(),
        "link": vars(link),
        "gathers": vars(probe.gathers("gathers", link)),
        "short_gathers": vars(short),
        "halves": vars(probe.ring("halves", dtype=torch.float16)),
        "shapes": system.shapes,
        "batch": system.batch,
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
        while not system.ready:
            turn(system, 1, wait)
        systems.append(system)
        say(system=name, warm=True)
    say(facts=facts(systems[0]))
    for _ in range(wanted["rounds"]):
        for system in systems:
            say(system=system.name, **turn(system, wanted["steps"], wait))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
