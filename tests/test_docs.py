"""docs/codecs.md: up to date and complete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from horovod_gradcomp.cli.docs import page
from horovod_gradcomp.cli.docstrings import arguments, parse
from horovod_gradcomp.codecs import REGISTRY
from horovod_gradcomp.codecs.fp16 import FP16
from tests.test_cli import ROW, gradcomp

FILE = Path(__file__).parent.parent / "docs" / "codecs.md"
SECTIONS = (
    "Formula",
    "Payload",
    "Combine",
    "Settings",
    "When to use",
    "Reference",
    "Difference from the paper",
)

DOCSTRING = """Send less.

    ``Q(x) = |x|``; see :class:`~core.Codec` and
    arXiv:1809.07599.

    ======  =====================
    format  range
    ======  =====================
    e4m3    up to 448
    ======  =====================

    Payload, by row:

    =======  =====  =======  =====
    tensor   dtype  shape    bytes
    =======  =====  =======  =====
    codes    uint8  ``|n|``
    =======  =====  =======  =====

    Combine: GATHER.
    Always.

    When to use: here. Not there.

    Args:
        bits: Bits an element,
            2 to 8.

        block: A multiple of 8: eight, say.

    Reference:
        Who, "What", 2014.

    This belongs to no section.
    """


def overview(text: str) -> dict[str, list[str]]:
    """Return the cells of the table of all codecs by name, "name" for its head."""
    lines = text.partition("\n## ")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return {row[0].partition("]")[0].strip("[`"): row for row in rows}


def test_the_page_is_up_to_date() -> None:
    assert FILE.read_text() == page([]), (
        "docs/codecs.md is stale: gradcomp docs codecs --output docs/codecs.md"
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_every_codec_has_every_section(name: str) -> None:
    section = page([]).partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for label in SECTIONS:
        _, found, text = section.partition(f"\n**{label}.**")
        assert found, f"{name} has no {label.lower()}: write it in the docstring of its class"
        assert len(text.partition("\n**")[0].strip()) > 10
    assert "``" not in section
    assert "=====" not in section


@pytest.mark.parametrize("name", REGISTRY)
def test_every_setting_is_explained(name: str) -> None:
    fields = {f.name for f in dataclasses.fields(REGISTRY[name])}
    assert set(arguments(parse(REGISTRY[name].__doc__).get("Args", ""))) == fields


def test_the_table_has_all_of_every_codec() -> None:
    rows = overview(page([]))
    assert list(rows) == ["name", "---", *REGISTRY]
    for name, cells in rows.items():
        assert len(cells) == 8
        assert all(cells), f"a cell of {name} is empty"
        assert len(cells[6]) < 80, f"{name}: the first sentence of 'When to use' is long"
    assert rows["topk"][2:6] == ["GATHER", "CONTRACTION", "residual", "0.0601"]
    assert rows["none"][5] == "4.0000"
    assert rows["onebit"][7] == "Seide et al. 2014"


def test_a_codec_without_words_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = type("Bare", (FP16,), {"__doc__": None})
    monkeypatch.setitem(REGISTRY, "bare", bare)
    text = page([])
    assert overview(text)["bare"][2:6] == ["SUM", "CONTRACTION", "none", "2.0000"]
    assert "\n## bare\n" in text


def test_docstrings_become_markdown() -> None:
    link = "[arXiv:1809.07599](https://arxiv.org/abs/1809.07599)"
    table = "| format | range |\n| --- | --- |\n| e4m3 | up to 448 |"
    assert parse(DOCSTRING) == {
        "Summary": "Send less.",
        "Formula": f"`Q(x) = |x|`; see `core.Codec` and {link}.\n\n{table}\n\n"
        "This belongs to no section.",
        "Payload": "Payload, by row:\n\n| tensor | dtype | shape | bytes |\n"
        "| --- | --- | --- | --- |\n| codes | uint8 | `\\|n\\|` |  |",
        "Combine": "GATHER. Always.",
        "When to use": "here. Not there.",
        "Args": "bits: Bits an element,\n    2 to 8.\n\nblock: A multiple of 8: eight, say.",
        "Reference": 'Who, "What", 2014.',
    }


def test_arguments() -> None:
    assert arguments(parse(DOCSTRING)["Args"]) == {
        "bits": "Bits an element, 2 to 8.",
        "block": "A multiple of 8: eight, say.",
    }
    assert arguments("a: One: two.\n    More.\nb: Three.") == {
        "a": "One: two. More.",
        "b": "Three.",
    }


def test_a_literal_block_stays_one() -> None:
    assert parse("It.\n\nAs\nfollows::\n\n    a = 1\n    b = 2\n")["Formula"] == (
        "As follows:\n\n    a = 1\n    b = 2"
    )


def test_the_command_and_measured_columns(tmp_path: Path) -> None:
    row = {key: kind() for key, kind in ROW.items()}
    row |= {"codec": "topk", "framework": "torch", "device": "cpu", "numel": 999_936}
    row |= {"threads": 1, "ranks": 8, "encode_x": 3.26, "decode_x": 9.0, "rel_error": 0.25}
    rows, written = tmp_path / "rows.json", tmp_path / "codecs.md"
    rows.write_text(json.dumps([row, {**row, "codec": "topk:ratio=0.001", "encode_x": 7.0}]))
    done = gradcomp("docs", "codecs", "--bench", str(rows), "--output", str(written))
    assert done.returncode == 0, done.stderr
    text = written.read_text()
    assert overview(text)["topk"][8:] == ["3.3", "9.0", "0.2500"]
    assert overview(text)["sign"][8:] == ["", "", ""]
    command = "--framework torch --device cpu --numel 999936 --threads 1 --ranks 8"
    assert f"`gradcomp bench codecs {command}`" in text
    assert gradcomp("docs", "codecs").stdout == page([])
