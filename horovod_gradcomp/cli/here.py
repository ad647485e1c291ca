"""The links and the copy speed of the cluster that a command runs on, under ``horovodrun``."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..core.errors import GradCompError, SettingsError, explain
from ..core.links import Cluster
from .costs import copy_speed


class Here(NamedTuple):
    """What was measured, alike on all ranks."""

    cluster: Cluster
    copy: float | None
    """Bytes a second of a plain copy on the slowest rank, all ranks at once; None on GPUs."""

    first: bool
    """Whether this is the rank that shows it."""


def look(device: str) -> Here:
    """Measure; every rank must call it.

    Args:
        device: "cpu" or "cuda", of what is sent.

    Raises:
        GradCompError: PyTorch or Horovod is missing.
        SettingsError: There is one rank only, or hosts hold different numbers of ranks.
    """
    try:
        import horovod.torch as hvd
        import torch

        from ..torch import probe
        from ..torch.agreement import gathered
    except ImportError as error:
        raise GradCompError(
            explain(
                got=f"--measure: {error}",
                expected="Horovod with PyTorch",
                do="gradcomp doctor tells what is missing; or give --workers and --bandwidth",
            )
        ) from None
    hvd.init()
    if hvd.size() < 2:
        raise SettingsError(
            explain(
                got="--measure on one rank",
                expected="it on every rank of the cluster",
                do="horovodrun -np 4 -H host-a:2,host-b:2 gradcomp advise --measure --params 100e6",
            )
        )
    if len({*gathered(hvd.local_size(), "gradcomp.advise.hosts")}) > 1:
        raise SettingsError(
            explain(
                got="--measure on hosts of different numbers of ranks",
                expected="as many on each",
                do="give --workers, --per-node and --bandwidth",
            )
        )
    where = torch.device(device, hvd.local_rank()) if device == "cuda" else torch.device(device)
    between = inside = probe.ring("gradcomp.advise.ring", device=where)
    if hvd.local_size() > 1 and hvd.local_size() < hvd.size():
        inside = probe.neighbours("gradcomp.advise.inside", where)
    copy = None
    if device == "cpu":
        slow = probe.slowest(1 / copy_speed(), "gradcomp.advise.copy", hvd.global_process_set)
        copy = 1 / slow
    spare = device == "cuda" or (os.cpu_count() or 1) > hvd.local_size() * torch.get_num_threads()
    long, short = (
        probe.gathers(f"gradcomp.advise.gathers.{nbytes}", between, where, nbytes)
        for nbytes in (probe.LONG, probe.BRIEF)
    )
    halves = probe.ring("gradcomp.advise.halves", device=where, dtype=torch.float16)
    cluster = Cluster(hvd.size(), hvd.local_size(), between, inside, spare, long, short, halves)
    return Here(cluster, copy, hvd.rank() == 0)
