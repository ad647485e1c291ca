"""Where the docstrings of codecs are parsed: into their sections, as Markdown.

A docstring is paragraphs. One that begins with a name of :data:`SECTIONS` and a colon is that
section, together with the indented paragraphs that follow; a table whose first column is
``tensor``, or a paragraph that begins with "Payload", is the payload; the first is the summary;
all others are the formula.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict

SECTIONS = (
    "Family",
    "Combine",
    "When to use",
    "Args",
    "Raises",
    "Example",
    "Reference",
    "Differs from the paper",
)
SUMMARY, FORMULA, PAYLOAD = "Summary", "Formula", "Payload"

_STARTS = re.compile(rf"({'|'.join(SECTIONS)}):")
_RULER = re.compile(r"=+(  ?=+)+")


def parse(docstring: str) -> dict[str, str]:
    """Return each section that a docstring has, as Markdown; "Args" is left as it is."""
    parts: dict[str, list[str]] = defaultdict(list)
    current = SUMMARY
    for paragraph in filter(None, re.split(r"\n\s*\n", inspect.cleandoc(docstring))):
        found = _STARTS.match(paragraph)
        if found:
            text = paragraph[found.end(1) + 1 :].lstrip(" ")
            current, paragraph = found[1], textwrap.dedent(text).strip("\n")
        elif paragraph.startswith(" ") and current in SECTIONS:
            paragraph = textwrap.dedent(paragraph)
        else:
            current = _kind(paragraph) if parts else SUMMARY
        parts[current].append(paragraph if current == "Args" else markdown(paragraph))
    return {name: "\n\n".join(texts).strip() for name, texts in parts.items()}


def arguments(args: str) -> dict[str, str]:
    """Return what the section "Args" says of each argument, as Markdown."""
    out: dict[str, str] = {}
    for entry in re.split(r"\n(?=\w)", textwrap.dedent(args.strip("\n"))):
        name, colon, text = entry.partition(": ")
        if colon:
            out[name] = " ".join(markdown(text).split())
    return out


def markdown(paragraph: str) -> str:
    """Return a paragraph of reStructuredText as Markdown; paper numbers become links."""
    if _is_table(paragraph):
        return _table(paragraph)
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", paragraph).replace("``", "`")
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return text if text.startswith(" ") else re.sub(r"::$", ":", " ".join(text.split()))


def row(cells: list[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(head: list[str], body: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(map(row, [head, ["---"] * len(head), *body]))


def _kind(paragraph: str) -> str:
    about_payload = paragraph.startswith("Payload")
    if _is_table(paragraph):
        about_payload = paragraph.splitlines()[1].startswith("tensor")
    return PAYLOAD if about_payload else FORMULA


def _is_table(paragraph: str) -> bool:
    return bool(_RULER.fullmatch(paragraph.splitlines()[0].strip()))


def _table(paragraph: str) -> str:
    ruler, *lines = textwrap.dedent(paragraph).splitlines()
    starts = [found.start() for found in re.finditer("=+", ruler)]
    ends = [*starts[1:], None]
    head, *body = (
        [
            markdown(line[start:end].strip()) if line[start:end].strip() else ""
            for start, end in zip(starts, ends)
        ]
        for line in lines
        if not _RULER.fullmatch(line)
    )
    return table(head, body)
