"""The laws that a codec must keep, as plain functions that assert."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

from ..core.codec import Bias, Call, Codec, Combine
from ..core.payload import FLAG_BYTES
from . import inputs
from .frameworks import Framework

Array = NDArray[Any]
EPS = 2.0**-23


@dataclass(frozen=True)
class Result:
    """What one rank's encoding gives."""

    payload: Any
    error: Any
    decoded: Any


@dataclass(frozen=True)
class Case:
    """One codec on one input, at one step, in one framework."""

    fw: Framework
    codec: Codec
    x: Array
    call: Call

    @cached_property
    def full_call(self) -> Call:
        """The call with the shared state that a codec starts from."""
        shared = self.codec.initial(self.fw.xp, self.call, self.fw.tensor(self.x))
        return replace(self.call, shared=shared)

    @property
    def in_rounds(self) -> bool:
        """Whether there is no payload that could be decoded by itself."""
        return self.codec.combine is Combine.ROUNDS

    def run(self, *, want_error: bool = True) -> Result:
        """Encode and decode a copy of the input."""
        if self.in_rounds:
            return self._rounds(want_error)
        payload, error = self.encode(want_error=want_error)
        return Result(payload, error, self.decode([payload]))

    def encode(self, *, want_error: bool = True) -> tuple[Any, Any]:
        if self.in_rounds:
            result = self._rounds(want_error)
            return result.payload, result.error
        return self.codec.encode(
            self.fw.xp, self.fw.tensor(self.x), self.full_call, want_error=want_error
        )[:2]

    def decode(self, payloads: list[Any], scale: float = 1.0) -> Any:
        return self.codec.decode(self.fw.xp, payloads, self.x.size, self.full_call, scale=scale)

    def _rounds(self, want_error: bool) -> Result:
        """Run all rounds of one rank; the payload is all of them, one after the other."""
        x = self.fw.tensor(self.x)
        run = self.codec.rounds(self.fw.xp, x, self.full_call, want_error=want_error)
        payload, sent = next(run), []
        while True:
            sent.append(self.fw.array(payload))
            try:
                payload = run.send(self.fw.tensor(sent[-1]))
            except StopIteration as end:
                (total, *_), error = end.value
                return Result(self.fw.tensor(np.concatenate(sent)), error, total)

    def on(self, x: Array) -> Case:
        """Return the same on another input."""
        return Case(self.fw, self.codec, x.astype(np.float32), self.call)

    @cached_property
    def once(self) -> Result:
        """One run, shared by the laws that only look."""
        return self.run()

    @cached_property
    def sent(self) -> Array:
        """What is decoded from the payload, as float64."""
        return self.fw.array(self.once.decoded).astype(np.float64)

    @cached_property
    def left(self) -> Array:
        """The error, as float64."""
        return self.fw.array(self.once.error).astype(np.float64)


# For any codec and any finite input -----------------------------------------------------------


def sizes_are_declared(case: Case) -> None:
    """The payload has exactly the declared bytes, and a dtype that Horovod carries."""
    payload = case.fw.array(case.once.payload)
    declared = case.codec.wire_bytes(*case.call.extents(case.x.size))
    assert type(declared) is int, f"wire_bytes returns {declared!r}"
    assert payload.ndim == 1, f"payload of shape {payload.shape}"
    if case.codec.combine is Combine.GATHER:
        assert payload.dtype == np.uint8, payload.dtype
        assert payload.nbytes == declared + FLAG_BYTES, (payload.nbytes, declared)
        assert declared % 4 == 0, f"{declared} bytes: the flag is not aligned"
    else:
        assert payload.dtype in (np.float16, np.float32), payload.dtype
        assert payload.nbytes == declared, (payload.nbytes, declared)


def results_are_flat_float32(case: Case) -> None:
    """Decoded values and error are flat float32 of the input's size."""
    for what in ("decoded", "error"):
        got = case.fw.array(getattr(case.once, what))
        assert got.dtype == np.float32, f"{what}: {got.dtype}"
        assert got.shape == case.x.shape, f"{what}: {got.shape}, expected {case.x.shape}"


def results_are_finite(case: Case) -> None:
    """Finite in, finite out; what is left of a mixture may be larger than any value of it."""
    assert np.isfinite(case.x).all()
    if case.codec.mixes and np.abs(case.x).max() > 1e38:
        return
    assert np.isfinite(case.sent).all(), f"decoded {_worst(~np.isfinite(case.sent), case)}"
    assert np.isfinite(case.left).all(), f"error {_worst(~np.isfinite(case.left), case)}"


def nothing_is_lost(case: Case) -> None:
    """What is sent and what is left make the input, to rounding."""
    wrong = np.abs(case.sent + case.left - case.x)
    allowed = EPS * np.abs(case.left) + case.fw.tiny
    good = wrong <= allowed  # false for NaN
    if case.codec.mixes:
        good |= np.abs(case.x).max() > 1e38
    assert good.all(), _worst(~good, case)


def zeros_stay_zeros(case: Case) -> None:
    """A zero input gives exact zeros, sent and left; a vote has no zero."""
    if not case.codec.additive:
        return
    zero = case.on(np.zeros_like(case.x))
    assert (zero.sent == 0).all()
    assert (zero.left == 0).all()


def runs_repeat(case: Case) -> None:
    """Payload, error and decoded values depend on nothing but the input and the call."""
    first, second = case.once, case.run()
    for what in ("payload", "error", "decoded"):
        same_bits(case.fw.array(getattr(first, what)), case.fw.array(getattr(second, what)), what)


def error_is_optional(case: Case) -> None:
    """Without the error the payload is the same, and none is returned."""
    payload, error = case.encode(want_error=False)
    assert error is None
    same_bits(case.fw.array(case.once.payload), case.fw.array(payload), "payload")


def storage_is_own(case: Case) -> None:
    """Error, payload and decoded values share no storage, and decode changes no payload.

    Horovod reduces payloads in place, and a front end works on decoded values in place.
    """
    fw, result = case.fw, case.run()
    before = fw.array(result.payload)
    if case.in_rounds:
        fw.ruin(result.decoded)
        same_bits(fw.array(case.once.error), fw.array(result.error), "error")
        return
    decoded = case.decode([result.payload], 0.5)
    same_bits(before, fw.array(result.payload), "payload after decode")
    again = case.decode([result.payload])
    same_bits(fw.array(result.decoded), fw.array(again), "decoded again")
    fw.ruin(decoded)
    same_bits(before, fw.array(result.payload), "payload after its decoded values changed")
    fw.ruin(result.payload)
    same_bits(fw.array(case.once.error), fw.array(result.error), "error")
    same_bits(fw.array(case.once.decoded), fw.array(result.decoded), "decoded values")


def payloads_add(case: Case) -> None:
    """Decoding several payloads, or their sum, gives the scaled sum of what each decodes to."""
    if case.in_rounds or not case.codec.additive:
        return
    other = case.on(case.x[::-1] * np.float32(0.5))
    first, second = case.once.payload, other.once.payload
    parts = np.abs(case.sent) + np.abs(other.sent)
    if case.codec.combine is Combine.SUM:
        with np.errstate(over="ignore"):
            summed = case.fw.array(first) + case.fw.array(second)
        payloads = [case.fw.tensor(summed)]
        eps = float(np.finfo(summed.dtype).eps)
    else:
        payloads, eps = [first, second], EPS
    scale = 1 / 3
    got = case.fw.array(case.decode(payloads, scale)).astype(np.float64)
    wrong = np.abs(got - scale * (case.sent + other.sent))
    safe = parts < 3e38  # beyond, the sum itself overflows
    if case.codec.mixes:
        parts = np.maximum(parts, 16 * np.abs(case.x).max())
    allowed = 2 * (eps * parts + case.fw.tiny) * scale + case.fw.tiny
    good = (wrong <= allowed) | ~safe
    assert good.all(), _worst(~good, case)


def bias_is_declared(case: Case) -> None:
    """A contraction never leaves more than the input; an identity leaves nothing."""
    assert isinstance(case.codec.bias, Bias)
    error, whole = case.x - case.sent, np.linalg.norm(case.x.astype(np.float64))
    if case.codec.bias is Bias.CONTRACTION:
        allowed = whole * (1 + 1e-6) + 2.0**-149 * case.x.size
        assert np.linalg.norm(error) <= allowed, (np.linalg.norm(error), whole)
    if case.codec.identity:
        same_bits(case.x, case.fw.array(case.once.decoded), "decoded")


def generators_are_left_alone(case: Case) -> None:
    """No generator of the user is moved."""
    case.fw.seed()
    expected = case.fw.draw()
    case.fw.seed()
    case.run()
    assert case.fw.draw() == expected


def bad_values_keep_the_size(case: Case) -> None:
    """Inf and NaN change neither the size of a payload nor that it can be decoded."""
    size = case.fw.array(case.once.payload).nbytes
    for value in (np.nan, np.inf, -np.inf):
        x = case.x.copy()
        x[x.size // 2 :: 1 if np.isnan(value) else x.size] = value
        payload, _ = case.on(x).encode()
        assert case.fw.array(payload).nbytes == size
        if not case.in_rounds:
            assert case.fw.array(case.decode([payload])).shape == case.x.shape


LAWS: tuple[Callable[[Case], None], ...] = (
    sizes_are_declared,
    results_are_flat_float32,
    results_are_finite,
    nothing_is_lost,
    runs_repeat,
    bias_is_declared,
)
"""Hold for every kind of values."""

FEW_KINDS_LAWS: tuple[Callable[[Case], None], ...] = (
    error_is_optional,
    storage_is_own,
    payloads_add,
    zeros_stay_zeros,
    generators_are_left_alone,
    bad_values_keep_the_size,
)
"""Hold too, and depend little on the values."""


def obey(laws: Iterable[Callable[[Case], None]], case: Case) -> None:
    """Apply laws, and name the one that is broken and the shapes."""
    for law in laws:
        with told(f"{law.__name__}, {case.call.shapes}"):
            law(case)


@contextmanager
def told(where: str) -> Iterator[None]:
    """Put where it was in front of what is wrong."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error


# For some -------------------------------------------------------------------------------------


def mean_is_unbiased(case: Case, *, keys: int = 300) -> None:
    """Over many steps the mean of what is sent is the input, within five sigma."""
    assert case.codec.bias is Bias.UNBIASED
    x = case.x.astype(np.float64)
    draws = np.stack(
        [
            Case(case.fw, case.codec, case.x, inputs.call(case.call.shapes, step=step)).sent
            for step in range(keys)
        ]
    )
    rng = np.random.default_rng(1)
    views = np.stack([np.ones_like(x), x, np.sign(x), *rng.choice([-1.0, 1.0], (8, x.size))])
    seen = draws @ views.T  # (keys, views)
    sigma = seen.std(axis=0, ddof=1) / math.sqrt(keys)
    wrong = np.abs(seen.mean(axis=0) - views @ x)
    rounding = EPS * np.abs(views) @ np.abs(x)
    assert (wrong <= 5 * sigma + rounding).all(), (wrong, sigma)
    # Element by element: the squared error of the mean is what the variance explains. Elements
    # that are drawn together count as one.
    centred = draws - draws.mean(axis=0)
    gram = centred @ centred.T / (keys - 1)
    variance, spread = np.trace(gram), ((draws.mean(axis=0) - x) ** 2).sum()
    independent = variance**2 / max((gram**2).sum(), 1e-300)
    most = 1 + 5 * math.sqrt(2 / max(independent, 1)) + 12 / max(independent, 1)
    allowed = most * variance / keys + (EPS * np.abs(x)).sum() ** 2
    assert spread <= allowed, (spread, allowed, independent)


def frameworks_agree(cases: Iterable[Case], *, scales: Iterable[float] = (1 / 3,)) -> None:
    """Payloads agree bit for bit, error and decoded values but for flushed subnormals."""
    first, *others = cases
    tiny = max(case.fw.tiny for case in (first, *others))
    for case in others:
        if not first.codec.bit_equal:
            nearly_agree(first, case, tiny)
            continue
        mine, theirs = (c.fw.array(c.once.payload) for c in (first, case))
        same_bits(mine, theirs, f"payloads of {first.fw.path} and {case.fw.path}")
        pairs = {"decoded": (first.sent, case.sent), "error": (first.left, case.left)}
        for scale in scales:
            a, b = (c.fw.array(c.decode([c.once.payload], scale)) for c in (first, case))
            pairs[f"decoded with scale {scale}"] = a.astype(np.float64), b.astype(np.float64)
        for what, (a, b) in pairs.items():
            good = np.abs(a - b) <= tiny
            assert good.all(), f"{what}: {_worst(~good, first)}"


def nearly_agree(first: Case, second: Case, tiny: float) -> None:
    """Decoded values agree to 1e-6 of themselves, or are as far from the input as each other.

    The logarithm of a value beyond 1 has fewer digits after the point, and so the value itself.
    """
    if first.codec.mixes:
        allowed = 1e-5 * np.abs(first.x).max() + tiny
        near = np.abs(first.sent - second.sent) <= allowed
        if getattr(first.codec, "then", None) is not None and not near.all():
            # What is rounded alike to 1e-5 may still get two codes: few do, and they decode alike.
            a, b = (c.fw.array(c.once.payload) for c in (first, second))
            assert np.mean(a != b) <= 0.01 + 1 / a.size, f"{np.sum(a != b)} of {a.size} differ"
            near = np.abs(first.sent - second.fw.array(second.decode([second.fw.tensor(a)])))
            near = near <= allowed
        assert near.all() or np.abs(first.x).max() > 1e38, _worst(~near, first)
        return
    share = 1e-6 + 2 * EPS * math.log1p(float(np.abs(first.x).max()))
    payload = first.fw.array(first.once.payload)
    a, b = (c.fw.array(c.decode([c.fw.tensor(payload)])) for c in (first, second))
    near = np.abs(a - b.astype(np.float64)) <= share * np.abs(a) + tiny
    assert near.all(), f"decoded from one payload: {_worst(~near, first)}"
    a, b = first.sent, second.sent
    allowed = share * np.maximum(np.abs(a), np.abs(b)) + tiny
    near = np.abs(a - b) <= allowed
    tied = np.abs(np.abs(a - first.x) - np.abs(b - first.x)) <= 4 * allowed
    assert (near | tied).all(), _worst(~(near | tied), first)
    assert np.mean(~near) <= 0.01 + 1 / near.size, f"{np.sum(~near)} of {near.size} differ"


def same_bits(a: Array, b: Array, what: str = "values", *, signed: bool = True) -> None:
    """Assert that two arrays are equal bit for bit; ``signed=False`` takes -0 for 0."""
    assert a.dtype == b.dtype, f"{what}: {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"{what}: {a.shape} and {b.shape}"
    if not signed and a.dtype.kind == "f":
        a, b = a + a.dtype.type(0), b + b.dtype.type(0)
    x, y = (np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (a, b))
    if not np.array_equal(x, y):
        at = int(np.flatnonzero(x != y)[0]) // a.itemsize
        raise AssertionError(f"{what}: at {at} of {a.size}: {a.flat[at]!r} and {b.flat[at]!r}")


def _worst(wrong: Array, case: Case) -> str:
    at = int(np.flatnonzero(wrong)[0])
    values = (case.x[at], case.sent[at], case.left[at])
    return f"{int(wrong.sum())} of {wrong.size} wrong, first at {at}: x, sent, left = {values}"
