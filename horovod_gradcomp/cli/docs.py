"""``gradcomp docs``: pages written from what the code declares, so that they cannot drift apart."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Optional

import typer

from ..codecs import REGISTRY
from ..core.options import Options
from ..core.settings import Settings, assemble, parse_codec
from .docstrings import FORMULA, PAYLOAD, SUMMARY, arguments, parse, table

Row = dict[str, Any]

app = typer.Typer(help="Write documentation from the code.", no_args_is_help=True)

_COMMAND = "gradcomp docs codecs --output docs/codecs.md"
_SHAPE = (1024, 1024)
_LABELS = {
    FORMULA: "Formula",
    PAYLOAD: "Payload",
    "Combine": "Combine",
    "Args": "Settings",
    "When to use": "When to use",
    "Reference": "Reference",
    "Differs from the paper": "Difference from the paper",
}
"""By section of a docstring, in order: its label on the page."""

_INTRODUCTION = f"""\
<!-- Written by `{_COMMAND}` from the codecs' docstrings. Change those. -->

# The codecs

Each is `Compression.<name>(...)` in every front end, and a string such as `"topk:ratio=0.01"`.

- **combine**: payloads of `SUM` are added by Horovod's own allreduce; with `GATHER` every rank
  receives every rank's payload.
- **bias**, with the default memory: `UNBIASED` means that the expectation of what is decoded is
  the gradient; `CONTRACTION` that the error is no larger than the gradient, which is what error
  feedback needs; `NEITHER` that neither is certain.
- **bytes**: of the payload, an element, with the default settings, for a gradient of shape
  {_SHAPE}; uncompressed it is 4.

What a first step leaves out of two real gradients, against the bytes that it sends (drawn by
`python examples/error_against_bytes.py docs/error_against_bytes.png`). What a memory gives back
later is not in it, nor are bases that `acp`, `tucker` and `powersgd` improve from step to step:
[convergence](convergence.md) shows how training ends. Gradients of a fully connected layer are of
rank 16 at most with a batch of 16, as here.

![error against bytes of every codec](error_against_bytes.png)
"""


@app.callback()
def _group() -> None:
    """Keep ``docs`` a group with named commands."""


@app.command()
def codecs(
    output: Optional[Path] = typer.Option(  # noqa: UP045 - typer reads this on Python 3.9
        None, help="Write to this file instead of to the terminal."
    ),
    bench: Optional[Path] = typer.Option(  # noqa: UP045
        None, exists=True, help="Add what 'gradcomp bench codecs --json FILE' measured."
    ),
) -> None:
    """Describe every codec: one table of all, then one section for each."""
    text = page(json.loads(bench.read_text()) if bench else [])
    if output:
        output.write_text(text)
    else:
        typer.echo(text, nl=False)


def page(rows: list[Row]) -> str:
    """Return the page of all codecs.

    Args:
        rows: What ``gradcomp bench codecs`` measured, for further columns.
    """
    sections = [_section(name) for name in REGISTRY]
    return "\n".join([_INTRODUCTION, *_overview(rows), *sections])


def _overview(rows: list[Row]) -> list[str]:
    head = ["name", "family", "combine", "bias", "memory", "bytes", "when to use", "paper"]
    body = [_summary(name) for name in REGISTRY]
    commands = []
    for taken, measured in _runs(rows).items():
        framework, device, numel, threads, ranks = taken
        head += [f"encode, {framework}", f"decode, {framework}", "error"]
        commands.append(
            f"`gradcomp bench codecs --framework {framework} --device {device} --numel {numel} "
            f"--threads {threads} --ranks {ranks}`"
        )
        for cells in body:
            cells += measured.get(cells[0].strip("`"), [""] * 3)
    linked = [[f"[`{cells[0]}`](#{cells[0]})", *cells[1:]] for cells in body]
    out = [table(head, linked), ""]
    if commands:
        out += [f"Times are in copies of the tensor; measured by {' and '.join(commands)}.", ""]
    return out


def _runs(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, list[str]]]:
    """Return for each way to run the bench three cells a codec."""
    out: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for row in rows:
        taken = tuple(row[key] for key in ("framework", "device", "numel", "threads", "ranks"))
        decode = "-" if row["decode_x"] is None else f"{row['decode_x']:.1f}"
        cells = [f"{row['encode_x']:.1f}", decode, f"{row['rel_error']:.4f}"]
        out.setdefault(taken, {})[row["codec"]] = cells
    return out


def _summary(name: str) -> list[str]:
    settings, parts = _settings(name), parse(REGISTRY[name].__doc__ or "")
    codec = settings.codec
    nbytes = codec.wire_bytes(_SHAPE) / (_SHAPE[0] * _SHAPE[1])
    return [
        name,
        parts.get("Family", "").rstrip("."),
        codec.combine.name,
        codec.bias.name,
        codec.default_memory,
        f"{nbytes:.4f}",
        re.split(r"\.\s", parts.get("When to use", "") + " ")[0],
        _paper(parts.get("Reference", "")),
    ]


def _section(name: str) -> str:
    cls, parts = REGISTRY[name], parse(REGISTRY[name].__doc__ or "")
    fields = dataclasses.fields(cls)
    values = ", ".join(f"{f.name}={_literal(f.default)}" for f in fields)
    meanings = arguments(parts.get("Args", ""))
    rows = [[f"`{f.name}`", f"`{_literal(f.default)}`", meanings.get(f.name, "")] for f in fields]
    parts["Args"] = table(["setting", "default", "meaning"], rows) if rows else "There are none."
    out = [f"## {name}", "", f"`Compression.{name}({values})`", "", parts.get(SUMMARY, ""), ""]
    for section, label in _LABELS.items():
        text = parts.get(section, "")
        if text:
            space = "\n\n" if text.startswith("|") else " "
            out += [f"**{label}.**{space}{text[0].upper()}{text[1:]}", ""]
    return "\n".join(out)


def _settings(name: str) -> Settings:
    return assemble(parse_codec(name), Options())


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _paper(reference: str) -> str:
    """Return the links of a reference, or else who wrote it and when."""
    links = re.findall(r"\[arXiv:[^)]*\)", reference)
    years = re.findall(r"\b(?:19|20)\d\d\b", reference)
    return ", ".join(links) or (f"{reference.split(',')[0]} et al. {years[-1]}" if years else "")
