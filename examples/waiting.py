"""A wait that leaves the core to others, for ranks that share few cores."""

from __future__ import annotations

import time

import horovod.torch as hvd


def sleep_while_waiting() -> None:
    """Let a rank that waits leave its core to the others.

    Horovod's wait asks again and again without a pause. Where ranks, and Horovod's own thread in
    each, are more than the cores, that takes the time of those that are waited for.
    """
    library = hvd.mpi_ops.mpi_lib
    wait, ended = library.horovod_torch_wait_and_clear, library.horovod_torch_poll

    def patient(handle: int) -> None:
        while not ended(handle):
            time.sleep(2e-4)
        wait(handle)

    library.horovod_torch_wait_and_clear = patient
