"""``gradcomp doctor``: whether a compressed step works here, and what mends it if not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import typer
from rich.console import Console
from rich.text import Text

from .checks import BAD, DOUBTFUL, GOOD, Finding, examine

_SIGNS = {GOOD: ("ok", "green"), DOUBTFUL: ("look", "yellow"), BAD: ("FAIL", "bold red")}


def doctor(
    timeout: float = typer.Option(120.0, min=1.0, help="Seconds for a run on two ranks."),
    json_file: Optional[Path] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, "--json", help="Write the findings to this file."
    ),
) -> None:
    """Check versions, Horovod's build and kernels, and run one step on two local ranks.

    Ends with code 1 if something does not work.
    """
    console, findings = Console(), []
    with Console(stderr=True).status("looking; two ranks are started for each framework"):
        for finding in examine(timeout):
            findings.append(finding)
            _show(console, finding)
    if json_file:
        json_file.write_text(json.dumps([vars(finding) for finding in findings], indent=2) + "\n")
    console.print(_sum(findings))
    raise typer.Exit(int(any(finding.state == BAD for finding in findings)))


def _show(console: Console, finding: Finding) -> None:
    sign, style = _SIGNS[finding.state]
    console.print(Text.assemble((f"{sign:4}", style), f"  {finding.what}: {finding.found}"))
    if finding.fix:
        console.print(Text(f"      -> {finding.fix}", style="cyan"), soft_wrap=True)


def _sum(findings: Sequence[Finding]) -> str:
    bad, doubtful = (sum(f.state == state for f in findings) for state in (BAD, DOUBTFUL))
    if bad:
        return f"\n{bad} of {len(findings)} do not work."
    return "\nAll works." + (f" {doubtful} to look at." if doubtful else "")
