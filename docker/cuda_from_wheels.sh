#!/usr/bin/env bash
# Makes NVIDIA's wheels of one Python complete enough to compile Horovod against them.
#
#   eval "$(docker/cuda_from_wheels.sh PYTHON)"
#
# NCCL is always taken from the framework's own wheel, so that what Horovod is linked to
# is what the process loads. The compiler comes from CUDA_HOME or /usr/local/cuda where
# there is one (NVIDIA's -devel images), else from the wheels of cuda-toolkit, which are
# for CUDA 13 only. Wheels lack the links that a linker looks for: they are added.
#
# Prints the settings of the build; changes nothing but those links.

set -euo pipefail
python=${1:?usage: cuda_from_wheels.sh PYTHON}
die() {
    echo "cuda_from_wheels: $1" >&2
    exit 3
}

packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/nvidia

link() { # link FOLDER NAME: NAME -> the only NAME.* there
    local found=("$1/$2".*)
    [[ -e $1/$2 ]] || { [[ -e ${found[0]} ]] && ln -s "$(basename "${found[0]}")" "$1/$2"; } || die "no $2 in $1"
}

nccl=$packages/nccl
[[ -r $nccl/include/nccl.h ]] || die "no NCCL in $packages: install nvidia-nccl-cu13 (or -cu12)"
link "$nccl/lib" libnccl.so

cuda=${CUDA_HOME:-/usr/local/cuda}
if [[ ! -x $cuda/bin/nvcc || -n ${CUDA_FROM_WHEELS:-} ]]; then
    cuda=$packages/cu13
    [[ -x $cuda/bin/nvcc ]] || die "no nvcc in /usr/local/cuda, nor in $cuda: pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.0.*'"
    [[ -e $cuda/lib64 ]] || ln -s lib "$cuda/lib64"
    link "$cuda/lib" libcudart.so
fi

cat <<SETTINGS
export CUDA_HOME=$cuda HOROVOD_CUDA_HOME=$cuda
export HOROVOD_NCCL_HOME=$nccl HOROVOD_NCCL_LINK=SHARED
export HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL
export HOROVOD_BUILD_CUDA_CC_LIST=${HOROVOD_BUILD_CUDA_CC_LIST:-75,80,90}
SETTINGS
