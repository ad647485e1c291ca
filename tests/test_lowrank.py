"""Low-rank codecs against NumPy: projections, orthonormal bases, and what they converge to."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest

from horovod_gradcomp import SettingsError
from horovod_gradcomp.codecs import REGISTRY, build
from horovod_gradcomp.core import factors
from horovod_gradcomp.core.codec import Bias, Combine
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.testing import frameworks
from tests import checks, lockstep, table

F32 = np.float32
TORCH = frameworks.load("torch")
MATRIX, KERNEL = ((60, 45),), ((16, 12, 3, 3),)
ALL = ("acp", "powersgd", "svd", "tucker")


@dataclass
class Shaped(lockstep.Ranks):
    """Simulated ranks whose gradients have given shapes."""

    shapes: tuple = ()

    def _call(self, step, rank):
        return table.call(self.shapes, size=self.size, step=step, rank=rank)


@pytest.mark.parametrize("form", ["acp", "powersgd", "svd"])
@pytest.mark.parametrize(
    ("torchs", "tensorflows"),
    [((128, 64, 3, 3), (3, 3, 64, 128)), ((512, 256, 1, 1), (1, 1, 256, 512))],
)
def test_output_channels_may_come_first_or_last(form, torchs, tensorflows):
    codec = build(form)
    dense = 4 * math.prod(torchs)
    assert codec.wire_bytes(tensorflows) == codec.wire_bytes(torchs) < 0.06 * dense


def test_the_smaller_factors_decide():
    assert factors.matrix_of((64, 3, 7, 7)) == (64, 147)
    assert factors.matrix_of((7, 7, 3, 64)) == (147, 64)
    assert factors.matrix_of((5, 9)) == (5, 9)
    assert factors.matrix_of((4, 2, 4)) == (4, 8)


def ranks_of(fw, text, shapes, *, size=1, memory=None):
    return Shaped(
        fw, build(text), memory or NoMemory(), size, table.numel(shapes), True, shapes=shapes
    )


def total(ranks, step, x):
    """Return what all ranks apply where each has the gradient ``x``."""
    grads = [np.ravel(x).astype(F32)] * ranks.size
    return ranks.fw.array(ranks.step(step, grads)[0].total).astype(np.float64).reshape(x.shape)


def basis_of(case, at=0):
    """Return the bases that a case starts from, as matrices."""
    codec, flat = case.codec, case.fw.array(case.full_call.shared[0]).astype(np.float64)
    if codec.describe().startswith("tucker"):
        shapes = codec._shapes(case.call.shapes)
    else:
        shapes = [(p.rank, p.longer) for p in codec.matrices(case.call.shapes)]
    out = []
    for shape in shapes:
        out.append(flat[: math.prod(shape)].reshape(shape))
        flat = flat[math.prod(shape) :]
    assert not flat.size
    return out


def case_of(fw, text, shapes, x, step=0):
    return checks.Case(fw, build(text), np.ravel(x).astype(F32), table.call(shapes, step=step))


def close(got, want, share=2e-6):
    assert np.abs(got - want).max() <= share * np.abs(want).max(), np.abs(got - want).max()


def spectrum(m, n, values, seed=0):
    """Return a matrix with given singular values."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((size, len(values))))[0] for size in (m, n))
    return u * values @ v.T


def outer(shape, seed=0):
    """Return a tensor of rank one."""
    rng = np.random.default_rng(seed)
    out = np.ones(())
    for n in shape:
        out = np.multiply.outer(out, rng.standard_normal(n))
    return out


# Bases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rows_become_orthonormal_at_every_scale(fw, scale):
    rows = (np.random.default_rng(0).standard_normal((6, 40)) * scale).astype(F32)
    got = fw.array(factors.orthonormal(fw.xp, fw.tensor(rows))).astype(np.float64)
    np.testing.assert_allclose(got @ got.T, np.eye(6), atol=1e-6)
    q = np.linalg.qr(rows.astype(np.float64).T)[0]
    np.testing.assert_allclose(got.T @ got, q @ q.T, atol=1e-5)  # the same space


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rows_of_different_scales_are_as_good(fw, scale):
    rows = np.random.default_rng(0).standard_normal((3, 40)) * np.array([[1], [1e-15], [1e15]])
    got = fw.array(factors.orthonormal(fw.xp, fw.tensor((rows * scale).astype(F32))))
    np.testing.assert_allclose(got @ got.T, np.eye(3), atol=1e-6)


def test_dependent_rows_become_zero(fw):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 40))
    rows = np.stack([a, b, 2 * a - 3 * b, 0 * a, -a, rng.standard_normal(40)]).astype(F32)
    got = fw.array(factors.orthonormal(fw.xp, fw.tensor(rows)))
    np.testing.assert_allclose(got @ got.T, np.diag([1, 1, 0, 0, 0, 1]), atol=1e-6)
    assert not got[2:5].any()


@pytest.mark.parametrize("text", ["acp:rank=3", "powersgd:rank=3", "tucker:ranks=3"])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_shared_bases_stay_orthonormal(fw, text, scale):
    shapes = KERNEL if "tucker" in text else MATRIX
    ranks, rng = ranks_of(fw, text, shapes, size=2), np.random.default_rng(0)
    for step in range(4):
        ranks.step(step, (rng.standard_normal((2, ranks.numel)) * scale).astype(F32))
        case = case_of(fw, text, shapes, np.zeros(ranks.numel))
        flat = fw.array(ranks.shared[0][0])
        sizes = [b.shape for b in basis_of(case)] if "powersgd" not in text else [(3, 45)]
        for shape in sizes:
            basis, flat = flat[: math.prod(shape)].reshape(shape), flat[math.prod(shape) :]
            np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-6)


# One step --------------------------------------------------------------------------------------


def acp(x, bases, shapes):
    matrix, (basis,) = x.reshape(shapes[0]), bases
    q = basis[:, : shapes[0][1]]
    return matrix @ q.T @ q


def tucker(x, bases, shapes):
    x, free = x.reshape(shapes[0]), 0
    for mode, basis in enumerate(bases):
        if mode != free:
            projector = basis.T @ basis
            x = np.moveaxis(np.tensordot(projector, x, axes=(1, mode)), 0, mode)
    return x


@pytest.mark.parametrize(
    ("text", "shapes", "rule"),
    [
        ("acp:rank=4", MATRIX, acp),
        ("acp:rank=4", ((45, 60),), acp),
        ("tucker:ranks=4", MATRIX, tucker),
        ("tucker:ranks=5x4x2", ((16, 12, 9),), tucker),
        ("tucker:ranks=5x4x1x2", KERNEL, tucker),
    ],
)
def test_first_step_is_the_formula(fw, text, shapes, rule):
    x = np.random.default_rng(0).standard_normal(shapes[0]).astype(F32)
    case = case_of(fw, text, shapes, x)
    want = rule(x.astype(np.float64), basis_of(case), shapes)
    close(case.sent, want.ravel())


def test_tucker_projects_every_mode_in_turn(fw):
    shape, text = (10, 9, 8), "tucker:ranks=2"
    x = np.random.default_rng(0).standard_normal(shape)
    for step in range(6):
        case = case_of(fw, text, (shape,), x, step)
        want = x.astype(F32).astype(np.float64)
        for mode, basis in enumerate(basis_of(case)):
            if mode != step % 3:
                want = np.moveaxis(np.tensordot(basis.T @ basis, want, (1, mode)), 0, mode)
        close(case.sent, want.ravel())
        done = case.codec.finish(fw.xp, [case.once.payload], x.size, case.full_call, scale=1.0)
        flat = fw.array(done.shared[0]).astype(np.float64)
        for mode, (n, old) in enumerate(zip(shape, basis_of(case))):
            new, flat = flat[: 2 * n].reshape(2, n), flat[2 * n :]
            if mode != step % 3:
                np.testing.assert_array_equal(new, old)
                continue
            t = np.moveaxis(want, mode, 0).reshape(n, -1)
            q = np.linalg.qr((old @ t @ t.T).T)[0]  # one step of subspace iteration
            np.testing.assert_allclose(new.T @ new, q @ q.T, atol=1e-4)


def test_modes_that_are_not_cut_need_no_basis():
    codec = build("tucker:ranks=4")
    assert codec._shapes(((64, 32, 3, 3),)) == [(4, 64), (4, 32)]
    assert codec.wire_bytes((64, 32, 3, 3)) == 4 * 64 * 4 * 9
    assert codec.wire_bytes((64, 3, 3)) == 4 * 64 * 9  # one mode alone is cut: sent as it is
    assert codec.wire_bytes((64,), ()) == 4 * 65
    for rate, share in ((0.12, 1), (0.13, 0.125)):
        other = build(f"tucker:ranks=4,max_rate={rate}")
        assert other.wire_bytes((64, 32, 3, 3)) == 4 * 64 * 32 * 9 * share
    assert build("tucker:ranks=16x8x2").wire_bytes((64, 64, 3, 3)) == 4 * 16 * 64 * 2 * 2


@pytest.mark.parametrize("text", ["acp:rank=4", "powersgd:rank=4", "svd:rank=4", "tucker:ranks=4"])
@pytest.mark.parametrize("step", [0, 1])
def test_what_is_sent_is_an_orthogonal_projection(fw, text, step):
    # The first basis of acp is one of rows: on an odd step it is none of a longer matrix's columns.
    for shapes in (MATRIX, KERNEL)[: 1 if step and "acp" in text else 2]:
        case = case_of(fw, text, shapes, table.values("gaussian", table.numel(shapes)), step)
        dot = case.sent @ case.left
        assert abs(dot) <= 1e-6 * np.linalg.norm(case.x) ** 2
        if build(text).combine is Combine.SUM:  # onto a space that does not depend on x
            close(case.on(case.sent).sent, case.sent)


# Over several steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_a_matrix_of_rank_one_is_recovered(fw, name, scale):
    x = outer(MATRIX[0]) * scale
    ranks = ranks_of(fw, name, MATRIX, size=2)
    for step in range(4):
        got = total(ranks, step, x)
        if step >= 2:
            close(got, x, 1e-5)


def test_a_tensor_of_rank_one_is_recovered(fw):
    shapes = ((12, 11, 10, 9),)
    x, ranks = outer(shapes[0]), ranks_of(fw, "tucker", shapes, size=2)
    for step in range(8):
        got = total(ranks, step, x)
        if step >= 4:
            close(got, x, 1e-5)


@pytest.mark.parametrize("text", ["acp", "powersgd", "svd:iterations=20", "tucker"])
def test_a_fixed_matrix_comes_to_its_best_approximation(text):
    m, n = MATRIX[0]
    x = spectrum(m, n, 0.7 ** np.arange(20))
    best = np.sqrt((np.linalg.svd(x, compute_uv=False)[4:] ** 2).sum())
    ranks = ranks_of(TORCH, text, MATRIX, size=2)
    for step in range(40):
        error = np.linalg.norm(x - total(ranks, step, x))
        assert error >= best * (1 - 1e-4)
    assert error <= best * 1.01, (error, best)


def test_a_random_start_comes_less_close():
    """So the test above tells a warm start from none."""
    m, n = MATRIX[0]
    x = spectrum(m, n, 0.7 ** np.arange(20))
    ranks = ranks_of(TORCH, "powersgd:warm_start=False", MATRIX)
    errors = [np.linalg.norm(x - total(ranks, step, x)) for step in range(40)]
    best = np.sqrt((np.linalg.svd(x, compute_uv=False)[4:] ** 2).sum())
    assert min(errors) > 1.01 * best


def test_a_fixed_tensor_comes_to_its_best_approximation():
    shape, rank = (16, 14, 12), 3
    rng = np.random.default_rng(5)
    x = 0.02 * rng.standard_normal(shape)
    for size in 0.6 ** np.arange(5):
        x = x + size * outer(shape, int(1000 * size)) / 10
    bases = [np.linalg.qr(rng.standard_normal((n, rank)))[0] for n in shape]

    def projected(free):
        y = x
        for mode, basis in enumerate(bases):
            if mode != free:
                y = np.moveaxis(np.tensordot(basis @ basis.T, y, (1, mode)), 0, mode)
        return y

    for turn in range(60):  # higher-order orthogonal iteration
        mode = turn % 3
        unfolded = np.moveaxis(projected(mode), mode, 0).reshape(shape[mode], -1)
        bases[mode] = np.linalg.svd(unfolded, full_matrices=False)[0][:, :rank]
    best = [np.linalg.norm(x - projected(free)) for free in range(3)]
    ranks = ranks_of(TORCH, f"tucker:ranks={rank}", (shape,))
    errors = [np.linalg.norm(x - total(ranks, step, x)) for step in range(60)]
    np.testing.assert_allclose(errors[-3:], best, rtol=0.01)


@pytest.mark.parametrize("name", ALL)
def test_zero_gradients_and_what_follows(fw, name):
    shapes = KERNEL if name == "tucker" else MATRIX
    x, ranks = outer(shapes[0]), ranks_of(fw, name, shapes)
    zeros = np.zeros(shapes[0])
    for step in range(4):
        assert not total(ranks, step, zeros).any()
    for step in range(4, 40):
        got = total(ranks, step, x)
    close(got, x, 1e-5)
    for step in range(40, 44):
        assert not total(ranks, step, zeros).any()
    for step in range(44, 60):
        got = total(ranks, step, x)
    close(got, x, 1e-5)


def test_tucker_keeps_its_bases_where_a_gradient_is_zero(fw):
    x, ranks = outer(KERNEL[0]), ranks_of(fw, "tucker", KERNEL)
    for step in range(4):
        total(ranks, step, x)
    for step in range(4, 8):
        total(ranks, step, 0 * x)
    close(total(ranks, 8, x), x, 1e-5)


@pytest.mark.parametrize("form", ["", "+fp16"])
@pytest.mark.parametrize("name", ALL)
def test_books_balance_over_ranks(name, form):
    for shapes in (table.MATRICES, KERNEL, MATRIX):
        checks.books_balance(
            ranks_of(TORCH, name + form, shapes, size=3, memory=Residual()), steps=12
        )


# Forms -----------------------------------------------------------------------------------------


def test_ranks_in_every_form():
    assert build("tucker:ranks=16x16x3") == REGISTRY["tucker"](ranks=(16, 16, 3))
    assert build("tucker:ranks=16x16x3").describe().startswith("tucker:ranks=16x16x3,")
    assert REGISTRY["tucker"](ranks=(5,)) == build("tucker:ranks=5")
    with pytest.raises(SettingsError, match="ranks='16x0'"):
        build("tucker:ranks=16x0")


@pytest.mark.parametrize("text", ["tucker", "tucker:ranks=3+fp16", "acp"])
def test_a_step_may_be_a_tensor(text):
    fw = frameworks.load("tensorflow")
    tf = fw.framework
    shapes = (*KERNEL, (), (9, 8, 7), (40, 30))
    x = table.values("gaussian", table.numel(shapes))
    start = case_of(fw, text, shapes, x)

    @tf.function(autograph=False)
    def run(x, number):
        call = dataclasses.replace(start.full_call, step=number)
        payload, error, _ = start.codec.encode(fw.xp, x, call, want_error=True)
        done = start.codec.finish(fw.xp, [payload], start.x.size, call, scale=1.0)
        assert payload.shape == start.once.payload.shape
        return error, done.total, done.shared[0]

    for step in range(12):
        call = dataclasses.replace(start.full_call, step=step)
        payload, error, _ = start.codec.encode(fw.xp, fw.tensor(x), call, want_error=True)
        done = start.codec.finish(fw.xp, [payload], x.size, call, scale=1.0)
        got = run(fw.tensor(x), tf.constant(step, tf.int64))
        for a, b in zip((error, done.total, done.shared[0]), got):
            np.testing.assert_allclose(fw.array(a), fw.array(b), atol=1e-3 if "+" in text else 1e-5)


@pytest.mark.parametrize(
    ("text", "combine", "bias"),
    [
        ("acp:rank=4+fp16", Combine.SUM, None),
        ("powersgd:rank=4+fp16", Combine.ROUNDS, None),
        ("svd:rank=4+linear:bits=8", Combine.GATHER, Bias.NEITHER),
        ("tucker:ranks=4+fp16", Combine.SUM, None),
        ("tucker:ranks=4+sign:block=64", Combine.GATHER, Bias.CONTRACTION),
    ],
)
def test_composition(fw, text, combine, bias):
    outer_text, inner = text.split("+")[0], build(text.split("+")[1])
    codec, plain = build(text).with_memory(True), build(outer_text)
    shapes = KERNEL if "tucker" in text else MATRIX
    kept = [(4 * 16 * 9,)] if "tucker" in text else [(4, 60)]
    if "powersgd" in text or "svd" in text:
        kept.append((4, 45))
    assert plain.wire_bytes(*shapes) == 4 * sum(map(math.prod, kept))
    assert codec.wire_bytes(*shapes) == inner.wire_bytes(*kept)
    assert codec.combine is combine
    assert codec.bias is (bias or inner.with_memory(True).bias)
    case = case_of(fw, text, shapes, table.values("gaussian", table.numel(shapes)))
    checks.nothing_is_lost(case)
    alone = case_of(fw, outer_text, shapes, case.x)
    assert np.abs(case.left - alone.left).max() > 1e-5  # it knows of the rounding, too


@pytest.mark.parametrize("text", ["acp:rank=3", "powersgd:rank=3", "tucker:ranks=3", "cltk"])
@pytest.mark.parametrize("shapes", [((10, 90),), ((90, 10),)], ids=str)
def test_a_bad_step_does_not_turn_the_sides(text, shapes):
    """What was not kept does not count as a step: the next one uses the bases as they are for."""
    ranks = ranks_of(TORCH, text, shapes, size=2)
    grads = table.rng(3).standard_normal((2, 900)).astype(F32)
    for step in range(9):
        spoilt = grads.copy()
        if step in (1, 4, 5):
            spoilt[1, 7] = np.inf
        outcomes = ranks.step(step, spoilt)
        for outcome, grad in zip(outcomes, grads):
            if step not in (1, 4, 5):
                error = ranks.fw.array(outcome.error)
                assert np.linalg.norm(error) <= np.linalg.norm(grad) * (1 + 1e-6), step
                total = ranks.fw.array(outcome.total)
                assert np.linalg.norm(total) > 0.1 * np.linalg.norm(grads.mean(axis=0)), step
