"""The books of one optimizer, whatever option it was made with.

What was applied and the mean of what ranks still hold is the sum of the true mean gradients; a
codec without a memory is held to a bound instead. In every step results are finite and the same
bits on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from horovod_gradcomp.torch import Compression
from tests.distributed.options import FAMILIES
from tests.distributed.workers.torch_laws import (
    SIZES,
    Net,
    backward,
    digest,
    make,
    mean,
    total_residual,
    wanted,
)

Tensor = torch.Tensor
COMPRESSED = frozenset({"a", "b", "kernel", "wide"})
"""Parameters of :class:`Net` that are large enough."""

REST = frozenset({"kernel", "wide", "bias", "scale", "tiny"})
BUCKETS = {"bucket_bytes": 20_000}
"""Two, of two parameters each."""

SHARE = 1 / 64
"""Of what torch_laws wants, so that float16 holds it."""

LIMITS = {"none": 1e-6, "fp16": 1e-3}
EXACT = 4e-6
"""Of books with a memory: the rounding of float32, relative to what has been applied."""

ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def build(family: str, **more: Any) -> Any:
    """Return a new compressor of a family, with several buckets."""
    text, options = FAMILIES[family]
    return Compression.from_string(text, **{**BUCKETS, **options, **more})


def target(name: str, like: Tensor, step: int, rank: int) -> Tensor:
    """Return the gradient of a parameter on a rank, in the parameter's dtype."""
    name = name.split(".")[-1]
    value = wanted(name, torch.empty(like.shape), step, rank) / SIZES[name]
    return (value * SHARE).to(like.dtype)


class Books:
    """A net that is trained, and what becomes of its gradients.

    Args:
        family: Of the codec.
        net: Whose parameters are trained; :class:`Net` by default.
        compression: An own one by default.
        optimizer: Horovod's, made with ``options`` by default.
        of: The gradient of a parameter on a rank in a backward pass.
        factor: On the mean.
        ranks: Who trains, all by default.
        options: Of ``hvd.DistributedOptimizer``.
    """

    def __init__(
        self,
        family: str,
        *,
        net: nn.Module | None = None,
        compression: Any = None,
        optimizer: Any = None,
        of: Callable[[str, Tensor, int, int], Tensor] = target,
        factor: float = 1.0,
        ranks: Collection[int] = (),
        **options: Any,
    ) -> None:
        self.family, self.of, self.factor, self.ranks = family, of, factor, ranks
        self.net = Net() if net is None else net
        self.compression = build(family) if compression is None else compression
        self.optimizer = optimizer or make(self.net, self.compression, **options)
        named = dict(self.net.named_parameters())
        self.applied = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in named.items()}
        self.true = {n: v.clone() for n, v in self.applied.items()}
        self.largest = dict.fromkeys(named, 0.0)
        self.digests: list[str] = []
        self.at = self.steps = 0

    def step(self, *, skip: Collection[str] = (), passes: int = 1) -> None:
        """Do one step of some backward passes."""
        self.optimizer.zero_grad()
        for _ in range(passes):
            self.backward(skip=skip)
        self.reduce()

    def backward(self, *, skip: Collection[str] = ()) -> None:
        """Do one backward pass, without some parameters."""
        backward(self.net, self.at, skip=set(skip), of=self.of)
        self.expect(skip=skip)

    def expect(self, *, skip: Collection[str] = ()) -> None:
        """Enter what a backward pass should bring."""
        for n, p in self.net.named_parameters():
            if n not in skip and p.requires_grad:
                self.enter(n, mean(n, p, self.at, of=self.of, ranks=self.ranks))
        self.at += 1

    def enter(self, name: str, value: Tensor) -> None:
        """Enter a true mean gradient."""
        self.true[name] += value
        self.largest[name] += value.abs().max().item()

    def reduce(self) -> None:
        """Reduce what backward passes have brought, and step."""
        self.optimizer.synchronize()
        self.take()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def take(self) -> None:
        """Enter what was applied."""
        self.steps += 1
        grads = {n: p.grad for n, p in self.net.named_parameters() if p.requires_grad}
        grads = {n: g.to_dense() if g.is_sparse else g for n, g in grads.items()}
        self.digests.append(digest(grads.values()))
        for n, p in self.net.named_parameters():
            if n in grads:
                assert grads[n].isfinite().all(), f"{n} is not finite"
                assert grads[n].dtype is p.dtype, f"{n}: {grads[n].dtype}, not {p.dtype}"
                self.applied[n] += grads[n].double() / self.factor

    def close(
        self,
        *,
        held: Collection[str] = COMPRESSED,
        unused: Collection[str] = (),
        names: Callable[[str], str] = str,
        number: int = 0,
    ) -> None:
        """Check the books and what is remembered.

        Args:
            held: Parameters that are compressed.
            unused: Those of them that never came.
            names: What a parameter is called by the optimizer.
            number: Of the optimizer under its compressor.
        """
        every = hvd.allgather_object(self.digests)
        assert all(every[rank] == self.digests for rank in self.ranks or range(hvd.size())), (
            f"ranks differ: {every}"
        )
        left = total_residual(self.compression, number, self.ranks)
        remembers = self.family not in LIMITS
        assert set(left) == ({names(n) for n in held} if remembers else set()), sorted(left)
        limit = LIMITS.get(self.family, EXACT)
        for n, p in self.net.named_parameters():
            residual = left.get(names(n), torch.zeros(()))
            error = (self.applied[n] + residual - self.true[n]).abs().max().item()
            allowed = max(limit, ROUNDING.get(p.dtype, 0.0)) * self.largest[n]
            assert error <= allowed, f"books of {n} are off by {error:.2e}, not {allowed:.2e}"
            if names(n) in left and n not in unused:
                assert residual.abs().max() > 0, f"{n} has no residual: nothing was compressed"
        entry = self.compression.state_dict()["optimizers"][number]
        assert entry["step"] == self.steps, f"{entry['step']} steps, expected {self.steps}"
        if self.family == "none":
            assert not entry["memory"]
            assert not entry["shared"]
        else:
            stats = self.compression.stats()["compressed"]
            assert 0 < stats["wire_bytes_per_step"] < 4 * stats["numel"], "nothing was compressed"
        assert self.compression.stats()["bad_steps"] == 0


@contextmanager
def quiet() -> Iterator[None]:
    """Let warnings pass that a check brings about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def refused(kind: type[Exception], part: str) -> Iterator[list[str]]:
    """Catch the error that is expected, and keep the first line of its message."""
    message: list[str] = []
    try:
        yield message
    except kind as error:
        (line, *_) = str(error).splitlines()
        assert part in line, line
        message.append(line)
        return
    raise AssertionError(f"no {kind.__name__} was raised")
