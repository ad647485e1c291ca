"""Pictures; matplotlib is looked for when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import GradCompError, explain
from .advice import Advice, Candidate, Question, rows
from .network_content import grouped
from .units import show_rate

_POINTS = 80
_SHOWN = 6
"""Codecs in a picture: those that are best anywhere, then those that are best here."""


def step_over_bandwidth(
    path: Path, question: Question, among: Sequence[Candidate], advice: Advice
) -> None:
    """Draw the predicted step over bandwidth, uncompressed and with the best codecs.

    Raises:
        GradCompError: There is no matplotlib, or it cannot write such a file.
    """
    plt = pyplot()
    here = question.cluster.between.bandwidth
    low, high = min(1.25e7, here / 10), max(1.25e10, here * 10)  # 100 Mbit/s to 100 Gbit/s
    speeds = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    asked = [question.at(speed) for speed in speeds]
    steps = [{row.codec: row.cost.step for row in rows(each, among)} for each in asked]
    winners = [min(by, key=lambda name: by[name]) for by in steps if by]
    chosen = [advice.chosen.codec] if advice.chosen else []
    shown = list(dict.fromkeys([*chosen, *winners, *(row.codec for row in advice.rows)]))[:_SHOWN]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    across = [8 * speed / 1e9 for speed in speeds]
    dense = [1e3 * each.dense().step for each in asked]
    axes.plot(across, dense, color="black", linewidth=2.5, label="uncompressed")
    for name in shown:
        axes.plot(across, [1e3 * by[name] for by in steps], label=name)
    axes.axvline(8 * here / 1e9, color="0.5", linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="Gbit/s of a host", ylabel="step, ms (predicted)")
    cluster = question.cluster
    axes.set_title(
        f"{question.params:,} parameters, {cluster.ranks} workers, {cluster.local} a host; "
        f"dotted: {show_rate(here)}",
        fontsize=9,
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    save(figure, path)


def speedups(path: Path, rows: Sequence[dict[str, Any]], leave_out: Sequence[str]) -> None:
    """Draw how many times as fast systems are over bandwidth, a panel for each model.

    Models that were measured with several hosts over one bandwidth have a panel over hosts, too.

    Args:
        path: Of the picture.
        rows: Of ``gradcomp bench network``.
        leave_out: Systems that are not shown.

    Raises:
        GradCompError: There is no matplotlib, or it cannot write such a file.
    """
    plt = pyplot()
    shown = [row for row in rows if row["system"] not in leave_out]
    names = list(dict.fromkeys(row["system"] for row in shown))
    panels = [*_panels(shown, "hosts", "bandwidth"), *_panels(shown, "bandwidth", "hosts")]
    down = -(-len(panels) // 3)
    across = min(3, len(panels))
    size = (5 * across + 3, 4.2 * down)
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, over, mine) in zip(grid.flat, panels):
        ticks = list(dict.fromkeys(row[over] for row in mine))
        for number, name in enumerate(names):
            points = [row for row in mine if row["system"] == name]
            at = [ticks.index(row[over]) + 0.012 * (number - len(names) / 2) for row in points]
            middle = [row["speedup_vs_none"] for row in points]
            below = [row["speedup_vs_none"] - row["speedup_least"] for row in points]
            above = [row["speedup_most"] - row["speedup_vs_none"] for row in points]
            style = {"color": "black", "linewidth": 2.5} if name.endswith(" auto") else {}
            look = plt.get_cmap("tab20")(number % 20)
            marks = {"marker": "o", "markersize": 4, "capsize": 2, "color": look, **style}
            axes.errorbar(at, middle, yerr=[below, above], label=name, **marks)
        axes.axhline(1.0, color="0.5", linestyle=":")
        axes.set(title=title, yscale="log", ylabel="times as fast as Horovod, none")
        axes.set_xticks(range(len(ticks)), [f"{t} hosts" if over == "hosts" else t for t in ticks])
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        axes.grid(alpha=0.3, which="both")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="center right")
    figure.tight_layout(rect=(0, 0, 1 - 2.4 / size[0], 1))
    save(figure, path)


def _panels(
    rows: Sequence[dict[str, Any]], fixed: str, over: str
) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return title, what it is over, and rows, for each model and each value of what is fixed.

    Over bandwidth all are shown, over hosts only where there are several.
    """
    out = []
    for mine in grouped(rows, ("model", fixed)):
        model, value = mine[0]["model"], mine[0][fixed]
        several = len({row[over] for row in mine}) > 1
        if several or (fixed == "hosts" and value == min(row["hosts"] for row in rows)):
            where = f"{value} hosts" if fixed == "hosts" else value
            out.append((f"{model}, {where}", over, mine))
    return out


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file, and let go of it.

    Raises:
        GradCompError: matplotlib cannot write such a file.
    """
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise GradCompError(f"picture {path}: {error}") from None
    finally:
        pyplot().close(figure)


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``, for pictures that are written to files."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise GradCompError(
            explain(
                got="a picture without matplotlib",
                expected="matplotlib",
                do="pip install 'horovod_gradcomp[plot]'",
            )
        ) from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
