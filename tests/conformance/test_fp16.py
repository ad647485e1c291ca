"""Half precision: no sum over ranks overflows."""

import numpy as np
import pytest

from horovod_gradcomp.codecs import build
from tests import checks, table


def cases(fw, values, size):
    x = np.asarray(values, np.float32)
    call = table.call(table.whole(x.size), size=size)
    return [checks.Case(fw, build("fp16"), x, call) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
def test_no_sum_overflows(fw, size):
    ranks = cases(fw, [40_000.0, 65_504, -65_504, 1e30, -3e38], size)
    with np.errstate(over="raise"):
        total = np.sum([fw.array(c.once.payload) for c in ranks], axis=0, dtype=np.float16)
    mean = (total * np.float16(1 / size)).astype(np.float16)
    got = fw.array(ranks[0].decode([fw.tensor(mean)]))
    want = [40_000, 65_504, -65_504, 65_504, -65_504]
    np.testing.assert_allclose(got, want, rtol=max(4, size) * 2.0**-11)  # each addition rounds
    assert np.isfinite(fw.array(ranks[0].decode([fw.tensor(total)], float(size)))).all()


def test_values_are_those_of_a_cast(fw):
    x = table.values("gaussian", 1001)
    for size in (1, 2, 5, 8):
        case = cases(fw, x, size)[0]
        checks.same_bits(x.astype(np.float16).astype(np.float32), fw.array(case.once.decoded))


def test_what_saturates_is_left(fw):
    case = cases(fw, [65_504, 65_505, 70_000, -1e30], 2)[0]
    assert case.sent.tolist() == [65_504, 65_504, 65_504, -65_504]
    np.testing.assert_allclose(case.left, [0, 1, 4496, -1e30 + 65_504], rtol=1e-6)


def test_the_smallest_values(fw):
    case = cases(fw, [6e-8, 2e-8, 1e-30], 1)[0]
    assert case.sent.tolist() == [float(np.float16(6e-8)), 0, 0]
