"""The hierarchical exchange on four real ranks, as two nodes of two, over Gloo and MPI."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.workers.torch_hierarchical import CHECKS

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
]

RUNS = {
    "gloo": {},  # process sets that hvd.init is given
    "mpi": {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},  # those that the package makes
}
FEW = (
    "books_balance-linear4:average",
    "weights_stay_equal-topk",
    "bytes_are_counted_where_they_go",
    "a_bad_step_is_agreed-linear4:kernel",
    "resume-ef21",
    "what_cannot_be_is_refused",
)
"""Over MPI; what is left is the same in both."""
CASES = [("gloo", name) for name in CHECKS] + [("mpi", name) for name in FEW]


@functools.cache
def run(controller: str) -> tuple[list[dict[str, str]], str]:
    """Run all checks once; the first that fails on a rank ends the run."""
    env = RUNS[controller]
    checks = [name for kind, name in CASES if kind == controller]
    try:
        worker = "torch_hierarchical.py"
        found = run_ranks(worker, 4, controller=controller, args=checks, env=env, timeout=240)
        return found, ""
    except AssertionError as error:
        return [], str(error)


@pytest.mark.parametrize(("controller", "check"), CASES)
def test_check(controller: str, check: str) -> None:
    reports, error = run(controller)
    assert not error, error
    assert [report.get(check) for report in reports] == ["ok"] * 4
