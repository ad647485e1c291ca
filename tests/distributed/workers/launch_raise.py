"""Rank 1 raises."""

import os

from tests.distributed.launch import report

report({"started": True})
if os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    raise RuntimeError("planted failure")
