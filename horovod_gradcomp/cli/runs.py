"""Files that telemetry wrote, as the runs that are in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import GradCompError, explain
from ..core.telemetry import FORMAT

Record = dict[str, Any]


@dataclass
class Run:
    """What one optimizer's telemetry recorded.

    Attributes:
        label: Of the file, and of the optimizer where it has several.
        records: By ascending step.
        events: What the guard did, by ascending step.
    """

    label: str
    records: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)

    def add(self, line: Record) -> None:
        """Add a line; it takes the place of what has the same or a later step.

        A run that went on from a checkpoint repeats some steps, and one that was started anew
        repeats all of them.
        """
        table = self.events if "event" in line else self.records
        again = bool(table) and table[-1]["step"] >= line["step"]
        while table and table[-1]["step"] >= line["step"]:
            table.pop()
        if again and table is self.records:
            self.events = [event for event in self.events if event["step"] <= line["step"]]
        table.append(line)

    @property
    def last(self) -> Record:
        """The last record."""
        return self.records[-1]

    def column(self, table: str, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a figure, where it is known."""
        known = [
            (record["step"], record[table][key])
            for record in self.records
            if record[table] is not None and record[table].get(key) is not None
        ]
        return [step for step, _ in known], [value for _, value in known]

    def layer(self, name: str, key: str) -> list[float | None]:
        """Return a figure of a layer in every record."""
        return [record["layers"].get(name, {}).get(key) for record in self.records]

    def fallbacks(self) -> list[tuple[int, int]]:
        """Return the first step of each fallback, and the step after its last, as far as known."""
        last = self.last["step"]
        return [
            (event["step"], min(event["until"], max(last, event["step"])))
            for event in self.events
            if event["event"] == "fallback"
        ]


def read(path: Path) -> list[Run]:
    """Return the runs of a file, one an optimizer.

    Raises:
        GradCompError: There is no such file, or it holds no telemetry.
    """
    if not path.is_file():
        raise GradCompError(
            explain(
                got=f"no file {path}",
                expected="what compression.telemetry(path) wrote",
                do="look on the first rank's host; it is written one record late",
            )
        )
    runs: dict[str, Run] = {}
    for line in _lines(path):
        name = line.get("optimizer", "")
        label = f"{path.stem} {name}" if name else path.stem
        runs.setdefault(name, Run(label)).add(line)
    found = [run for run in runs.values() if run.records]
    if not found:
        raise GradCompError(
            explain(
                got=f"{path} without a record",
                expected="at least one",
                why="the first is written after two steps, further ones every few steps",
            )
        )
    return found


def _lines(path: Path) -> Iterator[Record]:
    lines = path.read_bytes().splitlines()
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError:
            if number == len(lines) > 1:  # of a run that goes on, or was killed
                return
            line = None
        known = isinstance(line, dict) and isinstance(line.get("step"), int)
        if not known or line.get("gradcomp") != FORMAT:
            raise GradCompError(
                explain(
                    got=f"{path}, line {number}: {text[:60].decode(errors='replace')!r}",
                    expected=f"records of telemetry, format {FORMAT}",
                    do="give a file that compression.telemetry(path) wrote, with this version",
                )
            )
        yield line
