"""The files that images are built from, as far as that goes without building one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILES = sorted(path.name for path in (ROOT / "docker").glob("*.Dockerfile"))


def pins(*arguments):
    run = subprocess.run(
        ["bash", str(ROOT / "docker" / "pins.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run.returncode, run.stdout.splitlines(), run.stderr


def constraints():
    return (ROOT / "docker" / "constraints.txt").read_text().splitlines()


def test_pins_without_changes_are_the_file():
    assert pins() == (0, constraints(), "")


def test_a_version_takes_the_place_of_the_pinned_one():
    code, lines, _ = pins("torch==9.9", "PyYAML==1.0")
    assert code == 0
    assert set(constraints()) - set(lines) == {
        line for line in constraints() if re.match(r"torch==|PyYAML==", line)
    }
    assert lines[-2:] == ["torch==9.9", "PyYAML==1.0"]
    assert "tf_keras==2.21.0" in lines


@pytest.mark.parametrize(
    ("framework", "nccl"), [("torch", "nvidia-nccl-cu13"), ("tensorflow", "nvidia-nccl-cu12")]
)
def test_each_framework_has_its_own_set_for_gpus(framework, nccl):
    code, lines, _ = pins("--cuda", framework)
    names = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    assert code == 0
    assert names.count(framework) == 1
    assert [name for name in names if name.startswith("nvidia-nccl")] == [nccl]


def test_what_is_no_version_is_refused():
    code, lines, said = pins("torch")
    assert (code, lines) == (2, [])
    assert "'torch' is not NAME==VERSION" in said


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_an_image_copies_is_there_and_sent_to_the_builder(dockerfile):
    text = (ROOT / "docker" / dockerfile).read_text()
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignore if line.startswith("!")]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(name == one or name.startswith(f"{one}/") for one in sent), name


def enter(home, *arguments):
    """Run the images' entry point as if this were a container with that home."""
    return subprocess.run(
        ["bash", str(ROOT / "docker" / "image" / "entrypoint.sh"), *arguments],
        env={"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs openssh-client")
def test_a_cluster_key_is_made_once_and_at_run_time(tmp_path):
    folder = tmp_path / ".ssh"
    folder.mkdir()
    first = enter(tmp_path, "keys")
    assert first.returncode == 0, first.stderr
    key = folder / "id_ed25519"
    assert key.stat().st_mode & 0o077 == 0
    assert (folder / "authorized_keys").read_text() == (folder / "id_ed25519.pub").read_text()
    text = key.read_text()
    assert enter(tmp_path, "keys").returncode == 0
    assert key.read_text() == text


def test_the_entry_point_becomes_the_command(tmp_path):
    run = enter(tmp_path, "sh", "-c", "echo $1; exit 5", "sh", "two words")
    assert (run.returncode, run.stdout) == (5, "two words\n")
