"""Gradients are reduced here where no optimizer of Horovod's does it: for Keras 3 on torch.

Each gradient takes Horovod's own path (``compress``, allreduce, ``decompress``), and it is said
which parameter it belongs to instead of being found out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import horovod.torch as hvd
import torch

from .binding import Binding
from .bindings import OPS
from .compression import Compression, Compressor

Tensor = torch.Tensor


class Reduction:
    """Reduces the gradients of one optimizer.

    Args:
        compression: One of :data:`Compression`, its string form, or one of ``hvd.Compression``.
        name: Equal on all ranks; part of the names on the wire.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: The ranks that train together.
        gradient_predivide_factor: With Average, gradients are divided by it before the sum and
            the rest of the division comes after; above 0.
        sparse_as_dense: Without effect: sparse gradients are always made dense here.
        groups: Describes the optimizer when variables are bound, as parameter groups, so that it
            can be told what goes badly with it.
        facts: What else must be alike on all ranks, by the names of arguments.

    Raises:
        SettingsError: One of these is something else.
    """

    def __init__(
        self,
        compression: Any,
        *,
        name: str,
        op: Any = hvd.Average,
        process_set: Any = hvd.global_process_set,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        groups: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        facts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.compression = Compression.resolve(compression, hvd.Compression.none)
        self.process_set = process_set
        self.count = 0
        self._name, self._op, self._groups = name, op, groups
        self._predivide = gradient_predivide_factor if op == hvd.Average else 1.0
        self._facts = {
            "op": OPS.get(op, str(op)),
            "gradient_predivide_factor": f"{self._predivide:g}",
            **facts,
        }
        self._bindings: dict[tuple[int, ...], Binding] = {}

    @property
    def active(self) -> bool:
        """Whether there is any rank to reduce with."""
        return bool(self.process_set.included()) and self.process_set.size() > 1

    def __call__(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        *,
        names: Sequence[str],
        states: Collection[int] = (),
        scale: Any = None,
    ) -> list[Any]:
        """Return the reduced gradients.

        Args:
            grads: Tensors or None, for each variable. The same ones must be None on all ranks.
            variables: Parameters, in the same order on all ranks.
            names: Of the variables; numbers at the ends of their parts may differ between ranks.
            states: Positions of what is no gradient but a new value, which is always averaged and
                never compressed.
            scale: What the loss was multiplied by, where that changes from step to step. Memories
                are then kept in units of unscaled gradients.
        """
        if not self.active or all(grad is None for grad in grads):
            return list(grads)
        ours = isinstance(self.compression, Compressor)
        if not ours or self.compression.never_remembers:
            scale = None
        with torch.no_grad():
            sent = [
                None if grad is None else self._send(i, grad, variables, names, states, scale)
                for i, grad in enumerate(grads)
            ]
            reduced = [None if one is None else self._receive(*one) for one in sent]
            self.count += 1
            return [
                out if out is None or i in states else _multiplied(out, scale, grad)
                for i, (out, grad) in enumerate(zip(reduced, grads))
            ]

    def _send(
        self,
        i: int,
        grad: Tensor,
        variables: Sequence[Any],
        names: Sequence[str],
        states: Collection[int],
        scale: Any,
    ) -> tuple[Any, Any, Any]:
        grad = grad.detach()
        slot, op, ctx = self.compression, self._op, None
        if i in states:
            payload, slot, op = grad, hvd.Compression.none, hvd.Average
        else:
            # Where float16 could not hold an unscaled gradient, float32 does.
            grad = grad if scale is None else grad.float() / _plain(scale)
            grad = grad.to_dense() if grad.is_sparse else grad
            if isinstance(slot, Compressor):
                slot = self._binding(variables, names)
                payload, ctx = slot.compress(i, grad)
            else:
                payload, ctx = slot.compress(grad)
        handle = hvd.allreduce_async(
            payload.contiguous(),
            name=f"gradcomp.{self._name}.{i}",
            op=op,
            prescale_factor=1.0 / self._predivide,
            postscale_factor=self._predivide,
            process_set=self.process_set,
        )
        return handle, slot, ctx

    def _receive(self, handle: Any, slot: Any, ctx: Any) -> Tensor:
        out: Tensor = slot.decompress(hvd.synchronize(handle), ctx)
        return out

    def _binding(self, variables: Sequence[Any], names: Sequence[str]) -> Binding:
        key = tuple(map(id, variables))
        if key not in self._bindings:
            named = [
                (f"{i}.{re.sub(NUMBER, '', name)}", v)
                for i, (name, v) in enumerate(zip(names, variables))
            ]
            bindings = self.compression._bindings
            self._bindings[key] = bindings.bind(
                named, self.process_set, self._groups(), self._facts
            )
        return self._bindings[key]


NUMBER = r"_\d+(?=/|$)"
"""What Keras puts at the end of a name that it has given before."""


def _plain(scale: Any) -> Tensor:
    value: Tensor = getattr(scale, "value", scale)
    return value.detach()


def _multiplied(out: Tensor, scale: Any, like: Tensor) -> Tensor:
    return out if scale is None else (out * _plain(scale)).to(like.dtype)
