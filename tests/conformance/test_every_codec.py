"""Every law, for every registered codec, in both frameworks."""

import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest

import horovod_gradcomp.codecs as codecs
from horovod_gradcomp.core.codec import Bias, Codec, Combine
from horovod_gradcomp.core.memories import MEMORIES
from horovod_gradcomp.core.memory import NoMemory, Residual
from horovod_gradcomp.core.settings import make as settings_of
from horovod_gradcomp.testing import frameworks
from tests import checks, table

FORMS = pytest.mark.parametrize("label", table.FORMS)
# Eager TensorFlow takes as long for one operation as for a thousand elements, and where payloads,
# errors and decoded values agree with torch's, most laws follow. So they do for torch's tensor
# operations, which are compared with the compiled kernels.
SHAPES = {
    "torch": table.SHAPES,
    "torch_plain": (*table.COMPARED, table.split(9)),
    "tensorflow": table.FEW_SHAPES,
}
GRAPHS = [
    label
    for labels in (
        [label for label in table.FORMS if label.startswith(f"{name}(")] for name in table.SETTINGS
    )
    for label in dict.fromkeys((labels[0], labels[-1]))
]
"""Tracing takes a second: the first and the last form of each codec."""


def make(fw, label, shapes, kind):
    values = table.values(kind, table.numel(shapes))
    return checks.Case(fw, table.FORMS[label], values, table.call(shapes))


@FORMS
@pytest.mark.parametrize("kind", table.VALUES)
def test_laws(fw, kind, label):
    for shapes in SHAPES[fw.path]:
        checks.obey(checks.LAWS, make(fw, label, shapes, kind))


@FORMS
@pytest.mark.parametrize("kind", table.FEW_KINDS)
def test_other_laws(fw, kind, label):
    for shapes in SHAPES[fw.path]:
        checks.obey(checks.FEW_KINDS_LAWS, make(fw, label, shapes, kind))


@FORMS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_other_dtypes(fw, dtype, label):
    """What is sent of a gradient is what is sent of its values in float32."""
    case = make(fw, label, table.MATRICES, "gaussian")
    memory = Residual() if case.codec.bias is not Bias.UNBIASED else NoMemory()
    grad = fw.cast(fw.tensor(case.x), dtype)
    state = tuple(fw.tensor(np.zeros_like(case.x)) for _ in memory.slots)
    x = fw.array(memory.compensate(fw.xp, grad, state, None))
    assert x.dtype == np.float32
    want = case.on(fw.array(fw.cast(grad, "float32")))
    checks.same_bits(want.x, x)
    payload, _ = case.on(x).encode()
    checks.same_bits(fw.array(want.once.payload), fw.array(payload))


@pytest.mark.parametrize(
    "label", [label for label, codec in table.FORMS.items() if codec.bias is Bias.UNBIASED]
)
@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_unbiased(label, kind):
    # One framework is enough: payloads agree.
    case = make(frameworks.load("torch"), label, table.split(1001), kind)
    checks.mean_is_unbiased(case)


@FORMS
@pytest.mark.parametrize("kind", table.VALUES)
def test_frameworks_agree(label, kind):
    few = kind in table.FEW_KINDS
    for shapes in table.COMPARED if few else table.FEW_COMPARED:
        checks.frameworks_agree(
            [make(frameworks.load(name), label, shapes, kind) for name in frameworks.PATHS],
            scales=(1 / 3,) if few else (),
        )


@pytest.mark.parametrize(
    "label", [k for k, codec in table.FORMS.items() if codec.combine is not Combine.ROUNDS]
)
def test_a_scale_may_be_a_tensor(fw, label):
    case = make(fw, label, table.whole(100), "gaussian")
    for scale in (1.0, 0.25, 1 / 3):
        want = case.decode([case.once.payload], scale)
        got = case.decode([case.once.payload], fw.tensor(np.float32(scale)))
        checks.same_bits(fw.array(want), fw.array(got), signed=False)


@pytest.mark.parametrize("label", GRAPHS)
def test_a_graph_agrees_with_eager(label):
    fw = frameworks.load("tensorflow")
    shapes = table.MATRICES if table.FORMS[label].mixes else table.split(70_003)
    case = first = make(fw, label, shapes, "gaussian")
    call, spec = case.full_call, fw.framework.TensorSpec(case.x.shape, fw.framework.float32)

    @fw.framework.function(input_signature=[spec], autograph=True)
    def traced(x):
        if case.in_rounds:
            return in_rounds(x)
        payload, error, _ = case.codec.encode(fw.xp, x, call, want_error=True)
        return payload, error, first.decode([payload])

    @fw.framework.autograph.experimental.do_not_convert
    def in_rounds(x):
        run, sent = case.codec.rounds(fw.xp, x, call, want_error=True), []
        payload = next(run)
        while True:
            sent.append(payload)
            try:
                payload = run.send(payload)
            except StopIteration as end:
                (total, *_), error = end.value
                return fw.framework.concat(sent, axis=0), error, total

    for kind in table.VALUES:
        case = make(fw, label, shapes, kind)
        for what, got in zip(("payload", "error", "decoded"), traced(fw.tensor(case.x))):
            want = getattr(case.once, what)
            assert got.shape == want.shape  # known while tracing, too
            if case.codec.mixes:
                if what != "payload":
                    # An inner codec may round what differs by 1e-7 to two neighbouring codes.
                    share = 1e-5 if case.codec.then is None else 1e-2
                    wrong = np.abs(fw.array(want) - fw.array(got).astype(np.float64))
                    assert (wrong <= share * np.abs(case.x).max()).all() or kind == "largest", kind
                continue
            checks.same_bits(fw.array(want), fw.array(got), f"{kind}: {what}", signed=False)


def test_every_codec_has_a_row():
    assert list(table.SETTINGS) == list(codecs.REGISTRY)
    for name, rows in table.SETTINGS.items():
        assert rows[0] == {}, f"{name}: the default comes first"


def test_every_setting_is_in_the_table():
    for name, rows in table.SETTINGS.items():
        settings = set(inspect.signature(codecs.REGISTRY[name]).parameters)
        assert settings == set().union(*rows), name


def test_every_file_is_registered():
    files = {p.stem for p in Path(codecs.__file__).parent.glob("*.py")} - {"__init__"}
    registered = {cls.__module__.rpartition(".")[2] for cls in codecs.REGISTRY.values()}
    assert files == registered
    for stem in files:
        module = importlib.import_module(f"horovod_gradcomp.codecs.{stem}")
        own = [
            cls
            for cls in vars(module).values()
            if inspect.isclass(cls) and issubclass(cls, Codec) and cls.__module__ == module.__name__
        ]
        assert set(own) <= set(codecs.REGISTRY.values()), stem


@FORMS
def test_declarations(label):
    codec = table.FORMS[label]
    assert isinstance(codec.combine, Combine)
    assert isinstance(codec.bias, Bias)
    assert codec.default_memory in MEMORIES
    assert hash(codec) == hash(type(codec)(**vars(codec)))
    sizes = [codec.wire_bytes(n) for n in range(1, 3000)]
    assert sizes == sorted(sizes), "more elements, fewer bytes"
    assert codec.wire_bytes(3, 4) == codec.wire_bytes(*[3, 4])


@pytest.mark.parametrize("name", codecs.REGISTRY)
def test_defaults_fit_together(name):
    for row in table.SETTINGS[name]:
        settings = settings_of(name, row)
        if settings.memory.wants_error:
            assert settings.codec.bias is not Bias.UNBIASED


@pytest.mark.parametrize("name", codecs.REGISTRY)
def test_docstring_says_what_the_wire_holds(name):
    text = inspect.getdoc(codecs.REGISTRY[name])
    for part in ("=====", "bytes", "Combine:", "Bias:", "Example:", ">>> build("):
        assert part in text, part
    for field in inspect.signature(codecs.REGISTRY[name]).parameters:
        assert f"{field}: " in text, field


def test_empty_tensors_never_come():
    """Front ends pass them by; a codec need not know what their extremes are."""
    assert "numel > 0" in Codec.encode.__doc__


def test_docstring_examples():
    import doctest

    for cls in codecs.REGISTRY.values():
        result = doctest.testmod(importlib.import_module(cls.__module__))
        assert result.attempted, cls
        assert not result.failed, cls
