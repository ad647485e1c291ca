"""Shapes of the parameters of well-known models, for measurements without the models."""

from __future__ import annotations

from typing import Callable

from ..core.codec import Shape
from ..core.errors import SettingsError, explain


def resnet50() -> list[Shape]:
    """Return the 161 shapes of ResNet-50 for ImageNet (He et al., arXiv:1512.03385)."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, side in ((width, before, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, side, side), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def vgg16() -> list[Shape]:
    """Return the 32 shapes of VGG-16 for ImageNet (Simonyan, Zisserman, arXiv:1409.1556)."""
    shapes: list[Shape] = []
    before = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            shapes += [(width, before, 3, 3), (width,)]
            before = width
    for out, into in ((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)):
        shapes += [(out, into), (out,)]
    return shapes


def bert_base() -> list[Shape]:
    """Return the 199 shapes of BERT-base, uncased (Devlin et al., arXiv:1810.04805)."""
    width, inner = 768, 3072
    shapes: list[Shape] = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        shapes += [(width, width), (width,)] * 4 + [(width,), (width,)]
        shapes += [(inner, width), (inner,), (width, inner), (width,), (width,), (width,)]
    return [*shapes, (width, width), (width,)]


def lstm() -> list[Shape]:
    """Return the 11 shapes of the large word model of Zaremba et al., arXiv:1409.2329."""
    words, width = 10_000, 1500
    layer: list[Shape] = [(4 * width, width), (4 * width, width), (4 * width,), (4 * width,)]
    return [(words, width), *layer, *layer, (words, width), (words,)]


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    "bert-base": bert_base,
    "vgg16": vgg16,
    "lstm": lstm,
}
"""By the name for the command line."""


def shapes_of(model: str) -> list[Shape]:
    """Return the shapes of a model's parameters, first layer first.

    Raises:
        SettingsError: There is no model of this name.
    """
    if model not in MODELS:
        raise SettingsError(explain(got=f"--model {model}", expected=f"one of {', '.join(MODELS)}"))
    return MODELS[model]()
