"""What a long run of the torch front end needs: few collectives, memory that does not grow, and a
trace that says where time goes."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from horovod_gradcomp.cli.models import shapes_of
from horovod_gradcomp.torch import Compression, SettingsError
from tests.distributed.launch import FOLDER, run_checks
from tests.distributed.workers.waits import leave_cores_to_others

STEPS = 500
LEAST = 8 * 2**20
"""Bytes of resident memory that may come and go by themselves."""


class Model:
    """Parameters of some shapes, their gradients and an optimizer that reduces them."""

    def __init__(self, shapes: Any, compression: Any) -> None:
        gen = torch.Generator().manual_seed(hvd.rank())
        self.params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.grads = [torch.randn(shape, generator=gen) for shape in shapes]
        self.compression = compression
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.params, lr=0.0),
            named_parameters=[(f"p{i}", p) for i, p in enumerate(self.params)],
            compression=compression,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.params[::-1], self.grads[::-1])
        self.optimizer.step()


def collectives_of_resnet50() -> dict[str, float]:
    """Return own collectives a step, by codec, and what Horovod gets beside them."""
    found = {}
    for form in ("topk", "linear:bits=4,exchange=two_phase", "powersgd"):
        model = Model(shapes_of("resnet50"), Compression.from_string(form))
        model.step()
        stats = model.compression.stats()
        found[form] = stats["own_collectives_per_step"]
        assert stats["collectives_per_step"] == found[form] + len(model.params)
        del model
        gc.collect()
    return found


def memory_of_a_long_run() -> list[dict[str, Any]]:
    """Return what is there after 3 steps, halfway and at the end, with exchanges of all kinds."""
    shapes = [(64, 40), (40,), (40, 300), (300,), (300, 64), (8, 8, 5, 5), (64,)]
    rules = [("p2", "topk"), ("p4", "randomk"), ("p5", "powersgd:max_rate=1.0")]
    model = Model(shapes, Compression.linear(bits=4, exchange="two_phase", rules=rules))
    found = []
    for steps in (3, STEPS // 2, STEPS // 2):
        for _ in range(steps):
            model.step()
        found.append(there(model))
    return found


def there(model: Model) -> dict[str, Any]:
    """Return live tensors, their bytes, blocks of Python's memory, the process's, and the state."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what other modules keep
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    (entry,) = model.compression.state_dict()["optimizers"]
    return {
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "blocks": sys.getallocatedblocks(),
        "resident": resident,
        "state": {slot: sorted(table) for slot, table in entry["memory"].items()},
        "state_bytes": model.compression.stats()["state_bytes"],
    }


def traced_steps() -> dict[str, Any]:
    """Return the trace that all ranks wrote together, and what else happened."""
    folder = Path(os.environ[FOLDER])
    shapes = [(100, 300)] * 6 + [(100,)]
    compression = Compression.topk(bucket_bytes=4 * 30_000)
    model = Model(shapes, compression)
    model.step()
    path = folder / "trace.json"
    with compression.trace(path):
        for _ in range(4):
            model.step()
        with pytest.raises(SettingsError, match="trace within a trace"):
            compression.trace(folder / "other.json").start()
    (binding,) = compression._bindings
    assert binding.recorder is None, "a recorder after the trace"
    assert all(unit.stats.log is None for unit in binding.units), "a log after the trace"
    model.step()
    hvd.barrier()
    return json.loads(path.read_text())


def traced_by_one_rank() -> list[dict[str, Any]]:
    """Return what each rank wrote by itself: one that starts and stops, and one that fails."""
    folder = Path(os.environ[FOLDER])
    compression = Compression.from_string("randomk:ratio=0.1")
    model = Model([(40, 40), (40, 40)], compression)
    with pytest.raises(SettingsError, match="a folder that there is"):
        compression.trace(folder / "none" / "trace.json")
    trace = compression.trace(folder / f"own{hvd.rank()}.json", gather=False)
    trace.stop()
    trace.start()
    model.step()
    trace.stop()
    failed = compression.trace(folder / "failed.json").start()
    model.step()
    failed.__exit__(KeyError, None, None)  # as at the end of a block
    hvd.barrier()
    names = (f"own{hvd.rank()}.json", f"failed.rank{hvd.rank()}.json")
    return [json.loads((folder / name).read_text()) for name in names]


CHECKS = {
    run.__name__: run
    for run in (collectives_of_resnet50, memory_of_a_long_run, traced_steps, traced_by_one_rank)
}


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    leave_cores_to_others()
    run_checks(CHECKS, lambda name: hvd.barrier())


if __name__ == "__main__":
    sys.exit(main())
