"""Start hosts, run ranks on them, count what they send, and leave nothing behind."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from ..core.errors import GradCompError, SettingsError, explain
from . import cleanup, network, ranks
from .network import INTERFACE, Host


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host's interface has sent and received, headers of all protocols included."""

    sent: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


class Cluster:
    """Hosts on this machine, as a context manager.

    Example::

        with Cluster(hosts=2, bandwidth=125e6) as cluster:
            code = cluster.run(["python", "train.py"], ranks_per_host=1)
            print(cluster.traffic())

    Args:
        hosts: How many.
        bandwidth: Bytes a second of each link, in each direction.
        latency: Seconds added to every packet in each direction; needs netem in the kernel.
        slow: Bandwidth of single hosts by their index, in place of ``bandwidth``.

    Raises:
        SettingsError: A number is out of range.
        GradCompError: Not Linux, not root, no iproute2, or the kernel refuses.
    """

    def __init__(
        self,
        hosts: int,
        bandwidth: float,
        latency: float = 0.0,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        slow = dict(slow or {})
        _check(hosts, bandwidth, latency, slow)
        self._asked = [(slow.get(i, bandwidth), latency) for i in range(hosts)]
        self.hosts: list[Host] = []
        self._claim: cleanup.Claim | None = None

    def __enter__(self) -> Cluster:
        _check_machine()
        cleanup.sweep()
        self._claim = cleanup.Claim()
        number = self._claim.number
        self.hosts = [Host(number, i, *asked) for i, asked in enumerate(self._asked)]
        try:
            for command in network.build(self.hosts):
                _do(command)
            original = Path("/etc/hosts").read_text(encoding="utf-8")
            for host in self.hosts:
                folder = cleanup.ETC / host.name
                folder.mkdir(parents=True, exist_ok=True)
                text = network.hosts_file(socket.gethostname(), host.address, original)
                (folder / "hosts").write_text(text, encoding="utf-8")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on the hosts and take them away."""
        if self._claim is not None:
            cleanup.remove(self._claim.number)
            self._claim.release()
            self._claim = None

    def traffic(self) -> list[Traffic]:
        """Return what each host's interface has counted so far."""
        return [_traffic(host) for host in self.hosts]

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        say: Callable[[int, str], None] | None = None,
    ) -> int:
        """Run a command on every rank and return 0, or the code of the rank that failed first.

        Args:
            command: Program and arguments.
            ranks_per_host: How often on each host.
            env: More environment.
            timeout: Seconds after which the ranks are ended.
            say: Called with rank and line of what they print; default: print as horovodrun does.

        Raises:
            GradCompError: The time was over.
        """
        if ranks_per_host < 1:
            raise SettingsError(
                explain(got=f"ranks_per_host={ranks_per_host}", expected="1 or more")
            )
        return ranks.run(
            self.hosts,
            list(command),
            ranks_per_host=ranks_per_host,
            env=env or {},
            timeout=timeout,
            say=say or ranks.show,
        )


def _check(hosts: int, bandwidth: float, latency: float, slow: Mapping[int, float]) -> None:
    if not 1 <= hosts <= network.MOST_HOSTS:
        expected = f"1 to {network.MOST_HOSTS}"
        raise SettingsError(explain(got=f"{hosts} hosts", expected=expected))
    for value in (bandwidth, *slow.values()):
        if not value >= 1000:
            raise SettingsError(
                explain(got=f"{8 * value:g} bit/s", expected="a bandwidth of 8 kbit/s or more")
            )
    if not latency >= 0:
        raise SettingsError(explain(got=f"a latency of {latency}", expected="0 or more"))
    for index in slow:
        if not 0 <= index < hosts:
            expected = f"a host from 0 to {hosts - 1}"
            raise SettingsError(explain(got=f"host {index}", expected=expected))


def _check_machine() -> None:
    if platform.system() != "Linux":
        raise GradCompError(
            explain(
                got=platform.system(),
                expected="Linux",
                why="hosts are network namespaces",
                do="use a Linux machine, virtual machine or container",
            )
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise GradCompError(
                explain(got=f"no command '{tool}'", expected="it", do="install iproute2")
            )
    if os.geteuid() != 0:
        raise GradCompError(
            explain(
                got=f"user {os.geteuid()}",
                expected="root",
                why="only root may make networks",
                do='sudo env "PATH=$PATH" gradcomp ...',
            )
        )


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = " ".join((done.stderr or done.stdout).split())
    raise GradCompError(
        explain(
            got=f"'{' '.join(command)}': {said}",
            expected="it to work",
            do="leave out the latency: this kernel has no netem"
            if "netem" in command
            else "in a container, allow it CAP_NET_ADMIN and CAP_SYS_ADMIN",
        )
    )


def _traffic(host: Host) -> Traffic:
    command = ["ip", "-n", host.name, "-s", "-j", "link", "show", "dev", INTERFACE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (link,) = json.loads(done.stdout)
    counts = link.get("stats64") or link["stats"]
    return Traffic(counts["tx"]["bytes"], counts["rx"]["bytes"])
