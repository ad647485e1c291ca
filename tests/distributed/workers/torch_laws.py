"""Check the torch front end on real ranks; every check runs on every rank.

Gradients are made to measure: the loss is the sum of ``parameter * wanted``, so the gradient is
``wanted`` to the last bit, and every rank can work out what every other rank wanted.
"""

from __future__ import annotations

import copy
import hashlib
import io
import math
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable
from unittest import mock

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from horovod_gradcomp import ramp
from horovod_gradcomp.torch import (
    BindingError,
    Compression,
    DistributedOptimizer,
    ExchangeError,
    SettingsError,
    StateError,
    resize_state,
)
from tests.distributed.launch import report
from tests.distributed.workers.waits import leave_cores_to_others

KINDS = {
    "fp16": lambda **o: Compression.fp16(memory="residual", **o),
    "topk": lambda **o: Compression.topk(ratio=0.02, **o),
    "topk_f16": lambda **o: Compression.from_string("topk:ratio=0.02+fp16", **o),
    "linear4": lambda **o: Compression.linear(bits=4, **o),
    "linear8": lambda **o: Compression.linear(bits=8, block=64, **o),
    "two_phase": lambda **o: Compression.linear(bits=4, exchange="two_phase", **o),
    "two_phase_topk": lambda **o: Compression.topk(ratio=0.02, exchange="two_phase", **o),
    "randomk": lambda **o: Compression.randomk(ratio=0.05, **o),
    "acp": lambda **o: Compression.acp(rank=2, max_rate=1.0, **o),
    "acp_linear": lambda **o: Compression.from_string("acp:rank=2,max_rate=1.0+linear:bits=8", **o),
    "powersgd": lambda **o: Compression.powersgd(rank=2, max_rate=1.0, **o),
    "svd": lambda **o: Compression.svd(rank=2, max_rate=1.0, **o),
    "narrow": lambda **o: Compression.topk(ratio=0.02, state_dtype="bfloat16", **o),
    "late_topk": lambda **o: Compression.topk(ratio=0.02, start_after=4, **o),
    "ramp_topk": lambda **o: Compression.topk(ratio=ramp(0.5, 0.01, 12), **o),
    "ramp_acp": lambda **o: Compression.acp(rank=ramp(3, 1, 12, "steps"), max_rate=1.0, **o),
    "late_powersgd": lambda **o: Compression.powersgd(
        rank=2, max_rate=1.0, start_after=3, start_with="topk:ratio=0.1", **o
    ),
}
MEMORIES = {
    "momentum": lambda **o: Compression.topk(ratio=0.02, memory="momentum", **o),
    "ef21": lambda **o: Compression.topk(ratio=0.1, memory="ef21", **o),
    "differential": lambda **o: Compression.randomk(
        ratio=0.1, memory="differential:alpha=0.5", **o
    ),
    "two_phase_ef21": lambda **o: Compression.linear(
        bits=4, memory="ef21", exchange="two_phase", **o
    ),
    "two_phase_momentum": lambda **o: Compression.topk(
        ratio=0.05, memory="momentum", exchange="two_phase", **o
    ),
    "refreshed": lambda **o: Compression.linear(bits=4, memory="differential:refresh_every=4", **o),
    "differential_acp": lambda **o: Compression.acp(max_rate=1.0, memory="differential", **o),
}
"""Memories that follow the gradient in another way than by keeping books."""
ALL = {**KINDS, **MEMORIES}
LIMITS = {
    "fp16": 1e-3,  # off the books, relative: Horovod adds float16 payloads in float16
    "narrow": 1e-2,  # what is held is rounded to 8 bits of mantissa at every step
}
ROUNDED_SUMS = {"acp", "ramp_acp", "differential_acp", "powersgd"}
"""Codecs whose sums are not exact for any gradient: Horovod adds more than two of them in an order
that depends on what it happens to fuse, so that no two runs end in the same bits."""
SMALL = {"bucket_bytes": 8192}  # several buckets
CHECKS: dict[str, Callable[[], None]] = {}
JOINS: dict[str, Callable[[], None]] = {}
"""Checks that need ``HOROVOD_CACHE_CAPACITY=0``."""


def check(
    *cases: Any, into: dict[str, Any] = CHECKS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(run: Callable[..., None]) -> Callable[..., None]:
        for case in cases or [None]:
            name = run.__name__ if case is None else f"{run.__name__}-{case}"
            into[name] = run if case is None else lambda case=case: run(case)
        return run

    return add


class Net(nn.Module):
    """Two layers of equal shape, one tensor of four dimensions, small ones that ride along."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(5)
        shapes = {"a": (40, 33), "b": (40, 33), "kernel": (8, 9, 5, 5), "wide": (3, 900)}
        shapes |= {"bias": (33,), "scale": (), "tiny": (2, 2)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=gen).to(dtype)
            self.register_parameter(name, nn.Parameter(value))


SIZES = {"a": 1e3, "b": 1e-3, "kernel": 1.0, "wide": 1.0, "bias": 1.0, "scale": 1.0, "tiny": 1.0}


def wanted(name: str, like: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Return the gradient of a parameter on a rank; element 7 is a spike in some steps."""
    gen = torch.Generator().manual_seed(hash_of(f"{name}/{step}/{rank}"))
    value = torch.randn(like.shape, generator=gen) * SIZES[name] * (1 + 10 * rank)
    if step % 5 == 0 and value.numel() > 7:
        value.view(-1)[7] += 300 * SIZES[name]
    return value.to(like.dtype)


def hash_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def mean(
    name: str, like: torch.Tensor, step: int, *, of: Any = wanted, ranks: Any = None
) -> torch.Tensor:
    every = [of(name, like, step, rank).double() for rank in ranks or range(hvd.size())]
    return torch.stack(every).mean(0)


def backward(
    net: nn.Module,
    step: int,
    *,
    skip: set[str] = frozenset(),
    spoil: str = "",
    exact: bool = False,
    of: Any = wanted,
) -> None:
    """Set gradients by way of autograd, in an order that differs by rank and step.

    Exact gradients have few bits, so that a sum is the same in whatever order Horovod adds.
    """
    names = [n for n, _ in net.named_parameters() if n not in skip]
    gen = torch.Generator().manual_seed(hash_of(f"{step}/{hvd.rank()}"))
    loss = torch.zeros(())
    for i in torch.randperm(len(names), generator=gen):
        p = net.get_parameter(names[i])
        target = of(names[i], p, step, hvd.rank())
        if exact:
            target = torch.round(target / SIZES[names[i]] * 16) / 16
        if names[i] == spoil:
            target.view(-1)[3] = math.inf
        loss = loss + (p * target).sum()
    loss.backward()


def make(net: Net, compression: Any, lr: float = 1e-4, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=lr),
        named_parameters=net.named_parameters(),
        compression=compression,
        **options,
    )


def reduce(net: Net, optimizer: Any, step: int, **how: Any) -> dict[str, torch.Tensor]:
    """Do one step and return the reduced gradients."""
    optimizer.zero_grad()
    backward(net, step, **how)
    optimizer.synchronize()
    grads = {n: p.grad.clone() for n, p in net.named_parameters()}
    with optimizer.skip_synchronize():
        optimizer.step()
    return grads


def digest(values: Any) -> str:
    data = b"".join(
        v.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in values
    )
    return hashlib.sha256(data).hexdigest()


def same_everywhere(values: Any) -> None:
    every = hvd.allgather_object(digest(values))
    assert len(set(every)) == 1, f"ranks differ: {every}"


def memory(compression: Any) -> dict[str, torch.Tensor]:
    (entry,) = compression.state_dict()["optimizers"]
    return entry["memory"].get("residual", {})


def whole_state(compression: Any) -> dict[str, torch.Tensor]:
    """Return all that is carried from step to step, what ranks share included."""
    (entry,) = compression.state_dict()["optimizers"]
    owed = {n: values for n, (_, values) in entry["owed"].items()}
    tables = {**entry["memory"], **entry["shared"], "owed": owed}
    return {f"{slot}/{n}": v for slot, table in tables.items() for n, v in table.items()}


def total_residual(compression: Any, number: int = 0, ranks: Any = None) -> dict[str, torch.Tensor]:
    """Return the mean of what ranks hold, with what they hold as reducing sides.

    ``number`` is that of the optimizer, in the order in which they first stepped.
    """
    states = hvd.allgather_object(compression.state_dict())
    states = [states[rank] for rank in ranks or range(hvd.size())]
    for place, state in enumerate(states):
        state.update(rank=place, world_size=len(states))  # among those that train
        for table in state["optimizers"][number]["memory"].values():  # as precise as the books are
            table.update({name: part.double() for name, part in table.items()})
    (whole,) = resize_state(states, 1)
    return whole["optimizers"][number]["memory"].get("residual", {})


def books(
    compression: Any, kind: str, *, factor: float = 1.0, steps: int = 30, **options: Any
) -> None:
    net = Net()
    optimizer = make(net, compression, **options)
    applied = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in net.named_parameters()}
    true = copy.deepcopy(applied)
    for step in range(steps):
        grads = reduce(net, optimizer, step)
        same_everywhere(grads.values())
        for n, p in net.named_parameters():
            applied[n] += grads[n].double() / factor
            true[n] += mean(n, p, step)
    left = total_residual(compression)
    assert set(left) == {"a", "b", "kernel", "wide"}, sorted(left)
    for n in true:
        off = (applied[n] + left.get(n, 0.0) - true[n]).abs().max() / true[n].abs().max()
        assert off < LIMITS.get(kind, 2e-6), f"books of {n} are off by {off:.2e}"
        if n in left and kind not in ("fp16", "linear8"):
            assert left[n].abs().max() > 0, f"{n} has no residual: nothing was compressed"


@check(*KINDS)
def law1_books_balance(kind: str) -> None:
    books(KINDS[kind](**SMALL), kind)


@check("late_topk", "ramp_topk", "late_powersgd")
def sizes_change_at_their_steps(kind: str) -> None:
    net, compression = Net(), ALL[kind]()
    optimizer = make(net, compression)
    sent = []
    for step in range(16):
        before = compression.stats()["compressed"]["wire_bytes"] if step else 0
        reduce(net, optimizer, step)
        sent.append(compression.stats()["compressed"]["wire_bytes"] - before)
    changes = [step for step in range(1, 16) if sent[step] != sent[step - 1]]
    assert changes == {"late_topk": [4], "ramp_topk": [4, 8, 12], "late_powersgd": [3]}[kind], sent
    if kind != "late_powersgd":
        assert sent == sorted(sent, reverse=True)
    if kind == "late_topk":
        carriers = 4 * 4 * 4  # of four floats, one for each tensor
        assert sent[0] == 4 * (2 * 40 * 33 + 8 * 9 * 25 + 2700) + carriers


@check()
def a_refresh_puts_references_right() -> None:
    net, compression = Net(), MEMORIES["refreshed"](**SMALL)
    optimizer = make(net, compression, lr=0.0)
    sent = []
    for step in range(6):
        spoil = "kernel" if step == 2 and hvd.rank() == 0 else ""
        before = compression.stats()["compressed"]["wire_bytes"] if step else 0
        grads = reduce(net, optimizer, step, spoil=spoil)
        sent.append(compression.stats()["compressed"]["wire_bytes"] - before)
        if step == 3:  # as rounding would, in many steps
            (binding,) = compression._bindings
            for unit in binding.units:
                unit.store.state[1].mul_(1.5)
        if step == 4:
            (entry,) = compression.state_dict()["optimizers"]
            for n, own in entry["memory"]["own"].items():
                every = [
                    wanted(n, own, step, rank).clamp(-65504, 65504) for rank in range(hvd.size())
                ]
                true = every[hvd.rank()]
                assert (own - true).abs().max() < 1e-3 * true.abs().max(), f"reference of {n}"
                for other in (entry["memory"]["mean"][n], grads[n]):
                    off = (other - torch.stack(every).mean(0)).abs().max()
                    assert off < 2e-3 * other.abs().max(), f"mean of {n} is off by {off:.2e}"
    assert sent[4] > 3 * sent[3], sent
    assert sent[5] == sent[3] == sent[0]


@check("norm", "value")
def clipping_comes_before_the_memory(how: str) -> None:
    """What a rank clips away is never owed: the books balance for what is left."""
    net = Net()
    compression = Compression.topk(ratio=0.05, **{f"clip_{how}": 2.0}, **SMALL)
    optimizer = make(net, compression, lr=0.0)
    applied = dict.fromkeys(("a", "b", "kernel", "wide"), 0.0)
    true = dict(applied)
    for step in range(8):
        grads = reduce(net, optimizer, step)
        for n in applied:
            p = net.get_parameter(n)
            every = [wanted(n, p, step, rank).double() for rank in range(hvd.size())]
            if how == "norm":
                limit = 2.0 / math.sqrt(hvd.size())
                every = [g * min(1.0, limit / g.norm().item()) for g in every]
            else:
                every = [g.clamp(-2.0, 2.0) for g in every]
            true[n] = true[n] + torch.stack(every).mean(0)
            applied[n] = applied[n] + grads[n].double()
    left = total_residual(compression)
    for n in applied:
        off = (applied[n] + left[n] - true[n]).abs().max() / true[n].abs().max()
        assert off < 2e-6, f"books of {n} are off by {off:.2e}"


RULES = [("kernel", "randomk:ratio=0.1"), ("wide", None), ("bias", "linear"), ("a", "powersgd")]


@check()
def rules_by_name() -> None:
    """Codecs of all kinds in one model; the books balance, and a bad step touches none of them."""
    for options, factor in (({}, 1.0), ({"op": hvd.Sum, "groups": 2}, float(hvd.size()))):
        net, compression = Net(), Compression.topk(ratio=0.05, rules=RULES, **SMALL)
        optimizer = make(net, compression, lr=0.0, **options)
        applied = {n: 0.0 for n, _ in net.named_parameters()}
        true = dict(applied)
        for step in range(12):
            spoil = "kernel" if step == 5 and hvd.rank() == 0 else ""
            grads = reduce(net, optimizer, step, spoil=spoil)
            same_everywhere(grads.values())
            if step == 5:
                assert not grads["kernel"].isfinite().all()
                continue
            for n, p in net.named_parameters():
                applied[n] = applied[n] + grads[n].double() / factor
                true[n] = true[n] + mean(n, p, step)
        left = total_residual(compression)
        assert set(left) == {"a", "b", "kernel", "bias"}, sorted(left)
        for n in true:
            off = (applied[n] + left.get(n, 0.0) - true[n]).abs().max() / true[n].abs().max()
            assert off < 2e-6, f"books of {n} are off by {off:.2e}"
        assert compression.stats()["bad_steps"] == 1


@check("sum", "predivide", "groups")
def law1_under_options(option: str) -> None:
    factor, options = 1.0, {}
    if option == "sum":
        factor, options = float(hvd.size()), {"op": hvd.Sum}
    if option == "predivide":
        options = {"gradient_predivide_factor": 2.0}
    if option == "groups":
        options = {"groups": 2}
    for kind in ("topk", "linear4", "randomk"):
        books(KINDS[kind](**SMALL), kind, factor=factor, steps=6, **options)


@check(*ALL)
def law2_equal_weights(kind: str) -> None:
    net, compression = Net(), ALL[kind]()
    optimizer = make(net, compression)
    for step in range(300):
        optimizer.zero_grad()
        backward(net, step % 7)
        optimizer.step()
    same_everywhere(net.parameters())
    (entry,) = compression.state_dict()["optimizers"]
    for table in (*entry["shared"].values(), entry["memory"].get("mean", {})):
        same_everywhere(table.values())


@check("ef21", "differential", "differential_acp")
def references_follow(kind: str) -> None:
    """A gradient that stays as it is arrives whole, under every factor."""
    for options, factor in (({}, 1), ({"op": hvd.Sum}, hvd.size())):
        net = Net()
        optimizer = make(net, ALL[kind](**SMALL), lr=0.0, **options)
        for _ in range(150):
            grads = reduce(net, optimizer, 3)
        for n, p in net.named_parameters():
            true = mean(n, p, 3)
            off = (grads[n].double() / factor - true).norm() / true.norm()
            assert off < 2e-2, f"{n} is off by {off:.2e}"


@check("plain", "sum", "predivide", "groups", "passes")
def law5_none_is_plain_horovod(option: str) -> None:
    options: dict[str, Any] = {
        "plain": {},
        "sum": {"op": hvd.Sum},
        "predivide": {"gradient_predivide_factor": 2.0},
        "groups": {"groups": 2},
        "passes": {"backward_passes_per_step": 2},
    }[option]
    ends = []
    for compression in (hvd.Compression.none, Compression.none(), Compression.none):
        net = Net()
        optimizer = make(net, compression, **options)
        for step in range(10):
            optimizer.zero_grad()
            for part in range(options.get("backward_passes_per_step", 1)):
                backward(net, 2 * step + part, exact=True)
            optimizer.step()
        ends.append(digest(net.parameters()))
    assert len(set(ends)) == 1, ends


@check(
    "topk",
    "narrow",
    "linear4",
    "two_phase",
    "randomk",
    "acp",
    "powersgd",
    "ramp_acp",
    "ramp_topk",
    *MEMORIES,
)
def law6_resume(kind: str) -> None:
    straight, saved = Net(), None
    compression = ALL[kind](**SMALL)
    optimizer = make(straight, compression)
    for step in range(20):
        if step == 9:  # odd, also within a phase of a ramp
            saved = pickle.loads(pickle.dumps((straight.state_dict(), compression.state_dict())))
            saved = copy.deepcopy(saved)
        reduce(straight, optimizer, step, exact=True)
    resumed, compression = Net(), ALL[kind](**SMALL)
    resumed.load_state_dict(saved[0])
    compression.load_state_dict(saved[1])
    optimizer = make(resumed, compression)
    for step in range(9, 20):
        reduce(resumed, optimizer, step, exact=True)
    if hvd.size() > 2 and kind in ROUNDED_SUMS:
        for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
            assert (one - other).norm() < 1e-5 * (one.norm() + 1), "resumed far from straight"
    else:
        assert digest(straight.parameters()) == digest(resumed.parameters())


@check("topk", "two_phase", "randomk", "powersgd", "momentum", "ef21")
def a_run_goes_on_with_other_ranks(kind: str) -> None:
    """Saved by all ranks, resumed by a set of one: the books of what was owed still balance."""
    net, compression = Net(), ALL[kind](**SMALL)
    optimizer = make(net, compression, lr=0.0)
    applied = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in net.named_parameters()}
    true = copy.deepcopy(applied)
    for step in range(6):
        grads = reduce(net, optimizer, step)
        for n, p in net.named_parameters():
            applied[n] += grads[n].double()
            true[n] += mean(n, p, step)
    states = hvd.allgather_object(compression.state_dict())
    for size in (1, hvd.size(), 5):
        resized = resize_state(list(reversed(states)), size)
        assert [(s["rank"], s["world_size"]) for s in resized] == [(r, size) for r in range(size)]
        for n in memory(compression):
            held = torch.stack(
                [s["optimizers"][0]["memory"]["residual"][n].double() for s in resized]
            ).mean(0)
            off = (applied[n] + held - true[n]).abs().max() / true[n].abs().max()
            if kind not in ("momentum", "ef21"):
                assert off < 4e-6, f"books of {n} are off by {off:.2e}"
    again, resumed = Net(), ALL[kind](**SMALL)
    resumed.load_state_dict(resize_state(states, hvd.size())[hvd.rank()])
    optimizer = make(again, resumed, lr=0.0)
    for step in range(6, 9):
        same_everywhere(reduce(again, optimizer, step).values())
    for bad, part in (
        (states[:-1], "one of each"),
        ([*states[:-1], {**states[-1], "settings": "other"}], "settings differs"),
    ):
        with pytest.raises(StateError, match=part):
            resize_state(bad, 2)


@check(*[f"{kind}:{where}" for kind in ALL for where in ("kernel", "bias")])
def law7_bad_step(case: str) -> None:
    kind, where = case.split(":")
    net, compression = Net(), ALL[kind](**SMALL)
    optimizer = make(net, compression, lr=0.0)
    for step in range(3):
        reduce(net, optimizer, step)
    before = {n: v.clone() for n, v in whole_state(compression).items()}
    grads = reduce(net, optimizer, 3, spoil=where if hvd.rank() == hvd.size() - 1 else "")
    assert not all(g.isfinite().all() for g in grads.values()), "the bad step looks good here"
    after = whole_state(compression)
    assert all(torch.equal(before[n], after[n]) for n in before), "a bad step changed the memory"
    assert compression.stats()["bad_steps"] == 1
    grads = reduce(net, optimizer, 4)
    assert all(g.isfinite().all() for g in grads.values()), "the next step is bad too"
    same_everywhere(grads.values())
    after = whole_state(compression)
    assert any(not torch.equal(before[n], v) for n, v in after.items())
    assert all(v.isfinite().all() for v in after.values())


@check()
def two_phases_send_each_value_twice() -> None:
    """Once to the rank that reduces it, and once more in the mean of a part."""
    sent, collectives = {}, {}
    for kind in ("linear4", "two_phase"):
        net, compression = Net(), KINDS[kind](**SMALL)
        optimizer = make(net, compression)
        for step in range(3):
            reduce(net, optimizer, step)
        stats = compression.stats()
        sent[kind] = stats["compressed"]["wire_bytes_per_step"]
        collectives[kind] = stats["compressed"]["collectives_per_step"]
        (entry,) = compression.state_dict()["optimizers"]
        assert bool(entry["owed"]) == (kind == "two_phase")
    share = sent["two_phase"] / sent["linear4"]
    assert 1 < share < 1.2 + 1 / hvd.size(), sent
    buckets = len(stats["buckets"])
    assert collectives["two_phase"] == collectives["linear4"] + buckets, (collectives, buckets)


@check("topk", "linear4", "two_phase", "randomk")
def unused_on_one_rank(kind: str) -> None:
    """A parameter without a gradient on one rank is sent late, as zeros, with its residual."""
    net, compression = Net(), KINDS[kind](**SMALL)
    optimizer = make(net, compression)
    applied, true = 0.0, 0.0
    for step in range(12):
        skip = {"a"} if hvd.rank() == 0 and step % 2 else set()
        grads = reduce(net, optimizer, step, skip=skip)
        same_everywhere(grads.values())
        applied = applied + grads["a"].double()
        every = [
            0.0 * net.a.detach().double()
            if rank == 0 and step % 2
            else wanted("a", net.a, step, rank).double()
            for rank in range(hvd.size())
        ]
        true = true + torch.stack(every).mean(0)
    off = (applied + total_residual(compression)["a"] - true).abs().max() / true.abs().max()
    assert off < 2e-6, f"books are off by {off:.2e}"


@check("topk", "linear4", "randomk", "acp", "powersgd", "ramp_topk")
def law1_while_the_loss_scale_changes(kind: str) -> None:
    """The memory is held without the scale: the books balance in units of unscaled gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    net, compression = Net(), KINDS[kind](grad_scaler=scaler, **SMALL)
    optimizer = make(net, compression, lr=0.0)
    applied = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in net.named_parameters()}
    true = copy.deepcopy(applied)
    for step in range(16):
        scaler.update([1024.0, 64.0, 4096.0, 1.0][step // 4])
        scale = scaler.get_scale()
        optimizer.zero_grad()
        for n, p in net.named_parameters():
            (p * wanted(n, p, step, hvd.rank()) * scale).sum().backward()
        optimizer.synchronize()
        for n, p in net.named_parameters():
            applied[n] += p.grad.double() / scale
            true[n] += mean(n, p, step)
        with optimizer.skip_synchronize():
            optimizer.step()
    left = total_residual(compression)
    for n in left:
        off = (applied[n] + left[n] - true[n]).abs().max() / true[n].abs().max()
        assert off < 4e-6, f"books of {n} are off by {off:.2e}"


@check("topk", "ef21", "acp")
def horovods_recipe_with_a_grad_scaler(kind: str) -> None:
    """Synchronize, unscale, clip, step: a bad step on one rank halves the scale on all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    net, compression = Net(), ALL[kind](grad_scaler=scaler, **SMALL)
    optimizer = make(net, compression, lr=1e-4)
    for step in range(8):
        before = digest(net.parameters())
        held = {n: v.clone() for n, v in whole_state(compression).items()} if step else {}
        optimizer.zero_grad()
        loss = sum((p * wanted(n, p, step, hvd.rank())).sum() for n, p in net.named_parameters())
        if step == 4 and hvd.rank() == hvd.size() - 1:
            loss = loss + net.kernel.view(-1)[5] * math.inf
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e4)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (256.0 if step < 4 else 128.0), step
        assert (digest(net.parameters()) == before) == (step == 4), step
        if step == 4:
            assert all(torch.equal(held[n], v) for n, v in whole_state(compression).items())
    same_everywhere(net.parameters())


@check("topk", "randomk", "acp", "powersgd", "ef21")
def an_overflow_of_the_result_is_a_bad_step(kind: str) -> None:
    """Finite inputs whose sum, or whose cast, is not: all ranks drop the step with its memory."""
    # Low-rank factors are cut long before they overflow, so that only a cast of theirs does.
    both = ((torch.float16, 6e4), (torch.float32, 2e38))
    for dtype, size in both[: 1 if kind in ("acp", "powersgd") else 2]:
        net, compression = Net(dtype), ALL[kind](**SMALL)
        optimizer = make(net, compression, lr=0.0, op=hvd.Sum)
        for step in range(4):
            optimizer.zero_grad()
            for n, p in net.named_parameters():
                target = torch.full(p.shape, 1.0)
                if step == 2 and n in ("kernel", "a"):
                    target = torch.full(p.shape, size)
                (p * target.to(dtype)).sum().backward()
            before = {n: v.clone() for n, v in whole_state(compression).items()} if step else {}
            optimizer.synchronize()
            finite = all(p.grad.isfinite().all() for p in net.parameters())
            after = whole_state(compression)
            if step == 2:
                assert not finite, f"{dtype}: nothing overflows here"
                assert all(torch.equal(v, after[n]) for n, v in before.items()), dtype
                assert compression.stats()["bad_steps"] == 1
            else:
                assert finite, (dtype, step)
            with optimizer.skip_synchronize():
                optimizer.step()


@check()
def copies_keep_what_they_follow() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    compression = Compression.topk(grad_scaler=scaler)
    assert copy.deepcopy(compression)._grad_scaler is scaler
    assert (compression + Compression.fp16())._grad_scaler is scaler
    with pytest.raises(StateError, match="scaler"):
        pickle.dumps(compression)
    with pytest.raises(SettingsError, match="grad_scaler"):
        Compression.topk() + Compression.fp16(grad_scaler=scaler)


@check()
def a_state_is_not_lost_before_the_first_step() -> None:
    """Saved again right after loading; two optimizers that take theirs up in another order."""
    nets = {"x": Net(), "y": Net()}
    compression = Compression.topk(**SMALL)

    def optimizers(compression: Any, nets: dict[str, Net]) -> dict[str, Any]:
        return {
            key: hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=0.0),
                named_parameters=[(f"{key}.{n}", p) for n, p in net.named_parameters()],
                compression=compression,
            )
            for key, net in nets.items()
        }

    made = optimizers(compression, nets)
    for key in ("x", "y"):
        reduce(nets[key], made[key], 1)
    saved = compression.state_dict()
    nets = {"x": Net(), "y": Net()}
    again = Compression.topk(**SMALL)
    again.load_state_dict(copy.deepcopy(saved))
    kept = again.state_dict()
    assert len(kept["optimizers"]) == len(pickle.loads(pickle.dumps(again))._bindings.pending) == 2
    made = optimizers(again, nets)
    reduce(nets["y"], made["y"], 2)
    reduce(nets["x"], made["x"], 2)
    held = {n for e in again.state_dict()["optimizers"] for n in e["memory"]["residual"]}
    assert {n.split(".")[0] for n in held} == {"x", "y"}
    other = Compression.randomk(memory="none")
    other.load_state_dict({**other.state_dict(), "optimizers": [
        {"step": 3, "turns": {"q": 3}, "memory": {}, "shared": {}}
    ]})  # fmt: skip
    net = Net()
    with pytest.raises(StateError, match="buckets"):
        reduce(net, make(net, other), 0)


@check()
def a_state_finds_its_optimizer() -> None:
    """Two models of equal names and other shapes, resumed in another order; all or nothing."""
    compression, steps = Compression.topk(**SMALL), {"first": 0, "second": 0}

    def two(compression: Any) -> dict[str, Any]:
        return {key: _stack(compression, width) for key, width in (("first", 40), ("second", 48))}

    def norms(compression: Any) -> list[float]:
        tables = [e["memory"]["residual"] for e in compression.state_dict()["optimizers"]]
        return [float(sum(part.norm() for part in table.values())) for table in tables]

    made = two(compression)
    for key in ("first", "second", "first"):
        steps[key] += 1
        _step(*made[key], steps[key])
    saved, held = compression.state_dict(), norms(compression)
    for bind_first in (False, True):
        again = Compression.topk(**SMALL)
        made = two(again)
        if bind_first:
            for key in ("second", "first"):
                _step(*made[key], 5)
        again.load_state_dict(saved)
        if not bind_first:
            for key in ("second", "first"):
                again.bind_optimizer(made[key][1])
        assert norms(again) == held[::-1]
        assert [e["step"] for e in again.state_dict()["optimizers"]] == [1, 2]
    _step(*made["first"], 6)
    before = digest([part for e in again.state_dict()["optimizers"]
                     for part in e["memory"]["residual"].values()])  # fmt: skip
    damaged = copy.deepcopy(saved)
    damaged["optimizers"][0]["memory"]["residual"]["0.weight"] = torch.zeros(3)
    with pytest.raises(StateError, match="shape"):
        again.load_state_dict(damaged)
    after = digest([part for e in again.state_dict()["optimizers"]
                    for part in e["memory"]["residual"].values()])  # fmt: skip
    assert after == before
    assert [e["step"] for e in again.state_dict()["optimizers"]] == [1, 3]


def _stack(compression: Any, width: int) -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    return net, make(net, compression, lr=0.0)


def _step(net: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    gen = torch.Generator().manual_seed(9 * step + hvd.rank())
    net(torch.randn(4, net[0].in_features, generator=gen)).square().mean().backward()
    optimizer.step()


@check("topk", "two_phase", "powersgd", "ef21", "late_topk", "guarded")
def a_state_from_the_start_lets_all_begin_anew(kind: str) -> None:
    """Also what ranks share, the step, and where a guard stands."""
    if kind == "guarded":
        compression = Compression.guarded("topk:ratio=0.02", cosine=0.9, every=1, **SMALL)
    else:
        compression = ALL[kind](**SMALL)
    net = Net()
    optimizer, start = make(net, compression, lr=0.0), compression.state_dict()
    assert start["optimizers"] == []
    first = [digest(reduce(net, optimizer, step).values()) for step in range(4)]
    compression.load_state_dict(start)
    (entry,) = compression.state_dict()["optimizers"]
    assert entry["step"] == 0
    assert not any(entry["turns"].values())
    assert not entry["owed"]
    assert not any(part.any() for table in entry["memory"].values() for part in table.values())
    again = [digest(reduce(net, optimizer, step).values()) for step in range(4)]
    if hvd.size() == 2:  # sums of more depend on what Horovod fuses
        assert again == first


@check()
def that_nothing_is_compressed_is_told() -> None:
    for options, told in (({}, 1), ({"skip_1d": False}, 0)):
        vector = nn.Parameter(torch.zeros(5000))
        compression = Compression.topk(**options)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([vector], lr=1.0), [("vector", vector)], compression
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (vector * vector).sum().backward()
            optimizer.step()
        texts = [str(w.message) for w in caught if "is compressed" in str(w.message)]
        assert len(texts) == told, texts


@check("topk", "powersgd")
def a_state_is_matched_by_name(kind: str) -> None:
    """In whatever order it was saved; what does not fit is all in one message, and changes none."""
    net, compression = Net(), ALL[kind](**SMALL)
    optimizer = make(net, compression, lr=0.0)
    for step in range(3):
        reduce(net, optimizer, step)
    file = io.BytesIO()
    torch.save(compression.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)  # with weights_only, as torch has it by default
    kept = digest(whole_state(compression).values())
    reduce(net, optimizer, 3)
    (entry,) = saved["optimizers"]
    for tables in (entry["memory"], entry["shared"]):
        for slot, held in tables.items():
            tables[slot] = dict(reversed(held.items()))
    compression.load_state_dict(saved)
    assert digest(whole_state(compression).values()) == kept
    reduce(net, optimizer, 3)

    before = digest(whole_state(compression).values())
    held = entry["memory"]["residual"]
    held["other"] = held.pop("a")
    held["wide"] = held["wide"][:, :7]
    with pytest.raises(StateError) as caught:
        compression.load_state_dict(saved)
    for part in (
        "residual of 'a' is missing",
        "residual of 'other' is not known",
        "residual of 'wide' has shape (3, 7), expected (3, 900)",
    ):
        assert part in str(caught.value), caught.value
    assert digest(whole_state(compression).values()) == before
    reduce(net, optimizer, 4)


@check()
def collectives_are_counted() -> None:
    """Three small tensors in any case; payloads, or carriers and own collectives."""
    for kind, expected in {"randomk": 4, "acp": 4, "topk": 1 + 4, "powersgd": 2 + 4}.items():
        net, compression = Net(), ALL[kind]()
        optimizer = make(net, compression)
        for step in range(3):
            reduce(net, optimizer, step)
        assert compression.stats()["collectives_per_step"] == 3 + expected, kind


@check()
def doubts_are_said_once() -> None:
    net, compression = Net(), Compression.topk(**SMALL)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters()),
        named_parameters=net.named_parameters(),
        compression=compression,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            reduce(net, optimizer, step)
    assert len([w for w in caught if "start_after" in str(w.message)]) == 1


@check("topk", "two_phase", "powersgd")
def many_buckets_in_any_order(kind: str) -> None:
    """200 steps in another hook order on each rank, one exchange a parameter."""
    net, compression = Net(), KINDS[kind](bucket_bytes=4)
    optimizer = make(net, compression)
    for step in range(200):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
    assert len(compression.stats()["buckets"]) == 4
    same_everywhere(net.parameters())


@check("float16", "bfloat16", "float64")
def dtypes(name: str) -> None:
    dtype = getattr(torch, name)
    for kind, compressor in {**KINDS, "none": Compression.none}.items():
        net = Net(dtype)
        for p in net.parameters():
            p.requires_grad_(True)
        compression = compressor()
        optimizer = make(net, compression, lr=0.0)
        grads = {}
        for step in range(2):
            optimizer.zero_grad()
            for n, p in net.named_parameters():
                target = wanted(n, p.detach().float(), step, hvd.rank()) / 64
                (p * target.to(dtype)).sum().backward()
            optimizer.synchronize()
            grads = {n: p.grad.clone() for n, p in net.named_parameters()}
            with optimizer.skip_synchronize():
                optimizer.step()
        assert all(g.dtype is dtype and g.isfinite().all() for g in grads.values()), kind
        same_everywhere(grads.values())


@check("topk", "linear8", "randomk")
def strides(kind: str) -> None:
    """Expanded, transposed and channels_last gradients come back at the right coordinates."""
    torch.manual_seed(0)
    net = nn.Module()
    net.flat = nn.Parameter(torch.zeros(50, 60))
    net.turned = nn.Parameter(torch.zeros(50, 60))
    net.conv = nn.Conv2d(4, 64, 3).to(memory_format=torch.channels_last)
    compression = {
        "topk": lambda: Compression.topk(ratio=1.0),
        "linear8": lambda: Compression.linear(bits=8),
        "randomk": lambda: Compression.randomk(ratio=1.0),
    }[kind]()
    optimizer = make(net, compression, lr=0.0)
    optimizer.zero_grad()
    gen = torch.Generator().manual_seed(9)
    target = torch.randn(60, 50, generator=gen)
    image = torch.randn(2, 4, 8, 8, generator=gen).to(memory_format=torch.channels_last)
    (
        net.flat.sum() * 3 + (net.turned.t() * target).sum() + net.conv(image).square().sum()
    ).backward()
    local = {n: p.grad.clone() for n, p in net.named_parameters()}
    optimizer.synchronize()
    for n, p in net.named_parameters():
        close = 1e-6 if kind != "linear8" else 4e-3
        off = (p.grad - local[n]).abs().max() / local[n].abs().max()
        assert off <= close, f"{n}: {off}"
    with optimizer.skip_synchronize():
        optimizer.step()


@check()
def frozen_later() -> None:
    net, compression = Net(), KINDS["topk"]()
    optimizer = make(net, compression, lr=1.0)
    for step in range(3):
        reduce(net, optimizer, step)
    net.a.requires_grad_(False)
    weight, held = net.a.detach().clone(), memory(compression)["a"].clone()
    assert held.abs().max() > 0
    for step in range(3, 6):
        reduce(net, optimizer, step, skip={"a"})
    assert torch.equal(net.a, weight)
    assert torch.equal(memory(compression)["a"], held)


@check()
def two_optimizers_one_object() -> None:
    compression = KINDS["topk"](**SMALL)
    nets = [Net(), Net()]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1e-4),
            named_parameters=[(f"{i}.{n}", p) for n, p in net.named_parameters()],
            compression=compression,
        )
        for i, net in enumerate(nets)
    ]
    for step in range(6):
        for net, optimizer in zip(nets, optimizers):
            optimizer.zero_grad()
            backward(net, step)
        for optimizer in optimizers:
            optimizer.step()
    assert digest(nets[0].parameters()) == digest(nets[1].parameters())
    same_everywhere(nets[0].parameters())
    assert len(compression.state_dict()["optimizers"]) == 2


@check()
def sparse_gradients() -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        net = nn.ModuleDict({"e": nn.Embedding(200, 16, sparse=True), "l": nn.Linear(16, 90)})
        optimizer = make(net, Compression.topk(ratio=1.0), lr=0.0, sparse_as_dense=as_dense)
        for _ in range(2):
            optimizer.zero_grad()
            words = torch.tensor([3, 5, 3, 3, 9 + hvd.rank()])
            net["l"](net["e"](words)).sum().backward()
            local = net["e"].weight.grad.to_dense()
            optimizer.synchronize()
            grad = net["e"].weight.grad.to_dense()
            want = hvd.allreduce(local, name=f"want.{as_dense}")
            assert torch.allclose(grad, want, atol=1e-5), (as_dense, (grad - want).abs().max())
            with optimizer.skip_synchronize():
                optimizer.step()


@check()
def bare_allreduce() -> None:
    value = torch.full((100, 100), float(hvd.rank()))
    for _ in range(2):
        out = hvd.allreduce(value, name="bare", compression=Compression.fp16())
        assert torch.equal(out, torch.full((100, 100), (hvd.size() - 1) / 2))
    whole = torch.arange(4) * hvd.size()
    for kind in KINDS.values():
        assert torch.equal(hvd.allreduce(whole, name="whole", compression=kind()), whole)
    with pytest.raises(BindingError, match=r"\(100, 100\).*bind"):
        hvd.allreduce(value, name="bare", compression=KINDS["topk"]())


@check()
def users_generator_untouched() -> None:
    net, compression = Net(), KINDS["randomk"]()
    optimizer = make(net, compression)
    before = torch.get_rng_state()
    reduce(net, optimizer, 0)
    assert torch.equal(before, torch.get_rng_state())


@check()
def own_door_and_numbers() -> None:
    net = Net()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters(), "topk:ratio=0.01"
    )
    compression = optimizer._compression
    for step in range(3):
        reduce(net, optimizer, step)
    stats = compression.stats()
    numel = sum(net.get_parameter(n).numel() for n in ("a", "b", "kernel", "wide"))
    payload = compression._settings.codec.wire_bytes(numel) + 4
    assert stats["active"]
    assert stats["steps"] == 3
    assert stats["compressed"]["raw_bytes_per_step"] == 4 * numel
    carriers = 4 * 4 * 4  # of four floats, one for each tensor
    assert stats["compressed"]["wire_bytes_per_step"] == payload + carriers, stats["compressed"]
    assert stats["bypassed"]["wire_bytes_per_step"] == 4 * (33 + 1 + 4)
    assert sorted(stats["bypassed"]["names"]) == ["bias", "scale", "tiny"]


@check()
def copies() -> None:
    net, compression = Net(), KINDS["topk"]()
    optimizer = make(net, compression)
    for step in range(3):
        reduce(net, optimizer, step)
    for twin in (copy.deepcopy(compression), pickle.loads(pickle.dumps(compression))):
        fresh = Net()
        make_bound = make(fresh, twin)
        reduce(fresh, make_bound, 3)
        assert twin.state_dict()["optimizers"][0]["step"] == 4


@check(
    *[f"{kind}:average" for kind in ("topk", "linear4", "two_phase", "randomk", "acp", "powersgd")],
    "topk:sum",
    "two_phase:sum",
    into=JOINS,
)
def ranks_join_early(case: str) -> None:
    """Ranks run out of data one after the other; the books balance, and then all go on alike."""
    kind, op = case.split(":")
    net, compression, size = Net(), KINDS[kind](**SMALL), hvd.size()
    optimizer = make(net, compression, lr=0.0, op=hvd.Sum if op == "sum" else hvd.Average)
    applied, true = 0.0, 0.0
    steps = [3 + 2 * rank for rank in range(size)]

    def one(step: int) -> None:
        nonlocal applied, true
        grads = reduce(net, optimizer, step)
        applied = applied + grads["kernel"].double() / (size if op == "sum" else 1)
        present = [rank for rank in range(size) if step < steps[rank] or step >= steps[-1]]
        every = [wanted("kernel", net.kernel, step, rank).double() for rank in present]
        true = true + torch.stack(every).sum(0) / size

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps[hvd.rank()]):
            one(step)
        last = compression.join()
    assert last == size - 1
    for step in range(steps[-1], steps[-1] + 3):
        one(step)
        same_everywhere(net.get_parameter(n).grad for n in SIZES)
    left = total_residual(compression)["kernel"]
    if hvd.rank() == size - 1:
        off = (applied + left - true).abs().max() / true.abs().max()
        assert off < 2e-6, f"books are off by {off:.2e}"
        late = steps[-1] - steps[0]
        assert compression.stats()["joined_steps"] == (
            late if kind not in ("randomk", "acp") else 0
        )


@check(into=JOINS)
def votes_do_not_join() -> None:
    net, compression = Net(), Compression.sign(vote=True, **SMALL)
    reduce(net, make(net, compression), 0)
    with pytest.raises(BindingError, match="payloads add up"):
        compression.join()
    hvd.barrier()


@check(into=JOINS)
def a_plain_join_is_noticed() -> None:
    """hvd.join alone leaves ranks at different steps, which the next reduction tells."""
    for kind in ("topk", "randomk", "acp"):
        net, compression = Net(), KINDS[kind](**SMALL)
        optimizer = make(net, compression, lr=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(2 + hvd.rank()):
                reduce(net, optimizer, step)
            hvd.join()
        with pytest.raises(ExchangeError, match=r"compression\.join\(\)"):
            reduce(net, optimizer, 9)
        hvd.barrier()


@check()
def frozen_on_one_rank_is_noticed() -> None:
    net, compression = Net(), KINDS["topk"]()
    optimizer = make(net, compression)
    reduce(net, optimizer, 0)
    if hvd.rank() == 0:
        net.a.requires_grad_(False)
    with pytest.raises(ExchangeError, match="'a' frozen on some only"):
        reduce(net, optimizer, 1, skip={"a"} if hvd.rank() == 0 else set())


@check("fp16", "fp16_alone", "randomk", "acp", "ramp_acp")
def frozen_on_one_rank_of_what_horovod_adds_up(kind: str) -> None:
    """It counts as zero there, and keeps its memory; what the others sent reaches all ranks."""
    kinds = {**KINDS, "fp16_alone": Compression.fp16}
    net, compression = Net(), kinds[kind](**SMALL)
    optimizer = make(net, compression)
    applied = true = 0.0
    for step in range(5):
        frozen = hvd.rank() == 0 and 0 < step < 4
        net.kernel.requires_grad_(not frozen)
        grads = reduce(net, optimizer, step, skip={"kernel"} if frozen else set())
        same_everywhere(grads.values())
        every = [wanted("kernel", net.kernel, step, rank).double() for rank in range(hvd.size())]
        applied = applied + grads["kernel"].double()
        true = true + sum(every[1 if 0 < step < 4 else 0 :]) / hvd.size()
    same_everywhere(net.parameters())
    off = (applied + total_residual(compression).get("kernel", 0.0) - true).abs().max()
    limit = LIMITS["fp16"] if "fp16" in kind else 2e-6
    assert off <= limit * true.abs().max(), f"books are off by {off:.2e}"


@check("topk", "randomk")
def gradients_come_in_several_threads(kind: str) -> None:
    """As autograd has a thread for each device; the books balance."""
    net, compression = Net(), KINDS[kind](**SMALL)
    optimizer = make(net, compression, lr=0.0)
    names = [n for n, _ in net.named_parameters()]
    applied = true = 0.0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for step in range(20):
        optimizer.zero_grad()
        together = threading.Barrier(3)

        def part(mine: list[str], step: int = step, together: Any = together) -> None:
            together.wait()
            every = ((net.get_parameter(n), n) for n in mine)
            sum((p * wanted(n, p, step, hvd.rank())).sum() for p, n in every).backward()

        threads = [threading.Thread(target=part, args=(names[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
        same_everywhere(p.grad for p in net.parameters())
        applied = applied + net.a.grad.double()
        true = true + mean("a", net.a, step)
    sys.setswitchinterval(interval)
    off = (applied + total_residual(compression)["a"] - true).abs().max() / true.abs().max()
    assert off < 2e-6, f"books are off by {off:.2e}"


@check("topk", "randomk")
def a_step_is_given_up(kind: str) -> None:
    """Once the optimizer is reset, the next step works in whatever order gradients come."""
    net, compression = Net(), KINDS[kind](**SMALL)
    optimizer = make(net, compression)
    for at in range(1, 5):
        optimizer.zero_grad()
        failing = net.kernel.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sum((p * at).sum() for p in net.parameters()).backward()
        failing.remove()
        hvd.barrier()  # what was on its way has arrived
        optimizer.load_state_dict(optimizer.state_dict())
        for step in (2 * at, 2 * at + 1):
            same_everywhere(reduce(net, optimizer, step).values())
    same_everywhere(net.parameters())


@check()
def to_bind_again_changes_nothing() -> None:
    net, compression = Net(), KINDS["topk"]()
    applied = true = 0.0
    for step in range(6):
        compression.bind(net.named_parameters())
        net.zero_grad()
        backward(net, step)
        for n, p in net.named_parameters():
            p.grad = hvd.allreduce(p.grad, name=n, compression=compression)
        applied = applied + net.a.grad.double()
        true = true + mean("a", net.a, step)
    off = (applied + total_residual(compression)["a"] - true).abs().max() / true.abs().max()
    assert off < 2e-6, f"books are off by {off:.2e}"


@check(into=JOINS)
def a_rank_without_any_batch() -> None:
    net, compression = Net(), KINDS["topk"]()
    optimizer = make(net, compression)
    if hvd.rank() != hvd.size() - 1:
        with pytest.raises(BindingError, match="give every rank at least one batch"):
            reduce(net, optimizer, 0)
    hvd.join()


@check("topk", "powersgd")
def nobody_is_asked_whether_he_has_joined(kind: str) -> None:
    """An odd number of ranks has a mean that one of them could have sent alone."""
    net, compression = Net(), KINDS[kind](**SMALL)
    optimizer = make(net, compression)
    with mock.patch.object(hvd, "allgather_async", wraps=hvd.allgather_async) as gathers:
        for step in range(3):
            reduce(net, optimizer, step)
    names = [call.kwargs["name"] for call in gathers.call_args_list]
    assert not [name for name in names if name.endswith(".probe")], names


@check()
def broadcasting_the_optimizer_leaves_memories_alone() -> None:
    net, compression = Net(), KINDS["topk"](**SMALL)
    optimizer = make(net, compression)
    for step in range(3):
        reduce(net, optimizer, step)
    before = {n: v.clone() for n, v in whole_state(compression).items()}
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = whole_state(compression)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert len(set(hvd.allgather_object(digest(after.values())))) == hvd.size()
    same_everywhere(reduce(net, optimizer, 3).values())


@check("topk", "randomk")
def join_is_refused_with_a_process_set(kind: str) -> None:
    """On every rank, before any waits for another."""
    net, compression = Net(), KINDS[kind]()
    compression.bind(net.named_parameters(), process_set=hvd.ProcessSet([0]))
    with pytest.raises(BindingError, match=r"join\(\) with a process set"):
        compression.join()


@check()
def join_needs_horovod_without_its_cache() -> None:
    net, compression = Net(), KINDS["topk"]()
    optimizer = make(net, compression)
    reduce(net, optimizer, 0)
    with pytest.raises(BindingError, match="HOROVOD_CACHE_CAPACITY=0"):
        compression.join()


@check()
def elastic_training_needs_a_state_that_knows() -> None:
    net = Net()
    _optimizer = make(net, KINDS["topk"]())
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        with pytest.raises(BindingError, match=r"horovod_gradcomp\.torch\.elastic\.TorchState"):
            backward(net, 0)
    finally:
        del os.environ["HOROVOD_ELASTIC"]


@check()
def parameters_come_with_names() -> None:
    net = Net()
    for wrong, kind in ((net.parameters(), "Parameter"), (3, "int"), ([("a", 1)], "tuple")):
        with pytest.raises(BindingError, match=f"with {kind}; .*model.named_parameters"):
            Compression.topk(named_parameters=wrong)


@check()
def adasum_is_refused() -> None:
    net = Net()
    _optimizer = make(net, KINDS["topk"](), op=hvd.Adasum)
    with pytest.raises(BindingError, match="Adasum"):
        backward(net, 0)


def run_until_one_fails(checks: Mapping[str, Callable[[], None]], names: Sequence[str]) -> None:
    """Run some checks and report each; ranks are not together any more where one has failed."""
    for name in names:
        try:
            checks[name]()
            report({name: "ok"})
        except Exception:
            report({name: traceback.format_exc()})
            raise


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    leave_cores_to_others()
    run_until_one_fails({**CHECKS, **JOINS}, sys.argv[1:] or list(CHECKS))


if __name__ == "__main__":
    main()
