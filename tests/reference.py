"""Independent NumPy forms of what the package computes, written from the documented rules."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def fmix32(word: Any) -> np.ndarray:
    """Return MurmurHash3's 32-bit finaliser."""
    h = np.atleast_1d(np.asarray(word, dtype=np.uint32)).copy()
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def key(seed: int, name: str, step: int) -> tuple[int, int]:
    """Return the two words that stand for (seed, name, step)."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    low, high = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))
    first = int(fmix32((step % 2**32) ^ low)[0])
    return first, int(fmix32(((first + 0x9E3779B9) % 2**32) ^ high)[0])


def words(words_of_key: tuple[int, int], start: int, count: int) -> np.ndarray:
    """Return pseudo-random words for positions, uint32."""
    at = np.arange(start, start + count).astype(np.uint32)
    return fmix32(fmix32(at ^ np.uint32(words_of_key[0])) ^ np.uint32(words_of_key[1]))


def uniform(words_of_key: tuple[int, int], start: int, count: int) -> np.ndarray:
    """Return float32 values in [0, 1)."""
    return ((words(words_of_key, start, count) >> np.uint32(8)) * 2.0**-24).astype(np.float32)


def magnitude(x: np.ndarray) -> np.ndarray:
    """Return the bits of |x| as whole numbers: ordered as |x| is, NaN greatest."""
    return x.view(np.uint32) & np.uint32(0x7FFFFFFF)


def topk_positions(x: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k largest |x|, ties by lowest position, ascending."""
    order = np.lexsort((np.arange(x.size), -magnitude(x).astype(np.int64)))
    return np.sort(order[:k])


def linear(
    x: np.ndarray, bits: int, block: int, draw: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and dequantised values of one tensor."""
    f32 = np.float32
    codes, values = np.zeros(x.size, np.uint8), np.zeros(x.size, f32)
    for start in range(0, x.size, block):
        row = x[start : start + block]
        low, high = np.clip(row.min(), -1.7e38, 1.7e38), np.clip(row.max(), -1.7e38, 1.7e38)
        low = f32(0) if abs(low) < 2.0**-102 else f32(low)
        step = (f32(high) - low) * f32(1 / (2**bits - 1))
        step = f32(0) if abs(step) < 2.0**-102 else step
        with np.errstate(over="ignore"):
            ratio = (row - low) / (step if step else f32(1))
        if draw is None:
            level = np.rint(ratio)
        else:
            level = np.floor(ratio + draw[start : start + block])
        level = np.clip(level, 0, 2**bits - 1).astype(np.uint8)
        codes[start : start + block] = level
        values[start : start + block] = level.astype(f32) * step + low
    return codes, values


def randomk_positions(numel: int, k: int, words_of_key: tuple[int, int]) -> list[int]:
    """Return one position in each of k strata."""
    edges = [i * numel // k for i in range(k + 1)]
    drawn = words(words_of_key, 0, k)
    return [edges[i] + (int(drawn[i]) * (edges[i + 1] - edges[i]) >> 32) for i in range(k)]
