"""Check the hierarchical exchange on real ranks: four, as two nodes of two."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import sys
from collections import defaultdict
from typing import Any, Callable

import horovod.torch as hvd
import pytest
import torch

from horovod_gradcomp.torch import (
    BindingError,
    Compression,
    ExchangeError,
    SettingsError,
    node_process_sets,
)
from tests.distributed.workers import torch_laws as laws
from tests.distributed.workers.waits import leave_cores_to_others

PER_NODE = 2
HOW = {"exchange": "hierarchical", "ranks_per_node": PER_NODE, "bucket_bytes": 8192}
KINDS: dict[str, Callable[[], Any]] = {
    "linear4": lambda: Compression.linear(bits=4, **HOW),
    "topk": lambda: Compression.topk(ratio=0.02, **HOW),
    "qsgd": lambda: Compression.qsgd(**HOW),
    "momentum": lambda: Compression.linear(bits=4, memory="momentum", **HOW),
    "ef21": lambda: Compression.linear(bits=4, memory="ef21", **HOW),
    "refreshed": lambda: Compression.linear(
        bits=4, memory="differential:refresh_every=4,alpha=0.5", **HOW
    ),
}
CHECKS: dict[str, Callable[[], None]] = {}


def check(*cases: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return laws.check(*cases, into=CHECKS)


@check()
def without_process_sets_it_says_so() -> None:
    """Before any are made; later ones find what the first has made."""
    dynamic = os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS", "")
    if not dynamic:  # hvd.init made them
        return
    net = laws.Net()
    _optimizer = laws.make(net, KINDS["linear4"]())
    expected = r"without a process set of ranks \[0, 1\] and 3 more.*node_process_sets\(2\)"
    with pytest.raises(SettingsError, match=expected):
        laws.backward(net, 0)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = dynamic


@check("linear4:average", "topk:average", "linear4:sum", "linear4:predivide", "linear4:groups")
def books_balance(case: str) -> None:
    kind, option = case.split(":")
    options = {
        "sum": {"op": hvd.Sum},
        "predivide": {"gradient_predivide_factor": 2.0},
        "groups": {"groups": 2},
    }.get(option, {})
    factor = float(hvd.size()) if option == "sum" else 1.0
    laws.books(KINDS[kind](), kind, factor=factor, steps=8, **options)


@check("linear4", "topk", "qsgd", "refreshed")
def weights_stay_equal(kind: str) -> None:
    """Many steps in another hook order on each rank, one exchange a parameter."""
    net, compression = laws.Net(), KINDS[kind]()
    optimizer = laws.make(net, compression)
    for step in range(40 if kind == "linear4" else 12):
        optimizer.zero_grad()
        laws.backward(net, step)
        optimizer.step()
    assert len(compression.stats()["buckets"]) > 2
    assert compression.stats()["inside_bytes"] > 0
    laws.same_everywhere(net.parameters())
    (entry,) = compression.state_dict()["optimizers"]
    laws.same_everywhere(entry["memory"].get("mean", {}).values())


@check()
def bytes_are_counted_where_they_go() -> None:
    """What stats tell is what Horovod is given, by process set."""
    net, compression = laws.Net(), KINDS["linear4"]()
    optimizer = laws.make(net, compression)
    laws.reduce(net, optimizer, 0)
    before, given = compression.stats(), defaultdict(int)
    undo = [_counting(name, given) for name in ("alltoall", "allgather", "allreduce")]
    for step in range(1, 4):
        laws.reduce(net, optimizer, step)
    for put_back in undo:
        put_back()
    after = compression.stats()
    told = {
        name: after["compressed"][f"{name}_bytes"] - before["compressed"][f"{name}_bytes"]
        for name in ("wire", "inside", "between")
    }
    assert told["wire"] == told["inside"] + told["between"]
    inside = sum(n for ranks, n in given.items() if _is_node(ranks))
    across = sum(n for ranks, n in given.items() if _is_column(ranks))
    rest = sum(n for ranks, n in given.items() if len(ranks) == hvd.size())
    assert inside == told["inside"] > 0
    carriers = 3 * 4 * 4 * 4  # of four floats, one for each tensor; Horovod's optimizer sends them
    assert across + rest + carriers == told["between"], (across, rest, told)
    members = [unit.bucket for unit in compression._bindings[0].units]
    raw = 4 * sum(bucket.numel for bucket in members)
    # The whole gradient, then this rank's half of its mean with a flag.
    assert abs(inside / 3 - 1.5 * raw) <= 4 * 2 * len(members)
    assert across / 3 < 0.2 * raw / PER_NODE
    assert rest / 3 == 4  # one float that says who is there


def _is_node(ranks: tuple[int, ...]) -> bool:
    return len(ranks) == 2 and ranks[1] == ranks[0] + 1


def _is_column(ranks: tuple[int, ...]) -> bool:
    return len(ranks) == 2 and ranks[1] == ranks[0] + 2


def _counting(name: str, given: dict[tuple[int, ...], int]) -> Callable[[], None]:
    """Count the bytes of the package's own collectives by their ranks."""
    original = getattr(hvd, f"{name}_async")

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("name", "")).startswith("gradcomp."):
            ranks = kwargs.get("process_set", hvd.global_process_set).ranks
            given[tuple(ranks)] += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    setattr(hvd, f"{name}_async", counted)
    return lambda: setattr(hvd, f"{name}_async", original)


@check("linear4", "ef21")
def telemetry_changes_no_bit(kind: str) -> None:
    """What a rank leaves out is nothing: its node's sum is encoded, for which no rank speaks."""
    found = []
    for on in (False, True):
        net, compression, records = laws.Net(), KINDS[kind](), []
        optimizer = laws.make(net, compression)
        if on:
            compression.telemetry(records.append, every=2, all_ranks=True)
        seen = []
        for step in range(6):
            spoil = "kernel" if step == 3 and hvd.rank() == 0 else ""
            grads = laws.reduce(net, optimizer, step, spoil=spoil, exact=True)
            seen.append(laws.digest([*grads.values(), *laws.whole_state(compression).values()]))
        found.append(seen)
        if on:
            assert [record["step"] for record in records] == [0, 2, 4], records
            for record in records:
                told = [record["total"], *record["layers"].values()]
                if record["step"] != 2:  # the step that would have brought it was bad
                    assert record["cluster"]["ranks"] == hvd.size()
                    told += [record["cluster"], *record["cluster"]["layers"].values()]
                assert all(part["cosine"] == 1.0 for part in told), told
                assert all(part["residual_norm"] == 0.0 for part in told), told
    assert found[0] == found[1]


@check("linear4:kernel", "linear4:bias", "topk:kernel", "ef21:kernel")
def a_bad_step_is_agreed(case: str) -> None:
    kind, where = case.split(":")
    net, compression = laws.Net(), KINDS[kind]()
    optimizer = laws.make(net, compression, lr=0.0)
    for step in range(3):
        laws.reduce(net, optimizer, step)
    before = {n: v.clone() for n, v in laws.whole_state(compression).items()}
    for rank in range(hvd.size()):
        spoil = where if hvd.rank() == rank else ""
        grads = laws.reduce(net, optimizer, 3, spoil=spoil)
        assert not all(g.isfinite().all() for g in grads.values()), "looks good here"
        after = laws.whole_state(compression)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before), "the memory has changed"
    assert compression.stats()["bad_steps"] == hvd.size()
    grads = laws.reduce(net, optimizer, 4)
    assert all(g.isfinite().all() for g in grads.values()), "the next step is bad too"
    laws.same_everywhere(grads.values())


@check("linear4", "ef21", "momentum")
def resume(kind: str) -> None:
    straight, compression = laws.Net(), KINDS[kind]()
    optimizer = laws.make(straight, compression)
    saved: Any = None
    for step in range(8):
        if step == 4:
            saved = pickle.loads(pickle.dumps((straight.state_dict(), compression.state_dict())))
            saved = copy.deepcopy(saved)
        laws.reduce(straight, optimizer, step, exact=True)
    resumed, compression = laws.Net(), KINDS[kind]()
    resumed.load_state_dict(saved[0])
    compression.load_state_dict(saved[1])
    optimizer = laws.make(resumed, compression)
    for step in range(4, 8):
        laws.reduce(resumed, optimizer, step, exact=True)
    assert laws.digest(straight.parameters()) == laws.digest(resumed.parameters())


@check("linear4", "ef21")
def another_exchange_takes_over(kind: str) -> None:
    """What a rank owes of a shard goes on with it when payloads travel in another way."""
    net, compression = laws.Net(), KINDS[kind]()
    optimizer = laws.make(net, compression, lr=0.0)
    ways = ["hierarchical", "two_phase", "allgather", "hierarchical", "allgather"]
    applied, true = 0.0, 0.0
    for step in range(15):
        for unit in compression._bindings[0].units if compression._bindings else ():
            options = dataclasses.replace(unit._settings.options, exchange=ways[step // 3])
            unit._settings = dataclasses.replace(unit._settings, options=options)
        at = step if kind == "linear4" else 0
        grads = laws.reduce(net, optimizer, at)
        laws.same_everywhere(grads.values())
        applied = applied + grads["kernel"].double()
        true = true + laws.mean("kernel", net.kernel, at)
    assert not compression.state_dict()["optimizers"][0]["owed"]
    if kind == "linear4":
        off = applied + laws.total_residual(compression)["kernel"] - true
        assert off.abs().max() < 2e-6 * true.abs().max(), "books are off"
    else:  # the reference of all is the mean of all references again
        for n, own in compression.state_dict()["optimizers"][0]["memory"]["own"].items():
            mean = compression.state_dict()["optimizers"][0]["memory"]["mean"][n]
            off = hvd.allreduce(own, name=f"own.{n}") - mean
            assert off.abs().max() < 1e-5 * mean.abs().max(), n


@check()
def a_refresh_settles_what_is_owed() -> None:
    net, compression = laws.Net(), KINDS["refreshed"]()
    optimizer = laws.make(net, compression, lr=0.0)
    for step in range(6):
        laws.reduce(net, optimizer, step)
        (entry,) = compression.state_dict()["optimizers"]
        assert bool(entry["owed"]) == (step != 4), step
        if step == 4:
            for n, own in entry["memory"]["own"].items():
                mean = entry["memory"]["mean"][n]
                off = hvd.allreduce(own, name=f"own.{n}") - mean
                assert off.abs().max() < 2e-3 * mean.abs().max(), n


@check("linear4", "ef21")
def a_run_goes_on_with_other_ranks(kind: str) -> None:
    net, compression = laws.Net(), KINDS[kind]()
    optimizer = laws.make(net, compression, lr=0.0)
    for step in range(4):
        laws.reduce(net, optimizer, step)
    states = hvd.allgather_object(compression.state_dict())
    again, resumed = laws.Net(), KINDS[kind]()
    resized = laws.resize_state(states, hvd.size())
    resumed.load_state_dict(resized[hvd.rank()])
    if kind == "ef21":
        for own in resized[0]["optimizers"]:
            for n, value in own["memory"]["own"].items():
                assert torch.equal(value, own["memory"]["mean"][n]), n
    optimizer = laws.make(again, resumed, lr=0.0)
    for step in range(4, 7):
        laws.same_everywhere(laws.reduce(again, optimizer, step).values())


@check()
def unused_on_one_rank() -> None:
    net, compression = laws.Net(), KINDS["linear4"]()
    optimizer = laws.make(net, compression, lr=0.0)
    applied, true = 0.0, 0.0
    for step in range(8):
        odd = step % 2 == 1
        grads = laws.reduce(net, optimizer, step, skip={"a"} if odd and hvd.rank() == 2 else set())
        laws.same_everywhere(grads.values())
        applied = applied + grads["a"].double()
        for rank in range(hvd.size()):
            if not (odd and rank == 2):
                true = true + laws.wanted("a", net.a, step, rank).double() / hvd.size()
    off = (applied + laws.total_residual(compression)["a"] - true).abs().max()
    assert off < 2e-6 * true.abs().max(), f"books are off by {off:.2e}"


@check()
def auto_chooses_by_the_rule() -> None:
    def inside(**options: Any) -> int:
        net = torch.nn.Linear(500, 500)
        compression = Compression.linear(bits=8, **options)
        optimizer = laws.make(net, compression)
        net(torch.ones(1, 500)).sum().backward()
        optimizer.step()
        told: int = compression.stats()["inside_bytes"]
        return told

    assert inside(ranks_per_node=PER_NODE) > 0
    assert inside() == inside(ranks_per_node=4) == inside(ranks_per_node=3) == 0
    assert inside(ranks_per_node=PER_NODE, exchange="two_phase") == 0
    capacity = os.environ.get("HOROVOD_CACHE_CAPACITY")
    os.environ["HOROVOD_CACHE_CAPACITY"] = "0"  # as for ranks that join
    assert inside(ranks_per_node=PER_NODE) == 0
    del os.environ["HOROVOD_CACHE_CAPACITY"]
    assert capacity is None


@check()
def what_cannot_be_is_refused() -> None:
    for per_node, expected in {
        None: r"with 4 ranks on 1 node\(s\); expected several nodes of several ranks each",
        3: r"with 3, 1 ranks on 2 node\(s\); expected nodes of equal sizes",
        1: r"with 1, 1, 1, 1 ranks on 4 node\(s\); expected several nodes",
    }.items():
        net = laws.Net()
        _optimizer = laws.make(
            net, Compression.linear(exchange="hierarchical", ranks_per_node=per_node)
        )
        with pytest.raises(SettingsError, match=expected):
            laws.backward(net, 0)
    part = next(
        one for one in _sets() if one.ranks == [hvd.rank() // 2 * 2, hvd.rank() // 2 * 2 + 1]
    )
    net = laws.Net()
    _optimizer = laws.make(net, KINDS["linear4"](), process_set=part)
    with pytest.raises(SettingsError, match="over the process set of ranks"):
        laws.backward(net, 0)
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        net, compression = laws.Net(), KINDS["linear4"]()
        _optimizer = laws.make(net, compression)
        compression.follow_resets(_optimizer)
        with pytest.raises(SettingsError, match="in elastic training"):
            laws.backward(net, 0)
    finally:
        del os.environ["HOROVOD_ELASTIC"]
    net, compression = laws.Net(), KINDS["linear4"]()
    optimizer = laws.make(net, compression)
    laws.reduce(net, optimizer, 0)
    with pytest.raises(BindingError, match="exchange='hierarchical'"):
        compression.join()


@check()
def horovod_begins_anew() -> None:
    """Process sets are found, or made, again; other numbers may name them, or none."""
    net, compression = laws.Net(), KINDS["linear4"]()
    optimizer = laws.make(net, compression, lr=0.0)
    laws.reduce(net, optimizer, 0)
    numbers = {tuple(one.ranks): one.process_set_id for one in _sets()}
    hvd.barrier()  # a rank that shuts down takes Horovod with it
    hvd.shutdown()
    saved = compression.state_dict()
    made = [] if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") else node_process_sets(PER_NODE)
    hvd.init(process_sets=made[::-1])
    assert (saved["world_size"], saved["rank"]) == (hvd.size(), hvd.rank())
    if made:
        assert {tuple(one.ranks): one.process_set_id for one in _sets()} != numbers
    laws.same_everywhere(laws.reduce(net, optimizer, 1).values())
    compression.load_state_dict(saved)
    laws.same_everywhere(laws.reduce(net, optimizer, 1).values())
    assert compression.stats()["inside_bytes"] > 0


@check()
def a_rank_that_has_joined_is_noticed() -> None:
    """The last check: what was under way on the nodes never ends."""
    net, compression = laws.Net(), KINDS["linear4"]()
    optimizer = laws.make(net, compression)
    laws.reduce(net, optimizer, 0)
    if hvd.rank() != 3:
        with pytest.raises(ExchangeError, match=r"3 of 4 ranks.*hvd\.join"):
            laws.reduce(net, optimizer, 1)
    hvd.join()


def _sets() -> list[Any]:
    from horovod_gradcomp.torch.nodes import _known

    return list(_known().values())


def main() -> None:
    sets = [] if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") else node_process_sets(PER_NODE)
    hvd.init(process_sets=sets)
    torch.set_num_threads(1)
    leave_cores_to_others()
    laws.run_until_one_fails(CHECKS, sys.argv[1:] or list(CHECKS))
    hvd.barrier()  # a rank that ends takes Horovod with it, and other nodes may be exchanging


if __name__ == "__main__":
    main()
