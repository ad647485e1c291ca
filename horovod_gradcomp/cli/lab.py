"""``gradcomp lab``: run a training script on a small cluster inside this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..core.errors import SettingsError, explain
from ..lab import Cluster, Traffic
from . import units


def lab(
    command: list[str] = typer.Argument(
        ..., metavar="-- COMMAND", help="What every rank runs, after --: -- python train.py"
    ),
    hosts: int = typer.Option(2, min=1, help="Network namespaces that act as hosts."),
    ranks_per_host: int = typer.Option(1, min=1, help="Ranks on each."),
    bandwidth: str = typer.Option("1gbit", help="Of each host's link, each way: 100mbit, 10Gb/s."),
    latency: str = typer.Option(
        "0", help="Added to every packet, each way: 0.2ms; needs netem in the kernel."
    ),
    slow_host: Optional[list[str]] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, help="Another bandwidth for one host, 1:100mbit; several times for several."
    ),
    timeout: Optional[float] = typer.Option(  # noqa: UP045
        None, min=1.0, help="Seconds after which the ranks are ended."
    ),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--json", help="Write hosts and their traffic to this file."
    ),
) -> None:
    """Run ranks on hosts of their own on this Linux machine, over links of a set speed.

    Needs root. Horovod runs over Gloo; the command's ranks also suit torch.distributed. Hosts share
    this machine's processors, and reach nothing but one another. Ends with the command's code.
    """
    cluster = Cluster(
        hosts=hosts,
        bandwidth=units.bandwidth(bandwidth, "--bandwidth"),
        latency=units.duration(latency, "--latency"),
        slow=dict(_slow(text) for text in slow_host or ()),
    )
    console = Console(stderr=True)
    with cluster:
        rate = units.show_rate(units.bandwidth(bandwidth, "--bandwidth"))
        console.print(f"{hosts} hosts at {rate}, {hosts * ranks_per_host} ranks", highlight=False)
        before, start = cluster.traffic(), time.perf_counter()
        code = cluster.run(command, ranks_per_host=ranks_per_host, timeout=timeout)
        seconds = time.perf_counter() - start
        moved = [after - at_first for after, at_first in zip(cluster.traffic(), before)]
    console.print(_table(cluster, moved, seconds))
    if json_file:
        report = _report(cluster, moved, seconds, ranks_per_host)
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    raise typer.Exit(code if code >= 0 else 128 - code)


def _slow(text: str) -> tuple[int, float]:
    host, colon, rate = text.partition(":")
    if not colon or not host.strip().isdigit():
        raise SettingsError(
            explain(got=f"--slow-host {text!r}", expected="host and bandwidth, as in 1:100mbit")
        )
    return int(host), units.bandwidth(rate, "--slow-host")


def _table(cluster: Cluster, moved: Sequence[Traffic], seconds: float) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        caption=f"counted by the interfaces over {seconds:.1f} s, with the start of the ranks",
    )
    table.add_column("host")
    for head in ("address", "link", "MB sent", "MB received"):
        table.add_column(head, justify="right")
    for host, traffic in zip(cluster.hosts, moved):
        table.add_row(
            str(host.index),
            host.address,
            units.show_rate(host.bandwidth),
            f"{traffic.sent / 1e6:,.2f}",
            f"{traffic.received / 1e6:,.2f}",
        )
    return table


def _report(
    cluster: Cluster, moved: Sequence[Traffic], seconds: float, ranks_per_host: int
) -> dict[str, Any]:
    hosts = [
        {
            "host": host.index,
            "address": host.address,
            "bandwidth_bytes_a_second": host.bandwidth,
            "latency_seconds": host.latency,
            "ranks": ranks_per_host,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
        }
        for host, traffic in zip(cluster.hosts, moved)
    ]
    return {"seconds": seconds, "hosts": hosts}
