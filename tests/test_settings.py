"""What a user may write, and what the messages say about the rest."""

import copy
import dataclasses
import inspect
import math
import pickle

import numpy as np
import pytest

from horovod_gradcomp import GradCompError, SettingsError
from horovod_gradcomp.codecs import REGISTRY, build, name_of
from horovod_gradcomp.core.memories import MEMORIES
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.core.namespace import signature
from horovod_gradcomp.core.options import Options
from horovod_gradcomp.core.settings import assemble, make, parse_codec
from horovod_gradcomp.core.stringform import split
from tests import table

FRACTION = [
    0,
    10**400,
    -0.1,
    1.1,
    2,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "0.1",
    None,
    [0.1],
]
COUNT = [0, -1, 1.5, 8.0, True, "8", None, math.nan]
THEN = [3, True, ["fp16"], REGISTRY["fp16"]]
BAD: dict[str, dict[str, list]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "fp8": {"format": ["e3m4", "", None, 8, True, ["e4m3"]], "block": [*COUNT, 1, 12]},
    "linear": {
        "bits": [0, 1, 9, -4, 4.0, 3.5, True, "4", None],
        "block": [*COUNT, 1, 7, 12, 1023],
        "rounding": ["up", "", None, 0, True, ["nearest"]],
    },
    "logarithmic": {
        "bits": [0, 1, 9, 4.0, True, "4", None],
        "block": [*COUNT, 1, 12],
        "range": [
            0,
            np.array([2.0, 3.0]),
            0.5,
            -1,
            1e7,
            math.nan,
            math.inf,
            True,
            "wide",
            "32",
            ["auto"],
        ],
    },
    "qsgd": {
        "bits": [0, 1, 9, -4, 4.0, True, "4", None],
        "block": [*COUNT, 1, 12],
        "norm": ["l1", "", None, 2, True],
    },
    "terngrad": {
        "block": [*COUNT, 1, 12],
        "clip_sigma": [-1, -1e-9, 1e7, math.nan, math.inf, True, False, "2.5", [2.5]],
    },
    "natural": {},
    "sign": {
        "scale": ["max", "", None, 1, True],
        "block": [*COUNT, 1, 12],
        "vote": [0, 1, "yes", None],
    },
    "onebit": {"block": [*COUNT, 1, 12]},
    "topk": {
        "then": THEN,
        "ratio": FRACTION,
        "select": ["all", None, 1, "Exact"],
    },
    "threshold": {
        "then": THEN,
        "value": [0, -1, 1e-45, 1e39, math.nan, math.inf, True, "1", None, [1]],
        "max_ratio": FRACTION,
    },
    "dgc": {"then": THEN, "ratio": FRACTION, "select": ["all", None, 1, "Exact"]},
    "randomk": {
        "then": THEN,
        "ratio": FRACTION,
        "block": COUNT,
        "rescale": [True, False, None, "maybe"],
    },
    "bernoulli": {
        "then": THEN,
        "p": [*FRACTION, 1e-10],
        "rescale": [True, False, None, "maybe"],
    },
    "cltk": {"then": THEN, "ratio": FRACTION},
    "acp": {"then": THEN, "rank": COUNT, "max_rate": FRACTION},
    "powersgd": {
        "then": THEN,
        "rank": COUNT,
        "max_rate": FRACTION,
        "warm_start": [0, 1, "yes", None],
    },
    "svd": {"then": THEN, "rank": COUNT, "max_rate": FRACTION, "iterations": [-1, *COUNT[2:]]},
    "tucker": {
        "then": THEN,
        "ranks": [
            *COUNT,
            (),
            (4, 0),
            (4, 2.0),
            (True, 4),
            [4, 4],
            "4x0",
            "4x",
            "x4",
            "4xa",
            "-1x2",
        ],
        "max_rate": FRACTION,
    },
}
BAD_OPTIONS = {
    "memory": ["resdual", "", 3, True, "residual:decay=2", "none:decay=1", "residual:deca=1", []],
    "seed": [0.5, "1", None, True],
    "min_numel": [-1, 0.5, "8", None, True],
    "skip_1d": [0, 1, "yes", None],
    "bucket_bytes": [0, 3, -5, 1e6, None, True],
    "start_after": [-1, 0.5, "8", None, True],
    "start_with": ["fp17", "", 3, None, "topk:ratio=2"],
    "rules": ["a", 3, [("a",)], [("(", None)], [(1, None)], [("a", 3)], [("a", "topq")]],
    "clip_norm": [0, -1, math.inf, math.nan, "1", True],
    "clip_value": [0, -1, math.inf, math.nan, "1", True],
    "state_dtype": ["float16", "bf16", 16, None],
    "exchange": ["gather", "", None, True],
    "ranks_per_node": [0, -1, 0.5, "2", True],
}


def bad_settings():
    for name, settings in BAD.items():
        for key, values in settings.items():
            for value in values:
                yield pytest.param(name, key, value, id=f"{name}-{key}={value!r}")


def test_every_setting_is_tried():
    assert list(BAD) == list(REGISTRY)
    for name, settings in BAD.items():
        assert list(settings) == list(inspect.signature(REGISTRY[name]).parameters)
    assert list(BAD_OPTIONS) == [f.name for f in dataclasses.fields(Options)]


@pytest.mark.parametrize(("name", "key", "value"), list(bad_settings()))
def test_out_of_range(name, key, value):
    for start in (lambda: REGISTRY[name](**{key: value}), lambda: make(name, {key: value})):
        with pytest.raises(SettingsError) as caught:
            start()
        text = str(caught.value)
        assert text.startswith(f"{name}: got {key}={value!r}; expected "), text


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD_OPTIONS.items() for value in values]
)
def test_options_out_of_range(key, value):
    with pytest.raises(SettingsError) as caught:
        make("topk", {key: value})
    assert "expected" in str(caught.value)
    assert key in str(caught.value) or str(value).partition(":")[0] in str(caught.value)


def test_options_that_do_not_fit_one_another():
    with pytest.raises(SettingsError, match="one of them"):
        make("topk", {"clip_norm": 1.0, "clip_value": 1.0})
    for memory in ("ef21", "differential"):
        with pytest.raises(SettingsError, match="bfloat16"):
            make("topk", {"memory": memory, "state_dtype": "bfloat16"})
    with pytest.raises(SettingsError, match="two_phase"):
        make("fp16", {"exchange": "two_phase"})
    with pytest.raises(SettingsError, match="missing from the reference"):
        make("qsgd", {"exchange": "two_phase", "memory": "differential:alpha=0.1"})
    made = make("topk", {"exchange": "two_phase", "rules": [("a", "powersgd")]})
    assert made.exceptions[0][1].options.exchange == "auto"
    make("topk", {"memory": "momentum", "state_dtype": "bfloat16", "clip_norm": 1})


@pytest.mark.parametrize(
    ("start", "parts"),
    [
        (lambda: make("topk", {"ration": 0.1}), ["topk: keyword 'ration'", "'ratio'?", "select"]),
        (lambda: make("topk", {"momory": 1}), ["'momory'", "did you mean 'memory'?", "seed"]),
        (lambda: make("none", {"ratio": 1}), ["none: keyword 'ratio'", "memory", "min_numel"]),
        (
            lambda: make("topq", {}),
            ["codec 'topq'", "onebit, topk", "'topk'?"],
        ),
        (lambda: build("lin"), ["codec 'lin'", "linear"]),
        (lambda: build("topk:ratoi=0.1"), ["topk: keyword 'ratoi'", "'ratio'?"]),
        (lambda: build("topk:ratio"), ["topk", "'ratio'", "key=value"]),
        (lambda: build("topk:ratio=0.1,ratio=0.2"), ["topk", "ratio twice"]),
        (lambda: build("fp16:bits=4"), ["fp16: keyword 'bits'", "expected none"]),
        (lambda: build(""), ["codec ''", "topk"]),
        (lambda: build(0.01), ["0.01", "'topk:ratio=0.01'"]),
        (lambda: build("linear:block=12"), ["block=12", "multiple of 8"]),
        (lambda: build("linear:bits=1"), ["bits=1", "2, 3, 4, 5, 6, 7, 8"]),
        (lambda: build("topk:ratio=0"), ["ratio=0", "0 < ratio <= 1"]),
        (lambda: build("topk:ratio=nan"), ["ratio=nan", "0 < ratio <= 1"]),
        (lambda: make("topk", {"memory": "resdual"}), ["memory 'resdual'", "'residual'?"]),
        (lambda: make("topk", {"memory": 7}), ["memory=7", "none, residual"]),
        (lambda: make("topk", {"memory": "residual:decay=0"}), ["residual: got decay=0", "<= 1"]),
    ],
)
def test_messages_say_what_is_allowed(start, parts):
    with pytest.raises(SettingsError) as caught:
        start()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_an_unbiased_codec_refuses_a_residual():
    for name, settings in (
        ("none", {}),
        ("linear", {"rounding": "stochastic"}),
        ("qsgd", {}),
        ("terngrad", {"clip_sigma": None}),
        ("natural", {}),
        ("randomk", {"rescale": "yes"}),
    ):
        with pytest.raises(SettingsError, match="unbiased") as caught:
            make(name, {**settings, "memory": "residual"})
        assert "what to do" in str(caught.value)


def test_errors_are_value_errors_of_one_family():
    assert issubclass(SettingsError, ValueError)
    assert issubclass(SettingsError, GradCompError)
    with pytest.raises(ValueError, match="ratio"):
        build("topk:ratio=7")


@pytest.mark.parametrize("label", table.FORMS)
def test_string_forms_round_trip(label):
    codec = table.FORMS[label]
    text = codec.describe()
    assert text.partition(":")[0] == name_of(codec)
    assert build(text) == codec
    assert parse_codec(f"  {text.replace(',', ' , ').replace('=', ' = ')} ") == codec
    assert pickle.loads(pickle.dumps(codec)) == codec == copy.deepcopy(codec)
    assert hash(build(text)) == hash(codec)


def test_numbers_of_string_forms():
    assert build("topk:ratio=1e-3").ratio == 1e-3
    assert build("topk:ratio=1").ratio == 1
    assert build("linear:bits=4") == REGISTRY["linear"](bits=4)
    assert split("a:b=1,c=2.5,d=x,e=True,f=false,g=None") == (
        "a",
        {"b": 1, "c": 2.5, "d": "x", "e": True, "f": False, "g": None},
    )


def test_defaults():
    for name, rows in table.SETTINGS.items():
        assert rows[0] == {}
        settings = make(name, {})
        assert settings.memory == MEMORIES[REGISTRY[name]().default_memory]()
        assert settings.options == Options()


def test_memory_forms():
    assert make("topk", {"memory": "none"}).memory == NoMemory()
    assert make("topk", {"memory": "residual:decay=0.9"}).memory == Residual(decay=0.9)
    assert make("topk", {"memory": Residual(decay=0.5)}).memory == Residual(decay=0.5)


def test_the_codec_knows_whether_it_has_a_memory():
    assert make("randomk", {}).codec.rescale == "no"
    assert make("randomk", {"memory": "none"}).codec.rescale == "yes"
    assert make("randomk", {"rescale": "yes"}).memory == NoMemory()
    assert assemble(build("topk"), Options()).codec == build("topk")


def test_settings_describe_everything():
    settings = make("topk", {"ratio": 0.05, "seed": 7, "memory": "residual:decay=0.9"})
    text = settings.describe()
    assert "\n" not in text
    for part in ("topk:ratio=0.05", "memory=residual:decay=0.9", "seed=7", "min_numel=1024"):
        assert part in text
    other = make("topk", {"ratio": 0.05, "seed": 8, "memory": "residual:decay=0.9"})
    assert other.describe() != text
    assert make("topk", {"memory": "residual"}).describe() == make("topk", {}).describe()


def test_signatures_show_settings_and_options():
    for name, cls in REGISTRY.items():
        parameters = signature(cls).parameters
        own = [f.name for f in dataclasses.fields(cls) if f.name != "then"]
        last = ["then"] * any(f.name == "then" for f in dataclasses.fields(cls))
        assert list(parameters) == [*own, *last, *BAD_OPTIONS]
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values()), name


def test_codecs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        build("topk").ratio = 0.5


def test_numpy_numbers_are_refused_or_mean_the_same():
    assert build("topk") == REGISTRY["topk"](ratio=np.float64(0.01))
    with pytest.raises(SettingsError, match="bits="):
        REGISTRY["linear"](bits=np.float64(4))


@pytest.mark.parametrize(
    "text",
    [
        "topk+qsgd", "svd+terngrad", "acp+natural", "topk+sign:vote=True", "randomk+terngrad",
        "randomk:rescale=yes+sign:vote=True",
    ],
)  # fmt: skip
def test_noise_that_a_memory_would_let_grow_is_refused_after_a_plus(text):
    with pytest.raises(SettingsError, match="fed back"):
        build(text)


def test_what_is_rescaled_has_no_memory():
    for text in (
        "randomk:rescale=yes+fp16",
        "bernoulli:rescale=yes+linear",
        "randomk:rescale=yes+qsgd",
    ):
        codec = parse_codec(text)
        assert assemble(codec, Options()).memory == NoMemory()
        for memory in ("residual", "momentum", "ef21"):
            with pytest.raises(SettingsError, match="unbiased"):
                assemble(codec, Options(memory=memory))


def test_terngrad_takes_no_memory():
    with pytest.raises(SettingsError, match="noisy"):
        make("terngrad", {"memory": "residual"})
