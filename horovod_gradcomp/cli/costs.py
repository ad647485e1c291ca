"""What codecs cost: measured once in copies of the tensor, and how fast this machine copies.

``costs.json`` beside this file holds rows of ``gradcomp bench codecs`` and says where and when they
were measured; ``gradcomp bench costs`` writes it.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import typer

from ..core.cost import Speed
from ..core.errors import SettingsError, explain

Row = dict[str, Any]

PACKAGED = Path(__file__).with_name("costs.json")
_KEYS = ("codec", "framework", "device", "numel", "threads", "ranks", "copy_ms")
_FIGURES = ("encode_x", "decode_x", "rel_error")
_CHECK = "check_x"
"""Not in files of old."""

_COPIED = 64 * 2**20
"""Bytes of the copy that is timed: more than caches hold."""


@dataclass(frozen=True)
class Measured:
    """What one codec costs, in copies of the tensor.

    Attributes:
        encode: Encoding, with the update of the memory and a look whether all of it is finite.
        decode: Decoding one payload, with such a look at the result.
        decode_more: Decoding each further payload of the same gradient.
        error: What one encoding of Gaussian values leaves out, as a part of their norm.
        copy: Bytes a second of the copy that it was measured against.
    """

    encode: float
    decode: float
    decode_more: float
    error: float
    copy: float

    def speed(self, copy: float) -> Speed:
        """Return bytes a second where a copy runs at ``copy`` bytes a second."""
        return Speed(*(_over(copy, x) for x in (self.encode, self.decode, self.decode_more)))


class Costs:
    """Measured rows of every codec.

    Args:
        rows: Of ``gradcomp bench codecs --json``; of one codec there may be several with other
            numbers of payloads, which tell what a further one costs.
        about: Where and when they were measured.
    """

    def __init__(self, rows: Sequence[Row], about: dict[str, str]) -> None:
        self.rows, self.about = list(rows), about

    def of(self, form: str, framework: str, device: str) -> Measured | None:
        """Return what a codec costs; None where it was not measured."""
        mine = [
            row
            for row in self.rows
            if (row["codec"], row["framework"], row["device"]) == (form, framework, device)
        ]
        if not mine:
            return None
        few, many = (choose(mine, key=lambda row: row["ranks"]) for choose in (min, max))
        first = few["decode_x"] or 0.0  # None where it is part of the encoding
        more = first / few["ranks"]
        if many["ranks"] > few["ranks"]:
            more = ((many["decode_x"] or 0.0) - first) / (many["ranks"] - few["ranks"])
        more = max(0.0, more)
        first = max(0.0, first - (few["ranks"] - 1) * more)
        copy = 4e3 * few["numel"] / few["copy_ms"]
        check = few.get(_CHECK, 0.0)
        return Measured(few["encode_x"] + check, first + check, more, few["rel_error"], copy)


def load(path: Path | None = None) -> Costs:
    """Return the packaged costs, or those of a file of ``bench codecs`` or ``bench costs``.

    Raises:
        SettingsError: The file holds something else.
    """
    path = path or PACKAGED
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(explain(got=f"{path}: {error}", expected="a JSON file")) from None
    rows = content.get("rows") if isinstance(content, dict) else content
    about = content.get("about", {}) if isinstance(content, dict) else {"file": str(path)}
    known = isinstance(rows, list) and all(
        isinstance(row, dict) and {*_KEYS, *_FIGURES} <= row.keys() for row in rows
    )
    if not known:
        raise SettingsError(
            explain(
                got=f"{path} without rows of {', '.join(_FIGURES)}",
                expected="what 'gradcomp bench codecs --json FILE' writes",
            )
        )
    return Costs(rows or [], about)


def write(
    files: list[Path] = typer.Argument(..., help="Files of 'gradcomp bench codecs --json'."),
    output: Optional[Path] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, help="Write here instead of to the terminal."
    ),
) -> None:
    """Gather measured rows, with this machine and the day, for 'gradcomp advise --costs'."""
    rows = [row for file in files for row in load(file).rows]
    kept = [
        {key: _short(row[key]) for key in (*_KEYS, *_FIGURES, _CHECK) if key in row} for row in rows
    ]
    about = {
        "command": "gradcomp bench codecs --json FILE, then gradcomp bench costs FILE",
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "units": "encode_x and decode_x in copies of the tensor, each of copy_ms milliseconds",
    }
    lines = ",\n".join(f"    {json.dumps(row)}" for row in kept)
    text = f'{{\n  "about": {json.dumps(about)},\n  "rows": [\n{lines}\n  ]\n}}\n'
    if output:
        output.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)


def machine() -> str:
    """Return processor, cores and system in one line."""
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = " ".join(line.partition(":")[2].split())
                break
    except OSError:  # another system
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()}"


def copy_speed(repeat: int = 9) -> float:
    """Return the bytes a second that one thread of this machine copies, the median of some runs."""
    source, target = (ctypes.create_string_buffer(_COPIED) for _ in range(2))
    ctypes.memset(source, 1, _COPIED)  # so that it has memory of its own
    times = []
    for turn in range(repeat + 1):
        start = time.perf_counter()
        ctypes.memmove(target, source, _COPIED)
        if turn:  # the first one gets the memory
            times.append(time.perf_counter() - start)
    return _COPIED / statistics.median(times)


def _over(speed: float, times: float) -> float:
    return speed / times if times > 0 else math.inf


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
