"""Clipping of a rank's own gradient: on both frameworks, in whatever units it comes."""

import numpy as np
import pytest

from horovod_gradcomp.core.clip import clipped
from horovod_gradcomp.core.options import Options
from tests import table


def product(fw, values, gain, options, size=1):
    """Return the clipped gradient; the gain may come as a number or a tensor."""
    grad = fw.tensor(np.asarray(values))
    before = fw.array(grad).copy()
    made, factor = clipped(fw.xp, grad, gain, options, size)
    factor = factor if isinstance(factor, float) else fw.array(factor)
    with np.errstate(invalid="ignore"):
        out = fw.array(fw.xp.to_float32(made, None)) * np.float32(factor)
    np.testing.assert_array_equal(fw.array(grad), before)
    return out


@pytest.mark.parametrize("number", [True, False], ids=["number", "tensor"])
@pytest.mark.parametrize("gain", [1.0, 0.25, 64.0])
@pytest.mark.parametrize("size", [1, 4])
def test_the_norm_is_cut(fw, number, gain, size):
    x = table.values("heavy", 5001)
    true = x.astype(np.float64) * gain
    limit = 0.3 * np.linalg.norm(true) * np.sqrt(size)
    factor = gain if number else fw.xp.reshape(fw.tensor(np.float32([gain])), ())
    got = product(fw, x, factor, Options(clip_norm=limit), size)
    np.testing.assert_allclose(got, 0.3 * true, rtol=1e-5)
    got = product(fw, x, factor, Options(clip_norm=5 * limit), size)
    np.testing.assert_allclose(got, true, rtol=1e-6)


@pytest.mark.parametrize("number", [True, False], ids=["number", "tensor"])
@pytest.mark.parametrize("gain", [1.0, 0.25])
def test_values_are_cut(fw, number, gain):
    x = table.values("heavy", 5001)
    factor = gain if number else fw.xp.reshape(fw.tensor(np.float32([gain])), ())
    got = product(fw, x, factor, Options(clip_value=0.5))
    np.testing.assert_array_equal(got, np.clip(x * np.float32(gain), -0.5, 0.5))


def test_nothing_is_cut_unless_asked(fw):
    grad = fw.tensor(table.values("heavy", 100))
    assert clipped(fw.xp, grad, 3.0, Options(), 4) == (grad, 3.0)


@pytest.mark.parametrize("options", [Options(clip_norm=1.0), Options(clip_value=1.0)], ids=repr)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(fw, options, bad):
    """Else a loss scaler would not learn that its scale is too large."""
    x = table.values("gaussian", 100)
    x[17] = bad
    assert not np.isfinite(product(fw, x, 1.0, options)).all()


@pytest.mark.parametrize("options", [Options(clip_norm=1.0), Options(clip_value=1.0)], ids=repr)
@pytest.mark.parametrize("value", [0.0, 1e-40, 3e38])
def test_extremes_stay_finite(fw, options, value):
    got = product(fw, np.full(1000, value, np.float32), 1.0, options)
    assert np.isfinite(got).all()
    assert np.abs(got).max() <= 1.0


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_any_float_dtype(fw, dtype):
    x = table.values("gaussian", 100).astype(dtype)
    got = product(fw, x, 1.0, Options(clip_norm=1.0))
    assert np.linalg.norm(got) == pytest.approx(1.0, rel=1e-3)
