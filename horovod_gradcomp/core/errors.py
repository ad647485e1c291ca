"""The one family of exceptions.

Every message says what was got, what is expected, why, and what to do instead; :func:`explain`
puts the four together so that errors read alike in every front end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


class GradCompError(Exception):
    """Base of everything this package raises on purpose."""

    # TensorFlow re-raises an error from a traced function with more in its message, but only where
    # it knows the constructor; others become a StagingError.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class SettingsError(GradCompError, ValueError):
    """A setting is out of range, misspelt, or does not fit another one."""


class BindingError(GradCompError, RuntimeError):
    """It cannot be established which parameter a gradient belongs to."""


class ExchangeError(GradCompError, RuntimeError):
    """What came back from Horovod is not what this exchange is built on."""


class StateError(GradCompError, ValueError):
    """A saved state does not fit the compressor that it is loaded into."""


def explain(*, got: str, expected: str, why: str = "", do: str = "") -> str:
    """Return one message out of its four parts.

    Args:
        got: What was met, with names, shapes and dtypes.
        expected: What is allowed here.
        why: The reason behind the rule, where it is not plain.
        do: What to do instead.
    """
    parts = [f"got {got}", f"expected {expected}"]
    if why:
        parts.append(f"why: {why}")
    if do:
        parts.append(f"what to do: {do}")
    return "; ".join(parts)
