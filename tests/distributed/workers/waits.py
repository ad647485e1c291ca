"""Ranks that are more than the cores, and do not take each other's time."""

from __future__ import annotations

import os
import time

import horovod.torch as hvd


def leave_cores_to_others() -> None:
    """Let a rank that waits sleep, where there are more ranks on this host than cores.

    Horovod's wait asks again and again without a pause, which then takes the time of those that are
    waited for. What is waited for, and in which order, stays as it is.
    """
    if hvd.local_size() <= (os.cpu_count() or 1):
        return
    library = hvd.mpi_ops.mpi_lib
    wait, ended = library.horovod_torch_wait_and_clear, library.horovod_torch_poll

    def patient(handle: int) -> None:
        while not ended(handle):
            time.sleep(2e-4)
        wait(handle)

    library.horovod_torch_wait_and_clear = patient
