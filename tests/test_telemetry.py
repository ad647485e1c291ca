"""Figures, sinks, the guard's rule and reports, without ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_gradcomp.cli import report
from horovod_gradcomp.cli.runs import Run, read
from horovod_gradcomp.core.errors import GradCompError, SettingsError
from horovod_gradcomp.core.guard import Guard, Standing, guarded
from horovod_gradcomp.core.settings import make, parse_codec
from horovod_gradcomp.core.sinks import Sink, scalars
from horovod_gradcomp.core.stats import UnitStats
from horovod_gradcomp.core.telemetry import WIDTH, Heard, Since, Sums, a_step, added, total


def sums_of(gradient: np.ndarray, wanted: np.ndarray, left: np.ndarray) -> Sums:
    return Sums(
        *(float(a @ b) for a, b in [(gradient,) * 2, (wanted,) * 2, (left,) * 2, (wanted, left)])
    )


def vectors(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    gradient, held = rng.normal(size=500), rng.normal(size=500)
    wanted = gradient + held
    return gradient, wanted, np.where(np.abs(wanted) > 1, wanted * 0.1, wanted)


# Figures --------------------------------------------------------------------------------------
def test_figures() -> None:
    gradient, wanted, left = vectors(1)
    sent = wanted - left
    figures = sums_of(gradient, wanted, left).figures()
    assert figures["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    assert figures["residual_norm"] == pytest.approx(np.linalg.norm(left), rel=1e-5)
    cosine = wanted @ sent / np.linalg.norm(wanted) / np.linalg.norm(sent)
    assert figures["cosine"] == pytest.approx(cosine, rel=1e-5)


def test_sums_of_parts_are_those_of_the_whole() -> None:
    every = [vectors(seed) for seed in range(3)]
    parts = total(sums_of(*each) for each in every)
    whole = sums_of(*(np.concatenate(column) for column in zip(*every)))
    assert parts is not None
    assert parts == pytest.approx(whole)
    assert total([]) is None


@pytest.mark.parametrize(
    ("sums", "cosine"),
    [
        (Sums(1.0, 0.0, 0.0, 0.0), None),  # nothing to send
        (Sums(1.0, 4.0, 4.0, 4.0), 0.0),  # nothing sent
        (Sums(1.0, 4.0, 0.0, 0.0), 1.0),  # all sent
        (Sums(1.0, 1.0, 4.0, 2.0), -1.0),  # the opposite sent
        (Sums(1.0, 1.0, 0.0, 1e-9), 1.0),  # not above it, for rounding
        (Sums(math.inf, math.inf, 1.0, 1.0), None),
        (Sums(*[math.nan] * 4), None),
    ],
)
def test_cosine(sums: Sums, cosine: float | None) -> None:
    assert sums.cosine == cosine
    json.dumps(sums.figures(), allow_nan=False)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_what_all_ranks_have_measured(factor: float) -> None:
    """Ranks that measure nothing are not counted, and do not thin the means."""
    own = [sums_of(*vectors(seed)) for seed in range(2)]
    rows = np.array([[1.0, *own[0]], [1.0, *own[1]], [0.0] * WIDTH])
    heard = Heard.of(3, factor, {"w": rows.mean(0) * factor, "b": np.zeros(WIDTH)})
    assert heard is not None
    assert heard.ranks == 2
    assert set(heard.layers) == {"w"}
    figures = heard.figures()
    squares = (own[0].left + own[1].left) / 2
    assert figures["layers"]["w"]["residual_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert figures["residual_norm"] == figures["layers"]["w"]["residual_norm"]
    assert figures["ranks"] == 2
    assert Heard.of(3, factor, {"w": np.zeros(WIDTH)}) is None


def test_counts_are_those_since_the_last_record() -> None:
    stats = UnitStats(raw_bytes=100, wire_bytes=10)
    since = Since(stats)
    stats.raw_bytes, stats.wire_bytes, stats.encode_ms = 300, 30, 6.0
    told = a_step(since.take(), 2)
    assert (told["raw_bytes"], told["wire_bytes"], told["encode_ms"]) == (100, 10, 3.0)
    assert told["ratio"] == 0.1
    nothing = since.take()
    assert a_step(nothing, 1)["ratio"] is None
    assert added([{**nothing, "raw_bytes": 4}, {**nothing, "raw_bytes": 5}])["raw_bytes"] == 9


# The guard ------------------------------------------------------------------------------------
FINE, POOR = Sums(1.0, 1.0, 0.01, 0.01), Sums(1.0, 1.0, 0.99, 0.99)


def test_a_guard_goes_and_comes_back() -> None:
    guard = Guard(parse_codec("fp16"), cosine=0.5, patience=2, hold=10)
    standing, why = Standing().after(guard, 0, POOR, 2)
    assert (standing, why) == (Standing(1, 0), "")
    assert standing.after(guard, 10, FINE, 12)[0] == Standing()  # not in a row
    standing, why = standing.after(guard, 10, POOR, 12)
    assert standing == Standing(0, 22)
    assert why == "cosine 0.1, below 0.5"
    assert [standing.falls_back(step) for step in (12, 21, 22)] == [True, True, False]
    for step in (11, 21):  # was on its way, or is of the fallback
        assert standing.after(guard, step, POOR, step + 2) == (standing, "")
    assert standing.after(guard, 22, POOR, 24)[0] == Standing(1, 22)


@pytest.mark.parametrize(
    ("sums", "crossed"),
    [
        (FINE, False),
        (POOR, True),
        (Sums(1.0, 1.0, math.inf, 1.0), True),
        (Sums(*[math.nan] * 4), True),
        (Sums(0.0, 1.0, 1.0, 0.0), True),
        (Sums(0.0, 0.0, 0.0, 0.0), False),
    ],
)
def test_bounds(sums: Sums, crossed: bool) -> None:
    guard = Guard(parse_codec("fp16"), residual_norm=0.5)
    assert bool(guard.crossed(sums)) is crossed


def test_a_guard_serves_the_rules() -> None:
    rules = [("a", None), ("b", "powersgd"), ("c", "randomk")]
    settings = guarded(make("topk", {"rules": rules}), "fp16", cosine=0.1)
    (_, a), (_, b), (_, c) = settings.exceptions
    assert a is None
    for own in (settings, b, c):
        assert own.guard.fallback.registered == "fp16"
        assert not own.by_horovod
    assert [own.codec.registered for own in (b, c)] == ["powersgd", "randomk"]
    assert "guard=fp16:residual_norm=None,cosine=0.1" in settings.describe()
    assert "guard" not in make("topk", {}).describe()


# Sinks ----------------------------------------------------------------------------------------
def record(step: int, **more: Any) -> dict[str, Any]:
    figures = {"grad_norm": 2.0, "residual_norm": 1.0 + step, "cosine": 0.5}
    counts = {
        "raw_bytes": 4e6,
        "wire_bytes": 4e4,
        "ratio": 0.01,
        "encode_ms": 1.0,
        "wait_ms": None,
        "decode_ms": 0.5,
        "codec_ms": 1.0,
    }
    layer = {"bucket": "w", "numel": 1000, **counts, **figures}
    return {
        "gradcomp": 1,
        "step": step,
        "steps": 10,
        "optimizer": "",
        "rank": 0,
        "world_size": 2,
        "settings": "topk",
        "bad_steps": 0,
        "telemetry_ms": 0.1,
        "total": {**counts, **figures},
        "cluster": {"ranks": 2, **figures, "layers": {"w<1>": figures}},
        "bypassed": counts,
        "buckets": {},
        "layers": {"w<1>": layer, "v": {**layer, "numel": 7}},
        **more,
    }


class Writer:
    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))


def test_a_writer_of_scalars() -> None:
    writer = Writer()
    Sink(writer)(record(20))
    assert ("gradcomp/ratio", 0.01, 20) in writer.calls
    assert ("gradcomp/all_ranks/cosine", 0.5, 20) in writer.calls
    assert ("gradcomp/layers/w<1>/residual_norm", 21.0, 20) in writer.calls
    assert not [call for call in writer.calls if call[1] is None]
    Sink(writer)({"gradcomp": 1, "event": "fallback", "step": 22, "optimizer": "x"})
    assert writer.calls[-1] == ("gradcomp/x/fallback", 1.0, 22)


def test_a_writer_of_summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's writers belong to a package that has ``summary.scalar``."""
    calls: list[Any] = []

    class Package:
        class summary:
            @staticmethod
            def scalar(name: str, value: float, step: int) -> None:
                calls.append((name, value, step))

    class Summaries:
        @contextmanager
        def as_default(self) -> Any:
            yield

    Summaries.__module__ = "tensorless.python.ops"
    monkeypatch.setitem(sys.modules, "tensorless", Package)
    Sink(Summaries())(record(3))
    assert calls == [(name, value, 3) for name, value in scalars(record(3))]


def test_a_real_writer_of_tensorflow(tmp_path: Path) -> None:
    import tensorflow as tf

    writer = tf.summary.create_file_writer(str(tmp_path))
    Sink(writer)(record(7))
    writer.close()
    (path,) = tmp_path.iterdir()
    found = {
        value.tag: (event.step, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert found == {name: (7, pytest.approx(value)) for name, value in scalars(record(7))}


def test_a_real_writer_of_torch(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as events
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    Sink(writer)(record(7))
    writer.close()
    found = events.EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == {name for name, _ in scalars(record(7))}
    assert [event.step for event in found.Scalars("gradcomp/cosine")] == [7]


def test_a_sink_that_fails_is_said_once() -> None:
    def fail(record: Any) -> None:
        raise ValueError("full")

    sink = Sink(fail)
    with pytest.warns(UserWarning, match="its sink failed at step 4: ValueError: full"):
        sink(record(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink(record(5))


@pytest.mark.parametrize("given", [None, 3, "none/there/run.jsonl"])
def test_sinks_that_cannot_be(given: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected a"):
        Sink(tmp_path / given if isinstance(given, str) else given).open()


def test_lines_are_added_to_a_file(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = Sink(tmp_path / "run.jsonl")
        sink.open()
        sink(record(step))
        sink.close()
    (run,) = read(tmp_path / "run.jsonl")
    assert [one["step"] for one in run.records] == [1, 2]


# Reports --------------------------------------------------------------------------------------
def written(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_what_was_written_later_counts(tmp_path: Path) -> None:
    event = {
        "gradcomp": 1,
        "event": "fallback",
        "step": 12,
        "until": 17,
        "optimizer": "",
        "why": "",
    }
    lines = [record(s) for s in (0, 10, 20, 30)]
    lines += [
        record(20, steps=5),
        {**event, "step": 32, "until": 90},
        record(30, steps=5),
        record(40),
    ]
    lines += [record(5, optimizer="b"), '{"gradcomp": 1, "st']
    first, other = read(written(tmp_path / "run.jsonl", *lines))
    assert [(r["step"], r["steps"]) for r in first.records] == [
        (0, 10),
        (10, 10),
        (20, 5),
        (30, 5),
        (40, 10),
    ]
    assert first.fallbacks() == [(32, 40)]
    assert (first.label, other.label) == ("run", "run b")
    again = [*lines[:-2], event, record(0)]
    (anew,) = read(written(tmp_path / "run.jsonl", *again))
    assert ([r["step"] for r in anew.records], anew.events) == ([0], [])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "got no file"),
        ([], "without a record"),
        (["{}"], "line 1: '{}'"),
        (["no JSON", record(1)], "line 1: 'no JSON'"),
        (["half {"], "line 1"),
        ([record(1), {**record(2), "gradcomp": 2}], "line 2"),
        ([[1]], "line 1: '[1]'"),
    ],
)
def test_files_that_hold_no_telemetry(lines: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    if lines is not None:
        written(path, *lines)
        if not lines:
            path.write_text("")
    with pytest.raises(GradCompError) as caught:
        read(path)
    assert said in str(caught.value)


def test_rows_of_the_table() -> None:
    run = Run("run", [record(0), record(10)])
    run.records[0]["layers"]["w<1>"]["cosine"] = 0.25
    run.records[1]["layers"]["v"]["cosine"] = None
    first, second = report.rows(run)
    assert (first["layer"], second["layer"]) == ("w<1>", "v")
    assert (first["mean_cosine"], first["all_ranks_cosine"]) == (0.375, 0.5)
    assert report.cells(first)[:6] == ["w<1>", "1,000", "4,000,000", "40,000", "0.0100", "1.000"]
    assert (second["all_ranks_cosine"], report.cells(second)[10]) == (None, "")


def gradcomp(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod_gradcomp", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_gradcomp_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    event = {
        "gradcomp": 1,
        "event": "fallback",
        "step": 12,
        "until": 17,
        "optimizer": "",
        "codec": "fp16",
        "why": "cosine 0.1 & below",
    }
    a = written(tmp_path / "a.jsonl", record(0), record(10), event, record(20))
    bare = {**record(0), "cluster": None}
    bare["layers"] = {n: {**one, "cosine": None} for n, one in bare["layers"].items()}
    b = written(tmp_path / "b.jsonl", {**bare, "total": {**bare["total"], "cosine": None}})
    done = gradcomp("plot", a, b)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {a.with_suffix('.html')}\n"
    page = a.with_suffix(".html").read_text()
    for text in (
        "<svg",
        "w&lt;1&gt;",
        "<polyline",
        "step 12: fallback to fp16 (cosine 0.1 &amp; below)",
    ):
        assert text in page, text
    for outside in ('src="', 'href="http', "url(http", "<metadata"):
        assert outside not in page, outside
    picture, numbers = tmp_path / "r.png", tmp_path / "r.json"
    done = gradcomp("plot", b, a, "-o", picture, "--json", numbers)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(numbers.read_text())
    assert [one["run"] for one in found] == ["b", "a"]
    assert found[1]["layers"][0]["layer"] == "w<1>"
    for args, said in (
        ((tmp_path / "c",), "got no file"),
        ((a, "-o", tmp_path / "r.xyz"), "picture "),
    ):
        done = gradcomp("plot", *args)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
