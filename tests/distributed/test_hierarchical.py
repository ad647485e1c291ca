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


@functools.cache
def run(controller: str) -> tuple[list[dict[str, str]], str]:
    """Run all checks once; the first that fails on a rank ends the run."""
    env, checks = RUNS[controller], list(CHECKS)
    try:
        worker = "torch_hierarchical.py"
        found = run_ranks(worker, 4, controller=controller, args=checks, env=env, timeout=240)
        return found, ""
    except AssertionError as error:
        return [], str(error)


@pytest.mark.parametrize("controller", list(RUNS))
@pytest.mark.parametrize("check", list(CHECKS))
def test_check(controller: str, check: str) -> None:
    reports, error = run(controller)
    assert not error, error
    assert [report.get(check) for report in reports] == ["ok"] * 4
