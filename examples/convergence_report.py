"""From the JSON file of the convergence runs to tables, plots, a page, and broken bounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence_table import TASKS, Setting, Task, key
from rich.box import SIMPLE_HEAD
from rich.table import Table

BEGIN = "<!-- results: written by `python examples/convergence.py`, do not change by hand -->"
END = "<!-- end of results -->"
COLORS = ("tab:blue", "tab:orange", "tab:red", "tab:green", "tab:purple", "tab:brown")


@dataclass(frozen=True)
class Row:
    """All seeds of one setting."""

    setting: Setting
    label: str
    memory: str
    results: tuple[float | None, ...]
    ratio: float
    equal: bool
    behind: float | None
    """Mean result less that of dense on the same seeds; None where a seed diverged."""
    out: float | None
    """How much worse than dense, in units of the task's bound."""
    curve: tuple[tuple[float, float], ...]
    relative: bool
    """As of the task."""

    @property
    def mean(self) -> float | None:
        known = [r for r in self.results if r is not None]
        return statistics.mean(known) if len(known) == len(self.results) else None

    @property
    def missed(self) -> bool:
        """Whether a bound applies and is not kept."""
        return self.setting.role == "default" and (self.out is None or self.out > 1)

    @property
    def digits(self) -> int:
        """Decimals that a result is worth."""
        return 3 if self.relative else 2

    def result(self) -> str:
        if self.mean is None:
            return f"diverged ({self.results.count(None)} of {len(self.results)})"
        spread = max(self.results) - min(self.results)  # type: ignore[type-var,operator]
        mean, half = f"{self.mean:.{self.digits}f}", f"{spread / 2:.{self.digits}f}"
        return f"{mean} ± {half}" if len(self.results) > 1 else mean

    def difference(self) -> str:
        if self.setting.codec == "dense" or self.behind is None:
            return ""
        return f"{self.behind:+.{self.digits}f}" + (" *" if self.missed else "")


def rows(task: Task, runs: Mapping[str, Any]) -> list[Row]:
    """Return a row for each setting that has run, with the seeds that dense has run with, too."""
    dense = _seeds(task, task.settings[0], runs)
    out = []
    for setting in task.settings:
        found = _seeds(task, setting, runs)
        both = sorted(found.keys() & dense.keys())
        if both:
            out.append(_row(task, setting, [found[s] for s in both], [dense[s] for s in both]))
    return out


def _seeds(task: Task, setting: Setting, runs: Mapping[str, Any]) -> dict[int, Any]:
    known = {seed: runs.get(key(task, setting, seed)) for seed in range(1, 100)}
    return {s: run for s, run in known.items() if run and run["fixed"] == task.fixed()}


def _row(task: Task, setting: Setting, runs: Sequence[Any], dense: Sequence[Any]) -> Row:
    results = tuple(run["result"] for run in runs)
    base = [run["result"] for run in dense]
    behind = out = None
    if None not in results and None not in base:
        ours, theirs = statistics.mean(results), statistics.mean(base)
        behind, out = ours - theirs, task.worse(ours, theirs)
    points = zip(*(run["curve"] for run in runs))
    curve = [
        (point[0][0], statistics.mean(p[1] for p in point))
        for point in points
        if all(p[1] is not None for p in point)
    ]
    return Row(
        setting=setting,
        label=setting.label(task),
        memory=(setting.memory or runs[0]["memory"].partition(":")[0]).format(m=task.momentum),
        results=results,
        ratio=statistics.mean(run["ratio"] for run in runs),
        equal=all(run["weights_equal"] for run in runs),
        behind=behind,
        out=out,
        curve=tuple(curve),
        relative=task.relative,
    )


def heads(task: Task) -> list[str]:
    return ["setting", "memory", task.unit, "to dense", "bytes", "seeds"]


def cells(row: Row) -> list[str]:
    memory = row.memory or "none"
    return [
        row.label,
        memory,
        row.result(),
        row.difference(),
        f"{row.ratio:.4f}",
        str(len(row.results)),
    ]


def table(task: Task, some: Sequence[Row]) -> Table:
    """Return the table for a terminal."""
    out = Table(title=task.title, box=SIMPLE_HEAD)
    for i, head in enumerate(heads(task)):
        text = i < 2
        out.add_column(head, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for row in some:
        out.add_row(*cells(row))
    return out


def broken(task: Task, some: Sequence[Row]) -> list[str]:
    """Return which bounds of the quick form the rows of a task break."""
    found = [f"{r.label}: weights differ between ranks" for r in some if not r.equal]
    found += [
        f"{r.label}: does not save bytes"
        for r in some
        if r.setting.codec != "dense" and r.ratio >= 1
    ]
    if len(some) < len(task.settings):
        return [*found, f"only {len(some)} of {len(task.settings)} settings have run"]
    dense = some[0].mean
    assert task.floor is not None, f"{task.name} is not of the quick form"
    if dense is None or task.worse(dense, task.floor) > 0:
        found.append(f"dense: {some[0].result()}, expected {task.floor} or better")
    for row in some:
        if row.missed:
            found.append(f"{row.label} with {row.memory}: {row.result()}, too far from dense")
        if row.setting.role == "contrast":
            twin = next(r for r in some if r.label == row.label and r.setting.role != "contrast")
            gap = None if row.out is None or twin.out is None else row.out - twin.out
            if twin.out is None or (gap is not None and gap < 1):
                found.append(
                    f"{row.label}: {twin.result()} with its memory and {row.result()} without; "
                    "the memory should help more"
                )
    return found


def plot(task: Task, some: Sequence[Row], path: Path) -> None:
    """Draw the curves, a panel a family, dense in each."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    families = list(dict.fromkeys(row.setting.family for row in some[1:]))
    across = min(3, len(families))
    down = -(-len(families) // across)
    size = (4 * across, 3.2 * down + 0.6)
    figure, axes = plt.subplots(down, across, figsize=size, sharex=True, sharey=True, squeeze=False)
    for panel in axes.flat[len(families) :]:
        panel.set_axis_off()
    for panel, family in zip(axes.flat, families):
        panel.plot(*zip(*some[0].curve), color="0.6", linewidth=3, label="dense")
        members = [row for row in some[1:] if row.setting.family == family and row.curve]
        for row, color in zip(members, COLORS):
            style = "--" if row.setting.role == "contrast" else "-"
            label = row.label if row.memory in ("", "residual") else f"{row.label}, {row.memory}"
            panel.plot(*zip(*row.curve), style, color=color, label=label)
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    best = min(value for _, value in some[0].curve)
    axes.flat[0].set_ylim(*((0.97 * best, 1.35 * best) if task.relative else (50, 100)))
    figure.supxlabel("step")
    figure.supylabel(task.unit)
    figure.suptitle(f"{task.title}, held out, mean of seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def page(content: Mapping[str, Any], images: Mapping[str, Path], folder: Path) -> str:
    """Return the measured part of the page, as Markdown."""
    about = content["about"]
    lines = [BEGIN, "", "## Results", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [f"- Time: {_minutes(content['runs'])}"]
    if missing := _missing(content["runs"]):
        lines += ["", f"**Not complete.** {missing}"]
    for task in TASKS:
        some = rows(task, content["runs"])
        if not some:
            continue
        lines += ["", f"### {task.name}", "", f"{task.title}. {_how(task)}", ""]
        lines += [_line(heads(task)), _line(["---", "---", *["---:"] * 4])]
        lines += [_line([f"`{label}`", *rest]) for label, *rest in (cells(row) for row in some)]
        lines += ["", _verdict(task, some)]
        if task.name in images:
            lines += ["", f"![curves]({images[task.name].relative_to(folder)})"]
    return "\n".join([*lines, "", END]) + "\n"


def _minutes(runs: Mapping[str, Any]) -> str:
    """Return how long the runs of each task took, in minutes."""
    spent = {task.name: 0.0 for task in TASKS}
    for run in runs.values():
        if run["task"] in spent:
            spent[run["task"]] += run["seconds"] / 60
    return ", ".join(f"{name} {minutes:.1f} min" for name, minutes in spent.items() if minutes)


def _line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def _how(task: Task) -> str:
    kind = f"SGD with momentum {task.momentum}" if task.optimizer == "sgd" else "Adam"
    return (
        f"{task.steps} steps of {task.batch} samples a rank, {kind}, learning rate {task.lr} "
        "falling linearly to 0."
    )


def _verdict(task: Task, some: Sequence[Row]) -> str:
    bound = f"{task.bound:.0%} of" if task.relative else f"{task.bound} points from"
    missed = [f"`{r.label}` ({r.memory})" for r in some if r.missed]
    judged = sum(r.setting.role == "default" for r in some)
    text = f"Of {judged} mild rows, {judged - len(missed)} are within {bound} dense"
    return f"{text}; outside: {', '.join(missed)}." if missed else f"{text}."


def _missing(runs: Mapping[str, Any]) -> str:
    parts = []
    for task in TASKS:
        wanted = [key(task, s, n + 1) for s in task.settings for n in range(task.seeds)]
        done = sum(k in runs and runs[k]["fixed"] == task.fixed() for k in wanted)
        if done < len(wanted) and (done or not task.extra):
            parts.append(f"{task.name} has {done} of {len(wanted)} runs")
    return f"{'; '.join(parts)}. The seeds of each row are in its last column." if parts else ""


def update(page_file: Path, measured: str) -> None:
    """Put the measured part into a page; what people wrote around it stays."""
    old = page_file.read_text() if page_file.exists() else f"# Convergence\n\n{BEGIN}\n{END}\n"
    before, mark, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{page_file} has no lines {BEGIN!r} and {END!r} to write between")
    page_file.write_text(before + measured.rstrip("\n") + after)
