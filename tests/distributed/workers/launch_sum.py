"""Allreduce, and say what this rank's environment is."""

import os
import sys

import horovod.torch as hvd
import torch

from tests.distributed.launch import report

hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0, 10.0]), op=hvd.Sum)
report({"rank": hvd.rank(), "size": hvd.size(), "sum": total})
report({"args": sys.argv[1:], "extra": os.environ.get("EXTRA")})
