"""Exchanges over simulated ranks, and what the carrier can tell."""

import math
from dataclasses import replace

import numpy as np
import pytest

from horovod_gradcomp import ExchangeError
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core import damage, exchange, mark
from horovod_gradcomp.core.carrier import Carrier
from horovod_gradcomp.core.exchange import Gather, Reduce, Reply
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.testing import frameworks
from tests import checks, lockstep, table

TORCH = frameworks.load("torch")
PAIRS = {
    f"{label}-{type(memory).__name__}": (codec, memory)
    for label, codec in table.FORMS.items()
    for memory in (NoMemory(), Residual())
    if codec.additive and (codec.feeds_back or not memory.slots)
}


@pytest.mark.parametrize("pair", PAIRS)
def test_books_balance(pair):
    codec, memory = PAIRS[pair]
    checks.books_balance(lockstep.Ranks(TORCH, codec, memory, size=3, numel=1500))


@pytest.mark.parametrize("numel", [1, 7, 9, 1001])
@pytest.mark.parametrize("pair", PAIRS)
def test_sizes_that_no_rank_count_divides(pair, numel):
    codec, memory = PAIRS[pair]
    for size in (1, 2, 3):
        checks.books_balance(lockstep.Ranks(TORCH, codec, memory, size, numel), steps=3)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_no_compression_is_the_mean(fw, size, average):
    grads = np.random.default_rng(1).standard_normal((size, 100)).astype(np.float32)
    ranks = lockstep.Ranks(fw, build("none"), NoMemory(), size, 100, average)
    got = fw.array(ranks.step(0, grads)[0].total)
    want = grads.mean(axis=0) if average else grads.sum(axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", table.FORMS)
def test_scale_of_a_sum(label):
    """The sum is N times the mean."""
    fw, codec, size, n = TORCH, table.FORMS[label], 3, 65
    grads = np.random.default_rng(1).standard_normal((size, n)).astype(np.float32)
    totals = [
        fw.array(lockstep.Ranks(fw, codec, NoMemory(), size, n, average).step(0, grads)[0].total)
        for average in (True, False)
    ]
    np.testing.assert_allclose(totals[0] * size, totals[1], rtol=3e-3, atol=1e-3)


def test_without_an_error_none_is_returned(fw):
    for text in ("topk", "fp16"):
        codec, call = build(text), table.call(table.whole(8), size=1)
        x = fw.tensor(np.ones(8, np.float32))
        run = exchange.start(fw.xp, codec, x, call, want_error=False, name="w")
        assert lockstep.drive(fw, [run])[0].error is None


@pytest.mark.parametrize("text", ["topk", "randomk", "fp16", "none", "linear"])
@pytest.mark.parametrize("flag", [0.0, math.nan])
def test_an_agreed_flag_decides_alone(fw, text, flag):
    codec = build(text).with_memory(True)
    call, agreed = table.call(table.whole(40), size=2), fw.tensor(np.float32(flag))
    runs = [
        exchange.start(
            fw.xp,
            codec,
            fw.tensor(np.ones(40, np.float32)),
            call,
            want_error=True,
            name="w",
            agreed=agreed,
        )
        for _ in range(2)
    ]
    for outcome in lockstep.drive(fw, runs):
        finite = np.isfinite(fw.array(outcome.total))
        assert finite.all() if flag == 0 else not finite.any()
        assert math.isnan(fw.array(outcome.bad)) == math.isnan(flag)


def test_requests_follow_from_combine(fw):
    for text, kind in (("topk", Gather), ("linear", Gather), ("fp16", Reduce), ("none", Reduce)):
        x = fw.tensor(np.ones(8, np.float32))
        call = table.call(table.whole(8))
        request = next(exchange.start(fw.xp, build(text), x, call, want_error=False, name="w"))
        assert type(request) is kind


def test_a_payload_of_another_length_names_the_rank(fw):
    for wrong in (0, 4, 100):
        call, x = table.call(table.whole(50), size=3), fw.tensor(np.ones(50, np.float32))
        run = exchange.start(fw.xp, build("linear"), x, call, want_error=True, name="conv1.weight")
        good = fw.array(next(run).payload)
        other = fw.tensor(np.zeros(wrong, np.uint8))
        with pytest.raises(ExchangeError) as caught:
            run.send(Reply([fw.tensor(good), fw.tensor(good), other], 1 / 3))
        text = str(caught.value)
        for part in (f"{wrong} bytes", "'conv1.weight'", "rank 2", f"{good.size} bytes", "same"):
            assert part in text, text


# The mark of a step ---------------------------------------------------------------------------


def summed(fw, text, steps, average=True):
    """Drive an exchange of ranks that are at these steps, with the same gradient."""
    shapes, size, codec = ((50, 40),), len(steps), build(text).with_memory(True)
    shared = codec.initial(fw.xp, table.call(shapes), fw.tensor(np.zeros(1, np.float32)))
    runs = []
    for step in steps:
        call = replace(table.call(shapes, size=size, step=step), step=0, shared=shared)
        x = fw.tensor(table.rng(2000).standard_normal(2000).astype(np.float32))
        run = exchange.start(fw.xp, codec, x, call, want_error=True, name="fc.weight")
        runs.append(run)
    return lockstep.drive(fw, runs, average=average)


@pytest.mark.parametrize("text", ["randomk:ratio=0.1", "randomk:ratio=0.1+fp16", "acp"])
@pytest.mark.parametrize("late", [1, 2, 9])
def test_ranks_at_other_steps_are_noticed(fw, text, late):
    with pytest.raises(ExchangeError, match=r"different steps.*'fc.weight'.*compression\.join\(\)"):
        summed(fw, text, [5, 5, 5 + late])


def test_where_no_step_is_drawn_on_none_is_told(fw):
    for outcome in summed(fw, "fp16", [5, 6]):
        assert float(fw.array(outcome.bad)) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 63, 200])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
def test_the_sum_of_ranks_at_one_step_has_its_mark(fw, size, average, read, monkeypatch):
    """Also in float16, where a mean over 200 ranks rounds; ranks that have joined send zeros."""
    if not read:  # as on a GPU
        monkeypatch.setattr(fw.xp, "known", lambda _: None)
    call = table.call(table.whole(8), size=size, step=3)
    for dtype in ("float16", "float32"):
        x = fw.xp.cast(fw.tensor(np.arange(8, dtype=np.float32)), dtype)
        payload = fw.array(mark.attach(fw.xp, x, call))
        assert payload.shape == (8 + mark.WIDTH,)
        for present in {1, size // 2 + 1, size}:
            total = np.zeros_like(payload)
            for _ in range(present):
                total = total + payload
            total = total / total.dtype.type(size) if average else total
            rest, wrong = mark.detach(fw.xp, fw.tensor(total), call)
            assert (wrong is None) is read
            assert wrong is None or fw.array(wrong).tolist() == [0]
            assert np.array_equal(fw.array(rest), total[:8])


def test_a_mark_may_be_made_of_tensors():
    """In TensorFlow steps are counted by a variable, also where a function runs eagerly."""
    fw = frameworks.load("tensorflow")
    call = table.call(table.whole(8), size=1, step=3)
    call = replace(call, key=tuple(fw.tensor(np.int64(word)) for word in call.key))
    payload = mark.attach(fw.xp, fw.tensor(np.ones(8, np.float32)), call)
    rest, wrong = mark.detach(fw.xp, payload, call)
    assert fw.array(wrong).tolist() == [0]
    assert fw.array(rest).tolist() == [1] * 8


def test_one_late_rank_of_many_is_noticed(fw):
    x = fw.xp.cast(fw.tensor(np.ones(8, np.float32)), "float16")
    calls = [table.call(table.whole(8), size=1000, step=step) for step in (3, 4)]
    own, other = (fw.array(mark.attach(fw.xp, x, call)) for call in calls)
    total = other
    for _ in range(999):
        total = total + own
    for average in (np.float16(1), np.float16(1000)):
        _, wrong = mark.detach(fw.xp, fw.tensor(total / average), calls[0])
        assert fw.array(wrong).tolist() == [damage.STEPS]
    _, wrong = mark.detach(fw.xp, fw.tensor(total * np.float16("nan")), calls[0])
    assert fw.array(wrong).tolist() == [damage.STEPS]


def test_beyond_what_float16_counts_there_is_no_mark(fw):
    call = table.call(table.whole(8), size=mark.MOST_RANKS + 1)
    x = fw.tensor(np.ones(8, np.float32))
    assert fw.array(mark.attach(fw.xp, x, call)).size == 8
    assert mark.detach(fw.xp, x, call)[1] is None


@pytest.mark.parametrize("text", ["randomk:ratio=0.1", "bernoulli:p=0.1", "randomk+fp16"])
def test_positions_are_drawn_once_where_one_call_encodes_and_decodes(fw, text, monkeypatch):
    codec, drawn = build(text).with_memory(True), []
    draw = type(codec).draw
    monkeypatch.setattr(type(codec), "draw", lambda *args: drawn.append(1) or draw(*args))
    totals = []
    for notes, times in ((None, 2), ({}, 1)):
        call = replace(table.call(table.whole(1001)), notes=notes)
        x = fw.tensor(table.rng(1001).standard_normal(1001).astype(np.float32))
        run = exchange.start(fw.xp, codec, x, call, want_error=True, name="x")
        drawn.clear()
        (outcome,) = lockstep.drive(fw, [run], average=True)
        assert len(drawn) == times
        totals.append(fw.array(outcome.total).tobytes())
    assert totals[0] == totals[1]


# The carrier ----------------------------------------------------------------------------------


def test_factor_of_average_and_sum():
    checks.carrier_knows_average_and_sum(Carrier)


def test_what_is_not_linear_is_refused():
    checks.carrier_refuses_what_is_not_linear(Carrier)


def test_other_process_sets_are_refused():
    checks.carrier_refuses_other_sets(Carrier)


def rows(ranks):
    return checks.carriers(Carrier, ranks)


@pytest.mark.parametrize("pre", [0.5, 2.0, 3.0, 7.0, 1000.0])
def test_factor_with_predivide(pre):
    f32 = np.float32
    for size in checks.WORLDS:
        scaled = rows(range(size)) * f32(1 / pre)
        got = Carrier(range(size)).factor((checks.ring_sum(scaled) * f32(pre / size)).tolist(), "w")
        assert got == 1.0


def test_any_other_factor_is_kept():
    for size in (2, 3, 41):
        for factor in (0.25, 3.7, 128.0):
            mean = checks.ring_sum(rows(range(size))) * np.float32(factor / size)
            got = Carrier(range(size)).factor(mean.tolist(), "w")
            assert got == pytest.approx(factor, rel=1e-6)


def test_a_set_of_the_same_mean_rank_is_refused():
    with pytest.raises(ExchangeError, match="process set") as caught:
        Carrier(range(3)).factor((checks.ring_sum(rows([0, 2])) / 2).tolist(), "fc.weight")
    assert "'fc.weight'" in str(caught.value)
    assert "[0, 1, 2]" in str(caught.value)


def test_own_process_set_is_accepted():
    for ranks in ([0, 2], [1, 2, 5], [3]):
        values = checks.ring_sum(rows(ranks))
        assert Carrier(ranks).factor((values / len(ranks)).tolist(), "w") == 1.0
        assert Carrier(ranks).factor(values.tolist(), "w") == float(len(ranks))


def test_all_ranks_do_not_look_as_if_some_had_joined():
    """The mean of an odd number of ranks has the count and the rank of the middle one alone."""
    for size in range(1, 130):
        mean = rows(range(size)).astype(np.float64).mean(0)
        assert Carrier(range(size)).joined(mean.tolist()) is None, size
        assert Carrier(range(size)).joined((mean * size).tolist()) is None, size
    ranks = [0, 2, 4]
    assert Carrier(ranks).joined(rows(ranks).mean(0).tolist()) is None


def test_some_ranks_that_have_joined_show():
    for size in (2, 3, 5, 8, 41):
        for present in ([0], [size // 2], [size - 1], list(range(size - 1)), list(range(1, size))):
            total = checks.ring_sum(rows(present))
            assert Carrier(range(size)).joined(total.tolist()) == size, (size, present)
            mean = total * np.float32(1 / size)
            assert Carrier(range(size)).joined(mean.tolist()) == 1, (size, present)


def test_wrong_lengths_and_bad_values_are_refused():
    carrier = Carrier(range(2))
    good = (checks.ring_sum(rows(range(2))) / 2).tolist()
    assert carrier.factor(good, "w") == 1.0
    bad = [[], good[:2], [*good, 1.0], [math.nan] * 3, [math.inf] * 3, [0.0] * 3]
    for values in bad:
        with pytest.raises(ExchangeError):
            carrier.factor(values, "w")


def test_messages_of_large_worlds_stay_short():
    with pytest.raises(ExchangeError) as caught:
        Carrier(range(4096)).factor([1.0, 1.0, 1.0], "w")
    assert "[0, ..., 4095]" in str(caught.value)
    assert len(str(caught.value)) < 600
