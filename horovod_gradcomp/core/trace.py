"""Events in the Chrome trace format, which Perfetto and ``chrome://tracing`` show.

A process of the trace is a rank; a row is one thing after another, in which spans nest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]


class Events:
    """The events of one rank, in nanoseconds since 1970, so that those of all ranks fit together.

    Args:
        rank: Of Horovod.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[object, int] = {}
        self._offset = time.time() - time.perf_counter()
        self.events: list[Event] = [self._meta("process_name", 0, name=f"rank {rank}")]
        self.events.append(self._meta("process_sort_index", 0, sort_index=rank))

    def row(self, key: object, name: str) -> int:
        """Return the number of a row, which is made when it is first asked for."""
        if key not in self._rows:
            number = self._rows[key] = len(self._rows) + 1
            self.events.append(self._meta("thread_name", number, name=name))
            self.events.append(self._meta("thread_sort_index", number, sort_index=number))
        return self._rows[key]

    def span(self, row: int, name: str, start: float, end: float, **args: Any) -> None:
        """Add what began and ended at two times of ``time.perf_counter()``."""
        begun, done = (round(1e9 * (at + self._offset)) for at in (start, end))
        self.events.append(
            {
                "ph": "X",
                "pid": self._rank,
                "tid": row,
                "name": name,
                "ts": begun,
                "dur": done - begun,
                "args": args,
            }
        )

    def _meta(self, what: str, row: int, **args: Any) -> Event:
        return {"ph": "M", "pid": self._rank, "tid": row, "name": what, "args": args}


def document(ranks: Iterable[Sequence[Event]]) -> str:
    """Return the events of some ranks as JSON, in microseconds since the first of them."""
    every = [event for events in ranks for event in events]
    first = min((event["ts"] for event in every if "ts" in event), default=0)
    spans = [
        {**event, "ts": (event["ts"] - first) / 1e3, "dur": event["dur"] / 1e3}
        for event in every
        if "ts" in event
    ]
    meta = [event for event in every if "ts" not in event]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": meta + spans})
