"""Random-k against the documented rule, and its draws."""

import numpy as np
import pytest

from horovod_gradcomp.codecs import build
from horovod_gradcomp.testing import frameworks
from tests import checks, reference, table

TORCH = frameworks.load("torch")  # TensorFlow's payloads and values equal its


def case_of(fw, text, x, *, memory=True, step=5, name="layer.weight"):
    codec = build(text).with_memory(memory)
    call = table.call(table.whole(len(x)), step=step, name=name)
    return checks.Case(fw, codec, np.asarray(x, np.float32), call)


def check_against_reference(case):
    """Positions and values are those of the rule."""
    n, codec = case.x.size, case.codec
    blocks, k = -(-n // codec.block), codec.count(n)
    where = reference.randomk_positions(blocks, k, case.call.key)
    edges = [i * blocks // k for i in range(k + 1)]
    want = np.zeros(n, np.float32)
    for i, block in enumerate(where):
        part = slice(block * codec.block, (block + 1) * codec.block)
        factor = np.float32(edges[i + 1] - edges[i] if codec.rescale == "yes" else 1)
        want[part] = case.x[part] * factor
    checks.same_bits(want, case.fw.array(case.once.decoded), signed=False)


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "bare"])
@pytest.mark.parametrize("block", [1, 2, 4, 1000])
@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.37, 1.0])
def test_equals_the_rule(ratio, block, memory):
    for n in (1, 9, 1001, 4097):
        x = table.values("gaussian", n)
        text = f"randomk:ratio={ratio},block={block}"
        check_against_reference(case_of(TORCH, text, x, memory=memory))


def test_key_is_the_documented_one(fw):
    case = case_of(fw, "randomk", np.ones(500))
    assert case.call.key == reference.key(0, "layer.weight", 5)


def test_every_element_is_as_likely():
    n, steps, codec = 101, 6000, build("randomk:ratio=0.2").with_memory(True)
    k = codec.count(n)
    counts, expected = np.zeros(n), np.zeros(n)
    for step in range(steps):
        where = reference.randomk_positions(n, k, reference.key(0, "w", step))
        counts[where] += 1
    edges = [i * n // k for i in range(k + 1)]
    for low, high in zip(edges, edges[1:]):
        expected[low:high] = steps / (high - low)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = n - k
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_strata_are_drawn_independently():
    draws = np.array(
        [reference.randomk_positions(80, 8, reference.key(0, "w", s)) for s in range(4000)]
    )
    correlation = np.corrcoef(draws.T) - np.eye(8)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


def test_positions_change_with_step_and_name_only(fw):
    x = np.arange(1, 2001)
    first = case_of(fw, "randomk:ratio=0.05", x)
    kept = first.sent != 0
    assert (case_of(fw, "randomk:ratio=0.05", -3 * x).sent != 0).tolist() == kept.tolist()
    for other in (
        case_of(fw, "randomk:ratio=0.05", x, step=6),
        case_of(fw, "randomk:ratio=0.05", x, name="layer.bias"),
    ):
        assert (other.sent != 0).tolist() != kept.tolist()
        assert (other.sent != 0).sum() == kept.sum()


def test_the_sum_of_payloads_is_the_sum_of_kept_values(fw):
    rng = np.random.default_rng(0)
    ranks = [case_of(fw, "randomk:ratio=0.1", rng.standard_normal(1001)) for _ in range(4)]
    total = sum(fw.array(c.once.payload) for c in ranks)
    got = fw.array(ranks[0].decode([fw.tensor(total)]))
    kept = ranks[0].sent != 0
    want = np.where(kept, sum(c.x.astype(np.float64) for c in ranks), 0)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_the_last_block_is_cut_and_its_rest_carries_zero(fw):
    case = case_of(fw, "randomk:ratio=1.0,block=4", np.arange(1, 7))
    assert fw.array(case.once.payload).tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert case.sent.tolist() == [1, 2, 3, 4, 5, 6]


def test_rescaled_values_saturate(fw):
    case = case_of(fw, "randomk:ratio=0.5", np.full(10, 3e38), memory=False)
    assert set(np.abs(case.sent)) == {0.0, float(np.finfo(np.float32).max)}


@pytest.mark.parametrize("block", [500, 10**20])
def test_a_block_is_no_more_than_there_is(fw, block):
    case = case_of(fw, f"randomk:ratio=0.01,block={block}", np.arange(1, 101))
    assert case.codec.wire_bytes(100) == 4 * 100
    assert case.sent.tolist() == list(range(1, 101))
