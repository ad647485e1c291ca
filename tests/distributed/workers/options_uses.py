"""What surrounds an optimizer: bare reductions, copies of a compressor, errors in the slot."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import horovod.torch as hvd
import pytest
import torch

from horovod_gradcomp.torch import BindingError
from horovod_gradcomp.torch.binding import Binding
from horovod_gradcomp.torch.store import Store
from tests.distributed.workers.option_books import LIMITS, Books, build, quiet, refused, target
from tests.distributed.workers.torch_laws import Net, digest, make, whole_state

STEPS = 3


# Reductions without an optimizer ---------------------------------------------------------
def _bare(family: str, call: Any) -> str | None:
    """Reduce a tensor that belongs to nothing; without a memory it is sent as it is."""
    every = [target("a", torch.empty(40, 33), 0, rank) for rank in range(hvd.size())]
    compression, mine = build(family), every[hvd.rank()]
    with quiet():
        if family not in LIMITS:
            with refused(BindingError, "bind it first") as message:
                call(mine, compression)
            return message[0]
        out, before = call(mine, compression), every[hvd.rank()].clone()
    true = torch.stack(every).mean(0)
    assert (out - true).abs().max() <= 1e-6 * true.abs().max()
    assert torch.equal(mine, before)
    return None


def bare_allreduce(family: str) -> str | None:
    return _bare(family, lambda x, c: hvd.allreduce(x, name="bare", compression=c))


def bare_grouped_allreduce(family: str) -> str | None:
    return _bare(family, lambda x, c: hvd.grouped_allreduce([x, x], name="bare", compression=c)[1])


def _bound(family: str, reduce: Any) -> None:
    """Reduce gradients of bound parameters without an optimizer of Horovod's."""
    net = Net()
    compression = build(family, named_parameters=net.named_parameters())
    plain = torch.optim.SGD(net.parameters(), lr=1e-3)
    books = Books(family, net=net, compression=compression, optimizer=plain)
    for _ in range(STEPS):
        plain.zero_grad()
        books.backward()
        reduce(dict(net.named_parameters()), compression)
        books.take()
        plain.step()
    books.steps = compression.state_dict()["optimizers"][0]["step"]
    books.close()


def bound_allreduce(family: str) -> None:
    def reduce(params: Any, compression: Any) -> None:
        for n, p in params.items():
            p.grad = hvd.allreduce(p.grad, name=n, compression=compression)

    _bound(family, reduce)


def bound_grouped_allreduce(family: str) -> None:
    def reduce(params: Any, compression: Any) -> None:
        grads = [p.grad for p in params.values()]
        done = hvd.grouped_allreduce(grads, name="grouped", compression=compression)
        for p, grad in zip(params.values(), done):
            p.grad = grad

    _bound(family, reduce)


def reducescatter(family: str) -> str:
    with refused(BindingError, "hvd.reducescatter") as message:
        hvd.reducescatter(torch.ones(40, 33), name="scattered", compression=build(family))
    return message[0]


# Copies and errors ---------------------------------------------------------
def _goes_on(family: str, twin: Any) -> None:
    """Train, let a copy take over, and check that nothing is lost between them."""
    books = Books(family)
    for _ in range(STEPS):
        books.step()
    before, made = books.compression, twin(books.compression)
    held = {n: v.clone() for n, v in whole_state(before).items()}
    books.compression, books.net = made, Net()  # Horovod's hooks stay on the old one
    books.optimizer = make(books.net, made)
    for _ in range(2):
        books.step()
    books.close()
    assert digest(held.values()) == digest(whole_state(before).values()), "they share a memory"


def deep_copy(family: str) -> None:
    _goes_on(family, copy.deepcopy)


def pickled(family: str) -> None:
    _goes_on(family, lambda one: pickle.loads(pickle.dumps(one)))


class Interrupted(Exception):
    """What a user's own signal handler might raise."""


def interrupted(family: str) -> None:
    """An error inside ``compress`` ends a step; after the optimizer is reset the next one works."""
    books = Books(family)
    net = books.net
    books.step()
    held = {n: v.clone() for n, v in whole_state(books.compression).items()}
    owner, name = (Binding, "_bypass") if family == "none" else (Store, "take")
    inside, calls = getattr(owner, name), []

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise Interrupted
        return inside(*args, **options)

    def in_order() -> None:
        named = dict(net.named_parameters())
        loss = sum((p * target(n, p, books.at, hvd.rank())).sum() for n, p in named.items())
        loss.backward()

    books.optimizer.zero_grad()
    with mock.patch.object(owner, name, fails), pytest.raises(Interrupted):
        in_order()
    assert digest(held.values()) == digest(whole_state(books.compression).values())
    hvd.barrier()  # what was on its way has arrived
    books.optimizer.load_state_dict(books.optimizer.state_dict())  # Horovod forgets its handles
    for _ in range(2):
        books.optimizer.zero_grad()
        in_order()
        books.expect()
        books.reduce()
    books.steps += 1  # the one that counts for nothing
    books.close()


OPTIONS = {
    "bare_allreduce": bare_allreduce,
    "bare_grouped_allreduce": bare_grouped_allreduce,
    "bound_allreduce": bound_allreduce,
    "bound_grouped_allreduce": bound_grouped_allreduce,
    "reducescatter": reducescatter,
    "deep_copy": deep_copy,
    "pickled": pickled,
    "interrupted": interrupted,
}
