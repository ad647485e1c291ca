"""Horovod's own elastic driver on local hosts that are read from a file.

``horovodrun --host-discovery-script`` imports TensorFlow anew for every look at the hosts, which
takes longer than the training under test.

Usage: ``elastic_driver.py HOSTS LEAST MOST WORKER...``; HOSTS holds ``name:slots`` lines.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    from horovod.runner.common.util import secret, timeout
    from horovod.runner.elastic.discovery import HostDiscovery
    from horovod.runner.elastic.settings import ElasticSettings
    from horovod.runner.gloo_run import gloo_run_elastic

    hosts, least, most, *worker = sys.argv[1:]

    class File(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            lines = Path(hosts).read_text(encoding="utf-8").split()
            return {name: int(slots) for name, slots in (line.split(":") for line in lines)}

    settings = ElasticSettings(
        discovery=File(),
        min_num_proc=int(least),
        max_num_proc=int(most),
        elastic_timeout=60,
        reset_limit=5,
        num_proc=int(least),
        verbose=0,
        key=secret.make_secret_key(),
        start_timeout=timeout.Timeout(60, message="waiting for {activity}"),
        output_filename=None,
        run_func_mode=False,
        nics={"lo"},
    )
    gloo_run_elastic(settings, dict(os.environ), [sys.executable, *worker], sys.executable)


if __name__ == "__main__":  # the driver starts processes that import this file
    main()
