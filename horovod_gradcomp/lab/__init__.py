"""A small cluster on one Linux machine: hosts with a network of their own and a set link speed.

Every host is a network namespace with one interface into a switch, which is a namespace too, so
that the machine's own network is left alone. Both ends of each link are limited; interface counters
tell what was really sent. Hosts share processors, memory and files, and reach nothing but one
another.
"""

from __future__ import annotations

from .cluster import Cluster, Traffic
from .network import Host

__all__ = ["Cluster", "Host", "Traffic"]
