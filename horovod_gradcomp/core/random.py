"""Randomness as a counter hash of (seed, name, step, position).

Equal on all ranks and in both frameworks, new each step and for each tensor, and no generator of
the user is read or moved. The mixer is the 32-bit finaliser of MurmurHash3 (Appleby, 2011), whose
avalanche is close to ideal.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

from .codec import Tensor

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def fold(seed: int, name: str, step: Any) -> tuple[Any, Any]:
    """Return two 32-bit words that stand for (seed, name, step).

    Args:
        seed: Any whole number.
        name: Of the tensor or bucket; equal on all ranks.
        step: A whole number, or an int64 scalar tensor where steps are counted in a graph.

    Returns:
        Two whole numbers in ``[0, 2**32)``, or two int64 scalar tensors.
    """
    return advance(*origin(seed, name), step)


@functools.lru_cache(maxsize=4096)
def origin(seed: int, name: str) -> tuple[int, int]:
    """Return two 32-bit words that stand for (seed, name)."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def advance(low: Any, high: Any, step: Any) -> tuple[Any, Any]:
    """Return the words of :func:`fold` from those of :func:`origin`."""
    first = _mix_word((step % 2**32) ^ low)
    second = _mix_word(((first + _GOLDEN) % 2**32) ^ high)
    return first, second


def _mix_word(word: Any) -> Any:
    # For whole numbers of Python and int64 tensors alike. Division instead of a shift: TensorFlow's
    # tensors have no shift operator. An int64 product may wrap, its low 32 bits are right all the
    # same.
    word = word ^ (word // 2**16)
    word = (word * 0x85EBCA6B) % 2**32
    word = word ^ (word // 2**13)
    word = (word * 0xC2B2AE35) % 2**32
    return word ^ (word // 2**16)


def words(xp: Any, key: tuple[Any, Any], start: int, count: int, like: Tensor) -> Tensor:
    """Return ``count`` pseudo-random words for positions ``start ..``, as int32 bit patterns.

    Args:
        xp: An operations module.
        key: From :func:`fold`.
        start: First position; ``start + count`` below 2**31.
        count: Number of words.
        like: A tensor on the device to use.

    Returns:
        Shape ``(count,)``, int32.
    """
    kernels = xp.kernels(like)
    drawn = None if kernels is None else kernels.words(key, start, count, like)
    if drawn is not None:
        return drawn
    x = xp.arange(start, count, "int32", like)
    x = _mix(xp, xp.bit_xor_(x, xp.as_int32(key[0], like)))
    return _mix(xp, xp.bit_xor_(x, xp.as_int32(key[1], like)))


def uniform(xp: Any, key: tuple[Any, Any], start: int, count: int, like: Tensor) -> Tensor:
    """Return ``count`` float32 values, multiples of 2**-24 in ``[0, 1)``, for positions."""
    bits = xp.shift_right(words(xp, key, start, count, like), 8)
    return xp.scale_(xp.cast(bits, "float32"), 2.0**-24)


def centred(xp: Any, key: tuple[Any, Any], start: int, like: Tensor) -> Tensor:
    """Return float32 values of mean zero in ``[-1/2, 1/2]``, one for each element of ``like``.

    Args:
        xp: An operations module.
        key: From :func:`fold`.
        start: Position of the first element.
        like: Gives shape and device.
    """
    drawn = xp.cast(words(xp, key, start, xp.numel(like), like), "float32")
    return xp.reshape(xp.scale_(drawn, 2.0**-32), like.shape)


def round_(xp: Any, x: Tensor, key: tuple[Any, Any], start: int) -> Tensor:
    """Round up with a probability equal to the fraction, else down; ``x`` may be overwritten.

    Whole numbers stay, but once in some 10^8 draws, of exactly 1/2, when odd ones may move by one.

    Args:
        xp: An operations module.
        x: Float32.
        key: From :func:`fold`.
        start: Position of the first element.
    """
    return xp.round_(xp.add_(x, centred(xp, key, start, x)))


def below(xp: Any, key: tuple[Any, Any], limits: Tensor) -> Tensor:
    """Return for each limit a pseudo-random whole number below it.

    Args:
        xp: An operations module.
        key: From :func:`fold`.
        limits: Shape ``(count,)``, int64, each in ``[1, 2**31)``.

    Returns:
        Shape ``(count,)``, int64.
    """
    raw = words(xp, key, 0, xp.numel(limits), limits)
    unsigned = xp.bit_and(xp.cast(raw, "int64"), _WORD)
    return xp.shift_right(xp.mul_(unsigned, limits), 32)


def strata(
    xp: Any, key: tuple[Any, Any], numel: int, k: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one pseudo-random position in each of k strata of as equal size as can be.

    Args:
        xp: An operations module.
        key: From :func:`fold`.
        numel: Number of elements, ``numel // k`` of them or one more a stratum.
        k: ``1 <= k <= numel``.
        like: A tensor on the device to use.

    Returns:
        The positions, ascending, and the sizes of their strata, each ``(k,)``, int64.
    """
    edges = xp.floor_divide(xp.scale_(xp.arange(0, k + 1, "int64", like), numel), k)
    sizes = xp.sub(edges[1:], edges[:-1])
    return xp.add(edges[:-1], below(xp, key, sizes)), sizes


def geometric(xp: Any, key: tuple[Any, Any], p: float, count: int, like: Tensor) -> Tensor:
    """Return how often each of ``count`` games is lost before it is won with probability ``p``.

    A geometric number has no memory, so its two digits in any base are independent. Each is found
    by a search for one 32-bit word in a table of cumulated probabilities, at a cost that knows
    neither p nor the result.

    Args:
        xp: An operations module.
        key: From :func:`fold`.
        p: ``2**-31 <= p <= 1``.
        count: Of numbers.
        like: A tensor on the device to use.

    Returns:
        Shape ``(count,)``, int64, cut at some 23 / p, which one in 10^10 is above, or at 2^31.
    """
    base, low, high = _digits(p)
    drawn = xp.bit_and(xp.cast(words(xp, key, 0, 2 * count, like), "int64"), _WORD)
    first = xp.search(xp.as_int64(low, like), drawn[:count])
    second = xp.search(xp.as_int64(high, like), drawn[count:])
    return xp.add(first, xp.scale_(second, base))


@functools.lru_cache(maxsize=16)
def _digits(p: float) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a base, and for both digits of a geometric number which words lie below each step."""
    # Sums and products of float64, which are the same on every machine; powers are not.
    base = math.ceil(math.sqrt(min(23 / p, 2.0**31)))
    low = _cumulated(p, base)
    high = _cumulated(low[-1], base + 1)
    return base, _limits([c / low[-1] for c in low[:-1]]), _limits(high[:-1])


def _cumulated(p: float, count: int) -> list[float]:
    """Return the probabilities to lose fewer than 1, 2, ..., ``count`` times."""
    out, lost = [], 0.0
    for _ in range(count):
        lost += (1.0 - lost) * p
        out.append(min(lost, 1.0))
    return out


def _limits(cumulated: list[float]) -> tuple[int, ...]:
    """Return the greatest word that is too small for each step, in ascending order."""
    return tuple(round(c * 2.0**32) - 1 for c in cumulated)


def _mix(xp: Any, x: Tensor) -> Tensor:
    x = xp.bit_xor_(x, xp.shift_right(x, 16))
    x = xp.scale_(x, _signed(0x85EBCA6B))
    x = xp.bit_xor_(x, xp.shift_right(x, 13))
    x = xp.scale_(x, _signed(0xC2B2AE35))
    return xp.bit_xor_(x, xp.shift_right(x, 16))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
