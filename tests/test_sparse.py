"""Sparsifiers against NumPy forms of their rules, and the draws of ``bernoulli``."""

import dataclasses
import math

import numpy as np
import pytest

from horovod_gradcomp import SettingsError
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core import random
from horovod_gradcomp.core.codec import Bias, Combine
from horovod_gradcomp.core.memory import Residual
from horovod_gradcomp.testing import frameworks
from tests import checks, lockstep, reference, table

F32 = np.float32
TORCH = frameworks.load("torch")


def case_of(fw, text, x, *, memory=True, step=5, size=3, rank=0):
    x = np.asarray(x, F32)
    call = table.call(table.whole(x.size), step=step, size=size, rank=rank)
    return checks.Case(fw, build(text).with_memory(memory), x, call)


def same(case, sent):
    """What is decoded and what is left are those of a rule, but for flushed subnormals."""
    flushed = lambda v: np.where(np.abs(v) < case.fw.tiny, F32(0), v.astype(F32))  # noqa: E731
    fw = case.fw
    checks.same_bits(flushed(sent), flushed(fw.array(case.once.decoded)), "sent", signed=False)
    left = case.x - sent
    checks.same_bits(flushed(left), flushed(fw.array(case.once.error)), "left", signed=False)


# threshold -------------------------------------------------------------------------------------


def above(x, value, max_ratio):
    """Return what is kept, by a full sort."""
    order = np.lexsort((np.arange(x.size), -np.abs(x).astype(np.float64)))
    k = min(max(round(max_ratio * x.size), 1), x.size)
    count = min(max((np.abs(x) > F32(value)).sum(), 1), k)
    out = np.zeros_like(x)
    out[order[:count]] = x[order[:count]]
    return out


@pytest.mark.parametrize("max_ratio", [1e-4, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("kind", table.VALUES)
def test_threshold_is_the_rule(kind, max_ratio):
    for n in (1, 9, 1001, 70_003):
        x = table.values(kind, n)
        for value in (1e-3, 0.25, 2.0, float(np.quantile(np.abs(x), 0.99)) or 1.0, 1e30):
            value = max(value, 2.0**-126)
            case = case_of(TORCH, f"threshold:value={value!r},max_ratio={max_ratio}", x)
            same(case, above(x, value, max_ratio))


def test_threshold_in_both_frameworks(fw):
    for kind in ("gaussian", "ties", "zeros", "subnormal", "third_zeros"):
        for value, max_ratio in ((0.25, 0.5), (2.0, 0.05), (1e9, 0.01)):
            x = table.values(kind, 1001)
            case = case_of(fw, f"threshold:value={value},max_ratio={max_ratio}", x)
            same(case, above(x, value, max_ratio))


def test_what_equals_the_threshold_is_not_above_it(fw):
    case = case_of(
        fw, "threshold:value=0.25,max_ratio=1", [0.25, -0.25, 0.5, np.nextafter(F32(0.25), F32(1))]
    )
    assert np.flatnonzero(case.sent).tolist() == [2, 3]


def test_the_largest_alone_where_none_is_above(fw):
    case = case_of(fw, "threshold:value=7,max_ratio=1", [1.0, -3.0, 3.0, 2.0])
    assert case.sent.tolist() == [0, -3, 0, 0]


def test_threshold_takes_one_pass_and_no_selection(fw):
    """Where some, and not too many, are above it."""
    asked = []

    def counted(x, k):
        asked.append(fw.xp.numel(x))
        return fw.xp.kth_largest(x, k)

    ops = type("Ops", (), {**vars(fw.xp), "kth_largest": staticmethod(counted)})
    for name, value in vars(fw.xp).items():
        if callable(value) and name != "kth_largest":
            setattr(ops, name, staticmethod(value))
    x = table.values("gaussian", 200_003)
    codec = build("threshold:value=3,max_ratio=0.01")
    call = table.call(table.whole(x.size))
    codec.encode(ops, fw.tensor(x), call, want_error=True)
    assert asked == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_threshold_of_bad_values(fw, bad):
    for share in (0.001, 0.3, 1.0):
        x = table.values("ties", 1001)
        x[: math.ceil(share * x.size)] = bad
        case = case_of(fw, "threshold:value=1,max_ratio=0.02", x)
        assert fw.array(case.once.decoded).shape == x.shape


# dgc -------------------------------------------------------------------------------------------


def test_dgc_selects_as_topk(fw):
    for kind in ("heavy", "ties", "zeros"):
        x = table.values(kind, 200_003)
        for text in ("", ",select=exact"):
            a = case_of(fw, f"dgc:ratio=0.001{text}", x)
            where = reference.topk_positions(a.x, 200)
            sent = np.zeros_like(a.x)
            sent[where] = a.x[where]
            same(a, sent)
    assert build("dgc").count(1_000_000) == 1000


# bernoulli -------------------------------------------------------------------------------------


def gaps(key, p, count):
    """Return geometric numbers, two digits each, from powers of the probability to lose."""
    base = math.ceil(math.sqrt(min(23 / p, 2.0**31)))
    cumulated = lambda exponent: -np.expm1(exponent * np.log1p(-p)) if p < 1 else exponent * 0 + 1.0  # noqa: E731
    low = cumulated(np.arange(1.0, base)) / cumulated(np.float64(base))
    high = cumulated(base * np.arange(1.0, base + 1))
    words = reference.words(key, 0, 2 * count).astype(np.int64)
    digits = [
        np.searchsorted(np.rint(steps * 2.0**32), drawn, side="right")
        for steps, drawn in ((low, words[:count]), (high, words[count:]))
    ]
    return digits[0] + base * digits[1]


def drawn(numel, p, key):
    """Return the positions of a step."""
    k = min(math.ceil(numel * p + 5 * math.sqrt(numel * p * (1 - p)) + 5), numel)
    where = np.cumsum(gaps(key, p, k) + 1) - 1
    return where[where < numel]


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "bare"])
@pytest.mark.parametrize("p", [1e-5, 0.001, 0.01, 0.3, 0.99, 1.0])
def test_bernoulli_is_the_rule(p, memory):
    for n in (1, 9, 1001, 70_003):
        for step in (0, 5):
            case = case_of(
                TORCH, f"bernoulli:p={p}", table.values("gaussian", n), memory=memory, step=step
            )
            where = drawn(n, p, case.call.key)
            sent = np.zeros_like(case.x)
            sent[where] = case.x[where] * (F32(1) if memory else F32(1 / p))
            same(case, sent)


def test_bernoulli_in_both_frameworks(fw):
    for p in (0.01, 1e-4):
        case = case_of(fw, f"bernoulli:p={p}", np.ones(70_003))
        assert np.flatnonzero(case.sent).tolist() == drawn(70_003, p, case.call.key).tolist()


def chi_square_is_right(counts, expected):
    assert expected.min() >= 5
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("p", [0.5, 0.03, 1e-3, 1e-6, 2.0**-25])
def test_gaps_are_geometric(p):
    count, cells = 400_000, 200
    like = TORCH.tensor(np.zeros(1, F32))
    got = TORCH.array(random.geometric(TORCH.xp, random.fold(0, "w", 1), p, count, like))
    edges = np.unique(
        np.floor(np.log1p(-np.arange(1, cells) / cells) / np.log1p(-p)).astype(np.int64)
    )
    tail = np.concatenate([[1.0], np.exp((edges + 1) * np.log1p(-p)), [0.0]])  # P(gap > edge)
    counts = np.bincount(np.searchsorted(edges, got), minlength=edges.size + 1)
    chi_square_is_right(counts, -np.diff(tail) * count)
    spread = math.sqrt(1 - p) / p / math.sqrt(count)
    assert abs(got.mean() - (1 - p) / p) < 5 * spread


def test_gaps_follow_one_another_independently():
    like = TORCH.tensor(np.zeros(1, F32))
    got = TORCH.array(random.geometric(TORCH.xp, random.fold(0, "w", 1), 0.01, 200_000, like))
    order = np.argsort(np.argsort(got, kind="stable"), kind="stable").astype(np.float64)
    for lag in (1, 2, 3, 100):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / math.sqrt(got.size)


def test_every_position_is_as_likely_and_independent_of_the_step_before():
    n, p, steps = 2000, 0.05, 4000
    like = TORCH.tensor(np.zeros(1, F32))
    kept = np.zeros((steps, n), bool)
    for step in range(steps):
        call = table.call(table.whole(n), step=step)
        where, inside, _ = build(f"bernoulli:p={p}").draw(TORCH.xp, n, call, like)
        kept[step, TORCH.array(where)[TORCH.array(inside)]] = True
    sigma = math.sqrt(p * (1 - p))
    seen = kept.sum(axis=0)
    statistic = ((seen - steps * p) ** 2).sum() / (steps * sigma**2)
    assert abs(statistic - n) < 5 * math.sqrt(2 * n)
    each = kept.sum(axis=1)
    assert abs(each.mean() - n * p) < 5 * sigma * math.sqrt(n / steps)
    assert abs(each.var() / (n * sigma**2) - 1) < 5 * math.sqrt(2 / steps)
    for a, b in ((kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept[:, 77:], kept[:, :-77])):
        both = (a & b).sum()
        assert abs(both - a.size * p**2) < 5 * math.sqrt(a.size) * p * math.sqrt(1 - p**2)


@pytest.mark.parametrize("p", [1e-6, 1e-4, 0.01, 0.2, 0.5, 0.9])
def test_draws_are_hardly_ever_dropped(p):
    for n in (5, 100, 1024, 30_000, 1_000_000, 20_000_000):
        k = build(f"bernoulli:p={p}").count(n)
        log = lambda i, n=n: (  # noqa: E731 - of the probability of i draws
            math.lgamma(n + 1)
            - math.lgamma(i + 1)
            - math.lgamma(n - i + 1)
            + i * math.log(p)
            + (n - i) * math.log1p(-p)
        )
        beyond = sum(math.exp(log(i)) for i in range(k + 1, min(n, k + 5000) + 1))
        assert beyond < 1e-6, (n, k, beyond)


# cltk ------------------------------------------------------------------------------------------


class Simulated:
    """N ranks of cyclic local top-k with residuals, in NumPy, from the rule."""

    def __init__(self, size, numel, k):
        self.size, self.k = size, k
        self.where = np.array(
            reference.randomk_positions(numel, k, reference.key(0, lockstep.NAME, 0))
        )
        self.left = np.zeros((size, numel), F32)

    def step(self, number, grads):
        x = grads + self.left
        total = np.zeros(x.shape[1], F32)
        for row in x:
            total[self.where] += row[self.where]
        self.left = x.copy()
        self.left[:, self.where] = 0
        leader = (number + 1) % self.size
        self.where = reference.topk_positions(self.left[leader], self.k)
        return total * F32(1 / self.size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_cltk_follows_the_rule(fw, size):
    for numel, ratio in ((300, 0.05), (140_003, 0.001)):
        codec = build(f"cltk:ratio={ratio}")
        ranks = lockstep.Ranks(fw, codec, Residual(), size, numel)
        rule = Simulated(size, numel, codec.count(numel))
        rng = np.random.default_rng(0)
        for step in range(2 * size + 1):
            for shared in ranks.shared:
                assert fw.array(shared[0]).tolist() == rule.where.tolist(), step
            grads = rng.standard_normal((size, numel)).astype(F32)
            want = rule.step(step, grads)
            for outcome, left in zip(ranks.step(step, grads), rule.left):
                np.testing.assert_array_equal(fw.array(outcome.total), want)
                np.testing.assert_array_equal(fw.array(outcome.error), left)


def cltk_payloads(fw, text, n, size, step=4):
    """Return the payloads of all ranks, and the first one's case."""
    rng = np.random.default_rng(3)
    cases = [
        case_of(fw, text, rng.standard_normal(n), size=size, step=step, rank=r) for r in range(size)
    ]
    return [fw.array(c.once.payload) for c in cases], cases


def shared_after(case, payload):
    done = case.codec.finish(
        case.fw.xp, [case.fw.tensor(payload.astype(F32))], case.x.size, case.full_call, scale=1.0
    )
    return case.fw.array(done.shared[0])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 41, 100])
def test_a_choice_survives_whatever_linear_reduction(size):
    fw = TORCH
    payloads, cases = cltk_payloads(fw, "cltk:ratio=0.01", 70_003, size)
    leader = cases[5 % size]
    want = reference.topk_positions(
        fw.array(leader.once.error), leader.codec.count(70_003)
    ).tolist()
    for before, after in (
        (1, 1),
        (1, 1 / size),
        (1 / size, 1),
        (1 / 3, 3 / size),
        (0.7, 1.3),
        (1e-4, 1),
    ):
        total = np.zeros_like(payloads[0])
        for payload in payloads:
            total += payload * F32(before)
        assert shared_after(cases[0], total * F32(after)).tolist() == want


def test_only_the_leader_adds_a_choice(fw):
    payloads, _ = cltk_payloads(fw, "cltk:ratio=0.1", 100, 3)
    assert [bool(p[10:].any()) for p in payloads] == [False, False, True]  # step 4: 5 mod 3
    assert payloads[2][-1] == 1
    assert payloads[2][20:21].tolist() == [10]


@pytest.mark.parametrize(
    "fault",
    ["joined", "nan", "inf", "mark", "count", "last count", "order", "twice", "range", "minus"],
)
def test_without_a_valid_choice_positions_stay(fw, fault):
    n, k = 70_003, 70
    payloads, cases = cltk_payloads(fw, "cltk:ratio=0.001", n, 3)
    total = np.sum(payloads, axis=0, dtype=F32)
    before = fw.array(cases[0].full_call.shared[0]).tolist()
    assert shared_after(cases[0], total).tolist() != before
    if fault == "joined":
        total = payloads[0] + payloads[1]
    elif fault in ("nan", "inf"):
        total[k + 3] = float(fault)
    elif fault == "mark":
        total[-1] = np.nan
    elif fault == "count":
        total[2 * k] += 1
    elif fault == "order":
        total[[k, k + 1]] = total[[k + 1, k]]
    elif fault == "twice":
        total[k + 1] = total[k]
    elif fault == "last count":
        total[2 * k + 1] += 1
    elif fault == "range":
        assert total[2 * k + 1] >= 1  # the last position lies in the second, short block
        total[2 * k - 1] = 60_000
    elif fault == "minus":
        total[k] = -5
    assert shared_after(cases[0], total).tolist() == before


def test_cltk_takes_a_step_that_is_a_tensor():
    fw = frameworks.load("tensorflow")
    tf = fw.framework
    for step in (4, 5):
        _, (_, _, case) = cltk_payloads(fw, "cltk:ratio=0.1", 100, 3, step)

        def encode(x, number, case=case):
            call = dataclasses.replace(case.full_call, step=number)
            return case.codec.encode(fw.xp, x, call, want_error=True)

        traced = tf.function(lambda x, number: encode(x, number), autograph=False)
        got = traced(fw.tensor(case.x), tf.constant(step, tf.int64))
        checks.same_bits(fw.array(case.once.payload), fw.array(got.payload))
        assert got.payload.shape == case.once.payload.shape
        assert bool(fw.array(got.payload)[-1]) is (step == 4)  # 5 mod 3


def test_cltk_stands_alone():
    with pytest.raises(SettingsError, match="'cltk' alone"):
        build("cltk+fp16")


# A + B -----------------------------------------------------------------------------------------

COMPOSED = [
    ("topk:ratio=0.01+linear:bits=8,block=64", Combine.GATHER, Bias.NEITHER),
    ("topk:ratio=0.01+fp16", Combine.GATHER, None),
    ("threshold:value=1,max_ratio=0.01+fp16", Combine.GATHER, Bias.NEITHER),
    ("dgc:ratio=0.01+sign", Combine.GATHER, Bias.CONTRACTION),
    ("randomk:ratio=0.01+fp16", Combine.SUM, None),
    ("bernoulli:p=0.01+fp16", Combine.SUM, None),
    ("bernoulli:p=0.01+linear:bits=4,block=64", Combine.GATHER, Bias.NEITHER),
]


@pytest.mark.parametrize(("text", "combine", "bias"), COMPOSED)
def test_composition(fw, text, combine, bias):
    outer, inner = build(text.split("+")[0]), build(text.split("+")[1])
    codec, n = build(text).with_memory(True), 70_003
    k = sum(math.prod(shape) for shape in outer.kept((n,)))
    where = 0
    if isinstance(outer, (type(build("topk")), type(build("threshold")))):
        where = min(4 * k, 2 * k + 8, -(-n // 8))
    want = inner.wire_bytes(k) + where
    assert codec.wire_bytes(n) == (-(-want // 4) * 4 if combine is Combine.GATHER else want)
    assert codec.combine is combine
    if bias is None:
        bias = inner.with_memory(True).bias
    assert codec.bias is bias
    case = case_of(fw, text, table.values("gaussian", n))
    checks.nothing_is_lost(case)
    plain = case_of(fw, text.split("+")[0], case.x)
    assert np.linalg.norm(case.left) > np.linalg.norm(plain.left)  # it knows of the rounding, too
