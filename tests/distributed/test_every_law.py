"""Laws 1, 2, 6 and 7 of every codec with every memory that suits it, on two real ranks."""

from __future__ import annotations

import functools

import pytest

from tests import table
from tests.distributed.launch import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(800),
]

LABELS = list(table.trained_pairs())
ROUNDING, HALF = 4e-6, 1e-3
"""Of books, relative to the greatest value: of sums in float32, and in float16."""


@functools.cache
def run(worker: str, controller: str) -> tuple[list[dict], str]:
    """Run all pairs once for each kind of run."""
    try:
        return run_ranks(worker, 2, controller=controller, timeout=700), ""
    except AssertionError as error:
        return [], str(error)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_torch(controller, label):
    reports, error = run("torch_every_law.py", controller)
    assert not error, error
    assert [report.get(label) for report in reports] == ["ok"] * 2


@pytest.mark.parametrize("label", LABELS)
def test_tensorflow(label):
    reports, error = run("tensorflow_every_law.py", "gloo")
    assert not error, error
    one, other = (report[label] for report in reports)
    assert one == other
    settings = table.trained_pairs()[label]
    assert one["spoilt"] == [False, True, False]
    assert one["kept"]
    assert one["bad steps"] == 1
    assert one["resumed"]
    if settings.memory.slots:
        gathers = settings.codec.combine.name == "GATHER"
        assert one["books"] < (HALF if "fp16" in label and not gathers else ROUNDING)
