#!/usr/bin/env bash
# All checks and measurements that need a GPU, in under 6 minutes, for an environment
# with the package and its tests: make gpu-check, or tests/gpu/check.sh [FOLDER]
#
# Writes what it measures to FOLDER (default: a new one). Exit codes: 0 all that could be
# run passed, 1 something failed, 77 there is no GPU and nothing was run.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

python=$(command -v python || command -v python3)
results=${1:-$(mktemp -d "${TMPDIR:-/tmp}/gradcomp-gpu.XXXXXX")}
mkdir -p "$results" || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=3
# The tests hide GPUs unless told otherwise.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
failed=0
deadline=$((SECONDS + 350))

device=${GRADCOMP_TEST_DEVICE:-cuda} # cpu: to try this script without a GPU
if [[ $device == cuda ]]; then
    if ! gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__) if torch.cuda.is_available() else exit(1)' 2>"$results/torch.log"); then
        echo 'gpu: torch finds no GPU here: nothing was checked'
        tail -n 1 "$results/torch.log"
        exit 77
    fi
    echo "gpu: $gpu"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null | tee "$results/gpu.csv"
fi

step() { # step NAME SECONDS COMMAND...
    local name=$1 start=$SECONDS code=0 limit=$2
    shift 2
    ((limit <= deadline - SECONDS)) || limit=$((deadline - SECONDS))
    if ((limit < 5)); then
        echo "gpu: FAILED $name: no time is left"
        failed=1
        return
    fi
    timeout "$limit" "$@" >"$results/$name.txt" 2>&1 </dev/null || code=$?
    if ((code == 0)); then
        echo "gpu: ok $name, $((SECONDS - start)) s"
    else
        echo "gpu: FAILED $name, exit code $code, $((SECONDS - start)) s:"
        failed=1
    fi
    tail -n "$([[ $code == 0 && $name != bench* ]] && echo 8 || echo 60)" "$results/$name.txt" | sed 's/^/    /'
}

step conformance 120 "$python" -m pytest -q -p no:cacheprovider tests/gpu
step bench 120 "$python" -m horovod_gradcomp bench codecs --device "$device" ${NUMEL:+--numel "$NUMEL"} --repeat 5 --json "$results/codecs.json"

if ! "$python" -c 'import horovod.torch' 2>/dev/null; then
    echo 'gpu: skipped two ranks: Horovod is not installed here (docker/install_horovod.sh)'
elif [[ $device == cuda ]] && "$python" -c 'import horovod.torch as h, torch; exit(not (h.nccl_built() and torch.cuda.device_count() < 2))'; then
    echo 'gpu: skipped two ranks: this Horovod has NCCL, which wants two GPUs for them. For one GPU build Horovod'
    echo 'gpu: without HOROVOD_GPU_OPERATIONS, or set CUDA_VISIBLE_DEVICES=0,1 where there are two'
else
    step two_ranks 100 "$python" -m horovod.runner.launch --gloo -np 2 -H localhost:2 "$python" tests/gpu/step.py
fi

echo "gpu: what was measured is in $results"
exit $failed
