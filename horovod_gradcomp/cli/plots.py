"""Pictures; matplotlib is looked for when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import GradCompError, explain
from .advice import Advice, Candidate, Question, rows
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

    Args:
        path: Of the picture.
        rows: Of ``gradcomp bench network``.
        leave_out: Systems that are not shown.

    Raises:
        GradCompError: There is no matplotlib, or it cannot write such a file.
    """
    plt = pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = [n for n in dict.fromkeys(row["system"] for row in rows) if n not in leave_out]
    links = list(dict.fromkeys(row["bandwidth"] for row in rows))
    size = (5.5 * len(models) + 2.5, 4.5)
    figure, panels = plt.subplots(1, len(models), figsize=size, squeeze=False)
    for axes, model in zip(panels[0], models):
        for number, name in enumerate(names):
            mine = [row for row in rows if (row["model"], row["system"]) == (model, name)]
            at = [links.index(row["bandwidth"]) + 0.012 * (number - len(names) / 2) for row in mine]
            middle = [row["speedup_vs_none"] for row in mine]
            below = [row["speedup_vs_none"] - row["speedup_least"] for row in mine]
            above = [row["speedup_most"] - row["speedup_vs_none"] for row in mine]
            style = {"color": "black", "linewidth": 2.5} if name.endswith(" auto") else {}
            look = plt.get_cmap("tab20")(number % 20)
            marks = {"marker": "o", "markersize": 4, "capsize": 2, "color": look, **style}
            axes.errorbar(at, middle, yerr=[below, above], label=name, **marks)
        axes.axhline(1.0, color="0.5", linestyle=":")
        axes.set(title=model, yscale="log", ylabel="times as fast as Horovod, none")
        axes.set_xticks(range(len(links)), links)
        axes.grid(alpha=0.3, which="both")
    panels[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    save(figure, path)


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
