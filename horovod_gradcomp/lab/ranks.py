"""Start ranks on hosts, show what they print, and end them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Callable

from ..core.errors import GradCompError, explain
from .network import INTERFACE, SWITCH_ADDRESS, Host, switch_name

_OUTER = ("HOROVOD_", "OMPI_COMM_", "PMIX_")
"""Variables of an outer run, whose ranks are not this one's."""

_STOP_SECONDS = 5.0
_RENDEZVOUS = "horovod_gradcomp.lab.rendezvous"


def run(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    ranks_per_host: int,
    env: Mapping[str, str],
    timeout: float | None,
    say: Callable[[int, str], None],
) -> int:
    """Run a command on every rank; see :meth:`.Cluster.run`."""
    slots = ",".join(f"{host.name}:{ranks_per_host}" for host in hosts)
    server = _inside(switch_name(hosts[0].lab), [sys.executable, "-m", _RENDEZVOUS, slots])
    with _process(server, _paths()) as serving:
        found = _first_line(serving)
        ranks = []
        try:
            for place in found["places"]:
                host = next(h for h in hosts if h.name == place["hostname"])
                settings = _environment(place, found["port"], hosts[0], env)
                ranks.append(_start(_inside(host.name, command), settings))
            return _wait(ranks, timeout, say)
        finally:
            for rank in ranks:
                _stop(rank)


def _environment(
    place: Mapping[str, Any], port: int, first: Host, more: Mapping[str, str]
) -> dict[str, str]:
    outer = {k: v for k, v in os.environ.items() if not k.startswith(_OUTER)}
    return {
        **outer,
        "PYTHONUNBUFFERED": "1",
        **{f"HOROVOD_{key.upper()}": str(value) for key, value in place.items()},
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": SWITCH_ADDRESS,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        # The same ranks for torch.distributed
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": first.address,
        "MASTER_PORT": "29500",
        "RANK": str(place["rank"]),
        "WORLD_SIZE": str(place["size"]),
        "LOCAL_RANK": str(place["local_rank"]),
        "LOCAL_WORLD_SIZE": str(place["local_size"]),
        **more,
    }


def _inside(namespace: str, command: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


def _paths() -> dict[str, str]:
    """Return an environment in which this package is found, wherever it is."""
    root = str(Path(__file__).resolve().parents[2])
    paths = filter(None, [root, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process, which ends them
    )


@contextlib.contextmanager
def _process(command: Sequence[str], env: Mapping[str, str]) -> Any:
    with subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _first_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise GradCompError(
            explain(
                got="no rendezvous server",
                expected="Horovod's",
                do="'gradcomp doctor' says what is missing",
            )
        )
    return json.loads(line)


def _wait(
    ranks: Sequence[subprocess.Popen[str]],
    timeout: float | None,
    say: Callable[[int, str], None],
) -> int:
    readers = [
        threading.Thread(target=_read, args=(process.stdout, rank, say), daemon=True)
        for rank, process in enumerate(ranks)
    ]
    for reader in readers:
        reader.start()
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((code for code in codes if code), 0)
        if failed or all(code == 0 for code in codes):
            break
        if deadline is not None and time.monotonic() > deadline:
            raise GradCompError(explain(got=f"ranks after {timeout:g} s", expected="them to end"))
        time.sleep(0.02)
    if failed:
        time.sleep(0.5)  # the others tell what they met
        for process in ranks:
            _stop(process)
    for reader in readers:
        reader.join(_STOP_SECONDS)
    return failed


def _read(lines: IO[str], rank: int, say: Callable[[int, str], None]) -> None:
    with contextlib.suppress(ValueError):  # closed meanwhile
        for line in lines:
            say(rank, line.rstrip("\n"))


def show(rank: int, line: str) -> None:
    """Print a line of a rank."""
    sys.stdout.write(f"[{rank}] {line}\n")
    sys.stdout.flush()


def _stop(process: subprocess.Popen[str]) -> None:
    """End a rank with all that it started."""
    for how, seconds in ((signal.SIGTERM, 1.0), (signal.SIGKILL, _STOP_SECONDS)):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
