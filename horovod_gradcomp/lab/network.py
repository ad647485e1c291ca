"""The commands that make a switch and hosts out of network namespaces, as plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "gradcomp-lab"
"""What every name begins with."""

INTERFACE = "eth0"
"""A host's only interface beside the loopback."""

_SUBNET = "10.94.0"
_QUEUE = 0.05
"""Seconds of traffic that wait at a link before packets are dropped."""

_BURST = 0.002
"""Seconds of traffic that pass at once, so that the timer need not fire for each packet."""

_LARGEST = 2 * 65_536
"""Bytes of two of the largest packets that the kernel hands to an interface."""


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        lab: Number of the cluster.
        index: From 0.
        bandwidth: Bytes a second of its link, each way.
        latency: Seconds added to every packet, each way.
    """

    lab: int
    index: int
    bandwidth: float
    latency: float = 0.0

    @property
    def name(self) -> str:
        """The name of its namespace."""
        return f"{PREFIX}{self.lab}-host{self.index}"

    @property
    def address(self) -> str:
        """Its address."""
        return f"{_SUBNET}.{self.index + 1}"


def switch_name(lab: int) -> str:
    """Return the name of the switch's namespace."""
    return f"{PREFIX}{lab}-switch"


SWITCH_ADDRESS = f"{_SUBNET}.254"
MOST_HOSTS = 200


def build(hosts: Sequence[Host]) -> list[list[str]]:
    """Return the commands that make a switch and hosts.

    Args:
        hosts: All of one cluster.
    """
    switch = switch_name(hosts[0].lab)
    out = [
        ["ip", "netns", "add", switch],
        ["ip", "-n", switch, "link", "set", "lo", "up"],
        ["ip", "-n", switch, "link", "add", "br0", "type", "bridge"],
        ["ip", "-n", switch, "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "br0"],
        ["ip", "-n", switch, "link", "set", "br0", "up"],
    ]
    for host in hosts:
        port, name = f"port{host.index}", host.name
        peer = ["peer", "name", INTERFACE, "netns", name]
        out += [
            ["ip", "netns", "add", name],
            ["ip", "-n", name, "link", "set", "lo", "up"],
            ["ip", "-n", switch, "link", "add", port, "type", "veth", *peer],
            ["ip", "-n", switch, "link", "set", port, "master", "br0", "up"],
            ["ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", INTERFACE],
            ["ip", "-n", name, "link", "set", INTERFACE, "up"],
            *limit(switch, port, host.bandwidth, host.latency),
            *limit(name, INTERFACE, host.bandwidth, host.latency),
        ]
    return out


def limit(namespace: str, device: str, bandwidth: float, latency: float) -> list[list[str]]:
    """Return the commands that limit what a device sends, and delay it.

    Args:
        namespace: Where the device is.
        device: Its name.
        bandwidth: Bytes a second.
        latency: Seconds; 0 needs no ``netem`` in the kernel.
    """
    add = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
    burst = max(_LARGEST, round(_BURST * bandwidth))
    waiting = burst + max(_LARGEST, round(_QUEUE * bandwidth))
    rate = ["rate", f"{round(8 * bandwidth)}bit", "burst", str(burst), "limit", str(waiting)]
    if not latency:
        return [[*add, "root", "tbf", *rate]]
    packets = str(max(1000, round(2 * (latency + _QUEUE) * bandwidth / 1000)))
    delay = ["netem", "delay", f"{1e6 * latency:g}us", "limit", packets]
    return [
        [*add, "root", "handle", "1:", *delay],
        [*add, "parent", "1:1", "handle", "2:", "tbf", *rate],
    ]


def hosts_file(machine: str, address: str, original: str) -> str:
    """Return ``/etc/hosts`` in which the machine's name stands for a host's own address.

    Horovod binds to what the name resolves to.
    """
    kept = [line for line in original.splitlines() if machine not in line.split("#")[0].split()]
    return "\n".join([*kept, f"{address} {machine}"]) + "\n"
