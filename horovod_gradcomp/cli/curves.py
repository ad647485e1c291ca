"""The curves of some runs, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .plots import pyplot
from .runs import Run

_CODING = (("encode_ms", "encode"), ("wait_ms", "wait"), ("decode_ms", "decode"))
_STYLES = ("-", "--", ":", "-.")
_LEAST_SPAN = 10.0
"""From the bottom to the top of a logarithmic axis."""
_MOST_LAYERS = 40
"""Layers in the picture of cosines: the largest."""
_MOST_ROWS = 20
"""Rows of the table in a picture."""


def draw(runs: Sequence[Run], rows: Sequence[Sequence[str]] = (), heads: Sequence[str] = ()) -> Any:
    """Return a figure of some runs, with a table below where there are rows.

    Args:
        runs: At least one, each with a record.
        rows: Of the table; what is too much is left out.
        heads: Of its columns.

    Raises:
        GradCompError: There is no matplotlib.
    """
    plt = pyplot()
    shown = [list(row) for row in rows[:_MOST_ROWS]]
    below = 0.6 + 0.21 * len(shown) if shown else 0.0
    figure = plt.figure(figsize=(13, 7 + below), layout="constrained")
    heights = [3.5, 3.5, below] if shown else [3.5, 3.5]
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    panels = [figure.add_subplot(grid[i // 3, i % 3]) for i in range(6)]
    for axes, paint in zip(panels, (_ratio, _bytes, _residual, _cosine, _times, _layers)):
        paint(axes, runs)
        axes.title.set_fontsize(10)
        if paint is not _layers:
            _finish(axes, runs)
    if shown:
        _table(figure.add_subplot(grid[2, :]), shown, heads, len(rows) - len(shown))
    return figure


def _ratio(axes: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        axes.plot(*run.column("total", "ratio"), label=run.label)
    axes.set(title="bytes sent / bytes of gradients", yscale="log")


def _bytes(axes: Any, runs: Sequence[Run]) -> None:
    for run, style in zip(runs, _cycle(runs)):
        for key, colour, name in (("raw_bytes", "0.4", "gradients"), ("wire_bytes", "C0", "sent")):
            steps, values = run.column("total", key)
            millions = [value / 1e6 for value in values]
            axes.plot(steps, millions, style, color=colour, label=_label(name, run, runs))
    axes.set(title="MB a step", yscale="log")


def _residual(axes: Any, runs: Sequence[Run]) -> None:
    for run, style in zip(runs, _cycle(runs)):
        for key, colour, name in (
            ("residual_norm", "C3", "left out"),
            ("grad_norm", "0.4", "gradient"),
        ):
            label = _label(name, run, runs)
            axes.plot(*run.column("total", key), style, color=colour, label=label)
            axes.plot(*run.column("cluster", key), style, color=colour, linewidth=4, alpha=0.25)
    axes.set(title="norms (broad: root mean square of all ranks)", yscale="log")


def _cosine(axes: Any, runs: Sequence[Run]) -> None:
    for number, run in enumerate(runs):
        axes.plot(*run.column("total", "cosine"), color=f"C{number}", label=run.label)
        axes.plot(*run.column("cluster", "cosine"), color=f"C{number}", linewidth=4, alpha=0.25)
    axes.set(title="cosine of sent and true (broad: all ranks)")


def _times(axes: Any, runs: Sequence[Run]) -> None:
    for run, style in zip(runs, _cycle(runs)):
        for number, (key, name) in enumerate(_CODING):
            label = _label(name, run, runs)
            axes.plot(*run.column("total", key), style, color=f"C{number}", label=label)
    axes.set(title="ms a step")


def _layers(axes: Any, runs: Sequence[Run]) -> None:
    run = runs[0]
    layers = run.last["layers"]
    names = sorted(layers, key=lambda name: -layers[name]["numel"])[:_MOST_LAYERS]
    names = [name for name in layers if name in names]
    table = [[float("nan") if v is None else v for v in run.layer(n, "cosine")] for n in names]
    steps = [record["step"] for record in run.records]
    axes.set(title="cosine by layer" + (f", {run.label}" if len(runs) > 1 else ""), xlabel="step")
    if not names or all(value != value for row in table for value in row):
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    edges = [*steps, steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    image = axes.pcolormesh(
        edges, range(len(names) + 1), table, vmin=0, vmax=1, cmap="viridis", rasterized=True
    )
    axes.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=6)
    axes.invert_yaxis()
    axes.figure.colorbar(image, ax=axes)


def _finish(axes: Any, runs: Sequence[Run]) -> None:
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log" and high < _LEAST_SPAN * low:
        axes.set_ylim((low * high / _LEAST_SPAN) ** 0.5, (low * high * _LEAST_SPAN) ** 0.5)
    for run in runs:
        for first, end in run.fallbacks():
            axes.axvspan(first, end, color="C1", alpha=0.15, linewidth=0)
    axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        axes.set_yscale("linear")


def _table(axes: Any, rows: Sequence[Sequence[str]], heads: Sequence[str], left_out: int) -> None:
    axes.axis("off")
    made = axes.table(cellText=rows, colLabels=heads, loc="upper center", cellLoc="right")
    made.auto_set_font_size(False)
    made.set_fontsize(7)
    made.auto_set_column_width(list(range(len(heads))))
    more = f"; {left_out} smaller layers are left out" if left_out else ""
    axes.set_title(f"layers in the last record{more}", fontsize=10)


def _cycle(runs: Sequence[Run]) -> list[str]:
    return [_STYLES[i % len(_STYLES)] for i in range(len(runs))]


def _label(name: str, run: Run, runs: Sequence[Run]) -> str:
    return name if len(runs) == 1 else f"{name}, {run.label}"
