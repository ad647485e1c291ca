"""What a ramp takes up when, and how schedules are written."""

import doctest
import math

import pytest

from horovod_gradcomp import SettingsError, ramp
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core import schedule
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.core.schedule import Ramp
from horovod_gradcomp.core.settings import compose, make
from horovod_gradcomp.core.stringform import split


def at_steps(settings, key="ratio"):
    return [(phase.first, getattr(phase.codec, key)) for phase in settings.phases]


def test_the_ramp_of_deep_gradient_compression():
    """25, 6.3, 1.6, 0.4, 0.1 percent, one epoch each."""
    values = ramp(0.25, 0.001, steps=400).values()
    assert [first for first, _ in values] == [0, 100, 200, 300, 400]
    assert [round(100 * v, 2) for _, v in values] == [25, 6.29, 1.58, 0.4, 0.1]


def test_linear_and_whole_numbers():
    assert ramp(0.8, 0.1, 700, "linear").values() == [
        (0, 0.8), (100, 0.7), (200, 0.6), (300, 0.5), (400, 0.4), (500, 0.3), (600, 0.2), (700, 0.1)
    ]  # fmt: skip
    assert ramp(8, 4, 40, "steps").values() == [(0, 8), (10, 7), (20, 6), (30, 5), (40, 4)]
    assert ramp(1, 3, 2, "steps").values() == [(0, 1), (1, 2), (2, 3)]
    assert [v for _, v in ramp(8, 2, 10).values()] == [8, 2]
    assert ramp(4, 4, 10, "steps").values() == [(0, 4)]
    assert all(isinstance(v, int) for _, v in ramp(16, 1, 100).values())


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_ramps_are_monotonous_and_reach_the_end(kind):
    for start, end in ((0.5, 0.01), (0.01, 0.5), (32, 2), (0.3, 0.3)):
        firsts, values = zip(*ramp(start, end, 1000, kind).values())
        assert list(firsts) == sorted(set(firsts))
        assert firsts[0] == 0
        assert values[0] == start
        assert values[-1] == end
        assert list(values) == sorted(values, reverse=start > end)
        assert len(values) <= 8


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ((0, 1, 5), "start=0"),
        ((1, math.nan, 5), "end=nan"),
        ((1, math.inf, 5), "end=inf"),
        ((5e-324, 1.0, 5), "start=5e-324"),
        ((1, 10**400, 5), "end=1000"),
        ((0.1, 0.2, 10**400), "steps=1000"),
        ((2, 10**9, 10, "steps"), "2 to 1000000000"),
        ((True, 1, 5), "start=True"),
        ((1, 2, 0), "steps=0"),
        ((1, 2, 1.5), "steps=1.5"),
        ((1, 2, 5, "cosine"), "kind='cosine'"),
        ((0.5, 2, 5, "steps"), "whole number"),
    ],
)
def test_bad_ramps(settings, part):
    with pytest.raises(SettingsError, match=part):
        ramp(*settings)


def test_a_ramp_is_a_setting():
    settings = make("topk", {"ratio": ramp(0.25, 0.001, 400)})
    assert at_steps(settings) == ramp(0.25, 0.001, 400).values()
    assert settings.codec.ratio == 0.001
    assert settings.codec_at(0).ratio == 0.25
    assert settings.codec_at(99).ratio == 0.25
    assert settings.codec_at(100).ratio == 0.06287
    assert settings.codec_at(10**9) == settings.codec


def test_string_forms():
    for text, want in (
        ("topk:ratio=0.25..0.001@400", Ramp(0.25, 0.001, 400)),
        ("topk:ratio=0.8..0.1@700/linear", Ramp(0.8, 0.1, 700, "linear")),
        ("topk:ratio=1e-1..1e-3@7", Ramp(0.1, 0.001, 7)),
        ("linear:bits=8..4@40/steps", Ramp(8, 4, 40, "steps")),
    ):
        (value,) = split(text)[1].values()
        assert value == want
        (again,) = split(f"x:y={value}")[1].values()
        assert again == want
    assert split("topk:ratio=0.1..x@5")[1] == {"ratio": "0.1..x@5"}


def test_values_of_a_ramp_are_checked():
    with pytest.raises(SettingsError, match="ratio=2"):
        make("topk", {"ratio": ramp(2.0, 0.1, 10)})
    with pytest.raises(SettingsError, match="bits=1"):
        make("linear", {"bits": ramp(8, 1, 10)})
    with pytest.raises(SettingsError, match="one ramp"):
        make("linear", {"bits": ramp(8, 4, 10), "block": ramp(64, 8, 10)})
    with pytest.raises(SettingsError, match="ramp"):
        build("topk:ratio=0.5..0.1@10")


def test_a_gentle_start():
    settings = make("topk", {"start_after": 50})
    assert [(p.first, p.codec.describe().split(":")[0]) for p in settings.phases] == [
        (0, "none"),
        (50, "topk"),
    ]
    assert isinstance(settings.memory, Residual)
    settings = make("topk", {"ratio": ramp(0.1, 0.01, 10), "start_after": 50, "start_with": "fp16"})
    assert [p.first for p in settings.phases] == [0, 50, 55, 60]
    assert "from 55" in settings.describe()
    for bad in ({"start_after": -1}, {"start_after": 0.5}, {"start_with": "fp17"}):
        with pytest.raises(SettingsError):
            make("topk", bad)
    with pytest.raises(SettingsError, match="unbiased"):
        make("topk", {"start_after": 5, "start_with": "qsgd"})


def test_composition_keeps_the_schedule():
    first = make("topk", {"ratio": ramp(0.25, 0.001, 400), "start_after": 10})
    joined = compose(first, make("fp16", {}))
    assert [p.first for p in joined.phases] == [p.first for p in first.phases]
    assert joined.phases[0].codec.identity
    assert all(p.codec.then is not None for p in joined.phases[1:])
    with pytest.raises(SettingsError, match="ramp after"):
        compose(make("topk", {}), make("linear", {"bits": ramp(8, 4, 10)}))


def test_who_reduces_follows_from_all_phases():
    assert make("randomk", {"start_after": 5}).by_horovod
    assert make("fp16", {}).by_horovod
    assert not make("topk", {}).by_horovod
    assert not make("randomk", {"start_after": 5, "start_with": "topk"}).by_horovod
    assert not make("acp", {"memory": "ef21"}).by_horovod
    assert make("none", {}).identity
    assert not make("none", {"start_after": 5, "start_with": "fp16"}).identity
    assert isinstance(make("none", {}).memory, NoMemory)


def test_examples_in_docstrings():
    result = doctest.testmod(schedule)
    assert result.attempted
    assert not result.failed
