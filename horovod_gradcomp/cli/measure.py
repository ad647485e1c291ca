"""Time and memory of one codec on one framework, beside a plain copy.

Time is a ratio within one run: machines are shared and their speed wanders. Memory is the highest
resident size during one encode, above what the input, the memory's state and the payload take.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Callable

from ..core import random
from ..core.codec import Call, Codec
from ..core.settings import Options, assemble, parse_codec

_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")


def measure(
    text: str, numel: int, threads: int, framework: str, device: str, repeat: int
) -> dict[str, Any]:
    """Return one row.

    Args:
        text: String form of the codec, which gets its default memory.
        numel: Float32 values.
        threads: CPU threads.
        framework: "torch" or "tensorflow".
        device: "cpu" or "cuda".
        repeat: Runs, of which the median counts.

    Returns:
        ``encode_x`` and ``decode_x`` in copies of the tensor, ``bytes_per_elem``,
        ``peak_extra_bytes`` of encoding, ``rel_error`` of one encoding of Gaussian values and
        ``rel_error_heavy`` of values of Student's t with 3 degrees of freedom.
    """
    settings = assemble(parse_codec(text), Options())
    codec, memory = settings.codec, settings.memory
    lab = _Torch(threads, device) if framework == "torch" else _TensorFlow(threads)
    call = Call(size=2, shapes=((numel,),), key=random.fold(0, "bench", 1))
    grad, state = lab.normal(numel, 1), tuple(lab.normal(numel, 2) for _ in memory.slots)
    buffer = lab.scratch(numel)
    encode = lab.compiled(
        lambda g, *s: codec.encode(
            lab.xp, memory.compensate(lab.xp, g, s, buffer), call, want_error=memory.wants_error
        )
    )
    decode = lab.compiled(lambda p: codec.decode(lab.xp, [p], numel, call, scale=0.5))
    payload = encode(grad, *state).payload
    copies, encodes, decodes = [], [], []
    for _ in range(repeat):  # interleaved, so that all meet the same machine
        copies.append(lab.seconds(lambda: lab.copy(grad)))
        encodes.append(lab.seconds(lambda: encode(grad, *state)))
        decodes.append(lab.seconds(lambda: decode(payload)))
    copy = statistics.median(copies)
    peak = lab.peak(lambda: encode(grad, *state)) - codec.wire_bytes(numel)
    if buffer is None and memory.slots:
        peak -= 4 * numel  # the next state, which a framework without views makes anew
    return {
        "codec": text,
        "framework": framework,
        "device": device,
        "numel": numel,
        "encode_x": statistics.median(encodes) / copy,
        "decode_x": statistics.median(decodes) / copy,
        "bytes_per_elem": codec.wire_bytes(numel) / numel,
        "peak_extra_bytes": max(0, peak),
        "rel_error": _error(lab, codec, lab.normal(min(numel, 2**20), 3), call),
        "rel_error_heavy": _error(lab, codec, lab.heavy(min(numel, 2**20), 4), call),
        "copy_ms": 1e3 * copy,
    }


def _error(lab: Any, codec: Codec, x: Any, call: Call) -> float:
    numel = lab.xp.numel(x)
    call = Call(size=call.size, shapes=((numel,),), key=call.key)
    payload = codec.encode(lab.xp, lab.xp.copy(x), call, want_error=False).payload
    return float(lab.distance(codec.decode(lab.xp, [payload], numel, call, scale=1.0), x))


def _resident(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {key}: this measurement needs Linux")


def _host_peak(run: Callable[[], Any]) -> int:
    run()
    _RESET_PEAK.write_text("5")
    before = _resident("VmRSS")
    kept = run()
    peak = _resident("VmHWM") - before
    del kept
    return peak


class _Torch:
    def __init__(self, threads: int, device: str) -> None:
        import torch

        from ..ops import torch as xp

        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("gradcomp: --device cuda, but torch finds no CUDA device")
        torch.set_num_threads(threads)
        self.torch, self.xp, self.device = torch, xp, device

    def normal(self, numel: int, seed: int) -> Any:
        generator = self.torch.Generator(self.device).manual_seed(seed)
        return self.torch.randn(numel, generator=generator, device=self.device)

    def heavy(self, numel: int, seed: int) -> Any:
        chi = sum(self.normal(numel, seed + i).square() for i in (1, 2, 3))
        return self.normal(numel, seed) / (chi / 3).sqrt()

    def scratch(self, numel: int) -> Any:
        return self.torch.zeros(numel, device=self.device)

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def copy(self, x: Any) -> Any:
        if not hasattr(self, "_target"):
            self._target = self.torch.empty_like(x)
        return self._target.copy_(x)

    def seconds(self, run: Callable[[], Any]) -> float:
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def peak(self, run: Callable[[], Any]) -> int:
        if self.device == "cpu":
            return _host_peak(run)
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        run()
        return int(cuda.max_memory_allocated() - before)

    def distance(self, a: Any, b: Any) -> float:
        return float((a - b).norm() / b.norm())

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


class _TensorFlow:
    def __init__(self, threads: int) -> None:
        import tensorflow as tf

        from ..ops import tensorflow as xp

        if tf.config.threading.get_intra_op_parallelism_threads() != threads:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        self.tf, self.xp = tf, xp

    def normal(self, numel: int, seed: int) -> Any:
        return self.tf.random.stateless_normal((numel,), (seed, 0))

    def heavy(self, numel: int, seed: int) -> Any:
        chi = sum(self.normal(numel, seed + i) ** 2 for i in (1, 2, 3))
        return self.normal(numel, seed) / self.tf.sqrt(chi / 3)

    def scratch(self, numel: int) -> None:
        return None

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self.tf.function(fn)
        return compiled

    def copy(self, x: Any) -> Any:
        if not hasattr(self, "_target"):
            self._target = self.tf.Variable(x)
        return self._target.assign(x, read_value=False)

    def seconds(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def peak(self, run: Callable[[], Any]) -> int:
        return _host_peak(run)

    def distance(self, a: Any, b: Any) -> float:
        return float(self.tf.norm(a - b) / self.tf.norm(b))
