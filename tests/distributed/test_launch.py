"""The launcher itself: what every distributed test stands on."""

import shutil
import sys
import time

import pytest

from tests.distributed import launch
from tests.distributed.launch import leftovers, run_ranks

pytestmark = pytest.mark.distributed

CONTROLLERS = pytest.mark.parametrize("controller", ["gloo", "mpi"])


@CONTROLLERS
@pytest.mark.parametrize("itself", [True, False], ids=["horovodrun", "launcher"])
def test_ranks_report_in_order(controller, itself, monkeypatch):
    if itself:
        monkeypatch.setattr(launch, "LAUNCHER", None)
    ranks = run_ranks(
        "launch_sum.py", 2, controller=controller, args=["a b", 3], env={"EXTRA": "x=y z"}
    )
    assert [r["rank"] for r in ranks] == [0, 1]
    for r in ranks:
        assert r["size"] == 2
        assert r["sum"] == [3.0, 20.0]
        assert r["args"] == ["a b", "3"]
        assert r["extra"] == "x=y z"


def test_more_ranks_than_cores_over_mpi(monkeypatch):
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 2)
    ranks = run_ranks("launch_sum.py", 3, controller="mpi")
    assert [r["sum"] for r in ranks] == [[6.0, 30.0]] * 3


@CONTROLLERS
def test_a_rank_that_raises_is_shown(controller):
    with pytest.raises(AssertionError) as caught:
        run_ranks("launch_raise.py", 2, controller=controller)
    text = str(caught.value)
    assert "--- rank 1 ---" in text
    assert "RuntimeError: planted failure" in text.split("--- rank 1 ---")[1]


def test_a_rank_that_reports_nothing_fails_the_run():
    with pytest.raises(AssertionError, match=r"without a report: \[1\]"):
        run_ranks("launch_silent.py", 2)


@CONTROLLERS
def test_a_hang_is_killed_and_says_where(controller, tmp_path):
    note, start = tmp_path / "folder", time.monotonic()
    with pytest.raises(AssertionError, match="did not end in time") as caught:
        run_ranks("launch_hang.py", 2, controller=controller, args=[note], timeout=25)
    assert time.monotonic() - start < 80
    assert "planted_hang" in str(caught.value)
    folder = note.read_text()
    assert folder
    assert leftovers(folder) == []


def test_missing_horovod_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(AssertionError, match="Horovod is not installed"):
        run_ranks("launch_sum.py", 2)


def test_missing_mpi_fails(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(AssertionError, match="MPI is not installed"):
        run_ranks("launch_sum.py", 2, controller="mpi")


def test_unknown_worker_fails():
    with pytest.raises(AssertionError, match="no worker"):
        run_ranks("no_such_worker.py", 2)
