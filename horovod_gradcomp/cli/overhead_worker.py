"""What ``gradcomp bench step`` runs in one process: calls with next to nothing to encode.

``compress`` and ``decompress`` are called as Horovod's optimizer does, for as many tensors as a
model has, all of them small. What that takes without the work of codec and memory, and without
waiting, is the price of a call. It prints one JSON line for each codec.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from ..core.codec import Shape
from .models import shapes_of

MARK = "gradcomp-overhead "

_SMALL: Shape = (32, 32, 1, 1)
"""Of 1024 values, the fewest that are compressed; of vectors, which are not, the first 32."""
_WARM = 10


class Optimizer:
    """What a compressor looks at in Horovod's optimizer, which has no hooks in one process."""

    def __init__(self, params: list[Any]) -> None:
        self.param_groups = [{"params": params}]
        self._requires_update = set(params)
        self._parameter_names = {p: f"p{i}" for i, p in enumerate(params)}


class Calls:
    """Small tensors that are compressed and decompressed, and reduced by nobody.

    Args:
        form: The string form of a codec.
        model: A name that :func:`shapes_of` knows.
    """

    def __init__(self, form: str, model: str) -> None:
        import torch

        from ..torch import Compression

        shapes = [_SMALL[: len(shape)] for shape in shapes_of(model)]
        self.params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        gen = torch.Generator().manual_seed(0)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=gen)
        self.optimizer = Optimizer(self.params)
        self.compression = Compression.from_string(form).bind_optimizer(self.optimizer)

    def step(self) -> None:
        """Do a step's calls, last layer first."""
        slot = self.compression
        sent = [slot.compress(p.grad) for p in reversed(self.params)]
        for payload, context in sent:
            slot.decompress(payload, context)

    def work(self) -> float:
        """Return the milliseconds so far that are not the price of a call."""
        stats = self.compression.stats()
        return float(stats["steps"] * (stats["codec_ms_per_step"] + stats["wait_ms_per_step"]))


def price(calls: Calls) -> float:
    """Return what both calls take in a step, in microseconds a tensor."""
    before, start = calls.work(), time.perf_counter()
    calls.step()
    spent = 1e3 * (time.perf_counter() - start)
    return 1e3 * (spent - (calls.work() - before)) / len(calls.params)


def functions(calls: Calls) -> float:
    """Return how many functions a step calls, of Python or in C, a tensor: the same every time."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        calls.step()
    finally:
        sys.setprofile(None)
    return count / len(calls.params)


def row(form: str, model: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return what a codec's calls take: the median of some rounds.

    The least of some steps counts for a round, since others on this machine only add to it.
    """
    calls = Calls(form, model)
    for _ in range(_WARM):
        calls.step()
    least = [min(price(calls) for _ in range(steps)) for _ in range(rounds)]
    return {
        "system": form,
        "calls_us_per_tensor": statistics.median(least),
        "functions_per_tensor": functions(calls),
    }


def main() -> None:
    """Measure what the JSON on the command line asks for."""
    import horovod.torch as hvd
    import torch

    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    for form in wanted["systems"]:
        told = row(form, wanted["model"], wanted["steps"], wanted["rounds"])
        sys.stdout.write(MARK + json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
