"""``gradcomp bench network``: rows of real steps over limited links."""

import json
import os
import subprocess
import sys

import pytest

from horovod_gradcomp.cli import network
from horovod_gradcomp.cli.network_worker import DDP, HOROVOD, layers
from horovod_gradcomp.core.errors import SettingsError
from horovod_gradcomp.lab import cleanup
from tests.distributed.launch import FOLDER, leftovers

KEYS = {
    *("system", "bandwidth", "hosts", "model", "step_ms", "speedup_vs_none"),
    *("speedup_least", "speedup_most", "mb_per_step", "iface_mb_per_step"),
}


def turn(system, step_ms, told=None, sent=1.0):
    return {
        "system": system,
        "step_ms": step_ms,
        "mb_per_step": told,
        "iface_mb_per_step": sent,
    }


def test_ratios_are_those_of_one_round():
    turns = [
        *(turn("horovod none", 10.0), turn("x", 5.0, 0.1)),
        *(turn("horovod none", 90.0), turn("x", 30.0, 0.3)),  # the machine was busy
        *(turn("horovod none", 10.0), turn("x", 10.0, 0.2)),
    ]
    row = network._row("x", turns, {"hosts": 2})
    assert (row["speedup_vs_none"], row["speedup_least"], row["speedup_most"]) == (2.0, 1.0, 3.0)
    assert (row["step_ms"], row["mb_per_step"], row["hosts"]) == (10.0, 0.2, 2)
    assert network._row("horovod none", turns, {})["speedup_vs_none"] == 1.0
    assert network._row("horovod none", turns, {})["mb_per_step"] is None


def test_models():
    assert layers("mlp12x1024") == (12, 1024)
    for name in ("mlp", "mlp0x4", "mlp4x0", "cnn3x4", "mlp3x4x5"):
        with pytest.raises(SettingsError, match=f"--model {name}.*mlp12x1024"):
            layers(name)


def bench(folder, *args):
    return subprocess.run(
        [sys.executable, "-m", "horovod_gradcomp", "bench", "network", *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, FOLDER: str(folder)},
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--bandwidth", "1gbit,fast"), "--bandwidth 'fast'"),
        (("--model", "big"), "mlp12x1024"),
        (("--codec", "tokp"), "did you mean 'topk'"),
    ],
)
def test_errors_of_use(args, message, tmp_path):
    done = bench(tmp_path, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.distributed
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make networks")
def test_rows(tmp_path):
    file = tmp_path / "rows.json"
    options = ("--model", "mlp2x128", "--rounds", "1", "--steps", "2", "--codec", "linear:bits=4")
    done = bench(tmp_path, "--bandwidth", "1gbit", *options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [row["system"] for row in rows] == [*HOROVOD, *DDP, "gradcomp linear:bits=4"]
    assert all(row.keys() == KEYS and row["step_ms"] > 0 for row in rows)
    assert all(row["bandwidth"] == "1 Gbit/s" for row in rows)
    sent = {row["system"]: row["iface_mb_per_step"] for row in rows}
    dense = 4 * 2 * (128 * 128 + 128) / 1e6  # MB of gradients
    assert dense < sent["horovod none"] < 1.5 * dense
    assert dense < sent["ddp"] < 1.5 * dense
    assert dense / 2 < sent["horovod fp16"] < 0.8 * dense
    assert dense / 2 < sent["ddp fp16"] < 0.8 * dense
    told = rows[-1]["mb_per_step"]
    assert dense / 8 < told < dense / 6
    assert told < sent["gradcomp linear:bits=4"] < 0.8 * dense
    assert all(f"{row['iface_mb_per_step']:.3f}" in done.stdout for row in rows)
    assert leftovers(tmp_path) == []
    assert cleanup.sweep() == []
