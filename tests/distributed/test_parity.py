"""The same training in PyTorch and TensorFlow sends the same bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.workers.parity import FORMS, STEPS, start

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(330)]


@functools.cache
def trained(framework: str) -> list[dict[str, Any]]:
    return run_ranks("parity.py", 2, args=[framework], timeout=150)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_payloads_and_weights(form: str) -> None:
    for torch, tensorflow in zip(trained("torch"), trained("tensorflow")):
        (payloads, weight), (others, other) = torch[form], tensorflow[form]
        assert len(set(payloads)) == len(payloads) == STEPS
        assert payloads == others
        assert np.abs(np.subtract(weight, other)).max() <= 1e-6
        assert np.abs(weight - start()).max() > 0.01, "nothing was learned"
