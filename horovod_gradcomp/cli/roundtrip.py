"""What ``gradcomp doctor`` runs on two ranks: one compressed step whose result is known.

Everything is sent, so the mean must come back to the last bit; the carrier must tell Average from
Sum. Prints one JSON line a rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "gradcomp-doctor "
_CODEC = "topk:ratio=1.0"
_SHAPE = (64, 32)  # at least as many values as are compressed by default


def _torch() -> bool:
    import horovod.torch as hvd
    import torch

    from ..torch import Compression

    hvd.init()
    good = True
    for op, gain in ((hvd.Average, 0.5), (hvd.Sum, 1.0)):
        weight = torch.nn.Parameter(torch.zeros(_SHAPE))
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            named_parameters=[("weight", weight)],
            compression=Compression.from_string(_CODEC),
            op=op,
        )
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        good &= bool((weight == -3 * gain).all())  # 1 from one rank, 2 from the other
    return good


def _tensorflow() -> bool:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from ..tensorflow import Compression

    hvd.init()
    good = True
    for op, gain in ((hvd.Average, 0.5), (hvd.Sum, 1.0)):
        weight = tf.Variable(tf.zeros(_SHAPE))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * float(hvd.rank() + 1))
        tape = hvd.DistributedGradientTape(tape, compression=Compression.from_string(_CODEC), op=op)
        (grad,) = tape.gradient(loss, [weight])
        good &= bool(tf.reduce_all(grad == 3 * gain))
    return good


def main() -> None:
    """Run the step of the framework that the command line names."""
    good = {"torch": _torch, "tensorflow": _tensorflow}[sys.argv[1]]()
    sys.stdout.write(MARK + json.dumps({"good": good}) + "\n")


if __name__ == "__main__":
    main()
