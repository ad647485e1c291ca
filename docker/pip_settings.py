"""Hand this machine's pip configuration to the build of an image.

    python3 docker/pip_settings.py FOLDER

writes ``FOLDER/pip`` (a pip.conf) and, where a certificate bundle is configured,
``FOLDER/ca``; prints the local files and folders that the configuration names, one a
line: the build has to see them at the same place.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

# Where packages come from, and what is needed to reach that place.
SOURCES = ("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "constraint")
REACH = ("proxy", "default-timeout", "timeout", "retries")
INSIDE = "/run/secrets/ca"


def settings() -> dict[str, str]:
    """Return pip's settings of this machine: files first, then environment, the later one wins."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in lines:
            key, _, value = line.partition("=")
            where, _, name = key.rpartition(".")
            if where == section and value:
                found[name] = str(ast.literal_eval(value))
    return found


def local_paths(value: str) -> list[str]:
    """Return the absolute local paths in a setting; of a folder laid out as an index, the whole."""
    paths = []
    for word in value.split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # A simple index links to ../../files.
            paths.append(str(path.parent if path.name == "simple" else path))
    return paths


def main(folder: Path) -> None:
    found = settings()
    lines = ["[global]"]
    paths: list[str] = []
    for name in (*SOURCES, *REACH):
        if name in found:
            lines.append(f"{name} =")
            lines += [f"    {word}" for word in found[name].split()]
            paths += local_paths(found[name])
    bundle = found.get("cert")
    if bundle:
        shutil.copyfile(bundle, folder / "ca")
        lines.append(f"cert = {INSIDE}")
    if "client-cert" in found:
        raise SystemExit("pip_settings: client certificates are not handed on: build elsewhere")
    (folder / "pip").write_text("\n".join(lines) + "\n")
    for path in dict.fromkeys(paths):
        print(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
