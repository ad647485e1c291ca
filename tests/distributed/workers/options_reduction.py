"""What can be asked of ``hvd.DistributedOptimizer``, and of several at once."""

from __future__ import annotations

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

from horovod_gradcomp.torch import BindingError
from tests.distributed.workers.option_books import COMPRESSED, Books, build, refused, target
from tests.distributed.workers.torch_laws import Net, backward, make, mean

STEPS = 3


def average(family: str) -> None:
    books = Books(family)
    for _ in range(STEPS):
        books.step()
    books.close()


def sum_(family: str) -> None:
    books = Books(family, op=hvd.Sum, factor=hvd.size())
    for _ in range(STEPS):
        books.step()
    books.close()


def adasum(family: str) -> str:
    net = Net()
    _optimizer = make(net, build(family), op=hvd.Adasum)
    with refused(BindingError, "op=Adasum") as message:
        backward(net, 0)
    return message[0]


def predivide(family: str) -> None:
    books = Books(family, gradient_predivide_factor=4.0)
    for _ in range(STEPS):
        books.step()
    books.close()


def passes(family: str) -> None:
    books = Books(family, backward_passes_per_step=2)
    for _ in range(STEPS):
        books.step(passes=2)
    books.step(passes=1)  # as at the end of an epoch
    books.step(passes=2)
    books.close()


def groups_number(family: str) -> None:
    books = Books(family, groups=3)
    for _ in range(STEPS):
        books.step()
    books.close()


def groups_list(family: str) -> None:
    """One member of a group has no gradient in every second step."""
    net = Net()
    groups = [[net.a, net.b], [net.kernel, net.bias, net.scale]]
    books = Books(family, net=net, groups=groups)
    for step in range(5):
        books.step(skip={"a"} if step % 2 else ())
    books.close()


class Words(nn.Module):
    """An embedding that is used through a few of its rows, beside a dense parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.zeros(200, 16))
        self.a = nn.Parameter(torch.zeros(40, 33))


def _sparse(family: str, as_dense: bool) -> None:
    net = Words()
    books = Books(family, net=net, sparse_as_dense=as_dense)
    for step in range(STEPS):
        rows = [torch.arange(60) % 55 * 3 + rank for rank in range(hvd.size())]  # some twice
        every = [
            target("wide", torch.empty(60, 16), step, rank).double() for rank in range(hvd.size())
        ]
        mine, of_mine = rows[hvd.rank()], every[hvd.rank()].float()
        books.optimizer.zero_grad()
        of_a = target("a", net.a, step, hvd.rank())
        found = F.embedding(mine, net.e, sparse=True)
        ((found * of_mine).sum() + (net.a * of_a).sum()).backward()
        assert net.e.grad.is_sparse
        true = torch.zeros(200, 16, dtype=torch.float64)
        for where, values in zip(rows, every):
            true.index_add_(0, where, values / hvd.size())
        books.enter("e", true)
        books.enter("a", mean("a", net.a, step, of=target))
        books.reduce()
    if as_dense:
        books.close(held={"e", "a"})
        return
    error = (books.applied["e"] - books.true["e"]).abs().max()
    assert error <= 1e-6 * books.largest["e"], f"sent as it is, and off by {error:.2e}"
    books.close(held={"e", "a"}, unused={"e"})


def sparse_as_dense(family: str) -> None:
    _sparse(family, True)


def sparse(family: str) -> None:
    _sparse(family, False)


def parameter_groups(family: str) -> None:
    net = Net()
    parts = [{"params": [net.wide, net.a]}, {"params": [net.b, net.kernel], "lr": 0.5}]
    parts += [{"params": [net.bias, net.scale, net.tiny], "momentum": 0.9}]
    compression = build(family)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parts, lr=1e-3),
        named_parameters=net.named_parameters(),
        compression=compression,
    )
    books = Books(family, net=net, compression=compression, optimizer=optimizer)
    for _ in range(STEPS):
        books.step()
    books.close()


def no_names(family: str) -> None:
    """Horovod names parameters by group and place."""
    net, compression = Net(), build(family)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1e-3), compression=compression
    )
    books = Books(family, net=net, compression=compression, optimizer=optimizer)
    for _ in range(STEPS):
        books.step()
    places = [n for n, _ in net.named_parameters()]
    books.close(names=lambda n: f"allreduce.noname.0.{places.index(n)}")


def _two(family: str, compressions: list) -> list[Books]:
    """Train two nets whose backward passes come before any step."""
    every = []
    for i, compression in enumerate(compressions):
        net = nn.ModuleDict({f"net{i}": Net()})
        every.append(Books(family, net=net, compression=compression))
    for _ in range(STEPS):
        for books in every:
            books.optimizer.zero_grad()
            books.backward()
        for books in reversed(every):
            books.reduce()
    return every


def two_optimizers_two_objects(family: str) -> None:
    for i, books in enumerate(_two(family, [build(family), build(family)])):
        books.close(held={f"net{i}.{n}" for n in COMPRESSED})


def two_optimizers_one_object(family: str) -> None:
    for i, books in enumerate(_two(family, [build(family)] * 2)):
        assert len(books.compression.state_dict()["optimizers"]) == 2
        books.close(held={f"net{i}.{n}" for n in COMPRESSED}, number=i)


def synchronize_then_step(family: str) -> None:
    """A plain step reduces again what was reduced, as a step of its own."""
    books = Books(family)
    for _ in range(STEPS):
        books.optimizer.zero_grad()
        books.backward()
        books.optimizer.synchronize()
        books.optimizer.step()
        books.steps += 1
        books.take()
    books.close()


OPTIONS = {
    "average": average,
    "sum": sum_,
    "adasum": adasum,
    "predivide": predivide,
    "passes": passes,
    "groups_number": groups_number,
    "groups_list": groups_list,
    "sparse_as_dense": sparse_as_dense,
    "sparse": sparse,
    "parameter_groups": parameter_groups,
    "no_names": no_names,
    "two_optimizers_two_objects": two_optimizers_two_objects,
    "two_optimizers_one_object": two_optimizers_one_object,
    "synchronize_then_step": synchronize_then_step,
}
