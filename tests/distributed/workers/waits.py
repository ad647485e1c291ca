"""Ranks that are more than the cores, and do not take each other's time."""

from __future__ import annotations

import os

import horovod.torch as hvd

from examples.waiting import sleep_while_waiting


def leave_cores_to_others() -> None:
    """Let a rank that waits sleep, where there are more ranks on this host than cores.

    What is waited for, and in which order, stays as it is.
    """
    if hvd.local_size() > (os.cpu_count() or 1):
        sleep_while_waiting()
