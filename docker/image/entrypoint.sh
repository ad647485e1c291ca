#!/usr/bin/env bash
# The images' entry point.
#
#   docker run -it IMAGE                    a shell
#   docker run IMAGE horovodrun -np 2 ...   any command
#   docker run IMAGE keys                   make the cluster's key, if there is none
#   docker run IMAGE sshd                   wait for work: this container is a host
#   docker run IMAGE test_image             check the image
#
# A cluster has one key pair, in ~/.ssh, which all its containers share: a volume,
# a mounted folder or a secret (as the Kubeflow MPI operator's). It is made at run
# time and is never part of an image. It serves as the user's key and as every
# container's host key, so hosts know each other without asking.

set -euo pipefail
folder=$HOME/.ssh

find_key() {
    local name
    for name in id_ed25519 id_rsa ssh-privatekey; do
        [[ -r $folder/$name ]] && echo "$folder/$name" && return
    done
    return 1
}

make_key() {
    ! find_key >/dev/null || return 0
    if [[ ! -w $folder ]]; then
        echo "entrypoint: $folder holds no key and cannot be written to: mount a volume that user $(id -u) may write" >&2
        exit 3
    fi
    # Several containers may start on one new volume.
    exec {lock}<"$folder"
    flock "$lock"
    if ! find_key >/dev/null; then
        ssh-keygen -q -t ed25519 -N '' -C horovod -f "$folder/.new"
        cp "$folder/.new.pub" "$folder/authorized_keys"
        mv "$folder/.new.pub" "$folder/id_ed25519.pub"
        mv "$folder/.new" "$folder/id_ed25519"
    fi
    exec {lock}<&-
}

know_hosts() {
    local key
    key=$(find_key) || return 0
    [[ -w /run/gradcomp ]] || return 0
    printf '* %s\n' "$(ssh-keygen -y -f "$key")" >/run/gradcomp/known_hosts
}

case ${1:-bash} in
    keys)
        make_key
        know_hosts
        echo "entrypoint: the cluster's key is $(find_key)"
        ;;
    sshd)
        make_key
        know_hosts
        # sshd wants its own path, whole.
        exec /usr/sbin/sshd -D -e -h "$(find_key)" "${@:2}"
        ;;
    *)
        know_hosts
        exec "${@:-bash}"
        ;;
esac
