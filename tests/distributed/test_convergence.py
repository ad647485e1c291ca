"""Training with compressed gradients converges: the quick form of the convergence example.

Its bounds are seen to bite, too: they are given results as they would be without a memory.
"""

import contextlib
import copy
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.distributed import launch

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
]

EXAMPLES = launch.ROOT / "examples"
LIMIT = 240
"""Seconds; it took 70 to 125 on two cores that were busy with other work, too."""


@pytest.fixture(scope="module")
def quick():
    """Run the example, and return its exit code, what it printed and its JSON file's content."""
    folder = Path(tempfile.mkdtemp(prefix="gradcomp-"))
    try:
        results = folder / "convergence.json"
        command = [sys.executable, str(EXAMPLES / "convergence.py"), "--quick"]
        env = launch._environment(folder, LIMIT, {"COLUMNS": "120"})
        code, output = launch._run([*command, "--json", str(results)], env, LIMIT)
        content = json.loads(results.read_text()) if results.exists() else None
    finally:
        launch._kill(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return code, output, content


@pytest.fixture
def example(monkeypatch):
    """Return the modules of the example that need no framework."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import convergence_report
    import convergence_table

    return convergence_report, convergence_table


def test_quick_form_keeps_its_bounds(quick):
    code, output, _ = quick
    assert code == 0, output


def test_ranks_end_with_the_example(tmp_path):
    """A terminal that closes, or a job that is ended, leaves none behind."""
    command = [sys.executable, str(EXAMPLES / "convergence.py"), "--quick"]
    env = launch._environment(tmp_path, LIMIT, {})
    with (tmp_path / "output").open("w") as output:
        example = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    try:
        wait_until(lambda: ranks_in(tmp_path) == 2, 100)
        example.terminate()
        assert example.wait(20) == 128 + signal.SIGTERM
        wait_until(lambda: not launch.leftovers(tmp_path), 20)
    finally:
        example.kill()
        launch._kill(tmp_path)


def ranks_in(folder):
    """Return how many ranks of a run there are."""
    found = 0
    for pid in launch.leftovers(folder):
        with contextlib.suppress(OSError):  # ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += b"horovodrun" not in b" ".join(words) and any(
                word.endswith(b"convergence_worker.py") for word in words
            )
    return found


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.2)


def problems(example, runs):
    report, table = example
    return [p for t in table.QUICK_TASKS for p in report.broken(t, report.rows(t, runs))]


def changed(quick, example, change):
    """Return what is said to be broken when some runs are changed."""
    runs = copy.deepcopy(quick[2]["runs"])
    assert problems(example, runs) == []
    change(runs)
    return problems(example, runs)


def test_a_memory_that_does_nothing_is_noticed(quick, example):
    def forget(runs):
        for name, run in runs.items():
            without = name.replace("| default |", "| none |")
            if without != name and without in runs:
                run.update(result=runs[without]["result"], curve=runs[without]["curve"])

    found = changed(quick, example, forget)
    assert sum("the memory should help more" in text for text in found) == 2


def test_a_codec_that_trains_badly_is_noticed(quick, example):
    def spoil(runs):
        for run in runs.values():
            if run["setting"] == "linear:bits=8":
                run["result"] = None
            if run["setting"] == "topk:ratio=0.01":
                run["result"] = run["curve"][0][1]

    found = changed(quick, example, spoil)
    assert sum("too far from dense" in text for text in found) == 4
    assert any("diverged" in text for text in found)


def test_ranks_that_differ_and_bytes_that_are_not_saved_are_noticed(quick, example):
    def spoil(runs):
        for run in runs.values():
            if run["setting"] == "acp:rank=4":
                run.update(weights_equal=False, ratio=1.01)

    found = changed(quick, example, spoil)
    assert any("weights differ" in text for text in found)
    assert any("does not save bytes" in text for text in found)


def test_dense_training_that_learns_nothing_is_noticed(quick, example):
    def spoil(runs):
        for run in runs.values():
            run["result"] = run["curve"][0][1]

    assert any(text.startswith("dense:") for text in changed(quick, example, spoil))


def test_settings_that_have_not_run_are_noticed(quick, example):
    assert any("settings have run" in text for text in changed(quick, example, dict.clear))
