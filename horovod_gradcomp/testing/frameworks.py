"""Both frameworks behind one small face, so that a test is written once.

torch comes twice: as users have it, with the compiled kernels, and with tensor operations alone.
TensorFlow comes with the kernels. A framework or a library that is missing makes its tests fail;
nothing is skipped.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = ("torch", "tensorflow")
"""Of the front ends."""

PATHS = ("torch", "torch_plain", "tensorflow")
"""Of the ways through a codec."""


def without_kernels(xp: Any, **replaced: Any) -> Any:
    """Return operations without compiled kernels, some of them others."""
    return SimpleNamespace(**{**vars(xp), "kernels": lambda *tensors: None, **replaced})


def rebound(module: Any, **replaced: Any) -> Any:
    """Return a module's functions with some of the names that they use replaced."""
    names = {**vars(module), **replaced}
    made = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and name not in replaced:
            made[name] = FunctionType(value.__code__, names, name, value.__defaults__)
            made[name].__kwdefaults__ = value.__kwdefaults__
    return SimpleNamespace(**made)


class Framework:
    """A framework's operations, and the way between its tensors and NumPy's.

    Attributes:
        name: "torch" or "tensorflow".
        path: One of :data:`PATHS`.
        xp: The operations module under test.
        tiny: What may be lost of a value: the framework may flush subnormals to zero.
    """

    name: str
    path: str
    tiny: float

    def __init__(self) -> None:
        self.xp = importlib.import_module(f"horovod_gradcomp.ops.{self.name}")

    def tensor(self, values: Any) -> Any:
        """Return a tensor of its own storage with the values and dtype of an array."""
        raise NotImplementedError

    def array(self, tensor: Any) -> NDArray[Any]:
        """Return a tensor's values in storage of their own."""
        raise NotImplementedError

    def cast(self, tensor: Any, dtype: str) -> Any:
        """Return a tensor as another dtype, bfloat16 among them, which NumPy has not."""
        raise NotImplementedError

    def ruin(self, tensor: Any) -> None:
        """Overwrite a tensor's storage, where the framework lets one."""

    def seed(self) -> None:
        """Seed every generator that a user may have seeded."""
        random.seed(3)
        np.random.seed(3)

    def draw(self) -> list[float]:
        """Draw from every generator that a user may draw from."""
        return [random.random(), np.random.random()]


class Torch(Framework):
    """PyTorch on the CPU, with the compiled kernels where they are built."""

    name, path, tiny = "torch", "torch", 2.0**-149

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.framework = torch
        torch.set_num_threads(1)

    def tensor(self, values: Any) -> Any:
        return self.framework.from_numpy(np.array(values))

    def cast(self, tensor: Any, dtype: str) -> Any:
        return tensor.to(getattr(self.framework, dtype))

    def array(self, tensor: Any) -> NDArray[Any]:
        return np.array(tensor.detach().numpy())

    def ruin(self, tensor: Any) -> None:
        tensor.fill_(77)

    def seed(self) -> None:
        super().seed()
        self.framework.manual_seed(3)

    def draw(self) -> list[float]:
        return [*super().draw(), float(self.framework.rand(()))]


class PlainTorch(Torch):
    """PyTorch with tensor operations alone."""

    path = "torch_plain"

    def __init__(self) -> None:
        super().__init__()
        self.xp = without_kernels(self.xp)


class TorchOn(PlainTorch):
    """Tensor operations on another device, such as "cuda"; not one of the usual paths."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.path, self.device = f"torch_{device}", device

    def tensor(self, values: Any) -> Any:
        return super().tensor(values).to(self.device)

    def array(self, tensor: Any) -> NDArray[Any]:
        return super().array(tensor.cpu())


class TensorFlow(Framework):
    """TensorFlow on the CPU, with the compiled kernels where they are built."""

    name, path, tiny = "tensorflow", "tensorflow", 2.0**-126

    def __init__(self) -> None:
        super().__init__()
        import tensorflow

        self.framework = tensorflow

    def tensor(self, values: Any) -> Any:
        return self.framework.constant(np.array(values))

    def cast(self, tensor: Any, dtype: str) -> Any:
        return self.framework.cast(tensor, dtype)

    def array(self, tensor: Any) -> NDArray[Any]:
        return np.array(tensor.numpy())

    def seed(self) -> None:
        super().seed()
        self.framework.random.set_seed(3)
        self.framework.random.get_global_generator().reset_from_seed(3)

    def draw(self) -> list[float]:
        tf = self.framework
        own = tf.random.get_global_generator().uniform(())
        return [*super().draw(), float(tf.random.uniform(())), float(own)]


class PlainTensorFlow(TensorFlow):
    """Tensor operations alone; not one of the usual paths."""

    path = "tensorflow_plain"

    def __init__(self) -> None:
        super().__init__()
        self.xp = without_kernels(self.xp)


@functools.cache
def load(path: str) -> Framework:
    """Return a framework by one of :data:`PATHS`, or "tensorflow_plain"."""
    classes = (Torch, PlainTorch, TensorFlow, PlainTensorFlow)
    return next(cls for cls in classes if cls.path == path)()
