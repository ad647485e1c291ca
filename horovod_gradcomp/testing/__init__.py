"""Checks for codecs of one's own, as this package's own codecs are checked. They need NumPy."""

from __future__ import annotations

from collections.abc import Sequence

from ..codecs import build
from ..core.codec import Codec
from . import frameworks, inputs, laws

__all__ = ["check_codec"]

_SHAPES = (
    *map(inputs.whole, (1, 7, 8, 9, 1001, 1025)),
    *map(inputs.split, (9, 4097, 70_003)),
    ((40, 30), (0, 7), (), (7,), (12, 6, 3, 3)),
)


def check_codec(codec: Codec | str, paths: Sequence[str] = frameworks.PATHS) -> None:
    """Check that a codec keeps all laws, with a memory and without.

    On many sizes, shapes and kinds of values (spikes, zeros, subnormals, the largest floats): the
    payload has the declared bytes; what is sent and what is left make the input; the bias is the
    declared one; the same input gives the same bits, and the same payload in every framework;
    payloads add up; storage is its own; inf and NaN change no size; no generator is moved.

    Args:
        codec: A codec, or its string form.
        paths: Of "torch" (with compiled kernels), "torch_plain" and "tensorflow", those to check.

    Raises:
        AssertionError: A law is broken, with its name, the shapes and the first wrong value.

    Example:
        >>> from horovod_gradcomp.testing import check_codec
        >>> check_codec("linear:bits=3")  # doctest: +SKIP
    """
    given = build(codec) if isinstance(codec, str) else codec
    for form in dict.fromkeys((given.with_memory(True), given.with_memory(False))):
        for shapes in _SHAPES:
            for kind in inputs.VALUES:
                _check(form, shapes, kind, paths)


def _check(codec: Codec, shapes: inputs.Shapes, kind: str, paths: Sequence[str]) -> None:
    values, call = inputs.values(kind, inputs.numel(shapes)), inputs.call(shapes)
    cases = [laws.Case(frameworks.load(path), codec, values, call) for path in paths]
    every = (*laws.LAWS, *laws.FEW_KINDS_LAWS) if kind in ("gaussian", "ties") else laws.LAWS
    for case in cases:
        try:
            laws.obey(every, case)
        except AssertionError as error:
            raise AssertionError(f"{case.fw.path}, {kind} values: {error}") from error
    laws.frameworks_agree(cases)
