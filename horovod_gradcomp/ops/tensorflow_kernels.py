"""The compiled kernels on TensorFlow tensors, see :class:`horovod_gradcomp.ops.Kernels`.

They are operations of TensorFlow's own kind, registered by a small library through TensorFlow's C
interface: they run in its threads without Python, in a graph as well as eagerly. They serve tensors
of any size: of 1024 values they take about as long as the chains of operations that they replace,
of more less (``gradcomp bench codecs --framework tensorflow --numel 1024``, and the same with
``HOROVOD_GRADCOMP_NATIVE=0``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from array import array
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .. import native
from ..core.kernel import SPAN, Kernel
from ..native import pages

Tensor = Any

_NAMES = ("encode", "decode", "select", "scatter", "zeros")
_DTYPES = {"uint8": tf.uint8, "float16": tf.float16}


def apply(tensors: Sequence[Tensor]) -> bool:
    """Return whether kernels are there, and may read the storage of all these tensors."""
    # In a graph it is only known at run time where a tensor will be.
    others = (d for d in tf.config.get_visible_devices() if d.device_type != "CPU")
    return _operations()[0] is not None and next(others, None) is None


def reason() -> str:
    """Return in one line why the kernels are not available; empty where they are."""
    return _operations()[1]


@functools.cache
def _operations() -> tuple[Any, str]:
    """Return the module that calls the library's operations, and why there is none."""
    if not native.available():
        return None, native.reason()
    path = native.find("_tensorflow")
    if path is None:
        return None, "no compiled library for TensorFlow: it was installed without a C compiler"
    try:
        made = tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError, RuntimeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if not all(hasattr(made, f"gradcomp_{name}") for name in _NAMES):
        return None, f"{path} finds no C interface in TensorFlow {tf.__version__}"
    for name in _NAMES:
        # Else an outer tape fails on them, even where nobody asks it for such a gradient.
        with contextlib.suppress(KeyError):  # declared before
            tf.no_gradient(f"Gradcomp{name.title()}")
    kernels = native.loaded()[0]
    ctypes.CDLL(str(path)).gradcomp_bind(
        *(
            ctypes.cast(getattr(kernels, f"gradcomp_{name}"), ctypes.c_void_p)
            for name in ("encode", "decode", "largest", "above", "scatter")
        )
    )
    return made, ""


def encode(
    kernel: Kernel,
    spans: array[int],
    nbytes: int,
    x: Tensor,
    key: tuple[Any, Any],
    *,
    want_error: bool,
    dtype: str = "uint8",
) -> tuple[Tensor, Tensor | None]:
    numel, kind = x.shape.num_elements(), _DTYPES[dtype]
    words = tf.stack([tf.cast(word, tf.int64) for word in key])
    settings = _settings(kernel, spans, numel, nbytes, flag=want_error)
    payload, error = _operations()[0].gradcomp_encode(x, words, *settings, T=kind)
    payload.set_shape([nbytes // kind.size])
    error.set_shape([numel if want_error else 0])
    return payload, error if want_error else None


def decode(
    kernel: Kernel,
    spans: array[int],
    nbytes: int,
    payloads: Sequence[Tensor],
    numel: int,
    *,
    scale: Any,
) -> Tensor:
    settings = _settings(kernel, spans, numel, nbytes, flag=scale is not None)
    factor = tf.cast(1.0 if scale is None else scale, tf.float32)
    out = _operations()[0].gradcomp_decode(factor, *settings, list(payloads))
    out.set_shape([numel])
    return out


def largest(x: Tensor, k: int, rank: int, stride: int) -> Tensor:
    return above(x, -1, k, rank, stride)


def above(x: Tensor, bits: int, k: int, rank: int, stride: int) -> Tensor:
    job = tf.constant([x.shape.num_elements(), k, bits, rank, stride], tf.int64)
    positions = _operations()[0].gradcomp_select(x, job)
    positions.set_shape([k])
    return positions


def large(count: int) -> bool:
    """Return whether so many float32 are worth what follows here, in place of TensorFlow's own."""
    return 4 * count >= pages.LEAST


def worth(x: Tensor) -> bool:
    """Return whether a tensor is flat float32 and large."""
    count = x.shape.num_elements() if x.dtype == tf.float32 and x.shape.rank == 1 else None
    return count is not None and large(count)


def scatter(x: Tensor, positions: Tensor, values: Tensor, *, add: bool) -> Tensor:
    """Return ``x`` with values at positions, or with values added there in their order.

    Takes the storage of ``x`` where nobody else reads it, as TensorFlow's own does, which has more
    to do for each position.
    """
    job = tf.constant([x.shape.num_elements(), values.shape.num_elements(), int(add)], tf.int64)
    out = _operations()[0].gradcomp_scatter(x, positions, values, job)
    out.set_shape(x.shape)
    return out


def zeros(count: int, like: Tensor) -> Tensor:
    """Return float32 zeros in fresh storage, which a graph does not hold between steps."""
    out = _operations()[0].gradcomp_zeros(like, tf.constant([count], tf.int64))
    out.set_shape([count])
    return out


def _settings(
    kernel: Kernel, spans: array[int], numel: int, nbytes: int, *, flag: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what an operation of ``native/tensorflow/ops.c`` is told, in its inputs' order."""
    head = [native.index(kernel.name), kernel.bits, kernel.headers, int(flag), _threads()]
    job = [*head, numel, nbytes, len(spans) // SPAN, *spans]
    return (
        tf.constant(job, tf.int64),
        tf.constant(kernel.numbers.tolist(), tf.float64),
        tf.constant(kernel.tables.tolist(), tf.float32),
    )


def _threads() -> int:
    """Return how many threads TensorFlow gives to one operation."""
    return tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1


def words(key: tuple[Any, Any], start: int, count: int, like: Tensor) -> Tensor | None:
    return None  # TensorFlow's own operations draw them
