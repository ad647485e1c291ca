"""Every check is seen to fail: planted faults go through the very checks that the suite uses.

Beside each fault the sound original passes the same check, so it is the fault that is caught.
"""

import copy
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from horovod_gradcomp.codecs.acp import ACP
from horovod_gradcomp.codecs.fp16 import FP16
from horovod_gradcomp.codecs.linear import Linear
from horovod_gradcomp.codecs.none import NoneCodec
from horovod_gradcomp.codecs.randomk import RandomK
from horovod_gradcomp.codecs.topk import TopK
from horovod_gradcomp.core import exchange, select
from horovod_gradcomp.core.carrier import Carrier
from horovod_gradcomp.core.codec import Bias, Encoded
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.core.momentum import Momentum
from horovod_gradcomp.core.reference import EF21
from horovod_gradcomp.testing import frameworks
from tests import (
    checks,
    lockstep,
    table,
    test_bits,
    test_damage,
    test_imports,
    test_random,
)
from tests.conformance import test_every_codec, test_linear, test_randomk, test_topk

FW = frameworks.load("torch")


def caught(check, *arguments):
    with pytest.raises(AssertionError):
        check(*arguments)


def with_ops(fw=FW, **replaced):
    """Return a framework some of whose operations are others, and all of them in use."""
    broken = copy.copy(fw)
    broken.xp = frameworks.without_kernels(fw.xp, **replaced)
    return broken


def case(codec, kind="gaussian", shapes=None, fw=FW):
    shapes = shapes or table.split(1025)
    return checks.Case(fw, codec, table.values(kind, table.numel(shapes)), table.call(shapes))


# Codecs ---------------------------------------------------------------------------------------


class Edited(TopK):
    """A sound codec, with one thing changed by its descendants."""

    def encode(self, xp, x, call, *, want_error):
        return self.edit_encoded(super().encode(xp, x, call, want_error=want_error))

    def decode(self, xp, payloads, numel, call, *, scale):
        return self.edit_decoded(super().decode(xp, payloads, numel, call, scale=scale))

    def edit_encoded(self, encoded):
        return encoded

    def edit_decoded(self, decoded):
        return decoded


class LosesTheLastElement(Edited):
    def edit_decoded(self, decoded):
        decoded[-1] = 0
        return decoded


class ForgetsTheError(Edited):
    def edit_encoded(self, encoded):
        return Encoded(encoded.payload, encoded.error and encoded.error * 0)


class ErrorOfTheWrongSign(Edited):
    def edit_encoded(self, encoded):
        return encoded._replace(error=None if encoded.error is None else -encoded.error)


class ErrorIsNone(Edited):
    def edit_encoded(self, encoded):
        return Encoded(encoded.payload, None)


class ErrorUnasked(Edited):
    def edit_encoded(self, encoded):
        return Encoded(encoded.payload, encoded.payload.float())


class OffByFourBytes(Edited):
    def wire_bytes(self, *sizes):
        return super().wire_bytes(*sizes) + 4


class FloatBytes(Edited):
    def wire_bytes(self, *sizes):
        return float(super().wire_bytes(*sizes))


class Doubled(Edited):
    def edit_decoded(self, decoded):
        return decoded * 3


class InDoublePrecision(Edited):
    def edit_decoded(self, decoded):
        return decoded.double()


class InItsOwnShape(Edited):
    def edit_decoded(self, decoded):
        return decoded.view(1, -1)


class NanOnZeros(Edited):
    def edit_decoded(self, decoded):
        return decoded / decoded.abs().max() * decoded.abs().max()


class DrawsFromTheUsersGenerator(Edited):
    def edit_decoded(self, decoded):
        return decoded + 0 * FW.framework.rand(())


class DependsOnTheRun(Edited):
    counter = itertools.count()

    def edit_decoded(self, decoded):
        return decoded * (1 + next(self.counter) * 1e-6)


class SizeDependsOnValues(Edited):
    def edit_encoded(self, encoded):
        good = encoded.error is None or encoded.error.isfinite().all()
        return encoded if good else encoded._replace(payload=encoded.payload[4:])


class CannotDecodeNan(Edited):
    def edit_decoded(self, decoded):
        return decoded[~decoded.isnan()]


class NotScaled(TopK):
    def decode(self, xp, payloads, numel, call, *, scale):
        return super().decode(xp, payloads, numel, call, scale=1.0)


class LastRankOnly(TopK):
    def decode(self, xp, payloads, numel, call, *, scale):
        return super().decode(xp, payloads[-1:], numel, call, scale=scale)


class ReplacesInsteadOfAdding(TopK):
    def decode(self, xp, payloads, numel, call, *, scale):
        xp = SimpleNamespace(**{**vars(xp), "add_at_": xp.put_})
        return super().decode(xp, payloads, numel, call, scale=scale)


class ChangesThePayload(NoneCodec):
    def decode(self, xp, payloads, numel, call, *, scale):
        return xp.copy(xp.scale_(payloads[0], scale))


class ReturnsThePayload(NoneCodec):
    def decode(self, xp, payloads, numel, call, *, scale):
        return payloads[0] if scale == 1 else payloads[0] * scale


class ErrorSharesThePayload(NoneCodec):
    def encode(self, xp, x, call, *, want_error):
        whole = xp.concat([x, xp.zeros_like(x)], axis=0)
        return Encoded(whole[: xp.numel(x)], whole[xp.numel(x) - 1 : -1] if want_error else None)


class IdentityInName(FP16):
    identity = True


class SquareRoots(NoneCodec):
    """Sent as roots, which do not add up."""

    identity = False

    def encode(self, xp, x, call, *, want_error):
        return Encoded(x.sign() * x.abs().sqrt(), xp.zeros_like(x) if want_error else None)

    def decode(self, xp, payloads, numel, call, *, scale):
        return payloads[0] * payloads[0].abs() * scale


class NearestButUnbiased(Linear):
    bias = Bias.UNBIASED


class DrawsALittleLow(Linear):
    def quantize(self, xp, rows, call, start):
        head, codes = super().quantize(xp, rows - 0.02 * rows.abs().mean(), call, start)
        return head, codes


class SameDrawEachStep(Linear):
    def quantize(self, xp, rows, call, start):
        return super().quantize(xp, rows, table.call(call.shapes), start)


class KeptInsteadOfScaled(RandomK):
    bias = Bias.UNBIASED

    def with_memory(self, has_memory):
        return self


STOCHASTIC = {"bits": 2, "block": 64, "rounding": "stochastic"}

CODEC_FAULTS = [
    (checks.nothing_is_lost, LosesTheLastElement(ratio=1.0), "gaussian"),
    (checks.nothing_is_lost, ErrorOfTheWrongSign(), "gaussian"),
    (checks.nothing_is_lost, Doubled(), "spike"),
    (checks.nothing_is_lost, NanOnZeros(), "zeros"),
    (checks.sizes_are_declared, OffByFourBytes(), "gaussian"),
    (checks.sizes_are_declared, FloatBytes(), "gaussian"),
    (checks.results_are_flat_float32, InDoublePrecision(), "gaussian"),
    (checks.results_are_flat_float32, InItsOwnShape(), "gaussian"),
    (checks.results_are_finite, NanOnZeros(), "zeros"),
    (checks.zeros_stay_zeros, NanOnZeros(), "gaussian"),
    (checks.runs_repeat, DependsOnTheRun(), "gaussian"),
    (checks.error_is_optional, ErrorUnasked(), "gaussian"),
    (checks.storage_is_own, ChangesThePayload(), "gaussian"),
    (checks.storage_is_own, ReturnsThePayload(), "gaussian"),
    (checks.storage_is_own, ErrorSharesThePayload(), "gaussian"),
    (checks.payloads_add, NotScaled(), "gaussian"),
    (checks.payloads_add, LastRankOnly(), "gaussian"),
    (checks.payloads_add, ReplacesInsteadOfAdding(ratio=0.9), "gaussian"),
    (checks.payloads_add, SquareRoots(), "gaussian"),
    (checks.bias_is_declared, Doubled(ratio=1.0), "gaussian"),
    (checks.bias_is_declared, IdentityInName(), "gaussian"),
    (checks.generators_are_left_alone, DrawsFromTheUsersGenerator(), "gaussian"),
    (checks.bad_values_keep_the_size, SizeDependsOnValues(), "gaussian"),
    (checks.bad_values_keep_the_size, CannotDecodeNan(), "gaussian"),
    (checks.mean_is_unbiased, NearestButUnbiased(bits=2), "gaussian"),
    (checks.mean_is_unbiased, DrawsALittleLow(**STOCHASTIC), "gaussian"),
    (checks.mean_is_unbiased, SameDrawEachStep(**STOCHASTIC), "gaussian"),
    (checks.mean_is_unbiased, KeptInsteadOfScaled(ratio=0.1), "gaussian"),
]


def sound(codec):
    """Return the codec that a planted fault was made of."""
    base = type(codec)
    while base.__module__ == __name__:
        base = base.__base__
    if base is Linear and codec.bias is Bias.UNBIASED:
        return Linear(**STOCHASTIC)
    if base is RandomK:
        return RandomK(ratio=codec.ratio, rescale="yes")
    return base(**vars(codec))


@pytest.mark.parametrize(
    ("check", "codec", "kind"),
    [pytest.param(*f, id=f"{f[0].__name__}-{type(f[1]).__name__}") for f in CODEC_FAULTS],
)
def test_codecs(check, codec, kind):
    check(case(sound(codec), kind))
    caught(check, case(codec, kind))


def test_every_law_is_seen_to_fail():
    planted = {check for check, _, _ in CODEC_FAULTS}
    assert planted >= {*checks.LAWS, *checks.FEW_KINDS_LAWS, checks.mean_is_unbiased}


def test_a_broken_law_is_named():
    with pytest.raises(AssertionError, match=r"nothing_is_lost, .*1024, 1"):
        checks.obey(checks.LAWS[2:], case(ErrorOfTheWrongSign(), shapes=((1,), (1024, 1))))


def test_frameworks_that_round_otherwise():
    other = with_ops(round_=lambda x: FW.xp.floor_(x + 0.49))
    pair = [case(Linear(bits=2), "ramp", fw=fw) for fw in (FW, frameworks.load("tensorflow"))]
    checks.frameworks_agree(pair)
    caught(checks.frameworks_agree, [case(Linear(bits=2), "ramp", fw=other), pair[1]])


@pytest.mark.parametrize(
    "ops",
    [
        {"scaled": lambda a, b: a * (b + 1e-6)},
        {"add_at_": lambda x, at, values: FW.xp.add_at_(x, at, values * (1 + 1e-6))},
    ],
    ids=["scaled", "add_at_"],
)
def test_frameworks_that_decode_otherwise(ops):
    pair = [case(TopK(), fw=with_ops(**ops)), case(TopK(), fw=frameworks.load("tensorflow"))]
    caught(checks.frameworks_agree, pair)


# Against the references -----------------------------------------------------------------------


def test_ties_by_highest_position(monkeypatch):
    x = np.array([1.0, -2, 2, -2, 1, 2, -1, 0, 2, -2] * 5, np.float32)
    good = test_topk.case_of(FW, "topk:ratio=0.3", x)
    test_topk.check_selection(good)
    sound_way = select.largest

    def highest(xp, x, k, *, sampled):
        return (xp.numel(x) - 1 - sound_way(xp, x.flip(0), k, sampled=sampled)).flip(0)

    monkeypatch.setattr("horovod_gradcomp.codecs.topk.largest", highest)
    caught(test_topk.check_selection, test_topk.case_of(FW, "topk:ratio=0.3", x))


def test_a_sample_that_is_trusted(monkeypatch):
    kind = "large_elsewhere"
    good = test_topk.case_of(FW, "topk:ratio=0.01", test_topk.misleading(kind))
    test_topk.check_selection(good)

    def hasty(xp, x, k, *, sampled):
        sample = xp.magnitude(xp.strided(x, select.STRIDE))
        found = xp.positions_above(x, xp.kth_largest(sample, select._sample_rank(x.numel(), k)))
        return found[:k]

    monkeypatch.setattr("horovod_gradcomp.codecs.topk.largest", hasty)
    caught(test_topk.check_selection, test_topk.case_of(FW, "topk:ratio=0.01", good.x))


def test_positions_that_are_not_unique(monkeypatch):
    twice = lambda xp, x, k, *, sampled: xp.arange(0, k, "int64", x) // 2  # noqa: E731
    monkeypatch.setattr("horovod_gradcomp.codecs.topk.largest", twice)
    caught(test_topk.test_positions_stay_unique_and_in_range, FW, np.nan, 1001)


def test_linear_that_rounds_otherwise():
    text = "linear:bits=2"
    halves = [0.0, 0.5, 1.5, 2.5, 3.0]
    test_linear.check_against_reference(test_linear.case_of(FW, text, halves))
    broken = with_ops(round_=lambda x: FW.xp.floor_(x + 0.5))
    caught(test_linear.check_against_reference, test_linear.case_of(broken, text, halves))


def test_linear_that_divides_by_a_reciprocal():
    x = np.arange(511) * 0.05
    broken = with_ops(div_=lambda a, b: a * (1 / b))
    test_linear.check_against_reference(test_linear.case_of(FW, "linear:bits=8", x))
    caught(test_linear.check_against_reference, test_linear.case_of(broken, "linear:bits=8", x))


class OneRowOverAll(Linear):
    """A block that reaches into the next tensor."""

    def encode(self, xp, x, call, *, want_error):
        return super().encode(xp, x, table.call(((xp.numel(x),),)), want_error=want_error)

    def decode(self, xp, payloads, numel, call, *, scale):
        return super().decode(xp, payloads, numel, table.call(((numel,),)), scale=scale)


def test_linear_over_two_tensors():
    shapes = table.split(1025)
    good = case(Linear(), shapes=shapes)
    test_linear.check_against_reference(good)
    caught(test_linear.check_against_reference, case(OneRowOverAll(), shapes=shapes))


class OneStreamForAll(RandomK):
    """Draws that do not depend on the name."""

    def encode(self, xp, x, call, *, want_error):
        return super().encode(xp, x, table.call(call.shapes, name=""), want_error=want_error)

    def decode(self, xp, payloads, numel, call, *, scale):
        return super().decode(xp, payloads, numel, table.call(call.shapes, name=""), scale=scale)


def test_randomk_of_another_key():
    test_randomk.check_against_reference(case(RandomK(ratio=0.1, rescale="no")))
    caught(test_randomk.check_against_reference, case(OneStreamForAll(ratio=0.1, rescale="no")))


@pytest.mark.parametrize("bits", [1, 3, 7])
def test_packing_into_other_places(bits):
    test_bits.test_golden_bytes(FW, bits)
    broken = with_ops(shift_left=lambda a, n: FW.xp.shift_left(a, 7 - n))
    caught(test_bits.test_golden_bytes, broken, bits)
    caught(test_bits.test_round_trip, with_ops(shift_left=lambda a, n: a), bits)


def test_a_sign_that_is_shifted_in():
    broken = with_ops(shift_right=lambda a, n: a >> n)
    for check in (test_random.test_golden_words, test_random.test_words_are_the_rule):
        check(FW)
        caught(check, broken)


def test_a_codec_without_a_row(monkeypatch):
    registry = {**test_every_codec.codecs.REGISTRY, "new": TopK}
    monkeypatch.setattr(test_every_codec.codecs, "REGISTRY", registry)
    caught(test_every_codec.test_every_codec_has_a_row)


def test_a_codec_that_is_not_registered(monkeypatch):
    registry = dict(test_every_codec.codecs.REGISTRY)
    del registry["topk"]
    monkeypatch.setattr(test_every_codec.codecs, "REGISTRY", registry)
    caught(test_every_codec.test_every_file_is_registered)


# Memory and exchange --------------------------------------------------------------------------


class Forgets(Residual):
    def update(self, xp, state, done):
        return (done.error * 0,)


class Leaks(Residual):
    def update(self, xp, state, done):
        return (done.error * 0.999,)


class AddsTwice(Residual):
    def update(self, xp, state, done):
        return (done.error + state[0],)


class IgnoresWhatIsHeld(Residual):
    def compensate(self, xp, grad, state, out, **options):
        return xp.to_float32(grad, out)


def ranks(codec=None, memory=None, fw=FW, size=2, numel=300):
    codec = codec or TopK(ratio=0.1)
    return lockstep.Ranks(fw, codec, memory or Residual(), size=size, numel=numel)


@pytest.mark.parametrize("memory", [Forgets(), Leaks(), AddsTwice(), IgnoresWhatIsHeld()], ids=repr)
def test_memories_that_lose(memory):
    checks.books_balance(ranks())
    caught(checks.books_balance, ranks(memory=memory))


class StandsStill(EF21):
    def update(self, xp, state, done):
        return state


class OwnMean(EF21):
    """Takes what it sent itself for what all sent."""

    def update(self, xp, state, done):
        own, mean = super().update(xp, state, done)
        return own, mean * 0 + own


class GathersNothing(Momentum):
    def update(self, xp, state, done):
        speed, left = super().update(xp, state, done)
        return speed, left * 0


class SpeedLeaks(Momentum):
    def compensate(self, xp, grad, state, out, *, gain=1.0, note=None):
        return super().compensate(xp, grad, state, out, gain=gain, note=note * 0.999)


@pytest.mark.parametrize(
    "memory",
    [Forgets(), Leaks(), StandsStill(), OwnMean(), GathersNothing(), SpeedLeaks()],
    ids=repr,
)
def test_memories_whose_books_do_not_balance(memory):
    for sound in (Residual(), EF21(), Momentum()):
        checks.every_memory_keeps_its_books(ranks(memory=sound))
    caught(checks.every_memory_keeps_its_books, ranks(memory=memory))


class RemembersBesides(Residual):
    """Keeps something that is no state: a run that goes on does not have it."""

    def update(self, xp, state, done):
        seen.append(1)
        return (done.error * (1 + 2.0**-10 * len(seen)),)


seen: list[int] = []


@pytest.mark.parametrize("memory", [RemembersBesides()], ids=repr)
def test_runs_that_do_not_go_on(memory):
    checks.goes_on_bit_for_bit(ranks())
    caught(checks.goes_on_bit_for_bit, ranks(memory=memory))


@dataclass(frozen=True)
class OwnViewOfTheSum(TopK):
    """Decodes a little differently on every rank."""

    calls: itertools.count = field(default_factory=itertools.count, compare=False)

    def finish(self, xp, payloads, numel, call, *, scale):
        done = super().finish(xp, payloads, numel, call, scale=scale)
        return done._replace(total=done.total * (1 + next(self.calls) % 2 * 1e-7))


class OwnShare(ACP):
    """Carries what it sent itself, in place of the sum."""

    def share(self, xp, values, call):
        (shared,) = super().share(xp, values, call)
        return (shared * (1 + call.rank * 1e-7),)


class SharesBadSteps(ACP):
    """Changes the shared state in place, before it is known whether the step is good."""

    def project(self, xp, x, call):
        call.shared[0].mul_(1.001)
        return super().project(xp, x, call)


def test_ranks_that_apply_different_gradients():
    caught(checks.books_balance, ranks(OwnViewOfTheSum(ratio=0.1)))


def test_ranks_that_share_different_states():
    caught(checks.books_balance, ranks(OwnShare(rank=2), numel=1500))


def test_shared_state_that_a_bad_step_changes():
    grads = np.random.default_rng(0).standard_normal((2, 600)).astype(np.float32)
    checks.bad_ranks_are_seen_by_all(ranks(ACP(rank=2), numel=600), grads)
    caught(checks.bad_ranks_are_seen_by_all, ranks(SharesBadSteps(rank=2), numel=600), grads)


def test_ranks_that_send_different_sizes():
    runs = [
        exchange.start(
            FW.xp,
            TopK(ratio=ratio),
            FW.framework.ones(100),
            table.call(table.whole(100)),
            want_error=True,
            name="w",
        )
        for ratio in (0.1, 0.2)
    ]
    caught(lockstep.drive, FW, runs)


GRADS = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)


@pytest.mark.parametrize(
    ("codec", "ops"),
    [
        (TopK(), {"badness": lambda x: FW.framework.zeros(())}),
        (TopK(), {"flag_of": lambda payload: FW.framework.zeros(())}),
        (TopK(), {"set_flag_": lambda payload, flag: payload}),
        (TopK(), {"spoil_": lambda x, flag: x}),
        (FP16(), {"badness": lambda x: FW.framework.zeros(())}),
        (FP16(), {"poison_": lambda payload, flag: payload}),
        (FP16(), {"spoil_": lambda x, flag: x}),
        (RandomK(ratio=0.1), {"poison_": lambda payload, flag: payload}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else next(iter(value)),
)
def test_exchanges_that_ignore_the_flag(codec, ops):
    checks.bad_ranks_are_seen_by_all(ranks(codec), GRADS)
    caught(checks.bad_ranks_are_seen_by_all, ranks(codec, fw=with_ops(**ops)), GRADS)


def test_a_memory_that_is_committed_on_a_bad_step(monkeypatch):
    real = np.array
    seen_as_good = copy.copy(FW)
    seen_as_good.array = lambda t: real(FW.array(t)) if t.dim() else np.float32(0)
    caught(checks.bad_ranks_are_seen_by_all, ranks(fw=seen_as_good), GRADS)


def test_no_memory_is_not_a_residual():
    """Without a memory what is left is gone; the check must not count it as held."""
    checks.books_balance(ranks(memory=NoMemory()))
    lossy = ranks(memory=NoMemory())
    lossy.codec = ErrorOfTheWrongSign(ratio=0.1)
    caught(checks.books_balance, lossy)


# Damaged payloads -------------------------------------------------------------------------------


def positions_are_checked(fw):
    for form in test_damage.FORMS:
        for seed in range(20):
            for happen in (test_damage.noise, test_damage.flip, test_damage.twice):
                test_damage.are_checked(fw, form, [(happen, seed * 7919, seed * 104_729)])


POSITION_FAULTS = {
    "out of range": {"confine_": lambda positions, count, damage: positions},
    "equal ones": {"less": lambda a, b: a <= b if torch.is_tensor(b) else a < b},
    "another number": {"fit": lambda x, count: (FW.xp.fit(x, count)[0], torch.tensor(True))},
    "one end": {"logical_and": lambda a, b: a},
}


@pytest.mark.parametrize("fault", POSITION_FAULTS)
def test_positions_that_are_not_checked(fault):
    caught(positions_are_checked, with_ops(**POSITION_FAULTS[fault]))


def test_checked_positions():
    positions_are_checked(FW)


class Beyond(Edited):
    """Writes one element behind its result."""

    def finish(self, xp, payloads, numel, call, *, scale):
        done = super().finish(xp, payloads, numel, call, scale=scale)
        done.total.as_strided((1,), (1,), done.total.storage_offset() + numel).fill_(1)
        return done


class Careless(Edited):
    """Works in a payload's own storage."""

    def finish(self, xp, payloads, numel, call, *, scale):
        done = super().finish(xp, payloads, numel, call, scale=scale)
        payloads[1][:1] += 1
        return done


@pytest.mark.parametrize("cls", [Beyond, Careless])
def test_writing_where_it_does_not_belong(cls):
    test_damage.survives(FW, TopK(), table.whole(1000), [], True)
    caught(test_damage.survives, FW, cls(), table.whole(1000), [], True)


# The carrier ----------------------------------------------------------------------------------


class WithoutTheHash(Carrier):
    @staticmethod
    def row(rank):
        return 1.0, rank + 1.0, 1.0


class WithoutTheRank(Carrier):
    @staticmethod
    def row(rank):
        return 1.0, 1.0, 1.0


class Unsnapped(Carrier):
    def factor(self, values, name):
        super().factor(values, name)
        return values[0]


class Trusting(Carrier):
    def factor(self, values, name):
        return round(values[0])


def test_carriers():
    caught(checks.carrier_refuses_other_sets, WithoutTheHash)
    caught(checks.carrier_refuses_other_sets, Trusting)
    caught(checks.carrier_refuses_what_is_not_linear, WithoutTheRank)
    caught(checks.carrier_refuses_what_is_not_linear, Trusting)
    caught(checks.carrier_knows_average_and_sum, Unsnapped)


# Sources --------------------------------------------------------------------------------------

PLANTED = {
    "core/a.py": "import numpy as np\n",
    "core/b.py": "def f():\n    import torch\n",
    "codecs/c.py": "from tensorflow import constant\n",
    "ops/torch.py": "import tensorflow\n",
    "torch/d.py": "import tensorflow as tf\n",
    "tensorflow/e.py": "import torch.nn\n",
    "e.py": "import horovod.torch\n",
    "cli/f.py": "import torch\n",
    "cli/g.py": "def f():\n    import numpy\n",
}


@pytest.mark.parametrize("name", PLANTED)
def test_imports_where_they_do_not_belong(name, tmp_path, monkeypatch):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLANTED[name])
    monkeypatch.setattr(test_imports, "PACKAGE", tmp_path)
    caught(test_imports.test_frameworks_are_imported_where_they_belong, path)


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (test_imports.test_no_way_round_by_name, "importlib.import_module('torch')\n"),
        (test_imports.test_no_call_to_numpy, "def encode(x):\n    return x.numpy()\n"),
        (test_imports.test_no_codec_is_special, "if name == 'topk':\n    pass\n"),
        (test_imports.test_no_codec_is_special, "k = x.sum().item()\n"),
    ],
)
def test_sources(check, source, tmp_path, monkeypatch):
    path = tmp_path / "core" / "a.py"
    path.parent.mkdir()
    path.write_text(source)
    monkeypatch.setattr(test_imports, "PACKAGE", tmp_path)
    caught(check, path)


def test_ops_in_another_order(monkeypatch):
    sound_way = test_imports.functions
    monkeypatch.setattr(test_imports, "functions", lambda module: sound_way(module)[::-1])
    caught(test_imports.test_ops_are_those_of_the_protocol, "torch")
