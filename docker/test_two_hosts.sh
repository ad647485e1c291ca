#!/usr/bin/env bash
# Runs an image as two hosts that train over ssh, where docker compose cannot:
#
#   docker/test_two_hosts.sh [IMAGE]        (default: gradcomp-cpu)
#
# Two containers of buildah, each with a network namespace, a name and an address of its
# own, and a link between them. Needs root, buildah and iproute2. With Docker the same is
# docker/compose.yaml.

set -euo pipefail

image=${1:-gradcomp-cpu}
if ((EUID != 0)); then echo 'two hosts: needs root' >&2 && exit 3; fi
if [[ -z ${STORAGE_DRIVER:-} ]]; then
    STORAGE_DRIVER=vfs
    grep -qw overlay /proc/filesystems && STORAGE_DRIVER=overlay
fi
export STORAGE_DRIVER BUILDAH_ISOLATION=chroot

shared=$(mktemp -d "${TMPDIR:-/tmp}/gradcomp-ssh.XXXXXX")
chown 1000:1000 "$shared"
names=(host-a host-b)
addresses=(10.213.77.1 10.213.77.2)
spaces=("gradcomp-a-$$" "gradcomp-b-$$")
containers=()
waiting=

cleanup() {
    [[ -z $waiting ]] || kill -- "-$waiting" 2>/dev/null || true
    for container in "${containers[@]}"; do buildah rm "$container" >/dev/null 2>&1 || true; done
    for space in "${spaces[@]}"; do ip netns delete "$space" 2>/dev/null || true; done
    rm -rf -- "$shared" "$shared.log" "$shared.out"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

for space in "${spaces[@]}"; do
    ip netns add "$space"
    ip -n "$space" link set lo up
done
ip link add eth0 netns "${spaces[0]}" type veth peer name eth0 netns "${spaces[1]}"
for i in 0 1; do
    ip -n "${spaces[i]}" address add "${addresses[i]}/24" dev eth0
    ip -n "${spaces[i]}" link set eth0 up
    containers[i]=$(buildah from --quiet --add-host "${names[0]}:${addresses[0]}" --add-host "${names[1]}:${addresses[1]}" "$image")
done

start=() # start[0], start[1]: how a command line on that host begins, as one string
for i in 0 1; do
    start[i]="ip netns exec ${spaces[i]} buildah run --hostname ${names[i]} --network host
        --volume $shared:/home/horovod/.ssh ${containers[i]} -- entrypoint"
done

# The key first: a container that starts before there is one does not know the others.
# shellcheck disable=SC2086 # words on purpose
${start[0]} keys
# shellcheck disable=SC2086
setsid ${start[1]} sshd >"$shared.log" 2>&1 &
waiting=$!
# shellcheck disable=SC2016,SC2086
${start[0]} bash -c 'for _ in {1..50}; do ssh host-b true 2>/dev/null && exit 0; sleep 0.2; done; exit 1' ||
    { cat "$shared.log" && echo 'two hosts: no ssh to host-b' >&2 && exit 1; }

for launcher in gloo mpi; do
    echo "two hosts: horovodrun --$launcher"
    # shellcheck disable=SC2086
    ${start[0]} timeout 300 horovodrun "--$launcher" -np 2 -H host-a:1,host-b:1 \
        python /opt/gradcomp/examples/torch_mnist.py --compression topk:ratio=0.01 --epochs 2 | tee "$shared.out"
    grep -q "'weights_equal': True" "$shared.out"
done
echo 'two hosts: weights are equal on both'
