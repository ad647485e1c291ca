"""Telemetry and the guard on two real ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.workers.torch_telemetry import CHECKS, JOINS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(330)]


@functools.cache
def run() -> tuple[list[dict[str, Any]], str]:
    try:
        return run_ranks("torch_telemetry.py", 2, args=list(CHECKS), timeout=300), ""
    except AssertionError as error:
        return [], str(error)


def passed(reports: list[dict[str, Any]], check: str) -> Any:
    for report in reports:
        assert not (isinstance(report[check], dict) and "error" in report[check]), report[check][
            "error"
        ]
    return reports[0][check]


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str) -> None:
    reports, error = run()
    assert not error, error
    passed(reports, check)


def test_all_ranks_fall_back_at_the_same_step() -> None:
    reports, error = run()
    assert not error, error
    for fallback, used in passed(reports, "a_guard_falls_back_and_returns").items():
        name = fallback.partition(":")[0]
        assert used == [["topk"]] * 8 + [[name]] * 5 + [["topk"]] * 7
        assert all(report["a_guard_falls_back_and_returns"][fallback] == used for report in reports)


def test_ranks_join_early() -> None:
    env = {"HOROVOD_CACHE_CAPACITY": "0"}
    reports = run_ranks("torch_telemetry.py", 2, args=list(JOINS), env=env, timeout=120)
    for check in JOINS:
        passed(reports, check)


def test_three_ranks_over_mpi() -> None:
    checks = (
        "figures_are_those_of_the_step",
        "one_rank_alone",
        "a_guard_falls_back_and_returns",
    )
    reports = run_ranks("torch_telemetry.py", 3, controller="mpi", args=checks, timeout=200)
    for check in checks:
        passed(reports, check)
