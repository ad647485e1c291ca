"""The torch front end on real ranks, over Gloo and MPI: the laws, and what users do."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.workers.torch_laws import CHECKS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(700)]

RUNS = [("gloo", 2), ("gloo", 3), ("mpi", 2), ("mpi", 3)]


@functools.cache
def run(controller: str, np: int) -> tuple[list[dict[str, str]], str]:
    """Run all checks once for each kind of run; the first that fails on a rank ends the run."""
    try:
        return run_ranks("torch_laws.py", np, controller=controller, timeout=600), ""
    except AssertionError as error:
        return [], str(error)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("controller", "np"), RUNS, ids=lambda value: str(value))
def test_check(controller: str, np: int, check: str) -> None:
    reports, error = run(controller, np)
    assert not error, error
    assert [report.get(check) for report in reports] == ["ok"] * np


def test_other_settings_on_one_rank_are_named() -> None:
    """A rank with another ratio ends the run with a message, on every rank, and no hang."""
    reports = run_ranks("torch_other_settings.py", 2, timeout=90)
    for report in reports:
        assert "bytes for 'weight' from 2 ranks; expected 2 x" in report["error"], report


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(AssertionError, match="ended with"):
        run_ranks("torch_dies.py", 2, timeout=90)
