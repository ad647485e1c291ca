"""Where records of telemetry go: JSON lines, TensorBoard writers, or a function.

No framework is imported: a writer is known by what it can do. A sink that fails later on is said
once, and nothing more is written to it: training goes on.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, TextIO

from .errors import SettingsError, explain
from .telemetry import Record

Write = Callable[[Record], Any]

_TOTALS = ("ratio", "raw_bytes", "wire_bytes", "encode_ms", "wait_ms", "decode_ms")
_FIGURES = ("grad_norm", "residual_norm", "cosine")


class Lines:
    """A file of JSON lines, one a record; what a file holds already stays.

    Args:
        path: In a folder that there is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def open(self) -> None:
        """Open the file now, so that a mistake shows before the first step."""
        try:
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise SettingsError(
                explain(
                    got=f"telemetry({str(self._path)!r}): {error.strerror}",
                    expected="a file that can be written, in a folder that there is",
                )
            ) from None

    def __call__(self, record: Record) -> None:
        """Write a line."""
        if self._file is None:
            self.open()
        assert self._file is not None
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Sink:
    """What a user gave, as a function of records that never raises.

    Args:
        given: A path, a writer with ``add_scalar``, one of TensorFlow's with ``as_default``, or a
            function of a record.

    Raises:
        SettingsError: It is something else.
    """

    def __init__(self, given: Any) -> None:
        self._lines: Lines | None = None
        self._failed = False
        write: Write
        if isinstance(given, (str, os.PathLike)):
            write = self._lines = Lines(given)
        elif callable(getattr(given, "add_scalar", None)):
            write = _to_scalars(given)
        elif callable(getattr(given, "as_default", None)):
            write = _to_summaries(given)
        elif callable(given):
            write = given
        else:
            raise SettingsError(
                explain(
                    got=f"telemetry({given!r})",
                    expected="a path, a SummaryWriter of torch.utils.tensorboard or of tf.summary, "
                    "or a function of a record",
                )
            )
        self._write = write

    def open(self) -> None:
        """Let a file that cannot be written raise now."""
        if self._lines is not None:
            self._lines.open()

    def __call__(self, record: Record) -> None:
        """Hand a record on; what fails is warned of, once, and then left alone."""
        if self._failed:
            return
        try:
            self._write(record)
        except Exception as error:  # whatever a user's writer raises: training goes on
            self._failed = True
            warnings.warn(
                f"horovod_gradcomp: telemetry ends, as its sink failed at step {record['step']}: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file, if there is one; a user's writer stays open."""
        if self._lines is not None:
            self._lines.close()


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield names and values for TensorBoard, of what is known."""
    at = f"gradcomp/{record['optimizer']}" if record["optimizer"] else "gradcomp"
    if "event" in record:
        yield f"{at}/fallback", float(record["event"] == "fallback")
        return
    cluster = record["cluster"] or {}
    tables = [
        (at, record["total"], (*_TOTALS, *_FIGURES)),
        (f"{at}/all_ranks", cluster, _FIGURES),
        *((f"{at}/layers/{name}", one, _FIGURES) for name, one in record["layers"].items()),
    ]
    for where, table, keys in tables:
        for key in keys:
            if table.get(key) is not None:
                yield f"{where}/{key}", table[key]
    yield f"{at}/bad_steps", record["bad_steps"]


def _to_scalars(writer: Any) -> Write:
    def write(record: Record) -> None:
        for name, value in scalars(record):
            writer.add_scalar(name, value, record["step"])

    return write


def _to_summaries(writer: Any) -> Write:
    summary: Any = sys.modules[type(writer).__module__.partition(".")[0]]

    def write(record: Record) -> None:
        with writer.as_default():
            for name, value in scalars(record):
                summary.summary.scalar(name, value, step=record["step"])

    return write
