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
    plt = pyplot("--plot")
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
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise GradCompError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)


def pyplot(what: str) -> Any:
    """Return ``matplotlib.pyplot``, for pictures that are written to files.

    Args:
        what: That is asked for, for the message where there is none.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise GradCompError(
            explain(
                got=f"{what} without matplotlib",
                expected="matplotlib",
                do="pip install 'horovod_gradcomp[plot]'",
            )
        ) from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
