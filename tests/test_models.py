"""Shapes of well-known models: as many tensors and values as their papers' models have."""

import math

import pytest

from horovod_gradcomp import SettingsError
from horovod_gradcomp.cli.models import MODELS, shapes_of


@pytest.mark.parametrize(
    ("model", "tensors", "values"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("bert-base", 199, 109_482_240),
        ("lstm", 11, 66_034_000),
    ],
)
def test_tensors_and_values(model, tensors, values):
    shapes = shapes_of(model)
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == values


def test_other_models_are_refused():
    with pytest.raises(SettingsError, match=", ".join(MODELS)):
        shapes_of("resnet51")
