"""``gradcomp bench network``: rows of real steps over limited links."""

import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from horovod_gradcomp.cli import (
    costs,
    network,
    network_check,
    network_content,
    network_models,
    network_page,
)
from horovod_gradcomp.cli.network_worker import ALONE, AUTO, DDP, HOROVOD
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core.errors import GradCompError, SettingsError
from horovod_gradcomp.lab import cleanup
from tests.distributed.launch import FOLDER, leftovers

KEYS = {
    *("system", "bandwidth", "hosts", "model", "step_ms", "speedup_vs_none"),
    *("speedup_least", "speedup_most", "mb_per_step", "iface_mb_per_step"),
    *("step_ms_least", "step_ms_most", "forward_ms", "backward_ms", "choice"),
    *("encode_ms", "wait_ms", "decode_ms"),
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
    assert (row["step_ms_least"], row["step_ms_most"]) == (5.0, 30.0)
    assert network._row("horovod none", turns, {})["speedup_vs_none"] == 1.0
    assert network._row("horovod none", turns, {})["mb_per_step"] is None


def test_models():
    sizes = {"mlp2x8": 2 * 72, "vgg16-small": 14_982_474, "lstm": 0, "transformer": 0}
    for name, numel in sizes.items():
        model, loss, batch = network_models.build(name, 2)
        loss(model).backward()
        assert batch == 2
        found = sum(p.numel() for p in model.parameters())
        assert all(p.grad is not None for p in model.parameters())
        assert found == numel or (not numel and 5e6 < found < 3e7), (name, found)
        again, _, _ = network_models.build(name, 2)
        assert all((p == q).all() for p, q in zip(model.parameters(), again.parameters()))
    for name in ("mlp", "mlp0x4", "mlp4x0", "cnn3x4", "mlp3x4x5"):
        with pytest.raises(SettingsError, match=f"--model {name}.*mlp12x1024.*transformer"):
            network_models.check(name)


LINK = {"bandwidth": 1e6, "latency": 0.0}
FACTS = {"model": "m", "bandwidth": "b", "hosts": 2, "ranks": 2, "spare": True, "crowded": False}
FACTS |= {"command": "c", "date": "d", "load": "1.0"}
FACTS |= {"link": LINK, "gathers": {"bandwidth": 5e5, "latency": 0.0}, "copy": 1e9}


def content(*rows, shapes=((1000, 1000), (1000,))):
    """A run in which computing takes one second, 0.6 of it the backward pass."""
    found = []
    for name, step_ms, *choice in ((ALONE, 1000.0), *rows):
        turns = [turn("horovod none", 5000.0), {**turn(name, step_ms), "backward_ms": 600.0}]
        row = network._row(name, turns, FACTS)
        found.append({**row, "model": "m", "bandwidth": "b", "choice": (choice or [None])[0]})
    return {"machine": "this", "facts": [{**FACTS, "shapes": shapes}], "rows": found}


def test_predictions_by_hand():
    told = content(
        ("horovod none", 5000.0),
        ("horovod fp16", 2000.0),
        ("ddp", 4000.0),
        ("ddp powersgd", 1.0),
        ("gradcomp topk", 1000.0),
        (AUTO, 1000.0, "topk"),
        (AUTO, 5000.0, "none"),
    )
    table = costs.load()
    found = network_check.check(told, table)
    steps = [one.step_ms for one in found]
    # 4.004 MB at 1 MB/s there and back in halves, and packed and unpacked at 1 GB/s; two tensors,
    # the last one while nothing computes.
    assert steps[0] == pytest.approx(400 + 300 + 4004 + 8, rel=1e-4)
    assert steps[2] == steps[0]  # DDP: one small bucket, and one for all
    assert steps[1] == pytest.approx(400 + 600 / 2 + 2002, rel=0.03)  # and two casts
    speed = table.of("topk", "torch", "cpu").speed(1e9)
    payload = 4000 + build("topk").wire_bytes((1000, 1000))  # the bias as it is
    expected = 400 + 600 + payload / 500 + 1e3 * (speed.encoding(4e6) + speed.decoding(4e6, 2))
    assert steps[3] == pytest.approx(expected, abs=0.1)
    assert steps[4:] == [steps[3], steps[0]]  # what auto chose
    assert [one.near for one in found] == [True, False, True, True, True, True]
    assert round(found[0].ratio, 2) == 0.94
    said = "5 of 6 predictions (83 %) with a processor for each rank are within 20 % of"
    assert network_check.summary(found).startswith(said)
    crowded = [one._replace(crowded=True) for one in found[:2]]
    both = network_check.summary(found + crowded)
    assert "rank and 1 of 2 predictions (50 %) with more ranks than processors are" in both


def test_the_page(tmp_path):
    told = content(("horovod none", 5000.0), ("gradcomp topk", 1000.0), (AUTO, 1000.0, "topk"))
    for row in told["rows"]:
        row.update(iface_mb_per_step=1.0, speedup_least=0.5, speedup_vs_none=1.5, speedup_most=2.5)
    page = tmp_path / "page.md"
    network_page.write(page, told, costs.load())
    text = page.read_text()
    assert "| `auto`: `topk` | 1,000 | 1.50 (0.50 to 2.50) | 1.00 |" in text
    assert "Measured on this, by\n\n- `c`, d; load before each part: 1.0\n" in text
    assert text.startswith("# Training over limited links: m, 2 hosts\n")
    assert "## More hosts" not in text
    assert "![" in text
    assert "(page.png)" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "| m | 2 | b | horovod none |" in text


def at(hosts, told):
    """Return a run as if it had been one with so many hosts."""
    return {
        "machine": told["machine"],
        **{key: [{**one, "hosts": hosts} for one in told[key]] for key in ("facts", "rows")},
    }


def test_the_page_of_several_hosts(tmp_path):
    two = content(("horovod none", 5000.0), ("gradcomp sign", 900.0))
    three = at(3, content(("horovod none", 7000.0), ("gradcomp topk", 1.0)))
    told = network_content.together(two, three)
    for row in told["rows"]:
        row.update(iface_mb_per_step=1.0)
    page = tmp_path / "page.md"
    network_page.write(page, told, costs.load())
    assert page.read_text().startswith("# Training over limited links: m, 2, 3 hosts\n")
    part = page.read_text().partition("## More hosts")[2].partition("\n## ")[0]
    heads, _, *lines = (line for line in part.splitlines() if line.startswith("|"))
    assert heads == "| system | 2 hosts, ms | predicted | 3 hosts, ms | predicted |"
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| no exchange", "1,000"],
        ["| horovod none", "5,000"],
    ]
    assert lines[1].split(" | ")[3] == "6,000"


def test_added_rows_replace_those_of_the_same_part():
    old, new = content(("ddp", 1.0)), content(("ddp", 2.0))
    both = network_content.together(at(3, old), new)
    assert [(row["hosts"], row["step_ms"]) for row in both["rows"]] == [
        *((3, 1000.0), (3, 1.0)),
        *((2, 1000.0), (2, 2.0)),
    ]
    assert network_content.together(old, new) == new
    assert len(network_content.parts(both["rows"])) == 2
    with pytest.raises(SettingsError, match="rows of this machine, not of another"):
        network_content.together({**old, "machine": "another"}, new)


def test_exchanges_are_those_that_a_codec_has():
    found = network._ours(["sign", "acp", "auto"], ["allgather", "two_phase"])
    names = ["sign over allgather", "sign over two_phase", "acp", "auto"]
    assert found == [f"gradcomp {name}" for name in names]
    assert network._ours(["sign"], ["auto"]) == ["gradcomp sign"]
    told = content(*((f"gradcomp sign over {name}", 1.0) for name in ("allgather", "two_phase")))
    one, other = network_check.check(told, costs.load())
    assert (one.cost.exchange, other.cost.exchange) == ("allgather", "two_phase")


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(SettingsError, match=r"rows\.json"):
        network_content.read(tmp_path / "rows.json")


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
        (("--hosts", "2,one"), "--hosts 2,one"),
        (("--exchange", "ring"), "--exchange ring"),
        (("--add",), "--add without --json"),
    ],
)
def test_errors_of_use(args, message, tmp_path):
    done = bench(tmp_path, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_of_another_machine_are_refused_before_measuring(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    file.write_text('{"machine": "another", "facts": [], "rows": []}')
    measured = []
    monkeypatch.setattr(network, "_measure_all", lambda *_: measured.append(True))
    app = typer.Typer()
    app.command()(network.network)
    done = CliRunner().invoke(app, ["--add", "--json", str(file)])
    assert isinstance(done.exception, SettingsError)
    assert "rows of this machine, not of another" in str(done.exception)
    assert measured == []


def test_a_part_that_fails_leaves_those_before_it(tmp_path, monkeypatch):
    def measure(counts, *_):
        yield {**network_content.nothing(), "facts": [], "rows": [row(counts[0])]}
        raise GradCompError("a rank ended")

    def row(hosts):
        return {"model": "mlp1x1", "bandwidth": "1 Gbit/s", "hosts": hosts}

    file = tmp_path / "rows.json"
    network_content.write(file, {**network_content.nothing(), "rows": [row(3)]})
    monkeypatch.setattr(network, "_measure_all", measure)
    app = typer.Typer()
    app.command()(network.network)
    done = CliRunner().invoke(app, ["--hosts", "2,4", "--add", "--json", str(file)])
    assert str(done.exception) == "a rank ended"
    assert network_content.read(file)["rows"] == [row(3), row(2)]


@pytest.mark.distributed
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make networks")
def test_rows(tmp_path):
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    options = ("--model", "mlp2x128", "--rounds", "1", "--steps", "2")
    options += ("--codec", "linear:bits=4", "--codec", "auto", "--docs", str(page), "--check")
    done = bench(tmp_path, "--bandwidth", "1gbit", *options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    ours = ["gradcomp linear:bits=4", AUTO]
    assert [row["system"] for row in rows] == [ALONE, *HOROVOD, *DDP, *ours]
    assert all(row.keys() == KEYS and row["step_ms"] > 0 for row in rows)
    assert all(row["bandwidth"] == "1 Gbit/s" for row in rows)
    sent = {row["system"]: row["iface_mb_per_step"] for row in rows}
    dense = 4 * 2 * (128 * 128 + 128) / 1e6  # MB of gradients
    assert sent[ALONE] < 0.1 * dense
    assert dense < sent["horovod none"] < 1.5 * dense
    assert dense < sent["ddp"] < 1.5 * dense
    assert dense / 2 < sent["horovod fp16"] < 0.8 * dense
    assert dense / 2 < sent["ddp fp16"] < 0.8 * dense
    told = rows[-2]["mb_per_step"]
    assert dense / 8 < told < dense / 6
    assert told < sent["gradcomp linear:bits=4"] < 0.8 * dense
    assert rows[-1]["choice"]
    assert all(f"{row['iface_mb_per_step']:.3f}" in done.stdout for row in rows)
    assert "predictions" in done.stdout
    assert "predictions" in page.read_text()
    again = bench(tmp_path, "--read", str(file))
    assert again.returncode == 0, again.stderr
    assert f"{rows[1]['iface_mb_per_step']:.3f}" in again.stdout
    assert leftovers(tmp_path) == []
    assert cleanup.sweep() == []
