#!/usr/bin/env bash
# Builds the source archive and the wheel, and tries them where nothing else is installed:
#
#   tests/packaging/check.sh [none|torch|tensorflow ...]      (make package-check)
#
# Each environment is new and has no framework, only torch, or only TensorFlow; none has Horovod.
# PYTHON, PIP_ARGS: as for make. Needs pip's index, and a few minutes.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
read -ra pip_args <<<"${PIP_ARGS:-}"
environments=("$@")
((${#environments[@]})) || environments=(none torch tensorflow)
folder=$(mktemp -d "${TMPDIR:-/tmp}/gradcomp-package.XXXXXX")
trap 'rm -rf -- "$folder"' EXIT
say() { echo "package: $*"; }

venv() { # venv NAME: makes it and sets env
    env=$folder/$1
    "$python" -m venv "$env"
}
install() { "$env/bin/python" -m pip --disable-pip-version-check -q install "${pip_args[@]}" -c "$PWD/docker/constraints.txt" "$@"; }

venv build
install build
"$env/bin/python" -m build --outdir "$folder/dist" . >"$folder/log" 2>&1 || {
    tail -n 30 "$folder/log" >&2
    exit 1
}
wheel=$(ls "$folder"/dist/*.whl)
archive=$(ls "$folder"/dist/*.tar.gz)
say "$(basename "$wheel"), $(($(stat -c %s "$wheel") / 1000)) kB; $(basename "$archive"), $(($(stat -c %s "$archive") / 1000)) kB"

"$python" - "$wheel" "$archive" <<'CHECK'
import sys
import tarfile
import zipfile

wheel = zipfile.ZipFile(sys.argv[1]).namelist()
archive = {name.partition("/")[2] for name in tarfile.open(sys.argv[2]).getnames()}
for part in ("py.typed", "cli/costs.json", "native/_kernels", "native/_tensorflow"):
    assert any(name.startswith(f"horovod_gradcomp/{part}") for name in wheel), f"{part}: not in the wheel"
assert any(name.endswith("/licenses/LICENSE") or name.endswith("/LICENSE") for name in wheel), "no licence"
assert all(name.startswith("horovod_gradcomp") for name in wheel), "the wheel holds more than the package"
wanted = "LICENSE README.md CHANGELOG.md Makefile docker/constraints.txt docs/conf.py docs/reproduce.py"
wanted += " examples/demo.py tests/conftest.py docs/drawings/slot.svg horovod_gradcomp/native/kernels.h .ci/run"
missing = [name for name in wanted.split() if name not in archive]
assert not missing, f"not in the source archive: {missing}"
CHECK

smoke() { # smoke NAME: what the environment can do
    "$env/bin/python" -m pip --disable-pip-version-check check
    cd "$folder"
    "$env/bin/python" - "$1" <<'CHECK'
import importlib
import sys

import horovod_gradcomp
from horovod_gradcomp import native

assert native.available(), native.reason()
for front in ("torch", "tensorflow"):
    try:
        importlib.import_module(f"horovod_gradcomp.{front}")
    except ImportError as error:
        assert "horovod" in str(error) or front in str(error), error
    else:
        raise AssertionError(f"horovod_gradcomp.{front} without Horovod")
if sys.argv[1] != "none":
    import numpy as np

    from horovod_gradcomp.testing import roundtrip

    gradient = np.linspace(-1, 1, 5000, dtype=np.float32).reshape(50, 100)
    arrived, nbytes = roundtrip("topk:ratio=0.1+linear:bits=8", gradient, sys.argv[1])
    assert nbytes < gradient.nbytes / 10, nbytes
    assert np.count_nonzero(arrived) == 500, np.count_nonzero(arrived)
print(f"package: {horovod_gradcomp.__version__} works with {sys.argv[1]}")
CHECK
    "$env/bin/gradcomp" advise --params 1e6 --workers 4 --bandwidth 1gbit --codec topk >advice
    grep -q topk advice
    "$env/bin/gradcomp" docs codecs | grep -q '## topk'
    cd - >/dev/null
}

for name in "${environments[@]}"; do
    venv "$name"
    case $name in
        none) ;;
        torch) install torch numpy ;;
        tensorflow) install tensorflow-cpu numpy ;;
        *) echo "package: '$name' is none of none, torch, tensorflow" >&2 && exit 2 ;;
    esac
    install "${wheel}[cli]"
    smoke "$name"
    rm -rf -- "$env"
done
if [[ " ${environments[*]} " == *' none '* ]]; then
    venv source
    install "${archive}[cli]"
    smoke none
    say 'the source archive builds and works, too'
fi
