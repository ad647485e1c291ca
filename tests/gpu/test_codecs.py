"""Every law for every codec on a GPU's tensors, and the same bits there as on the CPU.

``GRADCOMP_TEST_DEVICE=cpu`` runs the file without a GPU, to check the file itself.
"""

import functools
import os

import numpy as np
import pytest

from horovod_gradcomp.testing import frameworks
from tests import checks, table

DEVICE = os.environ.get("GRADCOMP_TEST_DEVICE", "cuda")

pytestmark = pytest.mark.gpu

if DEVICE == "cuda":
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU", allow_module_level=True)

FORMS = pytest.mark.parametrize("label", table.FORMS)


@functools.cache
def on_device():
    return frameworks.TorchOn(DEVICE)


def make(fw, label, shapes, kind):
    values = table.values(kind, table.numel(shapes))
    return checks.Case(fw, table.FORMS[label], values, table.call(shapes))


@FORMS
@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_laws(label, kind):
    for shapes in table.FEW_SHAPES:
        checks.obey(checks.LAWS, make(on_device(), label, shapes, kind))


@FORMS
def test_other_laws(label):
    for shapes in table.FEW_SHAPES:
        checks.obey(checks.FEW_KINDS_LAWS, make(on_device(), label, shapes, table.FEW_KINDS[0]))


@FORMS
def test_agrees_with_the_cpu(label):
    """Payloads, errors and decoded values, as two frameworks must agree."""
    checks.frameworks_agree(
        make(fw, label, table.COMPARED[-1], "gaussian")
        for fw in (frameworks.load("torch_plain"), on_device())
    )


def test_tensors_are_on_the_device():
    fw = on_device()
    assert fw.tensor(np.zeros(3)).device.type == DEVICE
    case = make(fw, next(iter(table.FORMS)), table.FEW_SHAPES[0], "gaussian")
    for result in (case.once.payload, case.once.error, case.once.decoded):
        assert result.device.type == DEVICE
