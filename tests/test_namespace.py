"""The ``Compression`` object of every front end."""

import copy
import inspect

import pytest

from horovod_gradcomp import SettingsError
from horovod_gradcomp.codecs import REGISTRY
from horovod_gradcomp.core.namespace import Namespace
from horovod_gradcomp.core.settings import Settings, make


class Probe:
    def __init__(self, settings):
        self.settings = settings
        self.calls = []

    def compress(self, tensor):
        self.calls.append(tensor)
        return tensor, "ctx"

    def decompress(self, tensor, ctx):
        return tensor, ctx


@pytest.fixture
def compression():
    return Namespace(Probe)


@pytest.mark.parametrize("name", REGISTRY)
def test_one_attribute_a_codec(compression, name):
    factory = getattr(compression, name)
    built = factory(min_numel=5)
    assert isinstance(built, Probe)
    assert isinstance(built.settings, Settings)
    assert built.settings == make(name, {"min_numel": 5})
    assert factory.__doc__ == REGISTRY[name].__doc__
    assert "memory" in inspect.signature(factory).parameters
    assert repr(factory) == f"Compression.{name}"


@pytest.mark.parametrize("name", REGISTRY)
def test_uncalled_it_compresses_with_defaults(compression, name):
    factory = getattr(compression, name)
    assert factory.compress("tensor") == ("tensor", "ctx")
    assert factory.decompress("tensor", "ctx") == ("tensor", "ctx")
    assert factory._instance() is factory._instance()
    assert factory._instance().settings == make(name, {})


def test_each_call_builds_anew(compression):
    assert compression.topk() is not compression.topk()


def test_settings_by_position_are_refused(compression):
    with pytest.raises(SettingsError, match="keywords") as caught:
        compression.topk(0.1)
    assert "ratio" in str(caught.value)


def test_typos_are_refused(compression):
    with pytest.raises(AttributeError, match="did you mean 'topk'"):
        compression.topK  # noqa: B018
    with pytest.raises(SettingsError, match="did you mean 'ratio'"):
        compression.topk(ratoi=0.1)
    assert not hasattr(compression, "__wrapped__")
    assert not hasattr(compression, "power")


def test_string_forms(compression):
    built = compression.from_string("topk:ratio=0.1", seed=3)
    assert built.settings == make("topk", {"ratio": 0.1, "seed": 3})
    nested = compression.from_string("topk:ratio=0.1,memory=residual:decay=0.5")
    assert nested.settings == make("topk", {"ratio": 0.1, "memory": "residual:decay=0.5"})
    with pytest.raises(SettingsError, match="'topk'"):
        compression.from_string("tpk")


def test_it_can_be_copied(compression):
    assert copy.deepcopy(compression).topk().settings == compression.topk().settings


def test_a_compressor_of_another_framework_is_refused(compression):
    def made_in(module):
        return type("FP16", (), {"__module__": module, "compress": lambda tensor: tensor})

    none = made_in("horovod.tensorflow.compression")
    for given in (none, made_in("horovod.tensorflow.compression"), made_in("mine.compression")):
        assert compression.resolve(given, made_in("horovod.tensorflow.compression")) is given
    other = made_in("horovod.torch.compression")
    for given in (other, other(), type("Ours", (other,), {})):
        with pytest.raises(SettingsError, match="of another framework") as caught:
            compression.resolve(given, none)
        assert "horovod.tensorflow.compression" in str(caught.value)
