"""Run a worker on several ranks under ``horovodrun`` and collect what each rank reports.

Every run has a temporary folder of its own, whose path in the environment also marks each process
that belongs to it: whatever way a run ends, no process of it is left, and no other is touched.
Where Horovod, MPI or a framework is missing a run fails; it is never skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).resolve().parent / "workers"
LAUNCHER: Path | None = Path(__file__).with_name("launcher.py")
"""What starts the ranks; None for horovodrun itself."""
FOLDER = "GRADCOMP_TEST_FOLDER"
"""Environment variable that names the folder of a run."""

TAIL = 4000
"""Characters of each rank's output that a failure shows."""

_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
_PREFIX = re.compile(r"\[(?:\d+,)?(\d+)\]<(?:stdout|stderr)>:")


def run_ranks(
    worker: str,
    np: int,
    *,
    controller: str = "gloo",
    env: Mapping[str, str] | None = None,
    args: Sequence[object] = (),
    timeout: float = 120,
) -> list[dict[str, Any]]:
    """Run a worker and return what each rank gave to :func:`report`, in rank order.

    Args:
        worker: File name in ``tests/distributed/workers``. Not one that hides a module that it
            imports, such as ``torch.py``.
        np: Number of ranks.
        controller: "gloo" or "mpi".
        env: More environment for the ranks.
        args: Command line of the worker.
        timeout: Seconds after which the run is killed.

    Raises:
        AssertionError: The run ended with an error, or not in time, or a rank reported nothing;
            with the end of each rank's output.
    """
    assert controller in ("gloo", "mpi"), f"controller={controller!r}: 'gloo' or 'mpi'"
    script = WORKERS / worker
    assert script.is_file(), f"no worker {script}"
    folder = Path(tempfile.mkdtemp(prefix="gradcomp-"))
    try:
        code, output = _run(
            _command(script, np, controller, args), _environment(folder, timeout, env), timeout
        )
        reports = [_read(folder, rank) for rank in range(np)]
    finally:
        _kill(folder)
        shutil.rmtree(folder, ignore_errors=True)
    silent = [rank for rank, value in enumerate(reports) if value is None]
    if code != 0 or silent:
        what = "did not end in time" if code is None else f"ended with {code}"
        raise AssertionError(
            f"{worker} on {np} ranks over {controller} {what} ({timeout} s allowed); "
            f"ranks without a report: {silent or 'none'}\n{_by_rank(output)}"
        )
    return [value for value in reports if value is not None]


def run_elastic(
    worker: str,
    hosts: str,
    *,
    least: int,
    most: int,
    args: Sequence[object] = (),
    timeout: float = 120,
) -> list[dict[str, Any]]:
    """Run a worker under elastic Horovod and return the reports of the processes that gave one.

    The file ``hosts`` in the folder of the run holds the hosts, as ``name:slots`` lines; a worker
    that writes it anew changes the ranks.

    Args:
        worker: As of :func:`run_ranks`.
        hosts: What the file holds at first.
        least: Ranks, at least.
        most: Ranks, at most.
        args: Command line of the worker.
        timeout: Seconds after which the run is killed.

    Raises:
        AssertionError: The run ended with an error, or not in time.
    """
    folder = Path(tempfile.mkdtemp(prefix="gradcomp-"))
    try:
        (folder / "hosts").write_text(hosts, encoding="utf-8")
        command = [sys.executable, str(Path(__file__).with_name("elastic_driver.py"))]
        command += [str(folder / "hosts"), str(least), str(most), str(WORKERS / worker)]
        command += map(str, args)
        code, output = _run(command, _environment(folder, timeout, None), timeout)
        reports = [_read(folder, rank) for rank in range(most)]
    finally:
        _kill(folder)
        shutil.rmtree(folder, ignore_errors=True)
    assert code == 0, f"{worker} ended with {code} ({timeout} s allowed)\n{_by_rank(output)}"
    return [value for value in reports if value is not None]


def report(values: Mapping[str, Any]) -> None:
    """Hand results of this rank to the test; called again, it adds to them.

    Args:
        values: What JSON can hold, or has a ``tolist`` method.
    """
    folder, rank = Path(os.environ[FOLDER]), _own_rank()
    merged = {**(_read(folder, rank) or {}), **values}
    new = folder / f"rank{rank}.new"
    new.write_text(json.dumps(merged, default=lambda value: value.tolist()), encoding="utf-8")
    os.replace(new, folder / f"rank{rank}.json")


def run_checks(checks: Mapping[str, Callable[[], Any]], after: Callable[[str], Any]) -> None:
    """Run the checks that the command line names, and report what each returns, or its error.

    Args:
        checks: By name.
        after: Called with the name of each check that has ended; waits for the other ranks.
    """
    seconds = {}
    for name in sys.argv[1:]:
        start = time.monotonic()
        try:
            value = checks[name]()
        except Exception:
            value = {"error": traceback.format_exc()}
        seconds[name] = round(time.monotonic() - start, 1)
        report({name: value, "seconds": seconds})
        after(name)


def leftovers(folder: str | Path) -> list[int]:
    """Return the ids of the processes that belong to a run, by the folder that marks it."""
    mark, found = f"{FOLDER}={folder}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def _own_rank() -> int:
    for name in _RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise AssertionError("report() is for workers under run_ranks()")


def _read(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        return json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _command(script: Path, np: int, controller: str, args: Sequence[object]) -> list[str]:
    horovodrun = Path(sys.executable).parent / "horovodrun"
    assert horovodrun.is_file(), f"Horovod is not installed: no {horovodrun}"
    command = [sys.executable, str(LAUNCHER)] if LAUNCHER else [str(horovodrun)]
    command += [f"--{controller}", "--disable-cache"]
    command += ["-np", str(np), "-H", f"localhost:{np}"]
    if controller == "mpi":
        assert shutil.which("mpirun"), "MPI is not installed: no mpirun on the path"
        if np > (os.cpu_count() or 1):
            command.append("--mpi-args=--oversubscribe")
    return [*command, sys.executable, str(script), *map(str, args)]


def _environment(folder: Path, timeout: float, more: Mapping[str, str] | None) -> dict[str, str]:
    # An outer run's settings and ranks are not this run's.
    outer = ("HOROVOD_", "OMPI_COMM_", "PMIX_", FOLDER)
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    path = [str(Path(sys.executable).parent), env.get("PATH", os.defpath)]
    modules = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return {
        **env,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(modules),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a killed rank says where it hung
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        # Sooner than the run's own end, so that Horovod itself names the tensor that is stuck.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(timeout / 6))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(2, int(timeout / 2))),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(10, int(timeout / 2))),
        # Containers: root, no cross-process copies; more ranks than cores: do not spin.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_orte_tmpdir_base": str(folder),
        FOLDER: str(folder),
        **(more or {}),
    }


def _run(command: list[str], env: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Return the exit code, None for a run that was killed, and the whole output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=env[FOLDER],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
            _ask_where(Path(env[FOLDER]))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _ask_where(folder: Path) -> None:
    """Let every rank print its stack and end, and wait a little for that."""
    for pid in _ranks(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGABRT)
    until = time.monotonic() + 5
    while _ranks(folder) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)  # for the launcher to pass the output on


def _ranks(folder: Path) -> list[int]:
    found = []
    for pid in leftovers(folder):
        with contextlib.suppress(OSError):
            program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
            environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            if program.startswith("python") and any(
                f"\0{name}=".encode() in environ for name in _RANK_VARIABLES
            ):
                found.append(pid)
    return found


def _kill(folder: Path) -> None:
    until = time.monotonic() + 20
    while pids := leftovers(folder):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < until, f"processes {pids} do not end"
        time.sleep(0.05)


def _by_rank(output: str) -> str:
    """Return the end of each rank's output, and of the launcher's."""
    parts: dict[str, list[str]] = {}
    for line in output.splitlines(keepends=True):
        pieces = _PREFIX.split(line)
        parts.setdefault("horovodrun", []).append(pieces[0])
        for rank, text in zip(pieces[1::2], pieces[2::2]):
            parts.setdefault(f"rank {rank}", []).append(text)
    texts = {name: "".join(lines).strip() for name, lines in sorted(parts.items())}
    return "\n".join(f"--- {name} ---\n{text[-TAIL:]}" for name, text in texts.items() if text)
