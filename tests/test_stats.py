"""Counts: sums, ratios, and no division by zero."""

import json

from horovod_gradcomp.core.stats import Stats, UnitStats


def filled():
    stats = Stats(steps=4)
    stats.units["a+1"] = UnitStats(numel=100, raw_bytes=1600, wire_bytes=160, encode_ms=8.0)
    stats.units["a+1"].collectives = 12
    stats.bypassed = UnitStats(numel=10, raw_bytes=160, wire_bytes=160)
    stats.bypassed_names = ["bias"]
    return stats


def test_totals():
    report = filled().report(size=2, settings="topk")
    assert report["active"] is True
    assert report["note"] == ""
    assert (report["steps"], report["world_size"], report["settings"]) == (4, 2, "topk")
    assert report["numel"] == 110
    assert report["raw_bytes"] == 1760
    assert report["wire_bytes"] == 320
    assert report["raw_bytes_per_step"] == 440
    assert report["ratio"] == 320 / 1760
    assert report["compressed"]["ratio"] == 0.1
    assert report["compressed"]["encode_ms_per_step"] == 2.0
    assert report["collectives_per_step"] == 3.0
    assert report["bypassed"]["ratio"] == 1.0
    assert report["bypassed"]["names"] == ["bias"]
    assert report["buckets"]["a+1"]["wire_bytes_per_step"] == 40
    json.dumps(report)


def test_nothing_happened_yet():
    for size, part in ((1, "one process"), (2, "no step")):
        report = Stats().report(size=size, settings="x")
        assert report["active"] is False
        assert part in report["note"]
        assert report["ratio"] is None
        assert report["wire_bytes"] == 0
        json.dumps(report)


def test_time_is_added_up_even_after_an_error():
    unit = UnitStats()
    for _ in range(2):
        try:
            with unit.timed("wait_ms"):
                raise KeyError
        except KeyError:
            pass
    assert unit.wait_ms > 0
    assert unit.encode_ms == 0


def test_the_report_is_a_copy():
    stats = filled()
    stats.report(size=2, settings="")["bypassed"]["names"].append("x")
    assert stats.bypassed_names == ["bias"]
