"""Long runs on two real ranks: few collectives, no growth, and a trace of what overlaps what."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest

from horovod_gradcomp.cli import overhead_worker
from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.workers.torch_long import CHECKS, LEAST, STEPS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(330)]

MOST = 12
"""Collectives of our own that a step with ResNet-50's tensors may start."""

DEAREST = {"topk": 60, "linear": 60, "fp16": 130, "randomk": 180, "powersgd": 300}
"""Most functions that compress and decompress may call a tensor, those of the codec among them."""

Span = dict[str, Any]


@functools.cache
def run() -> tuple[list[dict[str, Any]], str]:
    try:
        return run_ranks("torch_long.py", 2, args=list(CHECKS), timeout=300), ""
    except AssertionError as error:
        return [], str(error)


def each(check: str) -> list[Any]:
    """Return what each rank reports of a check."""
    reports, error = run()
    assert not error, error
    found = [report[check] for report in reports]
    for one in found:
        assert not (isinstance(one, dict) and "error" in one), one["error"]
    return found


def test_calls_are_cheap() -> None:
    """What they take in time is for ``gradcomp bench step`` to say: here others use the machine."""
    wanted = {"systems": list(DEAREST), "model": "resnet50", "steps": 2, "rounds": 1}
    done = subprocess.run(
        [sys.executable, "-m", overhead_worker.__name__, json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=True,
    )
    rows = [json.loads(line.split(overhead_worker.MARK)[1]) for line in done.stdout.splitlines()]
    assert [row["system"] for row in rows] == list(DEAREST)
    for row in rows:
        assert row["calls_us_per_tensor"] > 0
        assert 10 < row["functions_per_tensor"] < DEAREST[row["system"]], row


def test_few_collectives() -> None:
    for found in each("collectives_of_resnet50"):
        assert len(found) == 3
        for form, count in found.items():
            assert 1 <= count <= MOST, f"{form} starts {count} collectives a step"


def test_nothing_grows() -> None:
    for first, middle, last in each("memory_of_a_long_run"):
        for what in ("tensors", "bytes", "state", "state_bytes"):
            assert last[what] == first[what], f"{what} after {STEPS} steps"
        # The count still moves a little in the first half, by less and less.
        more = last["blocks"] - middle["blocks"]
        assert more < STEPS // 2, f"Python holds {more} blocks more after {STEPS // 2} steps"
        more = last["resident"] - first["resident"]
        assert more < LEAST, f"the process holds {more} bytes more"
        assert last["state"] == {"residual": ["p0", "p2", "p4", "p5"]}


def spans_of(trace: dict[str, Any]) -> tuple[dict[int, str], dict[tuple[int, str], list[Span]]]:
    """Return the names of processes, and the spans of each of their rows."""
    events = trace["traceEvents"]
    named = {"process_name": {}, "thread_name": {}}
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            named[event["name"]][event["pid"], event["tid"]] = event["args"]["name"]
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], named["thread_name"][event["pid"], event["tid"]]].append(event)
    return {pid: name for (pid, _), name in named["process_name"].items()}, rows


def end(span: Span) -> float:
    return span["ts"] + span["dur"]


def check_nesting(spans: list[Span]) -> None:
    """Every two spans of a row lie one after the other, or one within the other."""
    around: list[Span] = []
    for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
        assert span["dur"] >= 0, span
        while around and end(around[-1]) <= span["ts"]:
            around.pop()
        if around:
            assert end(span) <= end(around[-1]) + 1e-3, (around[-1], span)
        around.append(span)


def of(spans: list[Span], what: str, step: int) -> dict[str, Span]:
    """Return the spans of a kind in a step by bucket."""
    found = [s for s in spans if s["name"].startswith(f"{what} ") and s["args"]["step"] == step]
    return {s["name"].split()[1]: s for s in found}


def test_a_trace_of_all_ranks() -> None:
    (trace, other) = each("traced_steps")
    assert trace == other
    processes, rows = spans_of(trace)
    assert processes == {0: "rank 0", 1: "rank 1"}
    overlaps = 0
    for rank in processes:
        (main,) = [
            spans for (pid, name), spans in rows.items() if (pid, name[:5]) == (rank, "steps")
        ]
        ways = [
            s
            for (pid, name), spans in rows.items()
            if (pid, name[:8]) == (rank, "exchange")
            for s in spans
        ]
        check_nesting(main)
        for spans in rows.values():
            check_nesting(spans)
        steps = [s for s in main if s["name"].startswith("step ")]
        assert [s["name"] for s in steps] == [f"step {i}" for i in range(1, 5)]
        assert not any(s["args"]["bad"] for s in steps)
        for number, step in enumerate(steps, 1):
            encoded, sent = of(main, "encode", number), of(ways, "exchange", number)
            decoded = of(main, "decode", number)
            assert len(encoded) == 6
            assert (
                encoded.keys() == sent.keys() == decoded.keys() == of(main, "wait", number).keys()
            )
            for bucket, way in sent.items():
                assert step["ts"] <= encoded[bucket]["ts"]
                assert end(encoded[bucket]) <= way["ts"] + 1e-3
                assert end(way) <= decoded[bucket]["ts"] + 1e-3
                assert end(decoded[bucket]) <= end(step) + 1e-3
                overlaps += any(
                    way["ts"] < end(other) and other["ts"] < end(way)
                    for name, other in encoded.items()
                    if name != bucket
                )
    # Buckets are on their way while gradients of others are still coming in.
    assert overlaps >= 10, overlaps


def test_a_trace_of_one_rank() -> None:
    for rank, traces in enumerate(each("traced_by_one_rank")):
        for number, trace in enumerate(traces):
            processes, rows = spans_of(trace)
            assert processes == {rank: f"rank {rank}"}
            spans = [span for row in rows.values() for span in row]
            assert {s["name"] for s in spans} == {
                f"step {number}",
                *(f"{what} p{i}" for what in ("encode", "exchange", "decode") for i in (0, 1)),
            }
            for row in rows.values():
                check_nesting(row)
