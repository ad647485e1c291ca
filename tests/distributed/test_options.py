"""Every family of codecs under every option of Horovod's torch optimizer; docs/options.md."""

from __future__ import annotations

import pytest

from tests.distributed.launch import ROOT
from tests.distributed.options import _COMMAND, FAMILIES, OPTIONS, kind, outcomes, page

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("option", sorted(OPTIONS, key=lambda name: OPTIONS[name].ranks))
def test_cell(option: str, family: str) -> None:
    """It works, or is refused where it is known to be, on every rank alike."""
    row = OPTIONS[option]
    messages = [report[option][family] for report in outcomes(row.ranks)]
    assert [kind(message) for message in messages] == [row.expected(family)] * row.ranks, messages


def test_page() -> None:
    found = {name: outcomes(option.ranks)[0][name] for name, option in OPTIONS.items()}
    assert (ROOT / "docs" / "options.md").read_text() == page(found), (
        f"docs/options.md is stale: {_COMMAND}"
    )
