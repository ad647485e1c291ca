"""The hierarchical exchange: nodes, the rule that chooses it, and its books, on both frameworks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_gradcomp.codecs import build
from horovod_gradcomp.core import hierarchical, twophase
from horovod_gradcomp.core.errors import ExchangeError, SettingsError
from horovod_gradcomp.core.hierarchical import Nodes, arrange
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.core.momentum import Momentum
from horovod_gradcomp.core.reference import EF21
from horovod_gradcomp.core.route import Team, route
from horovod_gradcomp.core.settings import make
from tests import lockstep, table

SHAPES = ((37, 41), (501,), (8, 3, 3, 3), (1,), (1700,))
NUMEL = sum(map(math.prod, SHAPES))
PAIRS = arrange([0, 0, 1, 1])
THREES = arrange([0, 1, 0, 1, 0, 1])  # two nodes of three, ranks in turns
SIX = arrange([0, 0, 1, 1, 2, 2])
TANGLED = arrange([0, 1, 1, 0])
BIG = arrange([rank // 8 for rank in range(16)])


def test_nodes():
    assert PAIRS.members == ((0, 1), (2, 3))
    assert PAIRS.columns == ((0, 2), (1, 3))
    assert THREES.members == ((0, 2, 4), (1, 3, 5))
    assert THREES.across(5) == (4, 5)
    assert TANGLED.members == ((0, 3), (1, 2))
    assert TANGLED.columns == ((0, 1), (2, 3))
    assert (SIX.hosts, SIX.local, SIX.size, SIX.even) == (3, 2, 6, True)
    assert not arrange([0, 0, 1]).even
    for nodes in (PAIRS, THREES, SIX, TANGLED):
        for rank in range(nodes.size):
            assert rank in nodes.inside(rank)
            assert rank in nodes.across(rank)
            assert set(nodes.inside(rank)) & set(nodes.across(rank)) == {rank}
            turn = nodes.inside(rank).index(rank)
            assert all(nodes.inside(r).index(r) == turn for r in nodes.across(rank))


def sent_by_a_node(exchange: str, payload: int, nodes: Nodes) -> float:
    ranks, local = nodes.size, nodes.local
    return (
        payload
        * {
            "hierarchical": nodes.hosts - 1,
            "allgather": ranks - 1,
            "two_phase": (local * (ranks - local) + ranks - 1) / ranks,
        }[exchange]
    )


@pytest.mark.parametrize(
    ("text", "numel", "nodes", "chosen"),
    [
        ("linear:bits=4", 10**6, BIG, "hierarchical"),
        ("linear:bits=8", 10**6, PAIRS, "hierarchical"),
        ("linear:bits=4", 10**6, PAIRS, "two_phase"),  # what is saved is little
        ("sign", 10**6, BIG, "two_phase"),  # likewise
        ("linear:bits=4", 10**7, arrange([r // 8 for r in range(64)]), "two_phase"),  # many nodes
        ("linear:bits=4", 5_000, BIG, "whole"),  # too small
        ("topk:ratio=0.5", 10**6, BIG, "whole"),
        ("sign:vote=True", 10**7, BIG, "whole"),
        ("fp16", 10**7, BIG, "whole"),
        ("linear:bits=4", 10**6, None, "two_phase"),
    ],
)
def test_the_rule(text, numel, nodes, chosen):
    codec = build(text)
    team = Team(nodes.size if nodes else 8, 1, nodes)
    found = route("auto", codec, NoMemory(), [(numel,)], team)
    assert found.exchange == chosen
    if found.exchange == "hierarchical":
        payload = codec.wire_bytes((numel,))
        sent = sent_by_a_node("hierarchical", payload, nodes)
        least = min(sent_by_a_node(e, payload, nodes) for e in ("allgather", "two_phase"))
        inside = 2 * (nodes.local - 1) / nodes.local * 4 * numel
        assert least - sent > inside / hierarchical.INSIDE_SPEED
        assert (found.part.start, found.part.stop) == (
            numel // nodes.local,
            2 * numel // nodes.local,
        )


def test_forced():
    codec, team = build("topk"), Team(4, 2, PAIRS)
    assert route("hierarchical", codec, Residual(), SHAPES, team).exchange == "hierarchical"
    assert route("hierarchical", codec, Residual(), [(511,)], team).exchange == "whole"
    assert route("hierarchical", build("svd"), Residual(), SHAPES, team).exchange == "whole"
    assert route("hierarchical", codec, Residual(), SHAPES, Team(4, 2)).exchange == "whole"
    assert route("allgather", build("linear"), Residual(), [(10**7,)], team).exchange == "whole"


@pytest.mark.parametrize(
    ("text", "memory", "why"),
    [
        ("fp16", None, "adds its payloads up"),
        ("powersgd", None, "adds its payloads up"),
        ("svd", None, "as a whole"),
        ("topk", "momentum", "which of its values"),
        ("qsgd", "differential:alpha=0.1", "for good"),
    ],
)
def test_what_does_not_go_with_it(text, memory, why):
    with pytest.raises(SettingsError, match=f"exchange='hierarchical'.*{why}"):
        make(text, {"exchange": "hierarchical", "memory": memory})
    for codec, good in (("topk", Residual()), ("linear", Momentum()), ("linear", EF21())):
        assert not hierarchical.misfit(build(codec), good)


def test_settings():
    made = make("topk", {"exchange": "hierarchical", "rules": [("a", "powersgd")]})
    assert made.exceptions[0][1].options.exchange == "auto"


class Run:
    """Ranks that train together by this exchange."""

    def __init__(self, fw, text, nodes, memory):
        self.fw, self.nodes, self.memory = fw, nodes, memory
        self.codec = build(text).with_memory(memory.wants_error)
        self.shards = twophase.parts(SHAPES, nodes.local)
        self.server = memory.of_server(self.codec)
        self.owed = [
            tuple(
                fw.tensor(np.zeros(self.shards[nodes.inside(r).index(r)].numel, np.float32))
                for _ in self.server.slots
            )
            for r in range(nodes.size)
        ]

    def step(self, number, grads, **how):
        fw, size = self.fw, self.nodes.size
        runs = [
            hierarchical.start(
                fw.xp,
                self.codec,
                fw.tensor(grads[rank]),
                table.call(SHAPES, size=size, step=number, rank=rank),
                want_error=self.memory.wants_error,
                name="layer",
                server=twophase.Server(self.server, self.owed[rank]),
                nodes=self.nodes,
            )
            for rank in range(size)
        ]
        outcomes = lockstep.drive(fw, runs, average=False, nodes=self.nodes, **how)
        totals = [fw.array(o.total) for o in outcomes]
        assert all(t.tobytes() == totals[0].tobytes() for t in totals), "ranks differ"
        bad = {math.isnan(fw.array(o.bad)) for o in outcomes}
        assert len(bad) == 1, "ranks do not agree on a bad step"
        if bad == {True}:
            assert np.isnan(totals[0]).all()
            return None
        if self.memory.slots:
            assert not any(fw.array(o.error).any() for o in outcomes)
        if self.server.slots:
            self.owed = [(o.owed,) for o in outcomes]
        return totals[0] / size

    def left(self):
        whole = np.zeros(NUMEL)
        for rank, owed in enumerate(self.owed):
            shard = self.shards[self.nodes.inside(rank).index(rank)]
            for one in owed:
                whole[shard.start : shard.stop] += self.fw.array(one)
        return whole


def gradients(step, size):
    grads = [table.values("gaussian", NUMEL) * (r + 1) * (step % 3 + 1) for r in range(size)]
    return [np.roll(g, 17 * step + r).astype(np.float32) for r, g in enumerate(grads)]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("linear:bits=4", PAIRS),
        ("sign", THREES),
        ("onebit", SIX),
        ("fp8", TANGLED),
        ("bf16", THREES),
        ("topk:ratio=0.1", PAIRS),
    ],
)
def test_books_balance(fw, text, nodes):
    run, applied, true = Run(fw, text, nodes, Residual()), 0.0, 0.0
    for step in range(4):
        grads = gradients(step, nodes.size)
        applied = applied + run.step(step, grads)
        true = true + np.mean(np.asarray(grads, np.float64), 0)
    left = run.left()
    assert np.abs(left).max() > 0
    assert np.abs(applied + left - true).max() < 4e-6 * np.abs(true).max()


def test_unbiased_stays_so(fw):
    def error(steps):
        run = Run(fw, "qsgd", PAIRS, NoMemory())
        every = [(run.step(n, g), np.mean(g, 0)) for n, g in enumerate(map(two, range(steps)))]
        return np.linalg.norm(sum(a - b for a, b in every)) / steps

    def two(step):
        return gradients(step, 4)

    assert error(12) < 0.6 * error(2)  # falls as the root of the number of steps


@pytest.mark.parametrize(("where", "value"), [(0, math.inf), (NUMEL - 1, math.nan)])
def test_a_bad_step_is_agreed_by_all(fw, where, value):
    """A bad value lies in one shard of one node; all shards of all nodes learn of it."""
    run = Run(fw, "linear:bits=4", PAIRS, Residual())
    for rank in range(4):
        grads = gradients(0, 4)
        grads[rank][where] = value
        assert run.step(0, grads) is None
    assert run.step(0, gradients(0, 4)) is not None


def test_a_sum_that_overflows_is_a_bad_step(fw):
    run, grads = Run(fw, "bf16", PAIRS, Residual()), gradients(0, 4)
    for rank in (0, 1):  # finite on each rank; the sum is in the first shard of the first node
        grads[rank][3] = 3e38
    assert run.step(0, grads) is None


def test_nodes_send_payloads_only(fw):
    """What crosses nodes is one payload a node; all else stays inside."""
    sent = {}

    def count(turn, payloads):
        sent[turn] = [p.nbytes for p in payloads]

    run = Run(fw, "linear:bits=4", THREES, Residual())
    run.step(0, gradients(0, 6), spoil=count)
    assert sent[0] == [4 * NUMEL] * 6
    lengths = [shard.numel for shard in run.shards]
    assert len(set(lengths)) > 1, "all shards are of one size"
    for rank in range(6):
        shard = run.shards[THREES.inside(rank).index(rank)]
        assert sent[1][rank] == run.codec.wire_bytes(*shard.shapes) + 4
        assert sent[2][rank] == 4 * shard.numel + 4
    assert sum(sent[1][r] for r in THREES.members[0]) < 0.2 * 4 * NUMEL


def test_damage_names_the_rank(fw):
    run = Run(fw, "topk:ratio=0.1", PAIRS, Residual())

    def lose(turn, sent):
        if turn == 1:
            sent[3] = np.full_like(sent[3], 255)
            sent[3][-4:] = 0

    with pytest.raises(ExchangeError, match="from rank 3"):
        run.step(0, gradients(0, 4), spoil=lose)
