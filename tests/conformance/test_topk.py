"""Top-k against a stable sort, and on what a sampled threshold could get wrong."""

import numpy as np
import pytest

from horovod_gradcomp.codecs import build
from horovod_gradcomp.core import positions, select
from horovod_gradcomp.testing import frameworks
from tests import checks, reference, table

TORCH = frameworks.load("torch")  # TensorFlow's payloads and values equal its


def case_of(fw, text, x):
    return checks.Case(fw, build(text), x.astype(np.float32), table.call(table.whole(x.size)))


def check_selection(case):
    """What is sent are the k largest, ties by lowest position, exactly."""
    k = case.codec.count(case.x.size)
    where = reference.topk_positions(case.x, k)
    sent, left = np.zeros_like(case.x), case.x.copy()
    sent[where] = case.x[where]
    left[where] = 0
    same(case.fw, sent, case.once.decoded)
    same(case.fw, left, case.once.error)


def same(fw, want, got):
    checks.same_bits(_flush(fw, want), _flush(fw, fw.array(got)), signed=False)


def _flush(fw, x):
    return np.where(np.abs(x) < fw.tiny, np.float32(0), x)


def positions_of(case):
    """Return the positions in a payload, as they are decoded."""
    n, k = case.x.size, case.codec.count(case.x.size)
    _, *coded = case.codec._layout(case.call.extents(n)).open(case.fw.xp, case.once.payload)
    return case.fw.array(positions.decode(case.fw.xp, coded, n, k)[0])


@pytest.mark.parametrize("ratio", [1e-4, 0.01, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("kind", table.VALUES)
def test_equals_a_stable_sort(kind, ratio):
    for n in (1, 9, 1001, 70_003):
        check_selection(case_of(TORCH, f"topk:ratio={ratio}", table.values(kind, n)))


@pytest.mark.parametrize("ratio", [1e-5, 1e-3, 0.01, 0.05])
def test_several_position_blocks(fw, ratio):
    for n in (65_536, 131_072, 300_007):
        case = case_of(fw, f"topk:ratio={ratio}", table.values("heavy", n))
        check_selection(case)
        got = positions_of(case)
        want = reference.topk_positions(case.x, case.codec.count(n))
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize("kind", table.VALUES)
def test_sampled_equals_exact(fw, kind):
    for ratio in (0.001, 0.01):
        x = table.values(kind, 200_003)
        a = case_of(fw, f"topk:ratio={ratio}", x)
        b = case_of(fw, f"topk:ratio={ratio},select=exact", x)
        checks.same_bits(fw.array(a.once.payload), fw.array(b.once.payload))


def test_a_sample_spares_the_full_selection(fw):
    sizes = []

    def counted(x, k):
        sizes.append(int(fw.xp.length(x)))
        return fw.xp.kth_largest(x, k)

    ops = frameworks.without_kernels(fw.xp, kth_largest=counted)
    n = 200_003
    for kind in ("gaussian", "heavy", "ramp"):
        select.largest(ops, fw.tensor(table.values(kind, n)), 2000, sampled=True)
    assert max(sizes) < n / 10
    select.largest(ops, fw.tensor(table.values("gaussian", n)), 2000, sampled=False)
    assert max(sizes) == n


def misleading(kind, n=200_003):
    rng = np.random.default_rng(7)
    x = rng.standard_normal(n) * 1e-3
    sampled = np.arange(n) % select.STRIDE == 0
    if kind == "large_where_sampled":
        x[sampled] = rng.standard_normal(sampled.sum()) + 10
    elif kind == "large_elsewhere":
        x[~sampled] = rng.standard_normal((~sampled).sum()) + 10
    elif kind == "one_value_where_sampled":
        x[sampled] = 5.0
    elif kind == "zero_where_sampled":
        x[sampled] = 0.0
    elif kind == "zero_elsewhere":
        x[~sampled] = 0.0
    elif kind == "large_at_the_end":
        x[-2500:] += 3
    elif kind == "all_equal":
        x[:] = -4.0
    return x


@pytest.mark.parametrize("ratio", [1e-3, 0.004, 0.01, 0.02])
@pytest.mark.parametrize(
    "kind",
    [
        "large_where_sampled",
        "large_elsewhere",
        "one_value_where_sampled",
        "zero_where_sampled",
        "zero_elsewhere",
        "large_at_the_end",
        "all_equal",
    ],
)
def test_a_misleading_sample(fw, kind, ratio):
    check_selection(case_of(fw, f"topk:ratio={ratio}", misleading(kind)))


@pytest.mark.parametrize("nonzero", [0, 1, 3, 500, 1999, 2000, 2001])
def test_fewer_nonzeros_than_k(fw, nonzero):
    for n in (5000, 200_003):
        x = np.zeros(n)
        x[np.random.default_rng(1).permutation(n)[:nonzero]] = -3.0
        check_selection(case_of(fw, f"topk:ratio={2000 / n}", x))


def test_ties_go_to_the_lowest_position(fw):
    x = np.array([1.0, -2, 2, -2, 1, 2, -1, 0, 2, -2], np.float32)
    case = case_of(fw, "topk:ratio=0.3", x)
    assert positions_of(case).tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [9, 1001, 70_003])
def test_positions_stay_unique_and_in_range(fw, bad, n):
    for share in (0.0, 0.001, 0.3, 1.0):
        x = table.values("ties", n)
        x[: int(np.ceil(share * n))] = bad
        case = case_of(fw, "topk:ratio=0.02", x)
        where = positions_of(case)
        assert len(set(where.tolist())) == case.codec.count(n)
        assert where.min() >= 0
        assert where.max() < n
        assert (np.diff(where) > 0).all()


@pytest.mark.parametrize(
    ("n", "k", "dtypes"),
    [
        (1, 1, ["uint8"]),
        (1000, 10, ["int32", "int16"]),
        (1000, 1, ["int32"]),
        (1000, 200, ["uint8"]),
        (10**6, 20, ["int32"]),
        (10**6, 10_000, ["int32", "int16"]),
        (10**6, 10**6, ["uint8"]),
    ],
)
def test_positions_take_the_cheapest_form(n, k, dtypes):
    form = positions.sections(n, k)
    assert [s.dtype for s in form] == dtypes
    blocks = -(-n // 65_536)
    costs = [4 * k, 2 * k + 4 * blocks, -(-n // 8)]
    assert sum(s.nbytes for s in form) == min(costs)


def test_all_forms_of_positions_round_trip(fw):
    rng = np.random.default_rng(3)
    for n, k in ((1, 1), (9, 4), (70_003, 3), (70_003, 700), (70_003, 30_000), (200_000, 2)):
        edges = [at for at in (0, 65_535, 65_536, n - 1) if at < n]
        want = np.unique([*rng.permutation(n)[:k], *edges])
        parts = positions.encode(fw.xp, fw.tensor(want.astype(np.int64)), n)
        shaped = [
            fw.xp.reshape(part, (s.rows, s.width))
            for part, s in zip(parts, positions.sections(n, want.size))
        ]
        got, damage = positions.decode(fw.xp, shaped, n, want.size)
        assert fw.array(got).tolist() == want.tolist()
        assert fw.array(damage).tolist() == [0]


@pytest.mark.parametrize(
    ("ratio", "n", "k"), [(0.01, 1, 1), (0.01, 250, 2), (0.5, 3, 2), (1, 7, 7)]
)
def test_k(ratio, n, k):
    assert build(f"topk:ratio={ratio}").count(n) == k


def test_float16_values_leave_their_rounding(fw):
    x = np.array([1.0001, 70_000.0, 1e-9, -3e38, 0.5], np.float32)
    case = case_of(fw, "topk:ratio=1.0+fp16", x)
    want = np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)
    checks.same_bits(want, fw.array(case.once.decoded))
    checks.same_bits(x - want, fw.array(case.once.error))


def test_positions_of_two_ranks_add(fw):
    a, b = np.zeros(10, np.float32), np.zeros(10, np.float32)
    a[[0, 5]], b[[5, 9]] = [1, 2], [4, 8]
    one, two = case_of(fw, "topk:ratio=0.2", a), case_of(fw, "topk:ratio=0.2", b)
    got = fw.array(one.decode([one.once.payload, two.once.payload], 0.5))
    assert got.tolist() == [0.5, 0, 0, 0, 0, 3, 0, 0, 0, 4]
