"""Start an example on local ranks and show how far it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def horovodrun(np: int) -> list[str]:
    """Return the start of a command line that runs a script on local ranks."""
    launcher = Path(sys.executable).with_name("horovodrun")
    if not launcher.exists():
        raise SystemExit(f"{launcher} is not there: run docker/install_horovod.sh first")
    return [str(launcher), "--gloo", "-np", str(np), "-H", f"localhost:{np}", sys.executable]


def run(
    command: list[str],
    progress_of: Callable[[str], tuple[str, int, int] | None],
    console: Console,
) -> None:
    """Run the ranks; ``progress_of`` turns their lines into what is done, how much, of how much."""
    # As Ctrl-C does: the ranks have a session of their own and would go on.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    log: list[str] = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("starting ranks", total=None)
        ranks = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            assert ranks.stdout is not None
            for line in ranks.stdout:
                log.append(line)
                found = progress_of(line)
                if found:
                    what, done, of = found
                    progress.update(task, description=what, completed=done, total=of)
            code = ranks.wait()
            progress.update(task, description="all of them")
        finally:
            if ranks.poll() is None:
                os.killpg(ranks.pid, signal.SIGTERM)
                ranks.wait()
    if code:
        console.print("".join(log[-40:]), markup=False)
        raise SystemExit(f"the ranks ended with exit code {code}")
