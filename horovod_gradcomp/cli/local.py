"""Ranks on this machine, and that none of them is left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MARK = "GRADCOMP_RUN"
"""Environment variable by which the processes of a run are known."""


def launcher() -> str | None:
    """Return the path of horovodrun, beside this Python first, or None."""
    beside = Path(sys.executable).with_name("horovodrun")
    return str(beside) if beside.exists() else shutil.which("horovodrun")


def run(command: list[str], timeout: float) -> tuple[int | None, str]:
    """Return the exit code, None for a run that was stopped, and the output."""
    outer = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL", "HOROVOD_CROSS", "OMPI_COMM_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    mark = f"{_MARK}={secrets.token_hex(8)}"
    env = {**env, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", _MARK: mark.split("=")[1]}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _end_marked(mark)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _end_marked(mark: str) -> None:
    """End every process that carries a variable: horovodrun gives its ranks their own sessions."""
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found.append(entry)
        if not found:
            return
        time.sleep(0.05)
