"""What is known to go badly together, said once when an optimizer is bound."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .settings import Settings

ADAPTIVE = (
    *("betas", "alpha", "rho", "beta2_decay", "initial_accumulator_value"),
    *("beta_1", "adam_beta_1", "beta_2_decay"),
)
"""Settings of optimizers that adapt to the size of gradients, in PyTorch and in Keras."""


def doubts(settings: Settings, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what speaks against settings with an optimizer.

    Args:
        settings: Of the compressor.
        groups: The optimizer's parameter groups, as plain dictionaries.
    """
    out, groups = [], list(groups)
    if settings.memory.is_momentum and any(_number(g.get("momentum")) > 0 for g in groups):
        out.append(
            "memory='momentum' takes the place of the optimizer's momentum, which is not 0: old "
            "gradients count twice. Set momentum=0, or use memory='residual'."
        )
    adaptive = any(name in g for g in groups for name in ADAPTIVE)
    if adaptive and settings.memory.slots and not settings.options.start_after:
        out.append(
            "error feedback with an optimizer that adapts to the size of gradients (Adam and its "
            "kin) is reported to converge worse than with SGD. Start uncompressed, as with "
            "start_after= at 10 to 25 % of all steps, or compare with memory='none' and fp16."
        )
    return out


def keras_group(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer of Keras as the parameter group that :func:`doubts` knows.

    Args:
        config: What the optimizer's ``get_config`` returns.
    """
    inner = config.get("inner_optimizer", {}).get("config")  # of a LossScaleOptimizer
    return dict(config if inner is None else inner)


def unused_rules(settings: Settings, names: Iterable[str]) -> list[str]:
    """Return a line for each rule whose pattern matches no parameter."""
    names = list(names)
    return [
        f"the rule {pattern!r} matches no parameter; names are such as {', '.join(names[:3])}"
        for pattern, _ in settings.exceptions
        if not any(re.fullmatch(pattern, name) for name in names)
    ]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
