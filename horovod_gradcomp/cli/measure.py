"""Time, memory and error of one codec on one framework, beside a plain copy.

Time is a ratio within one run: machines are shared and their speed wanders. Memory is the highest
during one encode, above what the input, the memory's state and the payload take.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from array import array
from dataclasses import replace
from typing import Any, Callable

from ..core.codec import Call, Codec, Combine, Encoded
from ..core.options import Options
from ..core.random import fold
from ..core.settings import assemble, parse_codec
from .labs import LABS, Lab
from .peak import elsewhere

_ERROR_NUMEL = 2**18  # the relative error hardly depends on more


def matrix(numel: int) -> tuple[int, int]:
    """Return a shape of at most ``numel`` elements, since some codecs treat matrices only.

    Rows are the largest power of two not above ``sqrt(numel)``.
    """
    rows = 1 << (math.isqrt(numel).bit_length() - 1)
    return rows, numel // rows


def measure(
    text: str,
    numel: int,
    *,
    framework: str = "torch",
    device: str = "cpu",
    threads: int = 1,
    ranks: int = 1,
    repeat: int = 5,
) -> dict[str, Any]:
    """Return one row.

    Args:
        text: String form of the codec, which gets its default memory.
        numel: Float32 values; those that fill the matrix are measured.
        framework: "torch" or "tensorflow".
        device: "cpu" or "cuda".
        threads: CPU threads of the framework.
        ranks: Payloads to decode. Where they combine by SUM, Horovod leaves one.
        repeat: Runs, of which the median counts.

    Returns:
        ``encode_x`` and ``decode_x`` in copies of the tensor (where payloads combine in rounds
        all is in the first, and the second is None), ``check_x`` likewise for finding out whether
        a tensor is finite, which a step does with what it encodes and with what it has decoded,
        ``bytes_per_elem``,
        ``peak_extra_bytes`` of encoding, ``rel_error`` of one encoding of Gaussian values and
        ``rel_error_heavy`` of values of Student's t with 3 degrees of freedom; ``copy_ms`` and
        ``spread``, the largest (max - min) / median of the three times.
    """
    bench = _Bench(text, numel, framework, device, threads, ranks)
    lab, codec, numel = bench.lab, bench.codec, bench.numel
    payloads = []
    for rank in range(ranks if codec.combine is Combine.GATHER else 1):
        bench.grad = lab.normal(numel, 3 + rank)
        payloads.append(bench.encode().payload)
    apart = codec.combine is not Combine.ROUNDS
    runs: list[Callable[[], Any]]
    runs = [lab.copier(numel), lambda: bench.check(bench.grad), bench.encode]
    runs += [lambda: bench.decode(payloads)] * apart
    for run in runs:
        run()
    # Interleaved, so that all meet the same machine.
    times = list(zip(*([lab.seconds(run) for run in runs] for _ in range(repeat))))
    copied, checked, encoded, *decoded = map(statistics.median, times)
    few = min(numel, _ERROR_NUMEL)
    where = (text, numel, framework, device)
    peak = elsewhere(peak_extra, *where) if device == "cpu" else peak_extra(*where)
    return {
        "codec": text,
        "framework": framework,
        "device": device,
        "numel": numel,
        "threads": threads,
        "ranks": ranks,
        "check_x": checked / copied,
        "encode_x": encoded / copied,
        "decode_x": decoded[0] / copied if decoded else None,
        "bytes_per_elem": bench.wire_bytes / numel,
        "peak_extra_bytes": peak,
        "rel_error": _error(lab, codec, few, heavy=False),
        "rel_error_heavy": _error(lab, codec, few, heavy=True),
        "copy_ms": 1e3 * copied,
        "spread": max((max(t) - min(t)) / statistics.median(t) for t in times),
    }


def peak_extra(text: str, numel: int, framework: str, device: str) -> int:
    """Return the most bytes of one encode above the input, the memory's state and the payload."""
    bench = _Bench(text, numel, framework, device)
    peak = bench.lab.peak(bench.encode) - bench.wire_bytes
    if bench.codec.combine is Combine.ROUNDS:
        peak -= 4 * bench.numel  # the reduced gradient
    if bench.state and not bench.lab.reuses:
        peak -= 4 * bench.numel  # the next state
    return max(0, peak)


class _Bench:
    """A codec with its memory, in a lab, and what it works on."""

    def __init__(
        self, text: str, numel: int, framework: str, device: str, threads: int = 1, ranks: int = 1
    ) -> None:
        settings = assemble(parse_codec(text), Options())
        codec, memory = settings.codec, settings.memory
        lab = LABS[framework](threads, device)
        call = _call(lab, codec, numel, ranks)
        (numel,) = call.sizes(numel)
        buffer = lab.normal(numel, 0) if lab.reuses else None
        spare = lab.normal(numel, 0) if lab.reuses and memory.notes else None

        def encode(grad: Any, *state: Any) -> Any:
            note = memory.note(lab.xp, grad, state, 1.0, spare) if memory.notes else None
            x = memory.compensate(lab.xp, grad, state, buffer, note=note)
            if codec.combine is Combine.ROUNDS:
                return _all_rounds(lab, codec, x, call, want_error=memory.wants_error)
            return codec.encode(lab.xp, x, call, want_error=memory.wants_error)

        self.codec, self.lab, self.numel = codec, lab, numel
        self.wire_bytes = codec.wire_bytes(*call.extents(numel))
        self.grad = lab.normal(numel, 1)
        self.state = tuple(lab.normal(numel, 2) for _ in memory.slots)
        self.check = lab.compiled(lab.xp.badness)
        self.decode = lab.compiled(lambda p: codec.decode(lab.xp, p, numel, call, scale=0.5))
        self._encode = lab.compiled(encode)

    def encode(self) -> Any:
        return self._encode(self.grad, *self.state)


def _call(lab: Lab, codec: Codec, numel: int, ranks: int) -> Call:
    call = Call(size=max(2, ranks), shapes=(matrix(numel),), key=fold(0, "bench", 1), step=1)
    return replace(call, shared=codec.initial(lab.xp, call, lab.normal(1, 0)))


def _all_rounds(lab: Lab, codec: Codec, x: Any, call: Call, *, want_error: bool) -> Encoded:
    """Return the reduced gradient in place of a payload, as if one rank were all."""
    run = codec.rounds(lab.xp, x, call, want_error=want_error)
    payload = next(run)
    while True:
        try:
            payload = run.send(payload)
        except StopIteration as end:
            finished, error = end.value
            return Encoded(finished.total, error)


def _error(lab: Lab, codec: Codec, numel: int, *, heavy: bool) -> float:
    call = _call(lab, codec, numel, 1)
    (numel,) = call.sizes(numel)
    x = lab.tensor(_values(numel, heavy))
    if codec.combine is Combine.ROUNDS:
        reduced = _all_rounds(lab, codec, lab.xp.copy(x), call, want_error=False).payload
        return lab.distance(reduced, x)
    payload = codec.encode(lab.xp, lab.xp.copy(x), call, want_error=False).payload
    return lab.distance(codec.decode(lab.xp, [payload], numel, call, scale=1.0), x)


@functools.cache
def _values(numel: int, heavy: bool) -> array[float]:
    """Return the same values for every framework: Gaussian, or of Student's t, 3 degrees."""
    draw = random.Random(0)
    if heavy:
        spread = [math.sqrt(draw.gammavariate(1.5, 2.0) / 3) for _ in range(numel)]
        return array("f", (draw.gauss(0.0, 1.0) / s for s in spread))
    return array("f", (draw.gauss(0.0, 1.0) for _ in range(numel)))
