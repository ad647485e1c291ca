"""``gradcomp doctor``: what it finds, and what it says to do."""

import json
import socket

import pytest
from typer.testing import CliRunner

from horovod_gradcomp import native
from horovod_gradcomp.cli import checks, doctor
from horovod_gradcomp.cli.checks import BAD, DOUBTFUL, GOOD, Finding
from tests.distributed.launch import FOLDER, leftovers

BUILT = {"version": "2.13", "gloo": True, "mpi": True, "nccl": False, "cuda": False}
KERAS_3 = {"version": "3.15.1"}


@pytest.fixture
def machine(monkeypatch):
    """A machine where all is well, to be changed by tests; nothing is imported or started."""
    probes = {"torch": BUILT, "tensorflow": BUILT, "keras": {"version": "2.21.0"}}

    def probe(code):
        return probes[next(name for name in probes if f"import {name}" in code or name in code)]

    monkeypatch.setattr(checks, "_probe", probe)
    monkeypatch.setattr(checks, "_installed", lambda name: name in probes)
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda _: "0.28.1")
    monkeypatch.setattr(checks, "launcher", lambda: "horovodrun")
    monkeypatch.setattr(checks, "run", lambda *_: (0, 2 * f'[0]: {checks.MARK}{{"good": true}}\n'))
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.1")
    monkeypatch.setattr(native, "reason", lambda: "")
    monkeypatch.setattr(native, "available", lambda: not native.reason())
    monkeypatch.setattr(native, "level", lambda: "avx2")
    return probes


def found(part, state):
    """Return the one finding of a state other than good; its text holds ``part``."""
    others = [finding for finding in checks.examine(1.0) if finding.state != GOOD]
    assert [finding.state for finding in others] == [state], others
    assert part in f"{others[0].what}: {others[0].found}"
    assert others[0].fix
    return others[0]


def test_all_is_well(machine):
    assert {finding.state for finding in checks.examine(1.0)} == {GOOD}


def test_no_kernels(machine, monkeypatch):
    monkeypatch.setattr(native, "reason", lambda: "no compiled library")
    assert "pip install" in found("not in use: no compiled library", DOUBTFUL).fix
    monkeypatch.setenv(native.SWITCH, "0")
    assert found("compiled kernels", DOUBTFUL).fix == f"unset {native.SWITCH}"


def test_kernels_that_one_framework_cannot_call(machine):
    why = "_tensorflow.so finds no C interface in TensorFlow 2.99"
    machine["tensorflow"] = {**BUILT, "kernels": why}
    assert (
        "pip install" in found(f"compiled kernels in tensorflow: not in use: {why}", DOUBTFUL).fix
    )


def test_another_horovod(machine, monkeypatch):
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda _: "0.27.0")
    assert "install_horovod.sh" in found("0.27.0", DOUBTFUL).fix


def test_no_horovod(machine, monkeypatch):
    def version(_):
        raise checks.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(checks.importlib.metadata, "version", version)
    machine["torch"] = machine["tensorflow"] = {"version": "2.13", "error": "no horovod"}
    bad = [finding for finding in checks.examine(1.0) if finding.state == BAD]
    assert [finding.what for finding in bad] == ["horovod", "frameworks"]


def test_a_framework_that_horovod_was_not_built_for(machine):
    machine["torch"] = {"version": "2.13", "error": "ImportError: Extension not built"}
    assert "HOROVOD_WITH_PYTORCH=1" in found("Extension not built", BAD).fix


def test_a_horovod_that_cannot_talk(machine):
    machine["torch"] = {**BUILT, "gloo": False, "mpi": False}
    assert "HOROVOD_WITH_GLOO=1" in found("built with nothing", BAD).fix


def test_a_broken_framework(machine):
    machine["tensorflow"] = {"error": "ImportError: libcudart.so"}
    found("cannot be imported: ImportError: libcudart.so", BAD)


def test_one_framework_is_enough(machine):
    del machine["tensorflow"]
    assert {finding.state for finding in checks.examine(1.0)} == {GOOD}


def test_keras_3_is_not_reduced(machine):
    machine["keras"] = KERAS_3
    assert "horovod_gradcomp.keras.DistributedOptimizer" in found("never reduces", DOUBTFUL).fix


def test_a_host_name_of_its_own(machine, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert "/etc/hosts" in found("stands for 127.0.1.1", DOUBTFUL).fix

    def unknown(_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "/etc/hosts" in found("does not resolve", BAD).fix


@pytest.mark.parametrize(
    ("code", "output", "part"),
    [
        (1, "noise\nValueError: planted\nend", "ended with code 1: ValueError: planted"),
        (None, "waiting", "did not end within 1 s: waiting"),
        (0, f'{checks.MARK}{{"good": true}}', "ended with code 0"),
        (0, 2 * f'{checks.MARK}{{"good": false}}', "a wrong gradient"),
    ],
)
def test_ranks_that_fail(machine, monkeypatch, code, output, part):
    del machine["tensorflow"]
    monkeypatch.setattr(checks, "run", lambda *_: (code, output))
    found(part, BAD)


def test_no_launcher(machine, monkeypatch):
    del machine["tensorflow"]
    monkeypatch.setattr(checks, "launcher", lambda: None)
    found("no horovodrun", BAD)


def test_over_mpi_where_there_is_no_gloo(machine):
    machine["torch"] = {**BUILT, "gloo": False}
    whats = [finding.what for finding in checks.examine(1.0)]
    assert "two ranks, torch over mpi" in whats
    assert "two ranks, tensorflow over gloo" in whats


@pytest.mark.parametrize(("state", "code"), [(GOOD, 0), (DOUBTFUL, 0), (BAD, 1)])
def test_report_and_exit_code(state, code, monkeypatch, tmp_path):
    import typer

    app, file = typer.Typer(), tmp_path / "doctor.json"
    app.command()(doctor.doctor)
    finding = Finding("thing", state, "[it] is", "mend it")
    monkeypatch.setattr(doctor, "examine", lambda _: iter([finding]))
    done = CliRunner().invoke(app, ["--json", str(file)])
    assert done.exit_code == code, done.output
    assert "thing: [it] is" in done.stdout
    assert "-> mend it" in done.stdout
    assert ("do not work" in done.stdout) == bool(code)
    assert json.loads(file.read_text()) == [vars(finding)]


def test_a_probe_tells_what_went_wrong():
    assert checks._probe("print('noise'); print('{\"version\": \"1\"}')") == {"version": "1"}
    assert checks._probe("raise ImportError('planted')") == {"error": "ImportError: planted"}
    assert checks._probe("import os; os._exit(3)") == {"error": "ended with code 3"}


@pytest.mark.distributed
def test_two_ranks_come_back():
    finding = checks.round_trip("torch", "gloo", 120)
    assert finding.state == GOOD, finding


@pytest.mark.distributed
def test_ranks_that_hang_are_ended(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    finding = checks.round_trip("torch", "gloo", 1.5)  # too short for an import
    assert finding.state == BAD
    assert "did not end within 1.5 s" in finding.found
    assert leftovers(tmp_path) == []
