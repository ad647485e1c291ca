"""What ``gradcomp doctor`` looks at. Frameworks are imported in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import __version__, native
from .local import launcher, run
from .roundtrip import MARK

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"
HOROVOD = "0.28.1"
"""The version that this package is tested with."""

FRAMEWORKS = ("torch", "tensorflow")
_BUILD = "docker/install_horovod.sh of this package's sources builds Horovod for what is installed"
_FLAGS = {"torch": "HOROVOD_WITH_PYTORCH=1", "tensorflow": "HOROVOD_WITH_TENSORFLOW=1"}
_COMPILER = "with a C compiler: pip install --force-reinstall --no-deps ."
_IMPORT_SECONDS = 180

_PROBE = """
import json, sys
import {name} as framework
out = {{"version": framework.__version__}}
try:
    import horovod.{name} as hvd
    for what in ("gloo", "mpi", "nccl", "cuda"):
        out[what] = bool(getattr(hvd, what + "_built")())
except Exception as error:
    out["error"] = f"{{type(error).__name__}}: {{error}}".splitlines()[0]
from horovod_gradcomp.ops.{name}_kernels import reason
out["kernels"] = reason()
print("\\n" + json.dumps(out))
"""
_KERAS = """
import json, keras
print("\\n" + json.dumps({"version": keras.__version__}))
"""


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        what: Was looked at.
        state: "good", "doubtful" or "bad"; one that is bad makes the command fail.
        found: What there is.
        fix: Command or place that mends it; empty if all is well.
    """

    what: str
    state: str
    found: str
    fix: str = ""


def examine(timeout: float) -> Iterator[Finding]:
    """Yield one finding after the other.

    Args:
        timeout: Seconds for each run on two ranks.
    """
    yield Finding("system", GOOD, f"{platform.platform()}, Python {platform.python_version()}")
    yield Finding("horovod_gradcomp", GOOD, __version__)
    yield _kernels()
    horovod = _horovod()
    yield horovod
    seen = {name: _probe(_PROBE.format(name=name)) for name in FRAMEWORKS if _installed(name)}
    for name in FRAMEWORKS:
        yield _framework(name, seen.get(name), with_horovod=horovod.state != BAD)
        yield from _kernels_of(name, seen.get(name, {}))
    ready = [name for name, found in seen.items() if found.get("gloo") or found.get("mpi")]
    if not ready:
        yield Finding("frameworks", BAD, "none that Horovod works with", _BUILD)
    for name in ready:
        yield round_trip(name, "gloo" if seen[name]["gloo"] else "mpi", timeout)
    if "tensorflow" in ready:
        yield _keras()
    yield _host_name()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _kernels() -> Finding:
    if native.available():
        return Finding("compiled kernels", GOOD, f"in use, {native.level()}")
    fix = _COMPILER
    if os.environ.get(native.SWITCH) == "0":
        fix = f"unset {native.SWITCH}"
    return Finding("compiled kernels", DOUBTFUL, f"not in use: {native.reason()}", fix)


def _kernels_of(name: str, found: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding where the kernels are there and a framework cannot call them."""
    if native.available() and found.get("kernels"):
        text = f"not in use: {found['kernels']}"
        yield Finding(f"compiled kernels in {name}", DOUBTFUL, text, _COMPILER)


def _horovod() -> Finding:
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return Finding("horovod", BAD, "not installed", _BUILD)
    if version != HOROVOD:
        found = f"{version}; this package is tested with {HOROVOD}"
        return Finding("horovod", DOUBTFUL, found, _BUILD)
    return Finding("horovod", GOOD, version)


def _probe(code: str) -> dict[str, Any]:
    """Return the JSON that code prints last in a process of its own, or an ``error``."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"import took more than {_IMPORT_SECONDS} s"}
    with contextlib.suppress(ValueError, IndexError):
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    said = done.stderr.strip().splitlines()
    return {"error": said[-1] if said else f"ended with code {done.returncode}"}


def _framework(name: str, found: dict[str, Any] | None, *, with_horovod: bool) -> Finding:
    if found is None:
        return Finding(name, GOOD, "not installed")
    if "version" not in found:
        return Finding(name, BAD, f"cannot be imported: {found['error']}", f"pip check; {name}")
    text = str(found["version"])
    if not with_horovod:
        return Finding(name, GOOD, text)
    if "error" in found:
        return Finding(
            f"{name} under horovod", BAD, f"{text}: {found['error']}", f"{_FLAGS[name]}; {_BUILD}"
        )
    built = [label for label in ("gloo", "mpi", "nccl", "cuda") if found[label]]
    text += f", Horovod built with {', '.join(built) or 'nothing'}"
    if not {"gloo", "mpi"} & set(built):
        return Finding(f"{name} under horovod", BAD, text, f"HOROVOD_WITH_GLOO=1; {_BUILD}")
    return Finding(f"{name} under horovod", GOOD, text)


def _keras() -> Finding:
    found = _probe(_KERAS)
    if "version" not in found:
        return Finding("keras", GOOD, "not in use")
    version = str(found["version"])
    if int(version.partition(".")[0]) < 3:
        return Finding("keras", GOOD, f"{version}: Horovod reduces its gradients")
    return Finding(
        "keras",
        DOUBTFUL,
        f"{version}: hvd.DistributedOptimizer never reduces the gradients of a Keras 3 optimizer",
        "horovod_gradcomp.keras.DistributedOptimizer, or hvd.DistributedGradientTape in a loop of "
        "your own",
    )


def _host_name() -> Finding:
    name = socket.gethostname()
    fix = f"a line 'ADDRESS {name}' in /etc/hosts"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        found = f"'{name}' does not resolve ({error}): over Gloo, ranks crash, on one host, too"
        return Finding("host name", BAD, found, fix)
    if address.startswith("127."):
        return Finding(
            "host name",
            DOUBTFUL,
            f"'{name}' stands for {address}: enough for one host; on several, process sets over "
            "Gloo need an address that the others reach",
            fix,
        )
    return Finding("host name", GOOD, f"'{name}' stands for {address}")


# Two ranks -------------------------------------------------------------------------------------
def round_trip(framework: str, controller: str, timeout: float) -> Finding:
    """Run one compressed step on two ranks of this machine."""
    what = f"two ranks, {framework} over {controller}"
    found = launcher()
    if found is None:
        return Finding(what, BAD, "there is no horovodrun", _BUILD)
    command = [found, f"--{controller}", "--disable-cache", "-np", "2", "-H", "localhost:2"]
    command += [sys.executable, "-m", "horovod_gradcomp.cli.roundtrip", framework]
    code, output = run(command, timeout)
    reports = re.findall(re.escape(MARK) + r"(\{.*?\})", output)
    if code == 0 and len(reports) == 2:
        if all(json.loads(report)["good"] for report in reports):
            return Finding(what, GOOD, "the mean and the sum came back to the last bit")
        return Finding(what, BAD, "a wrong gradient came back", "please report this")
    ended = f"ended with code {code}"
    if code is None:
        ended = f"did not end within {timeout:g} s"
    again = " ".join(command).replace(found, "horovodrun")
    return Finding(what, BAD, f"{ended}: {_reason(output)}", f"to see all of it: {again}")


def _reason(output: str) -> str:
    """Return the line that says most, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1 if not errors else 0][:300]
