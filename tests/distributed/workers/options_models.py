"""Models whose parameters, gradients or graphs are out of the ordinary."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from horovod_gradcomp.torch import StateError
from tests.distributed.workers.option_books import COMPRESSED, Books, refused, target
from tests.distributed.workers.torch_laws import Net, mean

STEPS = 3


def _trained(family: str, net: nn.Module, **more: Any) -> Books:
    books = Books(family, net=net, **more)
    for _ in range(STEPS):
        books.step()
    return books


def float16(family: str) -> None:
    _trained(family, Net(torch.float16)).close()


def bfloat16(family: str) -> None:
    _trained(family, Net(torch.bfloat16)).close()


def float64(family: str) -> None:
    _trained(family, Net(torch.float64)).close()


def mixed(family: str) -> None:
    net = Net()
    for name, dtype in {"a": "float16", "b": "bfloat16", "kernel": "float64"}.items():
        p = net.get_parameter(name)
        p.data = p.data.to(getattr(torch, dtype))
    net.bias.data = net.bias.data.bfloat16()
    _trained(family, net).close()


def channels_last(family: str) -> None:
    net = Net()
    net.kernel = nn.Parameter(net.kernel.detach().to(memory_format=torch.channels_last))
    books = Books(family, net=net)
    for _ in range(STEPS):
        books.optimizer.zero_grad()
        books.backward()
        assert not net.kernel.grad.is_contiguous()
        books.reduce()
    books.close()


def turned(family: str) -> None:
    """Parameters, and so their gradients, that are transposed and do not lie in one piece."""
    net = Net()
    net.a = nn.Parameter(torch.zeros(33, 40).t())
    net.wide = nn.Parameter(torch.zeros(900, 3).t())
    books = Books(family, net=net)
    for _ in range(STEPS):
        books.optimizer.zero_grad()
        books.backward()
        assert not net.a.grad.is_contiguous()
        assert not net.wide.grad.is_contiguous()
        books.reduce()
    books.close()


def expanded(family: str) -> None:
    """Gradients that a user has set: one row for all, or every second column of a larger one."""
    books = Books(family)
    net = books.net
    late = ("a", "wide")
    for step in range(STEPS):
        books.optimizer.zero_grad()
        books.backward(skip=late)
        rows = [target("bias", torch.empty(1, 33), step, r) for r in range(hvd.size())]
        larger = [target("wide", torch.empty(3, 1800), step, r) for r in range(hvd.size())]
        net.a.grad = rows[hvd.rank()].expand(40, 33)
        net.wide.grad = larger[hvd.rank()][:, ::2]
        books.enter("a", torch.stack(rows).double().mean(0).expand(40, 33))
        books.enter("wide", torch.stack(larger).double().mean(0)[:, ::2])
        books.reduce()
    books.close()


def frozen(family: str) -> None:
    """One parameter that never trains, and one that stops."""
    net = Net()
    net.b.requires_grad_(False)
    books = Books(family, net=net)
    for _ in range(STEPS):
        books.step()
    net.a.requires_grad_(False)
    weight = net.a.detach().clone()
    for _ in range(2):
        books.step(skip={"a", "b"})
    assert torch.equal(net.a, weight), "a frozen parameter moves"
    books.close(held=COMPRESSED - {"b"})


def tied(family: str) -> None:
    """One parameter under two names."""
    net = Net()
    net.again = net.a
    books = Books(family, net=net)
    for step in range(STEPS):
        books.optimizer.zero_grad()
        own = {n: target(n, p, step, hvd.rank()) for n, p in net.named_parameters()}
        other = target("b", net.again, step, hvd.rank())
        loss = sum((net.get_parameter(n) * g).sum() for n, g in own.items())
        (loss + (net.again * other).sum()).backward()
        books.expect()
        books.enter("a", mean("b", net.a, step, of=target))
        books.reduce()
    books.close()


def used_sometimes(family: str) -> None:
    books = Books(family)
    for step in range(5):
        books.step(skip={"kernel", "bias"} if step % 2 else ())
    books.close()


def used_on_one_rank(family: str) -> None:
    """A parameter that one rank does not use counts as zero there, and is owed no less."""

    def of(name: str, like: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        value = target(name, like, step, rank)
        return value * 0 if name == "kernel" and rank == 0 and step % 2 else value

    books = Books(family, of=of)
    for step in range(5):
        books.optimizer.zero_grad()
        absent = {"kernel"} if hvd.rank() == 0 and step % 2 else set()
        loss = sum(
            (p * of(n, p, step, hvd.rank())).sum()
            for n, p in books.net.named_parameters()
            if n not in absent
        )
        loss.backward()
        books.expect()
        books.reduce()
    books.close()


def unfrozen_later(family: str) -> None:
    """Horovod never reduces it, nor what is added later; nothing else suffers."""
    net = Net()
    net.b.requires_grad_(False)
    books = Books(family, net=net)
    books.step()
    net.b.requires_grad_(True)
    more = nn.Parameter(torch.zeros(50, 40))
    books.optimizer.add_param_group({"params": [more]})
    for _ in range(2):
        books.optimizer.zero_grad()
        (more * (1.0 + hvd.rank())).sum().backward()
        books.backward()
        books.true["b"].zero_()
        books.optimizer.synchronize()
        assert torch.equal(more.grad, torch.full_like(more, 1.0 + hvd.rank()))
        assert torch.equal(net.b.grad, target("b", net.b, books.at - 1, hvd.rank()))
        net.b.grad = None  # each rank's own: keep it out of the books
        net.b.requires_grad_(False)
        books.take()
        with books.optimizer.skip_synchronize():
            books.optimizer.step()
        net.b.requires_grad_(True)
    books.close(held=COMPRESSED - {"b"})


def made_anew(family: str) -> Any:
    """A new optimizer for more parameters starts without a memory; the old state is refused.

    The model is a new one, too, since Horovod's hooks stay on the parameters of an old optimizer.
    """
    net = Net()
    net.b.requires_grad_(False)
    first = _trained(family, net)
    saved = copy.deepcopy(first.compression.state_dict())
    again = _trained(family, Net())
    again.close()
    message = [None]
    if family == "none":  # whose states hold nothing
        again.compression.load_state_dict(saved)
        again.steps = first.steps
    else:
        with refused(StateError, "does not fit the model") as message:
            again.compression.load_state_dict(saved)
    again.step()
    again.close()
    return message[0]


OPTIONS = {
    "float16": float16,
    "bfloat16": bfloat16,
    "float64": float64,
    "mixed": mixed,
    "channels_last": channels_last,
    "turned": turned,
    "expanded": expanded,
    "frozen": frozen,
    "tied": tied,
    "used_sometimes": used_sometimes,
    "used_on_one_rank": used_on_one_rank,
    "unfrozen_later": unfrozen_later,
    "made_anew": made_anew,
}
