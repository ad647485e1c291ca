"""The tensor operations that codecs are written with, once for each framework.

``ops.torch`` and ``ops.tensorflow`` define the same functions in the same order; :class:`Ops` is
the contract. A name with a trailing underscore **may overwrite its first argument**: use only what
it returns. Dtypes are named by strings: float16, float32, float64, int16, int32, int64, uint8 and
bool.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Callable, Protocol

from ..core.kernel import Kernel

Tensor = Any


class Ops(Protocol):
    """What a codec may ask for; all tensors live on the device of the first argument."""

    # Shapes and types -------------------------------------------------------------------------
    def numel(self, x: Tensor) -> int:
        """Return the number of elements, statically known."""

    def arange(self, start: int, count: int, dtype: str, like: Tensor) -> Tensor:
        """Return ``start, start + 1, ...``, ``count`` of them, on the device of ``like``."""

    def zeros(self, count: int, dtype: str, like: Tensor) -> Tensor:
        """Return a flat tensor of zeros."""

    def zeros_like(self, x: Tensor) -> Tensor:
        """Return zeros of the shape and dtype of ``x``."""

    def empty(self, count: int, like: Tensor, dtype: str = "float32") -> Tensor:
        """Return a flat tensor to be filled."""

    def as_int32(self, word: Any, like: Tensor) -> Tensor:
        """Return a number in ``[0, 2**32)``, or an int64 scalar tensor, as an int32 scalar."""

    def as_int64(self, values: Sequence[int], like: Tensor) -> Tensor:
        """Return whole numbers as a flat int64 tensor on the device of ``like``."""

    def numbers(self, values: Sequence[Any], like: Tensor) -> Tensor:
        """Return numbers or scalar tensors as a flat tensor, with dtype and device of ``like``."""

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Convert; whole numbers wrap, floats round half to even."""

    def view(self, x: Tensor, dtype: str) -> Tensor:
        """Return the bits of ``x`` as another dtype of the same size, sharing storage."""

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the same elements in another shape, sharing storage where possible."""

    def copy(self, x: Tensor) -> Tensor:
        """Return the same values in storage of their own."""

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Join along an axis."""

    def pad_columns(self, x: Tensor, width: int) -> Tensor:
        """Append columns of zeros to ``(rows, w)`` until it is ``(rows, width)``."""

    # Arithmetic that rounds alike in every framework ------------------------------------------
    def add(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Return ``a + b``."""

    def add_(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Return ``a + b``."""

    def add_scaled(self, a: Tensor, b: Tensor, factor: float, out: Any) -> Tensor:
        """Return ``a + factor * b`` as float32, in ``out`` where it is given."""

    def to_float32(self, a: Tensor, out: Any) -> Tensor:
        """Return ``a`` as float32 in storage of its own, ``out`` where it is given."""

    def sub(self, a: Tensor | float, b: Tensor) -> Tensor:
        """Return ``a - b``."""

    def sub_(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a - b``."""

    def mul_(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a * b``; int32 and int64 products wrap."""

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a / b`` as :meth:`div_` does, leaving ``a`` alone."""

    def div_(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a / b`` by true division of tensors, never by a reciprocal."""

    def scale_(self, a: Tensor, factor: float | int) -> Tensor:
        """Return ``a * factor`` with the factor rounded to the dtype of ``a`` first."""

    def scaled(self, a: Tensor, factor: float) -> Tensor:
        """Return ``a * factor``, leaving ``a`` alone."""

    def round_(self, a: Tensor) -> Tensor:
        """Round half to even."""

    def floor_(self, a: Tensor) -> Tensor:
        """Round down."""

    def floor_divide(self, a: Tensor, divisor: int) -> Tensor:
        """Return ``a // divisor`` of int64 values that are not negative."""

    def clamp_(self, a: Tensor, low: float, high: float) -> Tensor:
        """Cut to ``[low, high]``."""

    def minimum(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Return the lesser of each pair."""

    def maximum(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Return the greater of each pair."""

    def where(self, mask: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        """Choose elementwise, with broadcasting."""

    def less(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Return ``a < b``."""

    def equal(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a == b``."""

    def logical_and(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a and b`` of two masks."""

    def logical_or(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a or b`` of two masks."""

    def logical_not(self, a: Tensor) -> Tensor:
        """Return ``not a`` of a mask."""

    def row_min(self, x: Tensor) -> Tensor:
        """Return the least of each row, ``(rows, width)`` to ``(rows, 1)``."""

    def row_max(self, x: Tensor) -> Tensor:
        """Return the greatest of each row, ``(rows, width)`` to ``(rows, 1)``."""

    def badness(self, x: Tensor) -> Tensor:
        """Return a float32 scalar: 0 if all of ``x`` is finite, NaN otherwise."""

    # Arithmetic that each framework rounds in its own way -------------------------------------
    def row_sum(self, x: Tensor) -> Tensor:
        """Return the sum of each row, in float64, ``(rows, width)`` to ``(rows, 1)``.

        Rounded to float32 it is the same in every framework but for one row in some 10^8: nothing
        is lost where the terms lie within a factor of 2^19 (1024 of them), little elsewhere.
        """

    def row_norm(self, x: Tensor) -> Tensor:
        """Return the Euclidean norm of each row, as :meth:`row_sum` returns the sum."""

    def log1p_(self, a: Tensor) -> Tensor:
        """Return ``log(1 + a)``."""

    def expm1_(self, a: Tensor) -> Tensor:
        """Return ``exp(a) - 1``."""

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the matrix product; leading dimensions are broadcast."""

    def transpose(self, a: Tensor) -> Tensor:
        """Return ``a`` with its last two dimensions exchanged, sharing storage where possible."""

    # Bits -------------------------------------------------------------------------------------
    def bit_and(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Bitwise and."""

    def bit_and_(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Bitwise and."""

    def bit_or(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Bitwise or."""

    def bit_or_(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Bitwise or."""

    def bit_xor(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Bitwise exclusive or."""

    def bit_xor_(self, a: Tensor, b: Tensor | int) -> Tensor:
        """Bitwise exclusive or."""

    def shift_left(self, a: Tensor, count: int) -> Tensor:
        """Shift towards the high bits."""

    def shift_left_(self, a: Tensor, count: int) -> Tensor:
        """Shift towards the high bits."""

    def shift_right(self, a: Tensor, count: int) -> Tensor:
        """Shift towards the low bits, zeros coming in (int64 must not be negative)."""

    def shift_signed(self, a: Tensor, count: int) -> Tensor:
        """Shift int16 or int32 towards the low bits, copies of the sign coming in."""

    def shift_signed_(self, a: Tensor, count: int) -> Tensor:
        """Shift as :meth:`shift_signed` does."""

    def magnitude(self, x: Tensor) -> Tensor:
        """Return the bits of ``|x|`` as int32: ordered as ``|x|`` is, NaN greatest.

        Raises:
            TypeError: It is not float32.
        """

    def flush(self, x: Tensor, floor: float) -> Tensor:
        """Return ``x`` with every ``|x| < floor`` replaced by zero, decided on the bits.

        Raises:
            TypeError: It is not float32.
        """

    # Selection --------------------------------------------------------------------------------
    def strided(self, x: Tensor, stride: int) -> Tensor:
        """Return every ``stride``-th element, from the first."""

    def kth_largest(self, x: Tensor, k: int) -> Tensor:
        """Return the k-th largest of a flat int32 tensor, as a scalar."""

    def positions_above(self, x: Tensor, bits: Tensor) -> Tensor:
        """Return where ``magnitude(x) > bits``, ascending, int64, of a size that depends on x."""

    def positions_of(self, mask: Tensor) -> Tensor:
        """Return where a flat mask is true, ascending, int64."""

    def count_true(self, mask: Tensor) -> Tensor:
        """Return how often a mask is true, int64 scalar."""

    def running_count(self, mask: Tensor) -> Tensor:
        """Return at each place how often a flat mask has been true so far, int64."""

    def running_sum(self, x: Tensor) -> Tensor:
        """Return at each place the sum of a flat int64 tensor so far."""

    def length(self, x: Tensor) -> Tensor | int:
        """Return the size of a flat tensor that may only be known at run time, int64."""

    def cond(self, condition: Any, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
        """Return ``yes()`` or ``no()``."""

    def sort(self, x: Tensor) -> Tensor:
        """Return a flat tensor in ascending order."""

    def fix_size(self, x: Tensor, count: int) -> Tensor:
        """Return ``x`` with its size, known to be ``count``, made static; raises if it is not."""

    def fit(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return a flat tensor cut, or filled up with zeros, to ``count``, and if it was so long.

        The second is a scalar mask.
        """

    def confine_(self, positions: Tensor, count: int, damage: Tensor) -> Tensor:
        """Return int64 positions, cut to ``[0, count)`` where the damage is not 0.

        Args:
            positions: All of them in range where the damage is 0.
            count: At least 1.
            damage: Float32, ``(1,)``.
        """

    def known(self, x: Tensor) -> list[float] | None:
        """Return all values of a small tensor, or None where reading them would wait.

        That is on a GPU, and in a graph.
        """

    def take(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the elements of a flat tensor at int64 positions."""

    def put_(self, x: Tensor, positions: Tensor, values: Tensor) -> Tensor:
        """Replace the elements of a flat tensor at unique int64 positions."""

    def mark(self, count: int, positions: Tensor) -> Tensor:
        """Return a flat mask of ``count`` places, true at the positions (all below ``count``)."""

    def add_at_(self, x: Tensor, positions: Tensor, values: Tensor) -> Tensor:
        """Add values at positions; equal positions add up."""

    def search(self, ordered: Tensor, values: Tensor) -> Tensor:
        """Return how many of an ascending tensor lie below each value, int64."""

    def repeat(self, x: Tensor, counts: Tensor, total: int) -> Tensor:
        """Return each element as often as its count says, ``total`` in all."""

    def repeat_each(self, x: Tensor, times: int) -> Tensor:
        """Return each element of a flat tensor ``times`` times in a row."""

    # Blocks and payloads ----------------------------------------------------------------------
    def kernels(self, *tensors: Tensor) -> Kernels | None:
        """Return the compiled kernels, or None.

        Only where they are there, and may read the storage of all these tensors.
        """

    def map_rows(
        self,
        fn: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
        into: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """Apply ``fn(first_row, *chunks)`` to chunks of rows that fit the cache.

        Every input is ``(rows, ...)``; each result is ``(rows of the chunk, ...)`` and the chunks
        of each are joined, inside the tensor given in ``into`` where there is one.
        """

    def join_flat(self, whole: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Return consecutive pieces as one flat tensor, ``whole`` where they are views of it."""

    def new_payload(self, layout: Any, like: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """See :meth:`horovod_gradcomp.core.payload.Layout.new`."""

    def seal_payload(self, layout: Any, payload: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
        """See :meth:`horovod_gradcomp.core.payload.Layout.seal`."""

    def section(self, payload: Tensor, start: int, dtype: str, rows: int, width: int) -> Tensor:
        """Return bytes of a payload as a matrix of a dtype."""

    def set_flag_(self, payload: Tensor, flag: Tensor) -> Tensor:
        """Write a float32 scalar into the last four bytes of a uint8 payload."""

    def flag_of(self, payload: Tensor) -> Tensor:
        """Return the last four bytes of a uint8 payload as a float32 scalar."""

    def spoil_(self, x: Tensor, flag: Tensor) -> Tensor:
        """Add a float32 scalar (0 or NaN) to every element."""

    def poison_(self, payload: Tensor, flag: Tensor) -> Tensor:
        """Add a float32 scalar (0 or NaN) to the first element of a float payload."""


class Kernels(Protocol):
    """The compiled kernels on a framework's tensors, in the computer's own memory."""

    def encode(
        self,
        kernel: Kernel,
        spans: array[int],
        nbytes: int,
        x: Tensor,
        key: tuple[Any, Any],
        *,
        want_error: bool,
        dtype: str = "uint8",
    ) -> tuple[Tensor, Tensor | None]:
        """Return a payload and, where it is wanted, what it leaves out, flat float32.

        Args:
            kernel: What to do.
            spans: Where rows lie, from :func:`horovod_gradcomp.core.kernel.spans`.
            nbytes: Of the payload.
            x: Flat float32. It is consumed, as :meth:`.core.codec.Codec.encode` says.
            key: Of the random draws, two numbers or int64 scalar tensors.
            want_error: Whether to return the error.
            dtype: Of the payload, uint8 or float16.
        """

    def decode(
        self,
        kernel: Kernel,
        spans: array[int],
        nbytes: int,
        payloads: Sequence[Tensor],
        numel: int,
        *,
        scale: Any,
    ) -> Tensor:
        """Return the sum of all decoded payloads, ``(numel,)``, float32, fresh.

        Args:
            kernel: What to do.
            spans: As in :meth:`encode`.
            nbytes: Of each payload at least.
            payloads: To be added in order.
            numel: Number of elements.
            scale: Factor on the sum, a number or a float32 scalar tensor; None for none.
        """

    def largest(self, x: Tensor, k: int, rank: int, stride: int) -> Tensor:
        """Return what :func:`horovod_gradcomp.core.select.largest` does.

        Args:
            x: Flat float32.
            k: ``1 <= k <= n``.
            rank: Which of the magnitudes of a sample is a little below the k-th of all; 0 for no
                sample.
            stride: One element in so many is in the sample.
        """

    def above(self, x: Tensor, bits: int, k: int, rank: int, stride: int) -> Tensor:
        """Return what :func:`horovod_gradcomp.core.select.above` does, see :meth:`largest`."""

    def words(self, key: tuple[Any, Any], start: int, count: int, like: Tensor) -> Tensor | None:
        """Return what :func:`horovod_gradcomp.core.random.words` does.

        None where there is no kernel for it, as for keys that are tensors.
        """
