"""The cost model, against cases worked out by hand."""

import math
from dataclasses import replace

import pytest

from horovod_gradcomp.core.codec import Combine, adds_halves
from horovod_gradcomp.core.cost import (
    EXCHANGES,
    Job,
    Speed,
    cheapest,
    cost,
    dense,
    exchanges,
    pipeline,
)
from horovod_gradcomp.core.errors import SettingsError
from horovod_gradcomp.core.links import (
    SHORT,
    Cluster,
    Link,
    alltoall,
    fitted,
    ring_allgather,
    ring_allreduce,
)
from horovod_gradcomp.core.settings import parse_codec

FAST = Link(bandwidth=1000.0, latency=0.0)
SLOW = Link(bandwidth=100.0, latency=0.5)  # bytes and seconds that can be added up by hand
FOUR = Cluster(ranks=4, per_host=1, between=SLOW, inside=FAST)
PAIRS = Cluster(ranks=4, per_host=2, between=SLOW, inside=FAST)
LONELY = Cluster(ranks=1, per_host=1, between=SLOW, inside=FAST)


def test_ring_allreduce():
    # 6 steps of 400 / 4 = 100 bytes: 0.5 + 1 second each.
    assert ring_allreduce(FOUR, 400) == pytest.approx(9.0)
    # In two messages: 12 steps of 50 bytes, 0.5 + 0.5 each.
    assert ring_allreduce(FOUR, 400, messages=2) == pytest.approx(12.0)
    # The slowest link rules; inside one host there is none of the slow ones.
    assert ring_allreduce(PAIRS, 400) == pytest.approx(9.0)
    assert ring_allreduce(Cluster(4, 4, SLOW, FAST), 400) == pytest.approx(6 * 0.1)
    assert ring_allreduce(LONELY, 400) == 0


def test_ring_allgather():
    assert ring_allgather(FOUR, 50) == pytest.approx(3 * (0.5 + 0.5))
    assert ring_allgather(FOUR, 50, messages=5) == pytest.approx(15 * (0.5 + 0.1))
    assert ring_allgather(LONELY, 50) == 0
    slower = replace(FOUR, gathers=Link(bandwidth=50.0, latency=0.5))
    assert ring_allgather(slower, 50) == pytest.approx(3 * (0.5 + 1.0))
    assert ring_allreduce(slower, 400) == ring_allreduce(FOUR, 400)


def test_short_gathers_and_sums_of_float16_have_links_of_their_own():
    cluster = replace(FOUR, gathers=Link(50.0, 0.0), short_gathers=Link(200.0, 0.0))
    assert ring_allgather(cluster, SHORT) == pytest.approx(3 * SHORT / 200)
    assert ring_allgather(cluster, SHORT + 200) == pytest.approx(3 * (SHORT + 200) / 50)
    assert ring_allgather(replace(cluster, short_gathers=None), 50) == pytest.approx(3)
    cluster = replace(FOUR, halves=Link(bandwidth=10.0, latency=0.0))
    assert ring_allreduce(cluster, 400, halves=True) == pytest.approx(6 * 10)
    assert ring_allreduce(cluster, 400) == ring_allreduce(FOUR, 400, halves=True)
    job = Job(raw=800, payload=400, halves=True)
    assert cost("allreduce", job, cluster, Speed()).transfer == pytest.approx(60)
    assert dense(job, cluster).transfer == ring_allreduce(FOUR, 800)


def test_horovod_packs_what_it_adds_up():
    cluster = replace(FOUR, copy=10.0)
    job = Job(raw=800, payload=400)
    plain, packed = (cost("allreduce", job, each, Speed()) for each in (FOUR, cluster))
    assert packed.transfer == pytest.approx(plain.transfer + 2 * 400 / 10)
    in_rounds = cost("allreduce", replace(job, rounds=2), cluster, Speed())
    assert in_rounds.late == pytest.approx(ring_allreduce(FOUR, 200) + 2 * 200 / 10)
    assert cost("allgather", job, cluster, Speed()) == cost("allgather", job, FOUR, Speed())
    alone = replace(LONELY, copy=10.0)
    assert cost("allreduce", job, alone, Speed()).transfer == 0
    with pytest.raises(SettingsError, match="copy"):
        replace(FOUR, copy=0.0)


def test_sums_of_float16_take_more_of_the_processor():
    busy = replace(FOUR, spare=False, halves=replace(SLOW, work=0.01))
    job = Job(raw=800, payload=400, backward=1.0, buckets=2)
    plain, halves = (
        cost("allreduce", replace(job, halves=each), busy, Speed()).step for each in (False, True)
    )
    # 600 bytes are sent, of which a half during backward.
    assert halves == pytest.approx(max(plain, 1.0 + 3.0 + ring_allreduce(FOUR, 400) / 2))


@pytest.mark.parametrize(
    ("form", "halves"),
    [
        ("fp16", True),
        ("randomk+fp16", True),
        ("acp+fp16", True),
        ("randomk", False),
        ("bf16", False),
        ("topk+fp16", False),
        ("powersgd+fp16", False),
        ("linear", False),
    ],
)
def test_which_codecs_have_horovod_add_up_float16(form, halves):
    assert adds_halves(parse_codec(form)) is halves


def test_alltoall():
    # 3 others, 100 of the 400 bytes to each.
    assert alltoall(FOUR, 400) == pytest.approx(3 * 1.5)
    # 2 ranks elsewhere; both ranks of the host send 100 bytes at a time over one interface.
    assert alltoall(PAIRS, 400) == pytest.approx(2 * (0.5 + 2.0))
    # All at home: 3 others, 100 bytes each.
    assert alltoall(Cluster(4, 4, SLOW, FAST), 400) == pytest.approx(3 * 0.1)
    assert alltoall(LONELY, 400) == 0


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_link_is_found_again_from_what_it_takes(ranks):
    link = Link(bandwidth=1e8, latency=2e-4)
    ring = Cluster(ranks, 1, link, link)
    told = [(nbytes, ring_allreduce(ring, nbytes)) for nbytes in (1e3, 1e7)]
    found = fitted(ranks, *told)
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert found.latency == pytest.approx(link.latency)
    assert fitted(ranks, (1e3, 0.1), (1e6, 0.1)).bandwidth == math.inf


def test_pipeline():
    # Made at 1, 2, 3, 4; each takes half a second to send: the last one decides.
    assert pipeline(4.0, 2.0, 4) == 4.5
    # Each takes two seconds: the link decides, from when the first is made.
    assert pipeline(4.0, 8.0, 4) == 9.0
    assert pipeline(4.0, 8.0, 1) == 12.0  # in one piece nothing overlaps
    for pieces in (1, 3, 7):
        for compute, transfer in ((5.0, 1.0), (1.0, 5.0), (0.0, 2.0), (2.0, 0.0)):
            ended = 0.0
            for i in range(1, pieces + 1):
                ended = max(ended, i / pieces * compute) + transfer / pieces
            assert pipeline(compute, transfer, pieces) == pytest.approx(ended)


def test_speed():
    speed = Speed(encode=100.0, decode=200.0, decode_more=400.0)
    assert speed.encoding(400) == 4.0
    assert speed.decoding(400) == 2.0
    assert speed.decoding(400, payloads=3) == 2.0 + 2 * 1.0
    assert Speed().encoding(400) + Speed().decoding(400, payloads=9) == 0


SPEED = Speed(encode=400.0, decode=800.0, decode_more=800.0)


def parts(exchange, cluster=FOUR, **changed):
    job = Job(**{"raw": 400, "payload": 40, "forward": 1.0, "backward": 2.0, **changed})
    c = cost(exchange, job, cluster, SPEED)
    return c.encode, c.early, c.late, c.decode, c.host_bytes, c.step


def test_allreduce_of_payloads():
    # 6 steps of 10 bytes: 0.6 each; encode 1, decode half a second.
    expected = (1.0, 3.6, 0.0, 0.5, 60.0, 1 + 2 + 1 + 3.6 + 0.5)
    assert parts("allreduce") == pytest.approx(expected)


def test_rounds_wait_for_one_another():
    # Each of two sums carries 20 bytes, 6 steps of 5: 0.55 each; the second cannot start early.
    expected = (1.0, 3.3, 3.3, 0.5, 60.0, 1 + 2 + 1 + 6.6 + 0.5)
    assert parts("allreduce", rounds=2) == pytest.approx(expected)


def test_allgather():
    # 3 steps of 40 bytes: 0.9 each; four payloads to decode.
    expected = (1.0, 2.7, 0.0, 2.0, 120.0, 1 + 2 + 1 + 2.7 + 2.0)
    assert parts("allgather") == pytest.approx(expected)


def test_overlap():
    # Backward and encoding take 3: half is sent until 1.5 + 1.35, the rest until 3 + 1.35.
    expected = (1.0, 2.7, 0.0, 2.0, 120.0, 1 + (3 + 1.35) + 2.0)
    assert parts("allgather", buckets=2) == pytest.approx(expected)
    expected = (*expected[:-1], 1 + 3 + 2.7 + 2.0)
    assert parts("allgather", buckets=2, overlap=False) == pytest.approx(expected)


def test_without_a_spare_processor_sending_takes_from_computing():
    # Each of 4 pieces takes 0.5 on the link, of which 0.4 of the processor; the last one's is free.
    assert pipeline(4.0, 2.0, 4, work=1.6) == pytest.approx(4.0 + 3 * 0.4 + 0.5)
    assert pipeline(1.0, 8.0, 4, work=1.6) == pytest.approx(0.25 + 8.0)  # the link decides
    assert pipeline(4.0, 2.0, 1, work=1.6) == pytest.approx(6.0)
    assert pipeline(4.0, 2.0, 2, work=9.0) == pipeline(4.0, 2.0, 2, work=2.0)  # no more than all
    link = Link(bandwidth=100.0, latency=0.5, work=0.01)
    busy = Cluster(ranks=4, per_host=1, between=link, inside=FAST, spare=False)
    # Of 120 bytes 1.2 seconds, half of them while backward and encoding go on, which take 8.
    expected = 1 + 8 + 0.6 + 1.35 + 2.0
    changed = {"buckets": 2, "backward": 7.0}
    assert parts("allgather", busy, **changed)[5] == pytest.approx(expected)
    with_spare = replace(busy, spare=True)
    assert parts("allgather", with_spare, **changed)[5] == pytest.approx(expected - 0.6)
    # The second of two rounds waits for the first: only that one's 30 bytes count.
    late = parts("allreduce", busy, rounds=2, **changed)[5]
    assert late - parts("allreduce", with_spare, rounds=2, **changed)[5] == pytest.approx(0.15)


def test_two_phase():
    # 3 messages of 10 bytes, twice. Decode four quarters, encode a quarter, decode all of one.
    after = 0.5 + 0.25 + 0.5
    expected = (1.0, 1.8, 1.8, after, 60.0, 1 + 2 + 1 + 3.6 + after)
    assert parts("two_phase") == pytest.approx(expected)
    # Two ranks a host: 2 messages of twice 10 bytes, then 3 of 10.
    out = 2 * 2 * 10 + 3 * 10
    expected = (1.0, 1.4, 1.8, after, out, 1 + 2 + 1 + 3.2 + after)
    assert parts("two_phase", PAIRS) == pytest.approx(expected)


def test_hierarchical():
    # Inside: 200 bytes each way, 0.2 twice. Between: 40 bytes to one other host, 0.9.
    # Half of the gradient to encode, and two payloads of it to decode.
    expected = (0.0, 0.2, 1.1, 0.5 + 0.5, 40.0, 1 + 2 + 0.2 + 1.1 + 1.0)
    assert parts("hierarchical", PAIRS) == pytest.approx(expected)


def test_horovod_packs_what_waits(monkeypatch):
    # Each message has its latency, in every step of every ring.
    monkeypatch.setattr("horovod_gradcomp.core.links.FUSED_BYTES", 25)
    _, early, late, *_ = parts("allreduce")  # 40 bytes: 2 messages, 6 steps each
    assert (early, late) == pytest.approx((12 * 0.5 + 6 * 0.1, 0.0))
    _, early, late, *_ = parts("allgather")  # 160 bytes: 7 messages, 3 steps each
    assert (early, late) == pytest.approx((21 * 0.5 + 3 * 0.4, 0.0))
    _, early, late, *_ = parts("two_phase", buckets=5)  # every alltoall by itself
    assert (early, late) == pytest.approx((15 * 0.5 + 3 * 0.1, 6 * 0.5 + 3 * 0.1))
    _, early, late, *_ = parts("hierarchical", PAIRS)  # no latency inside; 4 messages between
    assert (early, late) == pytest.approx((0.2, 4 * 0.5 + 0.4 + 0.2))
    # One alltoall a bucket inside, where one gather takes 400 bytes in 16 messages.
    close = Cluster(ranks=4, per_host=2, between=SLOW, inside=Link(1000.0, 0.01))
    _, early, late, *_ = parts("hierarchical", close, buckets=5)
    assert (early, late) == pytest.approx((5 * 0.01 + 0.2, 4 * 0.5 + 0.4 + 16 * 0.01 + 0.2))


def test_nothing_leaves_the_only_host():
    one = Cluster(ranks=4, per_host=8, between=SLOW, inside=FAST)
    assert (one.hosts, one.local, one.even) == (1, 4, True)
    assert parts("allgather", one)[4] == 0


def test_one_rank_sends_nothing():
    job = Job(raw=400, payload=400, forward=1.0, backward=2.0)
    assert dense(job, LONELY).step == 3.0
    assert dense(job, LONELY).transfer == 0


def test_dense_is_an_allreduce_of_everything_at_no_cost():
    job = Job(raw=400, payload=40, rounds=2, buckets=2)
    assert dense(job, FOUR).step == pytest.approx(9.0)
    assert dense(job, FOUR).decode == 0


def test_which_exchanges_there_are():
    uneven = Cluster(ranks=5, per_host=2, between=SLOW, inside=FAST)
    assert (uneven.hosts, uneven.even) == (3, False)
    assert exchanges(Combine.SUM, PAIRS) == exchanges(Combine.ROUNDS, PAIRS) == ("allreduce",)
    assert exchanges(Combine.GATHER, LONELY) == ("allgather",)
    assert exchanges(Combine.GATHER, FOUR) == ("allgather", "two_phase")
    assert exchanges(Combine.GATHER, uneven) == ("allgather", "two_phase")
    assert exchanges(Combine.GATHER, Cluster(4, 8, SLOW, FAST)) == ("allgather", "two_phase")
    assert exchanges(Combine.GATHER, PAIRS) == ("allgather", "two_phase", "hierarchical")
    assert {*exchanges(Combine.GATHER, PAIRS), "allreduce"} == set(EXCHANGES)


def best(job, cluster, speed):
    return cheapest(exchanges(Combine.GATHER, cluster), job, cluster, speed)


def test_the_best_exchange_depends_on_payload_and_ranks():
    link = Link(bandwidth=1.25e9, latency=50e-6)
    few, many = (Cluster(ranks=n, per_host=1, between=link, inside=link) for n in (2, 64))
    tiny, large = (Job(raw=4e8, payload=p) for p in (4e4, 1e8))
    assert best(tiny, few, SPEED).exchange == "allgather"
    assert best(large, many, Speed()).exchange == "two_phase"
    inside = Link(bandwidth=1e11, latency=2e-6)
    two, eight = (Cluster(ranks=n, per_host=8, between=link, inside=inside) for n in (16, 64))
    assert best(large, two, Speed()).exchange == "hierarchical"
    assert best(large, eight, Speed()).exchange == "hierarchical"
    slow = Cluster(ranks=64, per_host=8, between=link, inside=link)
    assert best(large, slow, Speed()).exchange == "two_phase"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Link(0.0, 0.0), "bandwidth > 0"),
        (lambda: Link(1.0, -1.0), "latency >= 0"),
        (lambda: Link(math.nan, 0.0), "got bandwidth=nan"),
        (lambda: Cluster(0, 1, SLOW, FAST), "ranks >= 1"),
        (lambda: Cluster(1, 0, SLOW, FAST), "per_host >= 1"),
        (lambda: Speed(encode=0.0), "encode > 0"),
        (lambda: Job(raw=-1, payload=0), "raw >= 0"),
        (lambda: Job(raw=1, payload=1, buckets=0), "buckets >= 1"),
        (lambda: cost("ring", Job(1, 1), FOUR, SPEED), "two_phase"),
    ],
)
def test_what_cannot_be(build, message):
    with pytest.raises(SettingsError, match=message):
        build()
