"""Where ranks find one another: Horovod's own rendezvous server, run inside the switch.

``python -m horovod_gradcomp.lab.rendezvous host0:2,host1:2`` prints one JSON line, the port and
each rank's place, and ends when its standard input does.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Serve until standard input ends."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    hosts = parse_hosts(sys.argv[1])
    places = get_host_assignments(hosts, sum(host.slots for host in hosts))
    server = RendezvousServer()
    port = server.start()
    server.init(places)
    keys = ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    found = {
        "port": port,
        "places": [{key: getattr(place, key) for key in keys} for place in places],
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
