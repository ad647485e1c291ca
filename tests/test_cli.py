"""The command line: rows, messages and exit codes."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tensorflow as tf
from rich.console import Console
from typer.testing import CliRunner

from horovod_gradcomp.cli import bench, peak
from horovod_gradcomp.cli.labs import LABS
from horovod_gradcomp.cli.measure import matrix, measure, peak_extra
from horovod_gradcomp.codecs import REGISTRY
from horovod_gradcomp.codecs.linear import Linear
from horovod_gradcomp.core.codec import Encoded
from horovod_gradcomp.core.errors import SettingsError
from horovod_gradcomp.core.stringform import split

ROW = {
    "codec": str,
    "framework": str,
    "device": str,
    "numel": int,
    "threads": int,
    "ranks": int,
    "check_x": float,
    "encode_x": float,
    "decode_x": float,
    "bytes_per_elem": float,
    "peak_extra_bytes": int,
    "rel_error": float,
    "rel_error_heavy": float,
    "copy_ms": float,
    "spread": float,
}


def gradcomp(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod_gradcomp", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_bench_codecs_writes_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = gradcomp(
        *("bench", "codecs", "--framework", "torch", "--framework", "tensorflow", "--repeat", "2"),
        *("--numel", "20000", "--numel", "3000", "--codec", "linear:bits=4", "--codec", "topk"),
        *("--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [(row["numel"], row["codec"], row["framework"]) for row in rows] == [
        (numel, codec, framework)
        for numel in (128 * 156, 32 * 93)
        for codec in ("linear:bits=4", "topk")
        for framework in ("torch", "tensorflow")
    ]
    for row in rows:
        assert {key: type(value) for key, value in row.items()} == ROW
        assert min(row["encode_x"], row["decode_x"], row["copy_ms"]) > 0
    assert rows[0]["bytes_per_elem"] == (20 * 8 + 19968 // 2) / 19968
    assert 0.05 < rows[0]["rel_error"] < 0.2
    for torch, tensorflow in zip(rows[::2], rows[1::2]):  # the same values, to the same codes
        assert torch["rel_error"] == pytest.approx(tensorflow["rel_error"], rel=1e-4)
    lines = done.stdout.splitlines()
    assert sum(line.startswith("linear:bits=4 ") for line in lines) == 2
    assert sum(f"{rows[0]['rel_error_heavy']:.4f}" in line for line in lines) == 1
    assert sum("32 float32 values" in line or "tensorflow" in line for line in lines) == 2


def test_nothing_is_measured_if_the_last_codec_is_mistyped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "horovod_gradcomp.cli.measure.measure", lambda form, *_, **__: seen.append(form)
    )
    done = CliRunner().invoke(bench.app, ["codecs", "--codec", "topk", "--codec", "liner"])
    assert isinstance(done.exception, SettingsError)
    assert not seen


def test_all_codecs_are_measured_by_default() -> None:
    assert {split(form)[0] for form in bench.FORMS} == set(REGISTRY)
    assert len(set(bench.FORMS)) == len(bench.FORMS)


@pytest.mark.parametrize("labs", [["torch"], ["torch", "tensorflow"]])
def test_the_table_is_whole_in_80_columns(labs: list[str]) -> None:
    row = {key: kind() for key, kind in ROW.items()}
    row |= {"numel": 25_001_984, "ranks": 64, "encode_x": 1234.5, "decode_x": 123.4}
    row |= {"peak_extra_bytes": 104_800_000}
    rows = [{**row, "codec": form, "framework": lab} for form in bench.FORMS for lab in labs]
    console = Console(file=io.StringIO(), width=500)
    console.print(bench._table(rows, labs))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for form in bench.FORMS:
        (cells,) = (line.split() for line in lines if line.startswith(f"{form} "))
        times = ["1234.5"] * len(labs) + ["123.4"] * len(labs)
        assert cells == [form, *times, "0.0000", *["104.8"] * len(labs), "0.0000", "0.0000"]


@pytest.mark.parametrize(
    ("numel", "shape"),
    [
        (1, (1, 1)),
        (3, (1, 3)),
        (4, (2, 2)),
        (20_000, (128, 156)),
        (2**20, (1024, 1024)),
        (25_001_984, (4096, 6104)),
    ],
)
def test_values_fill_a_matrix(numel: int, shape: tuple[int, int]) -> None:
    assert matrix(numel) == shape
    assert math.prod(shape) <= numel


@pytest.mark.parametrize("framework", LABS)
def test_the_copy_copies(framework: str) -> None:
    threads = 1
    if framework == "tensorflow":  # what it has: once it has run, it can take no other number
        threads = tf.config.threading.get_intra_op_parallelism_threads()
    lab = LABS[framework](threads, "cpu")
    copy = lab.copier(4_000_000)
    assert min(lab.seconds(copy) for _ in range(3)) > 16e6 / 200e9  # seconds at 200 GB/s


@pytest.mark.parametrize(("codec", "count"), [("linear", 5), ("randomk", 1), ("none", 1)])
def test_ranks_are_payloads_to_decode(
    codec: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, seen = REGISTRY[codec], []

    def decode(self, xp, payloads, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append({payload.numpy().tobytes() for payload in payloads})
        return original(self, xp, payloads, *args, **kwargs)

    original = cls.decode
    monkeypatch.setattr(cls, "decode", decode)
    row = measure(codec, 4096, ranks=5, repeat=1)
    assert row["ranks"] == 5
    assert {len(payloads) for payloads in seen[:2]} == {count}  # timed, each of another gradient


@dataclass(frozen=True)
class Wasteful(Linear):
    """A planted fault: storage for a quarter of the values, needed until the end."""

    def encode(self, xp, x, call, *, want_error):  # type: ignore[no-untyped-def]
        waste = xp.scaled(x[: xp.numel(x) // 4], 2.0)
        x = xp.add_(x, xp.scaled(waste[:1], 1e-30))  # so a graph has it from the start
        payload, error, _ = super().encode(xp, x, call, want_error=want_error)
        late = xp.take(waste, xp.cast(payload[:1], "int64"))  # known only in the end
        return Encoded(xp.set_flag_(payload, late[0]), error)


def peaks(numel: int, framework: str) -> tuple[int, int]:
    REGISTRY["wasteful"] = Wasteful
    return (
        peak_extra("linear", numel, framework, "cpu"),
        peak_extra("wasteful", numel, framework, "cpu"),
    )


@pytest.mark.parametrize("framework", LABS)
def test_the_peak_sees_what_is_given_back(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS")  # TensorFlow as users have it, with its pool
    peak._process.cache_clear()
    numel = 2**22
    without, planted = peak.elsewhere(peaks, numel, framework)
    assert 0.9 * numel < planted - without < 1.1 * numel


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


SLOW = """
import sys, time, typer
from horovod_gradcomp.cli import main

def wait(app):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)

typer.Typer.__call__ = wait
main.main()
"""


def test_a_terminated_command_cleans_up() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (said, process.returncode) == ("cleaned up\n", 128 + signal.SIGTERM)
