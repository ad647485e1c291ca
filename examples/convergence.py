"""Show on real data that training with compressed gradients converges.

    python examples/convergence.py                              # the three tasks
    python examples/convergence.py --task adam --task memories  # others are asked for by name
    python examples/convergence.py --quick                      # a small form, bounds are checked
    python examples/convergence.py --docs docs/convergence.md   # also write page and plots

Each task is trained on two local ranks by one ``horovodrun``, with every setting of
``convergence_table.py`` and every seed. Results are written as they come: a run that was
interrupted goes on where it was.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import typer
from convergence_report import broken, page, plot, rows, table, update
from convergence_table import QUICK_TASKS, RANKS, TASKS, Task, key, write
from launch import horovodrun, run
from rich.console import Console

HERE = Path(__file__).parent
NAMES = ", ".join(task.name for task in TASKS)
PROGRESS = re.compile(r"convergence: (?P<done>\d+)/(?P<of>\d+) (?P<name>.*)")


def about() -> dict[str, str]:
    """Return where and with what the runs are made."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    versions = (f"{n} {importlib.metadata.version(n)}" for n in ("torch", "horovod", "mlxtend"))
    return {
        "Machine": f"{os.cpu_count()} cores, {model[1] if model else platform.machine()}",
        "Software": f"Python {platform.python_version()}, {', '.join(versions)}",
        "Ranks": f"{RANKS} under `horovodrun --gloo`, all on this machine",
        "Command": "`python examples/convergence.py --docs docs/convergence.md`",
    }


def progress_of(line: str) -> tuple[str, int, int] | None:
    found = PROGRESS.search(line)
    return found and (found["name"], int(found["done"]), int(found["of"]))


def complete(task: Task, seeds: int, runs: dict[str, Any]) -> bool:
    wanted = [key(task, setting, s) for setting in task.settings for s in range(1, seeds + 1)]
    return all(k in runs and runs[k]["fixed"] == task.fixed() for k in wanted)


def train(tasks: list[Task], seeds: int | None, file: Path, quick: bool, console: Console) -> None:
    """Run what the file does not hold yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    write(file, {**content, "about": about()})
    for task in tasks:
        count = seeds or task.seeds
        if complete(task, count, content["runs"]):
            continue
        console.print(f"{task.title}: {len(task.settings)} settings, {count} seeds")
        command = [*horovodrun(RANKS), str(HERE / "convergence_worker.py")]
        command += ["--task", task.name, "--seeds", str(count), "--json", str(file.resolve())]
        run(command + ["--quick"] * quick, progress_of, console)


def write_page(page_file: Path, file: Path) -> None:
    """Write plots, the results and the measured part of the page."""
    content, images = json.loads(file.read_text()), {}
    for task in TASKS:
        some = rows(task, content["runs"])
        if some:
            images[task.name] = page_file.with_name(f"{page_file.stem}_{task.name}.png")
            plot(task, some, images[task.name])
    kept = page_file.with_suffix(".json")
    if file.resolve() != kept.resolve():
        shutil.copyfile(file, kept)
    update(page_file, page(content, images, page_file.parent))


def main(
    task: list[str] = typer.Option(None, help=f"Only these: {NAMES}."),
    seeds: int = typer.Option(None, help="Runs of each setting; default as in the table."),
    quick: bool = typer.Option(False, "--quick", help="Small tasks, few settings, checked bounds."),
    json_file: Path = typer.Option(
        None, "--json", help="Results so far; results/convergence.json, or none with --quick."
    ),
    docs: Path = typer.Option(None, help="Write this page, with plots and the JSON file beside."),
    only_show: bool = typer.Option(False, "--only-show", help="Train nothing."),
) -> None:
    console = Console()
    if quick and docs:
        raise typer.BadParameter("the page is of the whole runs, not of --quick")
    known = QUICK_TASKS if quick else TASKS
    tasks = [t for t in known if (t.name in task if task else not t.extra)]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        at_hand = Path(folder if quick else "results") / "convergence.json"
        file = json_file or at_hand
        if not only_show:
            train(tasks, seeds, file, quick, console)
        runs = json.loads(file.read_text())["runs"]
        for each in tasks:
            some = rows(each, runs)
            if some:
                console.print(table(each, some))
            problems += broken(each, some) if quick else []
            problems += [f"{r.label}: weights differ between ranks" for r in some if not r.equal]
        if docs:
            write_page(docs, file)
    if problems:
        raise SystemExit("not as it should be:\n" + "\n".join(dict.fromkeys(problems)))


if __name__ == "__main__":
    typer.run(main)
