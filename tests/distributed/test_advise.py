"""``gradcomp advise --measure`` on real ranks."""

import json
import sys
from types import SimpleNamespace

import pytest

from horovod_gradcomp.cli.local import launcher, run
from horovod_gradcomp.torch import probe

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]


def test_it_measures_and_one_rank_answers(tmp_path):
    report = tmp_path / "advice.json"
    command = [launcher(), "--gloo", "--disable-cache", "-np", "2", "-H", "localhost:2"]
    command += [sys.executable, "-m", "horovod_gradcomp", "advise", "--measure", "--params", "1e6"]
    command += ["--codec", "fp16", "--codec", "topk", "--json", str(report)]
    code, output = run(command, 100)
    assert code == 0, output
    assert output.count("1,000,000 parameters, 2 workers on 1 hosts") == 1
    assert "Links as measured here, with Horovod's own overhead: inside them" in output
    for where in ("gathers", "short gathers", "sums of float16"):
        assert f", in {where} " in output
    asked = json.loads(report.read_text())["question"]
    assert (asked["cluster"]["ranks"], asked["cluster"]["per_host"]) == (2, 2)
    assert 1e6 < asked["cluster"]["inside"]["bandwidth"] < 1e12
    assert 0 < asked["cluster"]["inside"]["latency"] < 1.0
    assert asked["copy"] > 1e7


def test_work_is_the_computing_that_is_lost(monkeypatch):
    """A product takes a second, and three while something is on its way."""
    clock, under_way = [0.0], []

    def product(*_, **__):
        clock[0] += 3.0 if under_way else 1.0

    def poll(handle):
        return clock[0] >= handle

    def start():
        under_way.append(True)
        return int(clock[0]) + 12

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(probe.torch, "mm", product)
    monkeypatch.setattr(probe.hvd, "poll", poll)
    monkeypatch.setattr(probe.hvd, "synchronize", lambda _: under_way.clear())
    monkeypatch.setattr(probe, "gathered", lambda mine, *_: [mine, mine + 2.0])
    assert probe._taken(start, "name", None) == 8.0 + 1.0  # 4 of 12; the other rank loses 2 more
