"""Which names are in use, and taking away what a run that was killed left behind.

Each running lab holds a lock on a file of its own in ``/run``; the kernel lets go of it however
the process ends. A lab whose lock is free, or that has no file, belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from ..core.errors import GradCompError, explain
from .network import PREFIX

LOCKS = Path("/run/gradcomp-lab")
NETNS = Path("/var/run/netns")
ETC = Path("/etc/netns")
_MOST = 256
_OURS = re.compile(rf"{re.escape(PREFIX)}(\d+)-(?:switch|host\d+)")


class Claim:
    """The number of a lab, held until :meth:`release`."""

    def __init__(self) -> None:
        for number in range(_MOST):
            locked = _lock(number)
            if locked is not None:
                self.number, self._locked = number, locked
                return
        raise GradCompError(explain(got=f"{_MOST} labs", expected="fewer at a time"))

    def release(self) -> None:
        """Let another lab have the number."""
        _release(self.number, self._locked)


def sweep() -> list[str]:
    """Take away every lab that belongs to nobody; return the names of its namespaces."""
    gone: list[str] = []
    for number in sorted({int(_OURS.fullmatch(name)[1]) for name in _names()}):  # type: ignore[index]
        locked = _lock(number)
        if locked is not None:
            gone += remove(number)
            _release(number, locked)
    return gone


def remove(number: int) -> list[str]:
    """Take away one lab: its processes, then its namespaces and files."""
    names = [name for name in _names() if name.startswith(f"{PREFIX}{number}-")]
    for name in names:
        _end_processes(name)
    for name in names:
        if (NETNS / name).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(ETC / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        ETC.rmdir()  # unless somebody else has something there
    return names


def _names() -> list[str]:
    found: set[str] = set()
    for folder in (NETNS, ETC):
        with contextlib.suppress(OSError):
            found |= {entry for entry in os.listdir(folder) if _OURS.fullmatch(entry)}
    return sorted(found)


def _end_processes(name: str) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        pids = [int(pid) for pid in done.stdout.split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _file(number: int) -> Path:
    return LOCKS / f"{number}.lock"


def _release(number: int, locked: int) -> None:
    with contextlib.suppress(OSError):
        _file(number).unlink()
        LOCKS.rmdir()  # unless there are other labs
    os.close(locked)


def _lock(number: int) -> int | None:
    """Return an open file that is locked; None if another process holds it."""
    while True:
        LOCKS.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(_file(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # somebody removed the folder in between
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(_file(number)).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # somebody removed the file in between
