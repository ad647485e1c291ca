"""``gradcomp bench step``: rows of both frameworks, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod_gradcomp.cli import step, step_tensorflow
from tests.distributed.launch import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(330)]


def bench(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod_gradcomp", "bench", "step", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )


def rows(path: Path, *args: object) -> dict[str, dict[str, Any]]:
    done = bench("--model", "resnet50", "--steps", 1, "--rounds", 1, "--json", path, *args)
    assert done.returncode == 0, done.stderr
    assert "161 tensors" in done.stdout
    return {row["system"]: row for row in json.loads(path.read_text())}


def test_rows_of_torch(tmp_path: Path) -> None:
    found = rows(tmp_path / "rows.json", "--codec", "topk")
    assert list(found) == ["none", "topk"]
    assert found["none"]["mb_per_step"] == pytest.approx(102.2, abs=0.1)
    assert 0.5 < found["topk"]["mb_per_step"] < 3
    assert found["topk"]["calls_us_per_tensor"] > 0


def test_rows_of_tensorflow(tmp_path: Path) -> None:
    found = rows(
        *(tmp_path / "rows.json", "--framework", "tensorflow", "--groups", 3),
        *("--codec", "topk", "--codec", "fp16"),
    )
    assert list(found) == ["none", "topk", "fp16", "none in groups of 3", "topk in groups of 3"]
    for name, row in found.items():
        assert row["times_none"] > 0
        assert 0.5 < row["mb_per_step"] < 3 if "topk" in name else row["mb_per_step"] > 50
        assert row["operations"] > 161
    assert found["topk"]["operations"] > found["none"]["operations"]


def test_a_ratio_is_that_of_a_round() -> None:
    turns = [
        {"system": name, "step_ms": ms, "bytes": nbytes, "operations": 7, "trace_s": 0.5}
        for name, ms, nbytes in (
            *(("none", 10.0, 0), ("topk", 5.0, 40)),
            *(("none", 90.0, 0), ("topk", 30.0, 40)),
            *(("none", 10.0, 0), ("topk", 10.0, 40)),
        )
    ]
    row = step_tensorflow.row("topk", turns, "lstm", [(10,)])
    times = [row[f"times_{which}"] for which in ("none", "least", "most")]
    assert times == [pytest.approx(value) for value in (0.5, 1 / 3, 1.0)]
    assert (row["step_ms"], row["mb_per_step"]) == (10.0, 40 / 1e6)
    assert step_tensorflow.row("none", turns, "lstm", [(10,)])["mb_per_step"] == 40 / 1e6
    assert step._row("none", turns, "lstm", [(10,)])["times_none"] == 1.0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--framework", "jax"], "torch or tensorflow"),
        (["--groups", "2"], "--framework tensorflow"),
        (["--framework", "tensorflow", "--telemetry", "5"], "no times of parts"),
        (["--model", "gpt"], "one of resnet50"),
    ],
)
def test_refusals(args: list[str], said: str) -> None:
    done = bench(*args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
