"""Some of the ranks, one of them, and ranks that change: sets, joining, elastic training."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch

from horovod_gradcomp.torch import BindingError, ExchangeError
from horovod_gradcomp.torch.elastic import TorchState
from tests.distributed.workers.option_books import Books, build, quiet, refused, target
from tests.distributed.workers.options_uses import bound_allreduce
from tests.distributed.workers.torch_laws import (
    Net,
    backward,
    digest,
    make,
    mean,
    memory,
    whole_state,
)

STEPS = 3
PAIR = hvd.ProcessSet([0, 2])
"""Of three ranks, with the same mean rank as all of them."""
ALONE = hvd.ProcessSet([1])
"""The rank that is left over."""


# Elastic training, as far as one set of ranks shows it --------------------------------------------
def elastic_of_horovod(family: str) -> str | None:
    books = Books(family)
    with mock.patch.dict(os.environ, HOROVOD_ELASTIC="1"):
        if family == "none":
            books.step()
            books.close()
            return None
        with refused(BindingError, "horovod_gradcomp.torch.elastic.TorchState") as message:
            backward(books.net, 0)
    return message[0]


def elastic_commit(family: str) -> None:
    """Steps after a commit are taken back, and done again; the books do not notice.

    Whenever ranks meet again they share what they have not yet sent, so that bits are the same from
    the second time on.
    """
    books = Books(family)
    state = TorchState(model=books.net, optimizer=books.optimizer, kept=None)
    for _ in range(2):
        books.step()
    state.commit()
    saved = copy.deepcopy((books.applied, books.true, books.largest, books.at, books.steps))
    ends = []
    for _ in range(3):
        books.step()
        ends.append(digest([*books.net.parameters(), *whole_state(books.compression).values()]))
        state.restore()
        books.applied, books.true, books.largest, books.at, books.steps = copy.deepcopy(saved)
    assert ends[1] == ends[2], "done again otherwise"
    state.sync()
    books.step()
    books.close()


# Ranks that stop early ---------------------------------------------------------
def _until_they_join(books: Books) -> None:
    """Let rank 0 do one step fewer than the others."""
    size, last = hvd.size(), hvd.size() - 1
    for step in range(3):
        if step == 2 and hvd.rank() == 0:
            continue
        books.optimizer.zero_grad()
        backward(books.net, step, of=target)
        for n, p in books.net.named_parameters():
            present = [rank for rank in range(size) if step < 2 or rank]
            every = [target(n, p, step, rank).double() for rank in present]
            books.enter(n, torch.stack(every).sum(0) / size)
        books.at = step + 1
        books.optimizer.synchronize()
        for n, p in books.net.named_parameters():
            books.applied[n] += p.grad.double()
        with books.optimizer.skip_synchronize():
            books.optimizer.step()
    with quiet():
        assert books.compression.join() in range(size)
    for own in (books.applied, books.true):
        for n, value in own.items():
            own[n] = hvd.broadcast(value, last, name=n)
    books.largest = hvd.broadcast_object(books.largest, last)
    books.at, books.steps = 3, 3


def join(family: str) -> None:
    """Ranks have other numbers of batches; then all go on alike, and the books balance."""
    books = Books(family)
    with quiet():
        _until_they_join(books)
    for _ in range(2):
        books.step()
    books.close()


def plain_join(family: str) -> str | None:
    """``hvd.join`` alone leaves ranks at different steps."""
    net, compression = Net(), build(family)
    optimizer = make(net, compression)
    with quiet():
        for step in range(2 + 2 * (hvd.rank() > 0)):
            optimizer.zero_grad()
            backward(net, step, of=target)
            optimizer.step()
        hvd.join()
    before = _owed(compression)
    optimizer.zero_grad()
    backward(net, 5, of=target)
    try:
        optimizer.synchronize()
    except ExchangeError as error:
        hvd.barrier()
        return str(error)
    after, off = _owed(compression), 0.0
    for n, p in net.named_parameters():
        true = mean(n, p, 5, of=target)
        error = p.grad + after.get(n, 0.0) - before.get(n, 0.0) - true
        off = max(off, error.abs().max().item() / true.abs().max().item())
    assert max(hvd.allgather_object(off)) < 0.01, "nothing was noticed, and gradients are wrong"
    return None


def _owed(compression: Any) -> dict[str, torch.Tensor]:
    held = sorted(memory(compression).items())
    return {n: hvd.allreduce(v.double(), name=f"owed.{n}") for n, v in held}


def join_with_cache(family: str) -> str | None:
    """Horovod's response cache is on, as it is by default."""
    books = Books(family)
    books.step()
    if any(unit.gathers for b in books.compression._bindings for unit in b.units):
        with refused(BindingError, "HOROVOD_CACHE_CAPACITY=0") as message:
            books.compression.join()
        return message[0]
    books = Books(family)
    _until_they_join(books)
    books.step()
    books.close()
    return None


# Process sets ---------------------------------------------------------
def process_set(family: str) -> None:
    """Two of three ranks train; the third steps by itself."""
    books = Books(family, process_set=PAIR, ranks=(0, 2))
    for _ in range(STEPS):
        if PAIR.included():
            books.step()
        else:
            books.optimizer.zero_grad()
            books.backward()
            books.take()
            books.optimizer.step()
    if PAIR.included():
        books.close()
    else:
        hvd.allgather_object(books.digests)  # as close() does
        total = hvd.allgather_object(books.compression.state_dict())
        assert not total[1]["optimizers"], "a rank outside of the set has reduced something"


def other_process_set(family: str) -> str | None:
    """Bound to all ranks, and reduced over some of them."""
    net = Net()
    compression = build(family, named_parameters=net.named_parameters())
    mine = PAIR if PAIR.included() else ALONE
    every = {n: [target(n, p, 0, r) for r in range(3)] for n, p in net.named_parameters()}
    for n, p in net.named_parameters():
        p.grad = every[n][hvd.rank()].clone()

    def reduce(over: Any) -> Any:
        return hvd.allreduce(net.a.grad, name="a", compression=compression, process_set=over)

    reduce(hvd.global_process_set)
    before = {n: v.clone() for n, v in whole_state(compression).items()}
    with refused(BindingError, "process set") as message:
        reduce(mine)
    assert digest(before.values()) == digest(whole_state(compression).values())
    out = reduce(hvd.global_process_set)
    assert out.isfinite().all()
    return message[0]


# One rank ---------------------------------------------------------
def one_rank(family: str) -> None:
    """Horovod reduces nothing: gradients stay as they are, and nothing is remembered."""
    net, compression = Net(), build(family)
    optimizer = make(net, compression)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(net, step, of=target)
        optimizer.synchronize()
        for n, p in net.named_parameters():
            assert torch.equal(p.grad, target(n, p, step, 0)), n
        with optimizer.skip_synchronize():
            optimizer.step()
    assert not compression.stats()["active"]
    assert not compression.state_dict()["optimizers"]


def one_rank_bound(family: str) -> None:
    """A bound compressor works among one rank as among many."""
    bound_allreduce(family)


TWO = {
    "elastic_of_horovod": elastic_of_horovod,
    "elastic_commit": elastic_commit,
    "join_with_cache": join_with_cache,
}
THREE = {
    "join": join,
    "plain_join": plain_join,
    "process_set": process_set,
    "other_process_set": other_process_set,
}
"""These need three ranks and ``HOROVOD_CACHE_CAPACITY=0``."""
ONE = {"one_rank": one_rank, "one_rank_bound": one_rank_bound}
