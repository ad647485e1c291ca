"""The command line: rows, messages and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROW = {
    "codec",
    "framework",
    "device",
    "numel",
    "encode_x",
    "decode_x",
    "bytes_per_elem",
    "peak_extra_bytes",
    "rel_error",
    "rel_error_heavy",
    "copy_ms",
}


def gradcomp(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod_gradcomp", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_bench_codecs_writes_rows(framework: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = gradcomp(
        *("bench", "codecs", "--framework", framework, "--repeat", "1", "--json", str(file)),
        *("--numel", "20000", "--numel", "3000", "--codec", "linear:bits=4", "--codec", "topk"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [(row["codec"], row["numel"]) for row in rows] == [
        (codec, numel) for numel in (20000, 3000) for codec in ("linear:bits=4", "topk")
    ]
    for row in rows:
        assert set(row) == ROW
        assert row["encode_x"] > 0
        assert row["framework"] == framework
    assert rows[0]["bytes_per_elem"] == (20 * 8 + 10000) / 20000
    assert 0.05 < rows[0]["rel_error"] < 0.2
    assert "linear:bits=4" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("bench", "codecs", "--codec", "topk:rato=1"), "did you mean 'ratio'"),
        (("bench", "codecs", "--codec", "top"), "did you mean 'topk'"),
        (("bench", "codecs", "--device", "gpu"), "cpu or cuda"),
        (("bench", "codecs", "--framework", "jax"), "torch or tensorflow"),
    ],
)
def test_errors_of_use(args: tuple[str, ...], message: str) -> None:
    done = gradcomp(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
