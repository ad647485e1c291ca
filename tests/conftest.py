"""Fixtures for all tests."""

import os

# Before any framework is imported: quiet, and one thread, as a rank has.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest

from horovod_gradcomp.testing import frameworks


@pytest.fixture(params=frameworks.PATHS)
def fw(request):
    """Each framework in turn, torch with and without compiled kernels."""
    return frameworks.load(request.param)


@pytest.fixture
def xp(fw):
    """The operations module of each framework in turn."""
    return fw.xp
