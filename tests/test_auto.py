"""The rule of ``Compression.auto``, and what it may be told."""

import pytest

from horovod_gradcomp.core import auto
from horovod_gradcomp.core.errors import SettingsError
from horovod_gradcomp.core.namespace import Namespace

PACE = auto.Pace(step=1.0, before=0.2, backward=0.4)


def test_a_rehearsed_step_is_a_pipeline():
    # Encoded at 0.1, 0.2, 0.3, 0.4; the link ends at 0.1 + 4 * 0.2; then decode.
    slow = auto.Rehearsal(encode=0.4, decode=0.3, whole=1.2, pieces=4)
    assert slow.transfer == pytest.approx(0.8)
    # Backward and encoding take 0.8, a piece each 0.2; the last is sent at 0.2 + 0.8.
    assert slow.step(PACE) == pytest.approx(0.2 + 1.0 + 0.3)
    # What comes after encoding is the last of four pieces.
    quick = auto.Rehearsal(encode=0.4, decode=0.3, whole=0.71, pieces=4)
    assert quick.transfer == pytest.approx(0.04)
    assert quick.step(PACE) == pytest.approx(0.2 + 0.4 + 0.4 + 0.01 + 0.3)
    # In one piece, nothing is hidden.
    one = auto.Rehearsal(encode=0.4, decode=0.3, whole=1.2, pieces=1)
    assert one.step(PACE) == pytest.approx(0.2 + 0.4 + 1.2)
    assert auto.Rehearsal(0.4, 0.3, 0.5, 2).transfer == 0  # clocks of other ranks


def test_of_those_alike_the_first_is_chosen():
    assert auto.choose(PACE, {"mild": 0.54, "strong": 0.5}) == "mild"
    assert auto.choose(PACE, {"mild": 0.56, "strong": 0.5}) == "strong"
    assert auto.choose(PACE, {"mild": 0.9, "strong": 0.5, "other": 0.49}) == "strong"


def test_too_little_is_not_worth_it():
    assert auto.choose(PACE, {}) == auto.NONE
    assert auto.choose(PACE, {"mild": 0.96}) == auto.NONE
    assert auto.choose(PACE, {"mild": 0.96, "strong": 0.9}) == "strong"  # mild alone is not
    assert auto.choose(PACE, {"mild": 0.95, "strong": 0.9}) == "mild"


def test_a_payload_that_takes_longer_than_a_step_is_not_tried():
    assert auto.hopeless(1.0, PACE, payload=81.0, bandwidth=100.0)
    assert not auto.hopeless(1.0, PACE, payload=79.0, bandwidth=100.0)


class Probe:
    def __init__(self, settings, **own):
        self.settings, self.own = settings, own


COMPRESSION = Namespace(Probe, ("grad_scaler",))


def test_settings_are_those_of_all_candidates():
    made = COMPRESSION.auto(candidates=["fp16", "topk:ratio=0.5"], seed=3, grad_scaler="g")
    assert made.own == {"grad_scaler": "g"}
    settings = made.settings
    assert settings.identity
    assert [form for form, _ in settings.auto.candidates] == ["fp16", "topk:ratio=0.5"]
    assert {own.options.seed for _, own in settings.auto.candidates} == {3}
    assert settings.auto.candidates[1][1].codec.ratio == 0.5
    other = COMPRESSION.auto(candidates=["fp16"], seed=3).settings
    assert settings.describe() != other.describe()
    assert (
        settings.describe()
        == COMPRESSION.auto(candidates=["fp16", "topk:ratio=0.5"], seed=3).settings.describe()
    )
    assert "seed=3" in settings.describe()


def test_defaults_and_string_form():
    settings = COMPRESSION.from_string("auto").settings
    assert tuple(form for form, _ in settings.auto.candidates) == auto.CANDIDATES
    assert COMPRESSION.from_string("auto:budget=2,seed=4").settings.auto.budget == 2
    assert COMPRESSION.resolve("auto", None).settings == settings
    assert COMPRESSION.resolve(COMPRESSION.auto, None).settings == settings
    assert repr(COMPRESSION.auto) == "Compression.auto"
    assert "candidates" in str(COMPRESSION.auto.__signature__)


def test_what_does_not_go_with_adam_is_left_out():
    settings = COMPRESSION.auto().settings
    assert {*auto.fitting(settings.auto, [{"momentum": 0.9}])} == {*auto.CANDIDATES}
    assert [*auto.fitting(settings.auto, [{"betas": (0.9, 0.999)}])] == ["fp16", "qsgd:bits=8"]
    late = COMPRESSION.auto(start_after=100).settings
    assert {*auto.fitting(late.auto, [{"betas": (0.9, 0.999)}])} == {*auto.CANDIDATES}
    momentum = COMPRESSION.auto(candidates=["topk:memory=momentum"]).settings
    assert not auto.fitting(momentum.auto, [{"momentum": 0.9}])
    assert not auto.fitting(COMPRESSION.auto(candidates=["none"]).settings.auto, [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": []}, "a list of string forms"),
        ({"candidates": "topk"}, "a list of string forms"),
        ({"candidates": [3]}, "a list of string forms"),
        ({"candidates": ["tokp"]}, "candidate 'tokp'.*did you mean 'topk'"),
        ({"candidates": ["qsgd"], "memory": "residual"}, "candidate 'qsgd'"),
        ({"budget": -1.0}, "budget"),
        ({"clip_norm": 1.0}, "are not cut"),
        ({"sed": 3}, "keyword 'sed'.*candidates, budget, memory"),
        ({"seed": "x"}, "seed='x'"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        COMPRESSION.auto(**settings)


def test_settings_are_keywords():
    with pytest.raises(SettingsError, match="keywords"):
        COMPRESSION.auto(["topk"])


def test_a_front_end_may_have_none():
    refused = Namespace(Probe, no_auto="got auto; expected a codec")
    for use in (refused.auto, lambda: refused.from_string("auto"), lambda: refused.auto + 1):
        with pytest.raises(SettingsError, match="expected a codec"):
            use()
