"""Linear quantisation against NumPy, from the formula."""

import numpy as np
import pytest

from horovod_gradcomp.codecs import build
from horovod_gradcomp.testing import frameworks
from tests import checks, reference, table

TORCH = frameworks.load("torch")  # TensorFlow's payloads and values equal its


def case_of(fw, text, x, shapes=None):
    return checks.Case(
        fw, build(text), np.asarray(x, np.float32), table.call(shapes or table.whole(len(x)))
    )


def check_against_reference(case):
    """Values are those of the formula, bit for bit, tensor by tensor."""
    codec, want, start = case.codec, [], 0
    for size in case.call.sizes(case.x.size):
        draw = None
        if codec.rounding == "stochastic":
            draw = reference.uniform(case.call.key, start, size)
        part = case.x[start : start + size]
        want.append(reference.linear(part, codec.bits, codec.block, draw)[1])
        start += size
    checks.same_bits(np.concatenate(want), case.fw.array(case.once.decoded), signed=False)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_equals_the_formula(bits, rounding):
    for kind in ("gaussian", "heavy", "spike", "positive", "subnormal", "ramp", "huge", "largest"):
        for shapes in (table.whole(1), table.whole(24), table.whole(25), table.split(4097)):
            x = table.values(kind, table.numel(shapes))
            text = f"linear:bits={bits},block=24,rounding={rounding}"
            check_against_reference(case_of(TORCH, text, x, shapes))


def test_many_rows():
    for block in (8, 1024, 65_536):
        for rounding in ("nearest", "stochastic"):
            x = table.values("heavy", 300_007)
            check_against_reference(case_of(TORCH, f"linear:block={block},rounding={rounding}", x))


def test_levels_are_hit_exactly(fw):
    for bits in range(2, 9):
        x = np.arange(2**bits, dtype=np.float32) - 3
        case = case_of(fw, f"linear:bits={bits},block=256", x)
        assert case.sent.tolist() == x.tolist()
        assert not case.left.any()


def test_halves_round_to_even(fw):
    case = case_of(fw, "linear:bits=2", [0.0, 0.5, 1.5, 2.5, 3.0])
    assert case.sent.tolist() == [0, 0, 2, 2, 3]


def test_extremes_of_a_block_survive(fw):
    case = case_of(fw, "linear:bits=2,block=8", table.values("gaussian", 800))
    rows = case.x.reshape(-1, 8)
    sent = case.sent.reshape(-1, 8)
    assert (sent.min(axis=1) == rows.min(axis=1)).all()
    np.testing.assert_allclose(sent.max(axis=1), rows.max(axis=1), rtol=1e-6)


def test_a_block_never_reaches_into_another_tensor(fw):
    small, large = np.full(5, 1e-3, np.float32), np.full(4, 1e6, np.float32)
    small[0], large[0] = -1e-3, -1e6
    case = case_of(fw, "linear:bits=8", np.concatenate([small, large]), ((5,), (2, 2)))
    assert np.abs(case.left[:5]).max() < 1e-5
    alone = case_of(fw, "linear:bits=8", small)
    assert case.sent[:5].tolist() == alone.sent.tolist()


def test_error_is_at_most_half_a_step(fw):
    for bits in (2, 4, 8):
        case = case_of(fw, f"linear:bits={bits}", table.values("gaussian", 4097))
        for start in range(0, 4097, 1024):
            row, left = (v[start : start + 1024] for v in (case.x, case.left))
            step = (row.max() - row.min()) / (2**bits - 1)
            assert np.abs(left).max() <= step / 2 * (1 + 1e-5) + 1e-12


@pytest.mark.parametrize("bits", range(2, 9))
def test_bytes(bits):
    codec = build(f"linear:bits={bits}")
    assert codec.wire_bytes(1024) == 8 + 128 * bits
    assert codec.wire_bytes(1025) == -(-(16 + 128 * bits + bits) // 4) * 4
    assert codec.wire_bytes(1, 1) >= 16


def test_scales_of_two_ranks_differ(fw):
    a = case_of(fw, "linear:bits=8", np.linspace(-1, 1, 1001))
    b = case_of(fw, "linear:bits=8", np.linspace(-100, 100, 1001))
    got = fw.array(a.decode([a.once.payload, b.once.payload], 0.5))
    np.testing.assert_allclose(got, (a.sent + b.sent) / 2, rtol=1e-6, atol=1e-6)


def test_stochastic_rounding_needs_a_new_draw_each_step_and_block(fw):
    x = np.tile(np.linspace(0, 1, 16, dtype=np.float32), 64)
    case = case_of(fw, "linear:bits=2,block=16,rounding=stochastic", x)
    rows = case.sent.reshape(64, 16)
    assert len({row.tobytes() for row in rows}) > 32
    later = checks.Case(fw, case.codec, x, table.call(table.whole(x.size), step=6))
    assert (later.sent != case.sent).any()
