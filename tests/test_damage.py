"""A payload of any bytes is refused by name or decoded within bounds; nothing beside is touched."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horovod_gradcomp import ExchangeError
from horovod_gradcomp.codecs import build
from horovod_gradcomp.core import damage, exchange, positions, twophase
from horovod_gradcomp.core.codec import Combine
from horovod_gradcomp.core.exchange import Reply
from horovod_gradcomp.core.memory import NoMemory
from horovod_gradcomp.core.payload import FLAG_BYTES
from horovod_gradcomp.ops import torch_kernels
from horovod_gradcomp.testing import frameworks
from tests import table

NAME = "layer.weight"
NUMEL = 1500
GUARD, CANARY = 256, 0xA5
PACKED = {label: codec for label, codec in table.FORMS.items() if codec.combine is Combine.GATHER}
LARGE = {
    "32 bit": build("topk:ratio=0.00004"),
    "16 bit": build("topk:ratio=0.01"),
    "bitmap": build("topk:ratio=0.2"),
}
"""On so many elements that positions lie in several blocks."""
FEW = ("topk()", "topk(ratio=0.1,then=linear:bits=4,block=64,select=exact)", "linear()", "onebit()")
"""For what is slow."""


def steadily(examples):
    """Run a property on the same examples each time."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# What may happen to a payload ------------------------------------------------------------------

WORDS = st.integers(0, 2**32 - 1)
EXTREMES = np.array([-(2**31), -1, 0, 1, 2**31 - 1, 0x7F800000, 0x7FC00000, 0x80800000 - 2**32])


def noise(data, a, b):
    return np.random.default_rng(a).integers(0, 256, data.size).astype(np.uint8)


def flip(data, a, b):
    data[a % data.size] ^= 1 << b % 8
    return data


def swap(data, a, b):
    """Exchange two runs of words, as where sections lie in another order."""
    length = 4 * (1 + a % max(1, data.size // 8))
    first, second = (4 * (at % max(1, (data.size - length) // 4 + 1)) for at in (b, a ^ b))
    kept = data[first : first + length].copy()
    data[first : first + length] = data[second : second + length]
    data[second : second + length] = kept
    return data


def twice(data, a, b):
    """Repeat a word, or half a one."""
    width = 2 + 2 * (b % 2)
    at = width * (1 + a % max(1, data.size // width - 1))
    data[at : at + width] = data[at - width : at][: data[at : at + width].size]
    return data


def overwrite(data, a, b):
    """Write an extreme word over and over."""
    word = EXTREMES[a % len(EXTREMES)].astype(np.int64).astype(np.uint32)
    start = 4 * (b % max(1, data.size // 4))
    stop = min(data.size, start + 4 * (1 + a % 7))
    data[start:stop] = np.resize(word[None].view(np.uint8), stop - start)
    return data


def cut(data, a, b):
    return data[: a % data.size]


def extend(data, a, b):
    return np.concatenate([data, noise(data, a, b)[: 1 + b % data.size]])


KINDS = (noise, flip, twice, swap, overwrite, cut, extend)
ACCIDENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), WORDS, WORDS),
    min_size=1,
    max_size=3,
)


def spoilt(good, accidents, keep_flag):
    """Return a copy of a payload after accidents; its flag says "finite" still where it is kept."""
    data = good.copy()
    for happen, a, b in accidents:
        data = happen(data, a, b) if data.size else data
    if keep_flag and data.size == good.size:
        data[-FLAG_BYTES:] = 0
    return data


# What must not happen --------------------------------------------------------------------------


class Guards:
    """Tensors inside larger ones that nothing may write to."""

    def __init__(self, fw):
        self._fw, self._wholes = fw, []
        self.xp = fw.xp
        if fw.name == "torch":
            made = {"empty": self._empty, "zeros": self._zeros}
            if fw.path == "torch":
                kernels = frameworks.rebound(torch_kernels, fresh=self._fresh)
                made["kernels"] = lambda *tensors: kernels if fw.xp.kernels(*tensors) else None
            self.xp = frameworks.without_kernels(fw.xp, **made)

    def around(self, data):
        """Return the bytes of an array, guarded."""
        whole = np.full(data.size + 2 * GUARD, CANARY, np.uint8)
        whole[GUARD : GUARD + data.size] = data
        tensor = self._fw.tensor(whole)
        self._wholes.append((tensor, data.copy()))
        return tensor[GUARD : GUARD + data.size]

    def _empty(self, count, like, dtype="float32"):
        nbytes = count * np.dtype(dtype).itemsize
        whole = self._fw.tensor(np.full(nbytes + 2 * GUARD, CANARY, np.uint8))
        self._wholes.append((whole, None))
        return whole[GUARD : GUARD + nbytes].view(getattr(self._fw.framework, dtype))

    def _fresh(self, count, dtype, like):
        return self._empty(count, like, str(dtype).partition(".")[2])

    def _zeros(self, count, dtype, like):
        return self._empty(count, like, dtype).zero_()

    def check(self):
        for tensor, data in self._wholes:
            whole = self._fw.array(tensor)
            assert (whole[:GUARD] == CANARY).all(), "written before its beginning"
            assert (whole[-GUARD:] == CANARY).all(), "written behind its end"
            if data is not None:
                assert whole[GUARD:-GUARD].tobytes() == data.tobytes(), "a payload was changed"


def begun(fw, xp, codec, shapes):
    """Return an exchange of two ranks that waits for payloads, and what this one has sent."""
    call = table.call(shapes, size=2)
    call = replace(call, shared=codec.initial(xp, call, fw.tensor(np.zeros(1, np.float32))))
    x = fw.tensor(table.values("gaussian", table.numel(shapes)))
    run = exchange.start(xp, codec, x, call, want_error=False, name=NAME)
    return run, fw.array(next(run).payload)


def survives(fw, codec, shapes, accidents, keep_flag):
    """A peer's payload after accidents is refused by name, or decoded to the right size."""
    guards = Guards(fw)
    run, good = begun(fw, guards.xp, codec, shapes)
    bad = spoilt(good, accidents, keep_flag)
    try:
        run.send(Reply([guards.around(good), guards.around(bad)], 0.5))
    except ExchangeError as error:
        outcome, text = None, str(error)
    except StopIteration as end:
        outcome = end.value
    guards.check()
    if outcome is None:
        assert f"'{NAME}'" in text, text
        assert "rank 1" in text, text
        assert bad.tobytes() != good.tobytes(), text
        return
    assert bad.size == good.size, "another length was taken"
    total = fw.array(outcome.total)
    assert total.shape == (table.numel(shapes),)
    assert total.dtype == np.float32
    if bad[-FLAG_BYTES:].view(np.float32)[0] != 0:
        assert np.isnan(total).all()
        assert math.isnan(fw.array(outcome.bad))


@pytest.mark.parametrize("path", ["torch", "torch_plain"])
@pytest.mark.parametrize("label", PACKED)
def test_any_bytes(label, path):
    @steadily(12)
    @given(ACCIDENTS, st.sampled_from([True, True, False]))
    def check(accidents, keep_flag):
        survives(frameworks.load(path), PACKED[label], table.mixed(NUMEL), accidents, keep_flag)

    check()


@pytest.mark.parametrize("path", ["torch", "torch_plain"])
@pytest.mark.parametrize("label", LARGE)
def test_any_bytes_where_positions_lie_in_several_blocks(label, path):
    @steadily(15)
    @given(ACCIDENTS, st.sampled_from([True, True, False]))
    def check(accidents, keep_flag):
        shapes = table.whole(200_003)
        survives(frameworks.load(path), LARGE[label], shapes, accidents, keep_flag)

    check()


@pytest.mark.parametrize("label", FEW)
def test_any_bytes_in_tensorflow(label):
    @steadily(10)
    @given(ACCIDENTS, st.sampled_from([True, True, False]))
    def check(accidents, keep_flag):
        fw = frameworks.load("tensorflow")
        survives(fw, PACKED[label], table.mixed(NUMEL), accidents, keep_flag)

    check()


# Positions -------------------------------------------------------------------------------------

FORMS = {"32 bit": (200_003, 8), "16 bit": (200_003, 700), "bitmap": (1003, 200), "one": (9, 1)}


def noted(parts, numel, k):
    """Return the positions in sections, or None where they are no ascending ones, by NumPy."""
    form = positions.sections(numel, k)
    if form[0].dtype == "uint8":
        step = form[0].width  # bit j of byte i is element i + j * step
        where = np.flatnonzero(np.unpackbits(parts[0].reshape(1, step), axis=0, bitorder="little"))
    elif len(form) == 1:
        where = parts[0].reshape(-1).astype(np.int64)
    else:
        counts = parts[0].reshape(-1).astype(np.int64)
        if (counts < 0).any() or (counts > 65_536).any() or counts.sum() != k:
            return None
        within = parts[1].reshape(-1).view(np.uint16).astype(np.int64)
        where = np.repeat(np.arange(counts.size) * 65_536, counts) + within
    fine = where.size == k and (np.diff(where) > 0).all() and where[0] >= 0 and where[-1] < numel
    return where if fine else None


def are_checked(fw, form, accidents):
    """Positions are those that NumPy reads, or are called damaged and lie within the tensor."""
    numel, k = FORMS[form]
    where = np.sort(np.random.default_rng(3).permutation(numel)[:k])
    parts = positions.encode(fw.xp, fw.tensor(where), numel)
    sections = positions.sections(numel, k)
    flat = np.concatenate([fw.array(part).reshape(-1).view(np.uint8) for part in parts])
    data = spoilt(flat, [a for a in accidents if a[0] not in (cut, extend)], False)
    ends = np.cumsum([0, *[s.nbytes for s in sections]])
    read = [
        np.ascontiguousarray(data[a:b]).view(s.dtype).reshape(s.rows, s.width)
        for a, b, s in zip(ends, ends[1:], sections)
    ]
    got, wrong = positions.decode(fw.xp, [fw.tensor(part) for part in read], numel, k)
    got, want = fw.array(got), noted(read, numel, k)
    assert got.shape == (k,)
    assert got.min() >= 0
    assert got.max() < numel
    assert (want is None) == bool(fw.array(wrong)[0]), (want, wrong)
    if want is not None:
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_positions_are_checked(fw, form):
    @steadily(60 if fw.name == "torch" else 20)
    @given(ACCIDENTS)
    def check(accidents):
        are_checked(fw, form, accidents)

    check()


@pytest.mark.parametrize(
    ("form", "change", "what"),
    [
        ("32 bit", lambda p: p[0].__setitem__((0, 3), p[0][0, 2]), damage.POSITIONS),  # twice
        ("32 bit", lambda p: p[0].__setitem__((0, 0), -1), damage.POSITIONS),
        ("32 bit", lambda p: p[0].__setitem__((0, 7), 200_003), damage.POSITIONS),
        ("16 bit", lambda p: p[1].__setitem__((0, 699), -1), damage.POSITIONS),  # 65,535, unsigned
        ("16 bit", lambda p: p[0].__isub__(1), damage.COUNTS),
        ("16 bit", lambda p: p[0].__setitem__((0, 0), 2**31 - 1), damage.COUNTS),
        ("bitmap", lambda p: p[0].__ior__(255), damage.COUNTS),
        ("bitmap", lambda p: p[0].__iand__(0), damage.COUNTS | damage.POSITIONS),
    ],
)
def test_what_is_wrong_with_positions(fw, form, change, what):
    numel, k = FORMS[form]
    where = np.sort(np.random.default_rng(3).permutation(numel)[:k])
    parts = positions.encode(fw.xp, fw.tensor(where), numel)
    sections = positions.sections(numel, k)
    read = [fw.array(p).reshape(s.rows, s.width) for p, s in zip(parts, sections)]
    change(read)
    _, wrong = positions.decode(fw.xp, [fw.tensor(part) for part in read], numel, k)
    assert int(fw.array(wrong)[0]) & what == what


# Who is told, and how --------------------------------------------------------------------------


def header(value, column=0, columns=1):
    """Return what writes one value over all of a column of headers."""

    def change(data, rows=2):
        data[: 4 * rows * columns].view(np.float32)[column::columns] = value
        return data

    return change


@pytest.mark.parametrize(
    ("text", "change"),
    [
        *[("sign", header(v)) for v in (np.nan, np.inf, -np.inf, -1.0)],
        *[("linear", header(v, 0, 2)) for v in (np.nan, -np.inf)],
        *[("linear", header(v, 1, 2)) for v in (np.nan, -1e-3)],
        ("onebit", header(-1.0, 0, 2)),
        ("onebit", header(1.0, 1, 2)),
    ],
)
def test_scales_that_no_encoder_writes_are_refused(fw, text, change):
    run, good = begun(fw, fw.xp, build(text), table.whole(1025))
    payloads = [fw.tensor(good), fw.tensor(change(good.copy()))]
    with pytest.raises(ExchangeError, match="scales") as caught:
        run.send(Reply(payloads, 0.5))
    for part in (f"'{NAME}'", "rank 1", "version"):
        assert part in str(caught.value)


def lost_positions(good):
    """Return a payload of ``topk`` whose positions are all ones."""
    data = good.copy()
    data[:-FLAG_BYTES] = 255
    return data


def unread(fw):
    """Return operations that read no value, as on a GPU."""

    def confine_(where, count, damage):
        return where.clamp_(0, count - 1)

    return frameworks.without_kernels(fw.xp, known=lambda x: None, confine_=confine_)


@pytest.mark.parametrize("label", ["32 bit", "16 bit", "bitmap"])
def test_where_nothing_may_be_read_the_step_is_bad(label):
    fw = frameworks.load("torch")
    for change, wrong in ((lost_positions, True), (np.copy, False)):
        run, good = begun(fw, unread(fw), LARGE[label], table.whole(200_003))
        with pytest.raises(StopIteration) as ended:
            run.send(Reply([fw.tensor(good), fw.tensor(change(good))], 0.5))
        outcome = ended.value.value
        assert np.isnan(fw.array(outcome.total)).all() == wrong
        assert math.isnan(fw.array(outcome.bad)) == wrong


def test_a_graph_asserts():
    tf = frameworks.load("tensorflow").framework
    from horovod_gradcomp.ops import tensorflow as xp
    from horovod_gradcomp.tensorflow.traced import TracedCodec
    from horovod_gradcomp.tensorflow.unit import whole

    call = table.call(table.whole(1000), size=2)

    @tf.function
    def step(agreed, other, replace):
        run = exchange.start(
            xp,
            TracedCodec(build("topk:ratio=0.01")),
            tf.constant(table.values("gaussian", 1000)),
            call,
            want_error=False,
            name=NAME,
            agreed=agreed,
        )
        own = next(run).payload
        received = tf.ensure_shape(tf.where(replace, other, own), own.shape)
        try:
            run.send(Reply([own, received], 0.5))
        except StopIteration as end:
            total, flag = whole(end.value, agreed, NAME)
        return total, flag

    codec = build("topk:ratio=0.01")
    lost = tf.fill([codec.wire_bytes(1000) + FLAG_BYTES], tf.constant(255, tf.uint8))
    zero, nan = tf.constant(0.0), tf.constant(math.nan)
    total, flag = step(zero, lost, tf.constant(False))
    assert np.isfinite(total.numpy()).all()
    assert flag.numpy() == 0
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(zero, lost, tf.constant(True))
    for part in (NAME, "[1 3]", "1 for positions", "2 for another number"):
        assert part in caught.value.message
    total, flag = step(nan, lost, tf.constant(True))
    assert np.isnan(total.numpy()).all()
    assert np.isnan(flag.numpy())


def two_phases(fw, codec, turn):
    """Run two ranks of the two-phase exchange; what rank 1 sends in a round is damaged."""
    size, shapes = 2, table.whole(4000)
    runs = [
        twophase.start(
            fw.xp,
            codec,
            fw.tensor(table.values("gaussian", 4000)),
            table.call(shapes, size=size, rank=rank),
            want_error=False,
            name=NAME,
            server=twophase.Server(NoMemory(), ()),
        )
        for rank in range(size)
    ]
    first = [next(run) for run in runs]
    sent = [np.split(fw.array(r.payload), np.cumsum(r.sent)[:-1]) for r in first]
    if turn == 0:
        sent[1] = [lost_positions(part) for part in sent[1]]
    parts = zip(*sent)
    second = [run.send(Reply([fw.tensor(part) for part in mine])) for run, mine in zip(runs, parts)]
    sent = [fw.array(request.payload) for request in second]
    if turn == 1:
        sent[1] = lost_positions(sent[1])
    runs[0].send(Reply([fw.tensor(part) for part in sent], 1.0))


@pytest.mark.parametrize("turn", [0, 1])
def test_both_phases_check(fw, turn):
    with pytest.raises(ExchangeError, match="rank 1"):
        two_phases(fw, build("topk:ratio=0.01"), turn)
    with pytest.raises(StopIteration):
        two_phases(fw, build("topk:ratio=0.01"), None)
