"""The layout of a payload: sections aligned, nothing overlapping, the flag last."""

import numpy as np
import pytest

from horovod_gradcomp.core.payload import FLAG_BYTES, ITEM_BYTES, Layout, Section
from tests import checks

LAYOUTS = {
    "one": (Section("float32", 1, 3),),
    "bytes": (Section("uint8", 3, 7),),
    "mixed": (
        Section("uint8", 1, 5),
        Section("float16", 1, 3),
        Section("int32", 2, 2),
        Section("int16", 1, 1),
        Section("float32", 3, 1),
    ),
    "with an empty one": (Section("float32", 0, 2), Section("uint8", 1, 9)),
    "none": (),
}
EACH = pytest.mark.parametrize("label", LAYOUTS)


@EACH
def test_sections_are_aligned_and_apart(label):
    layout = Layout(LAYOUTS[label])
    taken = set()
    for at, section in zip(layout.offsets(), layout.sections):
        assert at % ITEM_BYTES[section.dtype] == 0
        mine = set(range(at, at + section.nbytes))
        assert not mine & taken
        taken |= mine
    assert len(taken) == sum(s.nbytes for s in layout.sections)
    assert layout.nbytes - len(taken) in range(4)
    assert layout.nbytes % 4 == 0
    assert layout.total == layout.nbytes + FLAG_BYTES


def parts_of(layout):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 100, (s.rows, s.width)).astype(s.dtype) for s in layout.sections]


@EACH
def test_what_is_sealed_can_be_opened(fw, label):
    layout, like = Layout(LAYOUTS[label]), fw.tensor(np.zeros(1, np.float32))
    parts = parts_of(layout)
    for use_views in (False, True):
        payload, views = layout.new(fw.xp, like)
        tensors = [fw.tensor(p) for p in parts]
        if use_views and payload is not None:
            for view, tensor in zip(views, tensors):
                view.copy_(tensor)
            tensors = views
        sealed = layout.seal(fw.xp, payload, tensors)
        assert fw.array(sealed).nbytes == layout.total
        for part, got in zip(parts, layout.open(fw.xp, sealed)):
            checks.same_bits(part, fw.array(got))


@EACH
def test_the_flag_does_not_touch_the_rest(fw, label):
    layout, like = Layout(LAYOUTS[label]), fw.tensor(np.zeros(1, np.float32))
    payload, _ = layout.new(fw.xp, like)
    sealed = layout.seal(fw.xp, payload, [fw.tensor(p) for p in parts_of(layout)])
    before = fw.array(sealed)
    assert not before[-FLAG_BYTES:].any()
    assert fw.array(fw.xp.flag_of(sealed)) == 0
    for flag in (np.float32(np.nan), np.float32(0)):
        sealed = fw.xp.set_flag_(sealed, fw.tensor(flag))
        checks.same_bits(np.float32(flag).reshape(1), fw.array(fw.xp.flag_of(sealed)).reshape(1))
        checks.same_bits(before[:-FLAG_BYTES], fw.array(sealed)[:-FLAG_BYTES])


@EACH
def test_padding_is_zero(fw, label):
    """Bytes that nobody reads are the same on every rank and in every run."""
    layout, like = Layout(LAYOUTS[label]), fw.tensor(np.zeros(1, np.float32))
    used = sum(s.nbytes for s in layout.sections)
    for _ in range(5):
        payload, _ = layout.new(fw.xp, like)
        sealed = layout.seal(fw.xp, payload, [fw.tensor(p) for p in parts_of(layout)])
        assert not fw.array(sealed)[used:].any()
