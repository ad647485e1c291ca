"""Start an example on local ranks and show how far it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
    commands: Sequence[list[str]],
    progress_of: Callable[[str], tuple[str, int, int] | None],
    console: Console,
) -> None:
    """Run commands side by side, each with ranks of its own.

    ``progress_of`` turns their lines into what is done, how much, of how much. If one fails, the
    others are ended.
    """
    # As Ctrl-C does: the ranks have a session of their own and would go on.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    started: list[Started] = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        try:
            for command in commands:
                started.append(Started(command, progress_of, progress))
            while any(one.ranks.poll() is None for one in started):
                if any(one.ranks.poll() for one in started):
                    break
                time.sleep(0.1)
        finally:
            for one in started:
                one.end()
    for one in started:
        if one.ranks.returncode and not one.was_ended:
            console.print("".join(one.log[-40:]), markup=False)
            raise SystemExit(f"the ranks ended with exit code {one.ranks.returncode}")


class Started:
    """One command that runs, and a bar that follows what it prints."""

    def __init__(
        self,
        command: list[str],
        progress_of: Callable[[str], tuple[str, int, int] | None],
        progress: Progress,
    ) -> None:
        self.log: list[str] = []
        self.was_ended = False
        self._progress, self._progress_of = progress, progress_of
        self._bar = progress.add_task("starting ranks", total=None)
        self.ranks = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.ranks.stdout is not None
        for line in self.ranks.stdout:
            self.log.append(line)
            found = self._progress_of(line)
            if found:
                what, done, of = found
                self._progress.update(self._bar, description=what, completed=done, total=of)

    def end(self) -> None:
        """End the ranks if they still run, and wait for what they print."""
        if self.ranks.poll() is None:
            self.was_ended = True
            os.killpg(self.ranks.pid, signal.SIGTERM)
            self.ranks.wait()
        self._reader.join(10)
