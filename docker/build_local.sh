#!/usr/bin/env bash
# Builds an image on this machine and checks it: docker/build_local.sh --help

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'HELP'
Usage: docker/build_local.sh [options] [-- arguments of docker/test_image.sh]

Builds an image with docker, podman or buildah, the first that works here, and
runs docker/test_image.sh inside it.

Options
  --with TOOL     docker, podman or buildah
  --gpu FRAMEWORK docker/nccl.Dockerfile for torch or tensorflow (default: cpu.Dockerfile)
  --tag NAME      default: gradcomp-cpu, gradcomp-nccl-FRAMEWORK
  --base IMAGE    the base image. 'debootstrap' makes one here from the packages of this
                  Debian or Ubuntu (buildah as root only); it is the default with
                  buildah, for machines that reach no container registry
  --pip-args TEXT arguments of pip install, e.g. an index of CPU wheels of torch
  --versions TEXT versions in place of the pinned ones: 'torch==2.13.0 ...'
  --jobs N        compilers at a time
  --no-test       only build

pip's configuration of this machine (files, environment, certificates) is handed to
the build as secrets, and folders that it names are mounted during the build: neither
becomes part of the image. A base made by debootstrap does keep this machine's list of
package sources: such an image is for tests, not for publishing.
HELP
}

die() {
    echo "image: $1" >&2
    exit "${2:-1}"
}
say() { echo "image: $*"; }

tool='' gpu='' tag='' base='' pip_args='' versions='' jobs='' test=yes
while (($#)); do
    case $1 in
        --with | --gpu | --tag | --base | --pip-args | --versions | --jobs)
            [[ $# -ge 2 ]] || die "$1 needs a value" 2
            name=${1#--}
            declare "${name//-/_}=$2"
            [[ $1 != --with ]] || tool=$2
            shift
            ;;
        --no-test) test=no ;;
        --) shift && break ;;
        -h | --help) usage && exit 0 ;;
        *) die "unknown argument '$1' (see --help)" 2 ;;
    esac
    shift
done
[[ -z $gpu || $gpu =~ ^(torch|tensorflow)$ ]] || die "--gpu takes torch or tensorflow, not '$gpu'" 2

has() { command -v "$1" >/dev/null 2>&1; }
if [[ -z $tool ]]; then
    for candidate in docker podman buildah; do
        # A client alone is not enough.
        if has "$candidate" && timeout 20 "$candidate" info >/dev/null 2>&1; then tool=$candidate && break; fi
    done
fi
[[ $tool =~ ^(docker|podman|buildah)$ ]] || die 'neither docker, podman nor buildah works here. On Debian: apt-get install buildah debootstrap' 3
has "$tool" || die "$tool is not installed" 3

file=docker/cpu.Dockerfile
tag=${tag:-gradcomp-cpu}
if [[ -n $gpu ]]; then
    file=docker/nccl.Dockerfile
    [[ $tag != gradcomp-cpu ]] || tag=gradcomp-nccl-$gpu
fi

secrets=$(mktemp -d "${TMPDIR:-/tmp}/gradcomp-image.XXXXXX")
container=
cleanup() {
    [[ -z $container ]] || buildah rm "$container" >/dev/null 2>&1 || true
    rm -rf -- "$secrets"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if [[ $tool == buildah ]]; then
    if [[ -z ${STORAGE_DRIVER:-} ]]; then
        STORAGE_DRIVER=vfs
        if ((EUID == 0)) && grep -qw overlay /proc/filesystems; then STORAGE_DRIVER=overlay; fi
    fi
    export STORAGE_DRIVER BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
    base=${base:-debootstrap}
fi

# ------------------------------------------------------------------ the base image

# A minimal system from the packages that this machine is set up for.
bootstrap_base() { # sets base
    local codename mirror root
    ((EUID == 0)) || die 'a base by debootstrap needs root: give --base IMAGE' 3
    has debootstrap || die 'debootstrap is not installed. On Debian: apt-get install debootstrap' 3
    # shellcheck disable=SC1091 # the file of this machine
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    base=localhost/gradcomp-base:$codename
    if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
        # shellcheck disable=SC2016 # apt's own variables
        mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $codename" | head -n 1)
        [[ -n $mirror ]] || die "apt knows no source for $codename" 3
        say "base: $codename by debootstrap"
        container=$(buildah from scratch)
        root=$(buildah mount "$container")
        debootstrap --variant=minbase "$codename" "$root" "$mirror" >"$secrets/debootstrap.log" 2>&1 || {
            tail -n 20 "$secrets/debootstrap.log" >&2
            die 'debootstrap failed'
        }
        # Updates and security fixes too.
        # shellcheck disable=SC2016
        apt-get indextargets --format 'deb $(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
            grep -E " $codename(-updates|-security)? " | sort -u >"$root/etc/apt/sources.list"
        rm -rf "${root:?}"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
        buildah umount "$container" >/dev/null
        buildah commit --quiet --rm "$container" "$base" >/dev/null
        container=
    fi
}

# ------------------------------------------------------------------ build

arguments=(-f "$file" -t "$tag")
say "pip's settings of this machine are secrets of the build"
mapfile -t mounts < <(python3 docker/pip_settings.py "$secrets")
chmod 600 "$secrets"/*
arguments+=(--secret "id=pip,src=$secrets/pip")
[[ ! -e $secrets/ca ]] || arguments+=(--secret "id=ca,src=$secrets/ca")
if ((${#mounts[@]})) && [[ $tool == docker ]]; then
    say "warning: docker cannot see these folders of pip's configuration: ${mounts[*]}" >&2
else
    for mount in "${mounts[@]}"; do arguments+=(--volume "$mount:$mount:ro"); done
fi

[[ $base != debootstrap || $tool == buildah ]] || die '--base debootstrap goes with buildah only' 2
if [[ $base == debootstrap ]]; then bootstrap_base; fi
if [[ -n $base ]]; then
    if [[ -n $gpu ]]; then
        arguments+=(--build-arg "DEVEL_BASE=$base" --build-arg "RUNTIME_BASE=$base")
    else
        arguments+=(--build-arg "BASE=$base")
    fi
fi
[[ -z $gpu ]] || arguments+=(--build-arg "FRAMEWORK=$gpu")
[[ -z $pip_args ]] || arguments+=(--build-arg "PIP_ARGS=$pip_args")
[[ -z $versions ]] || arguments+=(--build-arg "VERSIONS=$versions")
[[ -z $jobs ]] || arguments+=(--build-arg "JOBS=$jobs")
arguments+=(--build-arg "CREATED=$(date -u +%Y-%m-%dT%H:%M:%SZ)")
arguments+=(--build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)")

start=$SECONDS
say "building $tag with $tool (about 15 minutes on 2 cores)"
case $tool in
    # The format of Docker knows health checks.
    buildah | podman) "$tool" build --format docker --layers "${arguments[@]}" . ;;
    docker) DOCKER_BUILDKIT=1 docker build "${arguments[@]}" . ;;
esac
say "built in $((SECONDS - start)) s"

# ------------------------------------------------------------------ check

inspect_size() {
    case $tool in
        docker | podman) "$tool" image inspect --format '{{.Size}}' "$tag" ;;
        buildah) buildah images --json "$tag" | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["size"])' ;;
    esac
}
say "size: $(inspect_size)"

[[ $test == yes ]] || exit 0
say "docker/test_image.sh inside $tag"
case $tool in
    docker | podman) "$tool" run --rm --shm-size 1g "$tag" test_image "$@" ;;
    buildah)
        container=$(buildah from --quiet "$tag")
        buildah run "$container" -- entrypoint test_image "$@"
        ;;
esac
