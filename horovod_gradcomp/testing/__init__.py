"""Checks for codecs of one's own, as this package's own codecs are checked. They need NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..codecs import build
from ..core.codec import Codec
from . import frameworks, inputs, laws

__all__ = ["check_codec", "roundtrip"]

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


def roundtrip(
    codec: Codec | str, gradient: laws.Array, path: str = "torch"
) -> tuple[laws.Array, int]:
    """Return what one rank's gradient becomes in one step, and the bytes that travel for it.

    Nothing is remembered between calls. A codec whose default memory keeps what is not sent
    sends what it would with that memory.

    Args:
        codec: A codec, or its string form.
        gradient: Of any shape and floating dtype; it is encoded as float32.
        path: "torch" (with compiled kernels), "torch_plain" or "tensorflow".

    Returns:
        The decoded gradient, float32 of the shape given, and the payload's bytes.

    Raises:
        SettingsError: There is no such codec.

    Example:
        >>> from horovod_gradcomp.testing import roundtrip
        >>> arrived, nbytes = roundtrip("topk:ratio=0.5", np.array([[1.0, -8.0], [0.5, 3.0]]))
        >>> arrived
        array([[ 0., -8.],
               [ 0.,  3.]], dtype=float32)
    """
    codec = build(codec) if isinstance(codec, str) else codec
    codec = codec.with_memory(codec.default_memory != "none")
    flat = np.ravel(gradient).astype(np.float32)
    call = inputs.call((np.shape(gradient),), size=1)
    case = laws.Case(frameworks.load(path), codec, flat, call)
    arrived = case.fw.array(case.once.decoded).reshape(np.shape(gradient))
    return arrived, codec.wire_bytes(*call.extents(flat.size))


def _check(codec: Codec, shapes: inputs.Shapes, kind: str, paths: Sequence[str]) -> None:
    values, call = inputs.values(kind, inputs.numel(shapes)), inputs.call(shapes)
    cases = [laws.Case(frameworks.load(path), codec, values, call) for path in paths]
    every = (*laws.LAWS, *laws.FEW_KINDS_LAWS) if kind in ("gaussian", "ties") else laws.LAWS
    for case in cases:
        with laws.told(f"{case.fw.path}, {kind} values"):
            laws.obey(every, case)
    with laws.told(f"frameworks_agree, {kind} values, shapes {shapes}"):
        laws.frameworks_agree(cases)
