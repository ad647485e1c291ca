"""A report of some runs: curves and a table of layers, as one HTML file or as a picture."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .curves import draw
from .plots import pyplot, save
from .runs import Run

Row = dict[str, Any]

COLUMNS = (
    ("layer", "layer", "{}"),
    ("numel", "elements", "{:,}"),
    ("raw_bytes", "bytes of gradient", "{:,.0f}"),
    ("wire_bytes", "bytes sent", "{:,.0f}"),
    ("ratio", "ratio", "{:.4f}"),
    ("encode_ms", "encode ms", "{:.3f}"),
    ("wait_ms", "wait ms", "{:.3f}"),
    ("decode_ms", "decode ms", "{:.3f}"),
    ("grad_norm", "gradient norm", "{:.4g}"),
    ("residual_norm", "left-out norm", "{:.4g}"),
    ("cosine", "cosine", "{:.4f}"),
    ("mean_cosine", "cosine, mean", "{:.4f}"),
    ("all_ranks_cosine", "cosine, all ranks", "{:.4f}"),
)
"""Key, head and format of the table's columns."""

_NO_METADATA = ("Creator", "Date", "Format", "Type")
"""What matplotlib would write into a drawing."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem;
       color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
svg.curves { width: 100%; height: auto }
table { border-collapse: collapse; font-size: 13px } .wide { overflow-x: auto }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd;
         font-variant-numeric: tabular-nums; white-space: nowrap }
th { position: sticky; top: 0; background: #f4f4f4 }
th:first-child, td:first-child { text-align: left }
tbody tr:hover { background: #f0f6ff } td.low { background: #fdecea }
.note { color: #666; font-size: 13px } svg.line { vertical-align: middle }
"""


def rows(run: Run) -> list[Row]:
    """Return the table of layers of the last record, the largest first."""
    last, out = run.last, []
    together = (last["cluster"] or {}).get("layers", {})
    for name, one in last["layers"].items():
        known = [value for value in run.layer(name, "cosine") if value is not None]
        mean = sum(known) / len(known) if known else None
        more = {"mean_cosine": mean, "all_ranks_cosine": together.get(name, {}).get("cosine")}
        out.append({"layer": name, **one, **more})
    return sorted(out, key=lambda row: -row["numel"])


def cells(row: Row) -> list[str]:
    """Return a row as it is shown."""
    return ["" if row.get(key) is None else form.format(row[key]) for key, _, form in COLUMNS]


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write a report; what the file is called decides between HTML and a picture.

    Raises:
        GradCompError: There is no matplotlib, or it cannot write such a file.
    """
    if path.suffix.lower() in (".html", ".htm"):
        path.write_text(page(runs), encoding="utf-8")
        return
    heads = [head for _, head, _ in COLUMNS]
    figure = draw(runs, [cells(row) for row in rows(runs[0])], heads)
    save(figure, path)


def page(runs: Sequence[Run]) -> str:
    """Return the report as HTML that needs nothing beside it."""
    parts = [f"<h1>Telemetry: {html.escape(', '.join(run.label for run in runs))}</h1>"]
    parts += [_summary(run) for run in runs]
    parts.append(_svg(draw(runs)))
    parts += [_layers(run) for run in runs]
    parts.append(
        '<p class="note">Bytes and times are means of the steps since the record before. A '
        "bucket's bytes and times are shared out among its layers by their elements. Norms and "
        "cosines are of this rank in the recorded step; cosine is that between what was to be "
        "sent, gradient and memory, and what was. Orange: the guard's fallback.</p>"
    )
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>gradcomp telemetry</title><style>{_STYLE}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def _summary(run: Run) -> str:
    first, last = run.records[0], run.last
    whole, cluster = last["total"], last["cluster"]
    facts = [
        f"steps {first['step']:,} to {last['step']:,}, {len(run.records)} records",
        f"{last['world_size']} ranks, seen from rank {last['rank']}",
        f"{whole['wire_bytes'] / 1e6:.4g} MB of {whole['raw_bytes'] / 1e6:.4g} MB sent a step",
        f"{sum(record['bad_steps'] for record in run.records)} bad steps",
    ]
    if cluster is not None and cluster["cosine"] is not None:
        facts.append(f"cosine over {cluster['ranks']} ranks {cluster['cosine']:.4f}")
    measured = [record["telemetry_ms"] for record in run.records]
    facts.append(f"measuring took {sum(measured) / len(measured):.3g} ms a record")
    events = [
        f"step {event['step']:,}: {event['event']} to {html.escape(event['codec'])}"
        + (f" ({html.escape(event['why'])})" if "why" in event else "")
        for event in run.events
    ]
    listed = "".join(f"<li>{event}</li>" for event in events)
    return (
        f"<h2>{html.escape(run.label)}</h2><p>{'; '.join(facts)}.</p>"
        f'<p class="note">{html.escape(last["settings"])}</p>'
        + (f"<ul>{listed}</ul>" * bool(events))
    )


def _layers(run: Run) -> str:
    heads = "".join(f"<th>{html.escape(head)}</th>" for _, head, _ in COLUMNS)
    lines = []
    for row in rows(run):
        shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))
        lines.append(f"<tr>{shown}<td>{_line(run.layer(row['layer'], 'cosine'))}</td></tr>")
    body = "\n".join(lines)
    return (
        f"<h2>Layers of {html.escape(run.label)} in the last record</h2><div class=wide><table>"
        f"<thead><tr>{heads}<th>cosine over time</th></tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _line(values: Sequence[float | None]) -> str:
    """Return a small curve between 0 and 1."""
    known = [(i, value) for i, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return ""
    width = 100 / max(1, len(values) - 1)
    points = " ".join(f"{i * width:.1f},{18 - 16 * max(0.0, v):.1f}" for i, v in known)
    return (
        '<svg class="line" width="100" height="20" role="img"><polyline fill="none" '
        f'stroke="#1f77b4" stroke-width="1.5" points="{points}"/></svg>'
    )


def _svg(figure: Any) -> str:
    text = io.StringIO()
    try:
        figure.savefig(text, format="svg", metadata=dict.fromkeys(_NO_METADATA))
    finally:
        pyplot().close(figure)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :].replace("<svg", '<svg class="curves"', 1)
