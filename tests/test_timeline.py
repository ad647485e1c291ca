"""The picture of a trace, made of a trace by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from horovod_gradcomp.cli import timeline
from horovod_gradcomp.cli.plot import plot
from horovod_gradcomp.core.trace import Events, document

KINDS = ("encode", "exchange", "wait", "decode")


def trace(path: Path, steps: int = 3, ranks: int = 2) -> Path:
    """Write a trace in which each step takes a second, and what is done in it a tenth each."""
    every = []
    for rank in range(ranks):
        events = Events(rank)
        main, way = events.row("main", "steps gradcomp"), events.row("way", "exchange a+1")
        for step in range(steps):
            for at, kind in enumerate(KINDS):
                start = step + at / 10 + rank / 100
                row = way if kind == "exchange" else main
                events.span(row, f"{kind} a+1", start, start + 0.1, step=step)
            events.span(main, f"step {step}", step, step + 0.9, bad=False)
        every.append(events.events)
    path.write_text(document(every))
    return path


def run(*args: object) -> Result:
    app = typer.Typer()
    app.command()(plot)
    return CliRunner().invoke(app, [str(arg) for arg in args])


def bars(monkeypatch: pytest.MonkeyPatch, *args: Any) -> list[tuple[float, float]]:
    """Return the bars that are drawn: when each begins, in ms, and how long it is."""
    from matplotlib.axes import Axes

    drawn = []

    def broken_barh(self: Axes, spans: Any, rows: Any, **_: Any) -> None:
        drawn.extend((round(start), round(length)) for start, length in spans)

    monkeypatch.setattr(Axes, "broken_barh", broken_barh)
    timeline.draw(*args)
    return drawn


def test_one_step_of_every_rank_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = trace(tmp_path / "steps.json"), tmp_path / "steps.png"
    for step in (None, 0, 2):
        found = bars(monkeypatch, source, target, step)
        assert sorted(found) == sorted((100 * at + 10 * r, 100) for r in (0, 1) for at in range(4))
    assert target.read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_it(tmp_path: Path) -> None:
    source = trace(tmp_path / "steps.json", steps=1)
    done = run(source)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "steps.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("steps", "asked", "said"), [(0, None, "at least one whole step"), (2, 7, "with step 7")]
)
def test_what_is_not_there(tmp_path: Path, steps: int, asked: int | None, said: str) -> None:
    source = trace(tmp_path / "steps.json", steps=steps)
    more = [] if asked is None else ["--step", asked]
    done = run(source, *more)
    assert done.exit_code != 0
    assert said in str(done.exception)
    assert not (tmp_path / "steps.png").exists()


def test_a_damaged_trace(tmp_path: Path) -> None:
    source = tmp_path / "steps.json"
    for text in ('{"traceEvents": [', json.dumps({"traceEvents": [{"ph": "X"}]})):
        source.write_text(text)
        done = run(source)
        assert "compression.trace" in str(done.exception)
