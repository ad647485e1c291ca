#!/usr/bin/env bash
# Checks an image from inside, a line for each check: docker run --rm IMAGE test_image
#
#   test_image [--quick]     --quick leaves out the package's own tests
#
# Exit code 0 when every check passed. What a failing check printed follows its line.

# shellcheck disable=SC2317,SC2329 # functions that are called through check or trap
set -uo pipefail

quick=no
case ${1:-} in
    '') ;;
    --quick) quick=yes ;;
    *) echo "test_image: unknown argument '$1' (--quick is the only one)" >&2 && exit 2 ;;
esac

home=/opt/gradcomp
log=$(mktemp -d)
sshd=
cleanup() {
    [[ -z $sshd ]] || kill "$sshd" 2>/dev/null
    rm -rf -- "$log"
}
trap cleanup EXIT
cd "$log" || exit 1
failed=0
skipped=0

check() { # check TEXT COMMAND...: prints the last line of what the command said
    local text=$1 start=$SECONDS code=0 running watch
    shift
    # Not by timeout(1), which knows no functions; a process group of its own ends as one.
    set -m
    "$@" >"$log/out" 2>&1 </dev/null &
    running=$!
    set +m
    (sleep 600 && kill -- "-$running") >/dev/null 2>&1 &
    watch=$!
    wait "$running" || code=$?
    kill "$watch" 2>/dev/null
    wait "$watch" 2>/dev/null
    if ((code == 0)); then
        printf 'ok      %-46s %4d s  %s\n' "$text" $((SECONDS - start)) "$(grep -v '^ *$' "$log/out" | tail -n 1 | cut -c 1-120)"
    else
        printf 'FAILED  %-46s %4d s  exit code %d\n' "$text" $((SECONDS - start)) "$code"
        tail -n 30 "$log/out" | sed 's/^/        | /'
        failed=$((failed + 1))
    fi
}
skip() {
    printf 'skipped %-46s         %s\n' "$1" "$2"
    skipped=$((skipped + 1))
}

# ------------------------------------------------------------------ the image itself

ordinary_user() { (($(id -u) != 0)) && [[ $HOME == /home/* ]] && touch "$HOME/.probe" && rm "$HOME/.probe" && id; }

# Keys are made at run time: none may come with the image, wherever it is.
no_keys() {
    local found
    found=$(find / -xdev -not -path '/proc/*' \( -name 'ssh_host_*_key' -o -name 'id_rsa' -o -name 'id_ed25519' \) 2>/dev/null)
    [[ -z $found ]] || { echo "keys in the image: $found" && return 1; }
    echo none
}

no_secrets() {
    local found
    found=$(find /run/secrets/pip /run/secrets/ca /etc/pip.conf /root/.cache /opt/build -type f -size +0 2>/dev/null)
    [[ -z $found ]] || { echo "left behind by the build: $found" && return 1; }
    echo nothing left behind by the build
}

kernels() { python -c 'from horovod_gradcomp import native as n; assert n.available(), n.reason(); print(n.level())'; }

kernels_of() { python -c "from horovod_gradcomp.ops.$1_kernels import reason; assert not reason(), reason(); print('loaded')"; }

# ------------------------------------------------------------------ Horovod

has_torch() { python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; }
has_tensorflow() { python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("tensorflow") is None)'; }

check_build() { # every WORD must be ticked
    local text word missing=()
    text=$(horovodrun --check-build) || return
    echo "$text"
    for word in "$@"; do grep -qF "[X] $word" <<<"$text" || missing+=("$word"); done
    ((${#missing[@]} == 0)) || { echo "built without: ${missing[*]}" && return 1; }
    echo "$*"
}

cat >sums.py <<'PYTHON'
"""Every rank gives its number plus one, a thousand times; Horovod adds them up."""

import sys

if sys.argv[1] == "torch":
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.full([1000], hvd.rank() + 1.0), op=hvd.Sum)
else:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_gradcomp.tensorflow import Compression

    hvd.init()
    weight = tf.Variable(tf.zeros([64, 64]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight) * (hvd.rank() + 1.0)
    tape = hvd.DistributedGradientTape(tape, compression=Compression.linear(bits=4), op=hvd.Sum)
    (total,) = tape.gradient(loss, [weight])
assert hvd.size() == 2, hvd.size()
assert abs(total.numpy() - 3).max() < 1e-4, total
if hvd.rank() == 0:
    print(f"sum over {hvd.size()} ranks is right", flush=True)
PYTHON

example() { # example LAUNCHER...
    "$@" python "$home/examples/torch_mnist.py" --compression topk:ratio=0.01 --epochs 2 --json "$log/rows.json" || return
    python - "$log/rows.json" <<'PYTHON'
import json
import sys

(row,) = json.load(open(sys.argv[1]))
assert row["weights_equal"], row
assert row["accuracy"] > 85, row
assert row["ratio"] < 0.05, row
print(f"{row['accuracy']} % right, {100 * row['ratio']:.1f} % of the bytes, weights equal")
PYTHON
}

over_ssh() { # this container twice: 127.0.0.2 is to Horovod another host
    "$@" -np 2 -H localhost:1,127.0.0.2:1 --network-interfaces lo python sums.py torch
}

tests() { (cd "$home" && HYPOTHESIS_STORAGE_DIRECTORY=$log/hypothesis python -B -m pytest -q -p no:cacheprovider -n 2 "$@"); }

check 'user is not root and has a home' ordinary_user
if [[ -e $HOME/.ssh/id_ed25519 || -e $HOME/.ssh/id_rsa ]]; then
    skip 'no ssh key in the image' 'this container already has its key'
else
    check 'no ssh key in the image' no_keys
fi
check 'no secret or cache of the build in the image' no_secrets
check 'compiled kernels' kernels
built=(Gloo MPI)
if has_torch; then built+=(PyTorch); fi
if has_tensorflow; then built+=(TensorFlow); fi
[[ -z ${GRADCOMP_NCCL:-} ]] || built+=(NCCL)
check 'horovodrun --check-build' check_build "${built[@]}"
if gradcomp doctor --help >/dev/null 2>&1; then
    check 'gradcomp doctor' gradcomp doctor
else
    skip 'gradcomp doctor' 'no such command in this version'
fi

for framework in torch tensorflow; do
    "has_$framework" || continue
    check "$framework, compiled kernels" kernels_of $framework
    check "$framework, 2 ranks, horovodrun --gloo" horovodrun --gloo -np 2 -H localhost:2 python sums.py $framework
    check "$framework, 2 ranks, horovodrun --mpi" horovodrun --mpi -np 2 -H localhost:2 python sums.py $framework
    check "$framework, 2 ranks, mpirun" mpirun -np 2 --oversubscribe python sums.py $framework
done
if has_torch; then
    check 'example, 2 ranks, horovodrun' example horovodrun -np 2 -H localhost:2
    check 'example, 2 ranks, mpirun' example mpirun -np 2 --oversubscribe
fi

entrypoint sshd >"$log/sshd" 2>&1 &
sshd=$!
for _ in {1..50}; do
    if (exec 3<>/dev/tcp/localhost/2222) 2>/dev/null; then break; fi
    sleep 0.2
done
check 'ssh with a key made at run time' ssh localhost echo logged in
check 'health check' healthcheck
if has_torch; then
    check '2 hosts over ssh, horovodrun --gloo' over_ssh horovodrun --gloo
    check '2 hosts over ssh, horovodrun --mpi' over_ssh horovodrun --mpi
fi

if [[ $quick == yes ]]; then
    skip 'tests of the package' 'asked for by --quick'
else
    skip 'an install without a compiler' 'the image holds no sources to install'
    check 'tests of the package, those that are quick' tests \
        --deselect tests/test_native.py::test_an_install_without_a_compiler tests/test_bits.py tests/test_exchange.py \
        tests/test_imports.py tests/test_memory.py tests/test_native.py tests/test_payload.py tests/test_plan.py
fi

echo "test_image: $failed failed, $skipped skipped"
exit $((failed > 0))
