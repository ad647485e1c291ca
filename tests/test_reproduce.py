"""``make reproduce``: every command that a page names for its figures, and only such."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def load():
    spec = importlib.util.spec_from_file_location("reproduce", ROOT / "docs" / "reproduce.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["reproduce"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


reproduce = load()


def plain(text):
    """Return text with commands as they are typed in one line."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    return re.sub(r"\s+", " ", text).replace("sudo ", "").replace("results/", "")


@pytest.mark.parametrize("figure", reproduce.FIGURES, ids=lambda figure: figure.name)
def test_the_page_names_the_command(figure):
    assert plain(figure.command) in plain((ROOT / figure.page).read_text())


def named(text):
    """Return measuring commands with options that a page names within its text."""
    found = re.findall(r"`((?:sudo )?(?:gradcomp bench|python examples/)[^`]* --[^`]*)`", text)
    return [plain(command) for command in found if not re.search(r"\b(?:FILE|URL)\b", command)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_named_command_is_in_the_list(page):
    known = [plain(figure.command) for figure in reproduce.FIGURES]
    missing = [
        command
        for command in named(page.read_text())
        if not any(line.startswith(command) for line in known)
    ]
    assert missing == []


def test_names_differ():
    names = [figure.name for figure in reproduce.FIGURES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("figure", reproduce.FIGURES, ids=lambda figure: figure.name)
def test_the_quick_form_touches_no_page(figure):
    assert "docs/" not in (figure.quick or figure.command)


def run(*args):
    return subprocess.run(
        [sys.executable, str(ROOT / "docs" / "reproduce.py"), *args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_list():
    done = run("--list", "--quick", "--only", "demo")
    assert done.stdout == "demo, README.md: python examples/demo.py --epochs 2\n"
    assert run("--only", "nothing").returncode == 2


def test_a_command_that_fails_is_told(monkeypatch, capfd, tmp_path):
    figures = [
        reproduce.Figure("good", "README.md", "echo 42"),
        reproduce.Figure("bad", "README.md", "false"),
        reproduce.Figure("long", "README.md", "false", quick="echo short"),
        reproduce.Figure("net", "README.md", "echo net", root=True),
    ]
    monkeypatch.setattr(reproduce, "FIGURES", figures)
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"failed: bad$"):
        reproduce.main(quick=True, only=[], show=False)
    said = capfd.readouterr().out
    assert "42" in said
    assert "only root may make networks: net" in said
    assert (tmp_path / reproduce.QUICK / "good.txt").read_text() == "42\n"
    assert (tmp_path / reproduce.QUICK / "long.txt").read_text() == "short\n"
