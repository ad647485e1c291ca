"""Twenty steps of one linear model, in the framework that the argument names.

Everything that is rounded is rounded element by element, so that both frameworks must see the same
gradients, and send the same payloads.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from tests.distributed.launch import report

STEPS, IN, OUT, LR = 20, 8, 256, 0.125
FORMS = (
    *("linear:bits=4", "sign", "qsgd:bits=4", "natural", "topk:ratio=0.05", "randomk:ratio=0.1"),
    *("topk:ratio=0.05+linear:bits=8", "topk:ratio=0.1 memory=momentum", "threshold:value=0.5"),
)


def start() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((IN, OUT)).astype(np.float32)


def sample(rank: int, step: int) -> tuple[list[float], np.ndarray]:
    draw = np.random.default_rng([rank, step])
    x, y = draw.standard_normal(IN), draw.standard_normal(OUT)
    return x.astype(np.float32).tolist(), y.astype(np.float32)


def parts(form: str) -> tuple[str, dict[str, Any]]:
    codec, _, memory = form.partition(" memory=")
    return codec, {"memory": memory} if memory else {}


def recording(codec: Any, numpy: Any) -> list[str]:
    """Return what will hold a digest of each payload that the codec encodes."""
    kind, found = type(codec), []
    encode = kind.encode

    def recorded(self: Any, *args: Any, **more: Any) -> Any:
        encoded = encode(self, *args, **more)
        if self is codec:
            payload = numpy(encoded.payload).tobytes()
            found.append(f"{len(payload)} {hashlib.sha256(payload).hexdigest()[:16]}")
        return encoded

    kind.encode = recorded
    return found


def in_torch(form: str) -> tuple[list[str], np.ndarray]:
    import horovod.torch as hvd
    import torch

    from horovod_gradcomp.torch import Compression

    hvd.init()
    codec, more = parts(form)
    compression = Compression.from_string(codec, **more)
    payloads = recording(compression._settings.codec, lambda x: x.numpy())
    weight = torch.nn.Parameter(torch.tensor(start()))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=LR), [("0.kernel", weight)], compression
    )
    for step in range(STEPS):
        x, y = sample(hvd.rank(), step)
        optimizer.zero_grad()
        off = -torch.tensor(y)
        for factor, row in zip(x, weight.unbind(0)):
            off = off + factor * row
        (0.5 * (off * off).sum()).backward()
        optimizer.step()
    return payloads, weight.detach().numpy()


def in_tensorflow(form: str) -> tuple[list[str], np.ndarray]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_gradcomp.tensorflow import Compression

    hvd.init()
    tf.config.run_functions_eagerly(True)
    codec, more = parts(form)
    compression = Compression.from_string(codec, **more)
    payloads = recording(compression._settings.codec, lambda x: x.numpy())
    weight = tf.Variable(start(), name="kernel")
    for step in range(STEPS):
        x, y = sample(hvd.rank(), step)
        with tf.GradientTape() as tape:
            off = -tf.constant(y)
            for factor, row in zip(x, tf.unstack(weight)):
                off = off + factor * row
            loss = 0.5 * tf.reduce_sum(off * off)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        (grad,) = tape.gradient(loss, [weight])
        weight.assign_sub(LR * grad)
    return payloads, weight.numpy()


if __name__ == "__main__":
    run = {"torch": in_torch, "tensorflow": in_tensorflow}[sys.argv[1]]
    ends = {form: run(form) for form in FORMS}
    report({form: [payloads, weight.tolist()] for form, (payloads, weight) in ends.items()})
