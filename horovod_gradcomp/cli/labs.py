"""One framework on one device, as :mod:`.measure` needs it: tensors, clock, copy and peak memory.

On the CPU a copy is one thread's memcpy between buffers that exist, for every framework: times are
comparable between frameworks, and TensorFlow, where assigning a tensor to a variable copies
nothing, has no such copy of its own.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from array import array
from typing import Any, Callable

from .peak import host_peak


class Lab(ABC):
    """What differs between frameworks and devices.

    Attributes:
        xp: The operations module.
        reuses: Whether the error is left in the storage of the input, as torch's front end has it.
    """

    xp: Any
    reuses: bool

    def __init__(self, device: str) -> None:
        self.device = device

    @abstractmethod
    def tensor(self, values: array[float]) -> Any:
        """Return a tensor of float32 values on the device."""

    @abstractmethod
    def normal(self, numel: int, seed: int) -> Any:
        """Return Gaussian values on the device, other ones than another framework's."""

    @abstractmethod
    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` as the framework's front end would run it."""

    @abstractmethod
    def distance(self, a: Any, b: Any) -> float:
        """Return ``||a - b|| / ||b||``."""

    @abstractmethod
    def _wait(self) -> None:
        """Return when the accelerator has finished."""

    @abstractmethod
    def _copier(self, numel: int) -> Callable[[], Any]:
        """Return a copy of ``numel`` float32 values within the accelerator."""

    @abstractmethod
    def _peak(self, run: Callable[[], Any]) -> int:
        """Return the most bytes of the accelerator that ``run`` takes above those taken before."""

    def copier(self, numel: int) -> Callable[[], Any]:
        """Return what copies ``numel`` float32 values into storage that exists."""
        if self.device != "cpu":
            return self._copier(numel)
        nbytes = 4 * numel
        source, target = (ctypes.create_string_buffer(nbytes) for _ in range(2))
        for buffer in (source, target):
            ctypes.memset(buffer, 1, nbytes)  # so that it has memory of its own
        return lambda: ctypes.memmove(target, source, nbytes)

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return how long ``run`` takes."""
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def peak(self, run: Callable[[], Any]) -> int:
        """Return the most bytes that ``run`` takes above those taken before it.

        On the CPU that is only seen where :func:`.peak.elsewhere` calls.
        """
        return host_peak(run) if self.device == "cpu" else self._peak(run)


class Torch(Lab):
    """PyTorch."""

    reuses = True

    def __init__(self, threads: int, device: str) -> None:
        super().__init__(device)
        import torch

        from ..ops import torch as xp

        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("gradcomp: --device cuda, but torch finds no CUDA device")
        torch.set_num_threads(threads)
        self.torch, self.xp = torch, xp

    def tensor(self, values: array[float]) -> Any:
        flat = self.torch.frombuffer(values, dtype=self.torch.float32)
        return flat.to(self.device, copy=True)

    def normal(self, numel: int, seed: int) -> Any:
        generator = self.torch.Generator(self.device).manual_seed(seed)
        return self.torch.randn(numel, generator=generator, device=self.device)

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def distance(self, a: Any, b: Any) -> float:
        return float((a - b).norm() / b.norm())

    def _copier(self, numel: int) -> Callable[[], Any]:
        source, target = self.torch.zeros(2, numel, device=self.device)
        return lambda: target.copy_(source)

    def _peak(self, run: Callable[[], Any]) -> int:
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        run()
        return int(cuda.max_memory_allocated() - before)

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


class TensorFlow(Lab):
    """TensorFlow, each function traced once."""

    reuses = False

    def __init__(self, threads: int, device: str) -> None:
        super().__init__(device)
        import tensorflow as tf

        from ..ops import tensorflow as xp

        if device == "cuda" and not tf.config.list_physical_devices("GPU"):
            raise SystemExit("gradcomp: --device cuda, but TensorFlow finds no GPU")
        config = tf.config.threading
        if config.get_intra_op_parallelism_threads() != threads:
            config.set_intra_op_parallelism_threads(threads)
            config.set_inter_op_parallelism_threads(threads)
        tf.get_logger().setLevel("ERROR")  # it warns of retracing when it sees many functions
        self.tf, self.xp = tf, xp
        self._where = "/GPU:0" if device == "cuda" else "/CPU:0"

    def tensor(self, values: array[float]) -> Any:
        with self.tf.device(self._where):
            return self.tf.identity(self.tf.io.decode_raw(values.tobytes(), self.tf.float32))

    def normal(self, numel: int, seed: int) -> Any:
        with self.tf.device(self._where):
            return self.tf.random.stateless_normal((numel,), (seed, 0))

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        traced = self.tf.function(fn)

        def run(*args: Any) -> Any:
            with self.tf.device(self._where):
                return traced(*args)

        return run

    def distance(self, a: Any, b: Any) -> float:
        return float(self.tf.norm(a - b) / self.tf.norm(b))

    def _copier(self, numel: int) -> Callable[[], Any]:
        source = self.normal(numel, 0)
        return lambda: self.tf.raw_ops.DeepCopy(x=source)

    def _peak(self, run: Callable[[], Any]) -> int:
        memory = self.tf.config.experimental
        memory.reset_memory_stats("GPU:0")
        before = memory.get_memory_info("GPU:0")["current"]
        run()
        return int(memory.get_memory_info("GPU:0")["peak"] - before)

    def _wait(self) -> None:
        if self.device == "cuda":
            self.tf.test.experimental.sync_devices()


LABS: dict[str, Callable[[int, str], Lab]] = {"torch": Torch, "tensorflow": TensorFlow}
"""By framework: what makes a lab of a number of CPU threads and "cpu" or "cuda"."""
