"""The torch front end on real ranks, over Gloo and MPI: the laws, and what users do."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.launch import run_elastic, run_ranks
from tests.distributed.workers.torch_laws import CHECKS, JOINS

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(700),
]

LONG = ("law2_", "many_buckets_", "references_follow")
"""Checks of hundreds of steps."""
SHORT = [name for name in CHECKS if not name.startswith(LONG)]
TWICE = ("topk", "two_phase", "randomk", "acp", "powersgd", "momentum", "differential", "ramp_topk")
"""Kinds of which there is one for each exchange, memory and schedule: 300 steps over MPI, too."""
ON_MPI = [
    name for name in CHECKS if not name.startswith("law2_") or name.partition("-")[2] in TWICE
]
ELSEWHERE = ("law6_", "law7_")
"""What test_every_law.py sees on two ranks over MPI."""
ON_FOUR = (
    *(f"law1_books_balance-{kind}" for kind in ("topk", "two_phase", "randomk", "powersgd")),
    "many_buckets_in_any_order-two_phase",
    "law7_bad_step-two_phase:kernel",
)
RUNS = {
    ("gloo", 2): list(CHECKS),
    ("mpi", 3): ON_MPI,
    ("gloo", 3): SHORT,
    ("mpi", 2): [name for name in SHORT if not name.startswith(ELSEWHERE)],
    ("gloo", 4): list(ON_FOUR),
}


@functools.cache
def run(controller: str, np: int) -> tuple[list[dict[str, str]], str]:
    """Run all checks once for each kind of run; the first that fails on a rank ends the run."""
    checks = RUNS[controller, np]
    try:
        return run_ranks("torch_laws.py", np, controller=controller, args=checks, timeout=600), ""
    except AssertionError as error:
        return [], str(error)


@pytest.mark.parametrize(
    ("controller", "np", "check"),
    [(*kind, check) for kind, checks in RUNS.items() for check in checks],
)
def test_check(controller: str, np: int, check: str) -> None:
    reports, error = run(controller, np)
    assert not error, error
    assert [report.get(check) for report in reports] == ["ok"] * np


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_ranks_join_early(controller: str) -> None:
    reports = run_ranks(
        "torch_laws.py",
        3,
        controller=controller,
        args=list(JOINS),
        env={"HOROVOD_CACHE_CAPACITY": "0"},
        timeout=300,
    )
    assert reports == [dict.fromkeys(JOINS, "ok")] * 3


def test_other_settings_on_one_rank_are_named() -> None:
    """A rank that is set otherwise ends the run with a message, on every rank, and no hang."""
    reports = run_ranks("torch_other_settings.py", 2, timeout=120)
    for report in reports:
        for case, parts in {
            "ratio": ("codec: topk:ratio=0.1,", "on rank 0, topk:ratio=0.05,", "on rank 1"),
            "codec": ("codec: topk", "on rank 0, fp16 on rank 1"),
            "memory": ("memory: residual:decay=1.0 on rank 0, none on rank 1",),
            "seed": ("seed: 0 on rank 0, 1 on rank 1",),
            "start": ("start_after: 0 on rank 0, 10 on rank 1",),
            "model": ("parameters: 2 of digest", "on rank 0, 2 of digest", "on rank 1"),
            "op": ("op: Average on rank 0, Sum on rank 1",),
            "predivide": ("gradient_predivide_factor: 1 on rank 0, 2 on rank 1",),
        }.items():
            for part in (*parts, "the same on all ranks"):
                assert part in report[case], f"{case}: {report[case]}"


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_ranks_come_and_go(how: str) -> None:
    """Elastic training, two ranks, three, and two again: only what left is lost, and it is told."""
    reports = run_elastic(
        "torch_elastic.py", "localhost:2\n", least=2, most=3, args=[how], timeout=240
    )
    assert len(reports) == 2
    for one in reports:
        assert one["size"] == 2
        assert one["steps"] == [reports[0]["steps"][0]] * 4
        assert one["lost"][0] == pytest.approx(one["off"], rel=1e-3)
        assert one["lost"][0] > 0
    told = [text for one in reports for text in one["told"]]
    assert len(told) == 3, told
    assert all("rank(s) 2" in text and "at the last commit" in text for text in told)


@pytest.mark.parametrize(
    ("how", "said"), [("dies", "ended with"), ("raises", "a hook of the user")]
)
def test_a_rank_that_fails_ends_the_others(how: str, said: str) -> None:
    with pytest.raises(AssertionError, match="ended with") as caught:
        run_ranks("torch_fails.py", 2, args=[how], timeout=90)
    assert said in str(caught.value)
    assert "went on alone" not in str(caught.value)


def test_a_rank_that_stalls_ends_the_run() -> None:
    """After the time that Horovod is told to wait; over Gloo, Horovod 0.28.1 waits for good."""
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    found = run_ranks("torch_fails.py", 2, controller="mpi", env=env, args=["stalls"], timeout=90)
    assert [one["steps"] for one in found] == [0, 0], "they went on"
    assert not found[0]["too_long"]
