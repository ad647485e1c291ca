"""A thousand eager steps, each with a tape of its own: what is there after some of them."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_gradcomp.tensorflow import Compression
from tests.distributed.launch import report

MARKS = (200, 600, 1000)
"""Steps after which is looked."""


def look(compression: Compression) -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "variables": len(compression.variables),
        "records": len(compression._steps.records),
        "tensors": sum(isinstance(one, tf.Tensor) for one in gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def main() -> None:
    hvd.init()
    kernel = tf.Variable(tf.random.stateless_normal([64, 48], [1, 2]), name="kernel")
    bias = tf.Variable(tf.zeros([48]), name="bias")
    x = tf.random.stateless_normal([8, 64], [3, hvd.rank()])
    compression = Compression.topk(ratio=0.1)
    found = []
    for step in range(1, MARKS[-1] + 1):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ kernel + bias))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, grad in zip((kernel, bias), tape.gradient(loss, [kernel, bias])):
            variable.assign_sub(1e-4 * grad)
        if step in MARKS:
            found.append(look(compression))
    report({"looks": found, "steps": compression.stats()["steps"]})


if __name__ == "__main__":
    main()
