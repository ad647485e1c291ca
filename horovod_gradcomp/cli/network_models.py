"""Small models of four kinds that ``gradcomp bench network`` trains, with data of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Callable

from ..core.errors import SettingsError, explain

KNOWN = ("vgg16-small", "lstm", "transformer")
_WORDS, _LENGTH = 4000, 32
_PERCEPTRON = re.compile(r"mlp([1-9]\d*)x([1-9]\d*)")

Training = tuple[Any, Callable[[Any], Any], int]
"""A module, what makes a scalar loss of it, and the samples of a step."""


def check(model: str) -> None:
    """Raise unless :func:`build` knows a model.

    Raises:
        SettingsError: It does not.
    """
    if model not in KNOWN and not _PERCEPTRON.fullmatch(model):
        raise SettingsError(
            explain(
                got=f"--model {model}",
                expected=f"mlp, layers, x, width, as in mlp12x1024, or one of {', '.join(KNOWN)}",
            )
        )


def build(model: str, batch: int | None = None) -> Training:
    """Return a model with random weights and data, the same on every call.

    Args:
        model: A name that :func:`check` lets pass.
        batch: Samples of a step; None for what keeps a step short on one thread of a processor.
    """
    import torch

    check(model)
    torch.manual_seed(1)
    found = _PERCEPTRON.fullmatch(model)
    if found:
        return _perceptron(int(found[1]), int(found[2]), batch or 32)
    made: dict[str, Callable[[int], Training]]
    made = {"vgg16-small": _vgg, "lstm": _lstm, "transformer": _transformer}
    return made[model](batch or 4)


def _perceptron(count: int, width: int, batch: int) -> Training:
    import torch
    from torch import nn

    blocks = [part for _ in range(count) for part in (nn.Linear(width, width), nn.ReLU())]
    data = torch.randn(batch, width)
    return nn.Sequential(*blocks), lambda model: (model(data) ** 2).mean(), batch


def _vgg(batch: int) -> Training:
    """VGG-16's convolutions for images of 32 by 32 and ten classes: 15 million parameters."""
    import torch
    from torch import nn

    parts: list[Any] = []
    before = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            parts += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        parts.append(nn.MaxPool2d(2))
    parts += [nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    data, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    return nn.Sequential(*parts), _classify(data, labels), batch


def _lstm(batch: int) -> Training:
    """A word model of two layers of 650, as the medium one of Zaremba et al., arXiv:1409.2329."""
    from torch import nn

    width = 650

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(_WORDS, width), nn.Linear(width, _WORDS)
            self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)

        def forward(self, words: Any) -> Any:
            return self.out(self.layers(self.embed(words))[0])

    return Words(), _next_word(batch), batch


def _transformer(batch: int) -> Training:
    """Four encoder layers of width 512, with words in and out."""
    from torch import nn

    width = 512

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(_WORDS, width), nn.Linear(width, _WORDS)
            layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

        def forward(self, words: Any) -> Any:
            return self.out(self.layers(self.embed(words)))

    return Words(), _next_word(batch), batch


def _next_word(batch: int) -> Callable[[Any], Any]:
    import torch

    words = torch.randint(_WORDS, (batch, _LENGTH + 1))
    return _classify(words[:, :-1], words[:, 1:].reshape(-1))


def _classify(data: Any, labels: Any) -> Callable[[Any], Any]:
    import torch

    def loss(model: Any) -> Any:
        out = model(data)
        return torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), labels)

    return loss


def shapes(module: Any) -> Sequence[tuple[int, ...]]:
    """Return the shapes of a module's parameters, first layer first."""
    return [tuple(p.shape) for p in module.parameters()]
