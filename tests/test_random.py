"""The counter hash: its values, which are part of the wire format, and its quality."""

import numpy as np
import pytest

from horovod_gradcomp.core import random
from horovod_gradcomp.testing import frameworks
from tests import reference

KEYS = [(0, "a", 0), (0, "layer.weight", 5), (-3, "", 1), (2**40, "ä", 2**31), (1, "a", 2**33 + 7)]
GOLDEN_FOLD = {
    (0, "a", 0): (4070788701, 146320880),
    (0, "layer.weight", 5): (188254787, 615873159),
    (-3, "", 1): (3960886485, 1028334821),
    (1099511627776, "ä", 2147483648): (1058957728, 3552583021),
    (1, "a", 8589934599): (1264090154, 3554658517),
}
GOLDEN_WORDS = [3541811699, 443535472, 656629430, 2781605173, 3173174415, 2980330295]


def key_tensors(fw, key):
    return tuple(fw.tensor(np.int64(word)) for word in key)


def like(fw):
    return fw.tensor(np.zeros(1, np.float32))


@pytest.mark.parametrize("args", KEYS, ids=repr)
def test_fold_is_the_rule(args):
    assert random.fold(*args) == reference.key(*args)


def test_golden_fold():
    assert {args: random.fold(*args) for args in KEYS} == GOLDEN_FOLD


def test_golden_words(fw):
    got = fw.array(random.words(fw.xp, random.fold(0, "layer.weight", 5), 0, 6, like(fw)))
    assert got.dtype == np.int32
    assert got.view(np.uint32).tolist() == GOLDEN_WORDS


def test_words_are_the_rule(fw):
    key = random.fold(7, "x", 3)
    for start, count in ((0, 1000), (999, 10), (2**31 - 20, 19)):
        got = fw.array(random.words(fw.xp, key, start, count, like(fw)))
        want = reference.words(key, start, count)
        np.testing.assert_array_equal(got.view(np.uint32), want)


def test_uniform_is_the_rule(fw):
    key = random.fold(7, "x", 4)
    got = fw.array(random.uniform(fw.xp, key, 5, 5000, like(fw)))
    np.testing.assert_array_equal(got, reference.uniform(key, 5, 5000))
    assert got.dtype == np.float32
    assert got.min() >= 0
    assert got.max() < 1
    np.testing.assert_array_equal(got * 2.0**24, np.floor(got * 2.0**24))


def test_positions_may_be_cut_anywhere(fw):
    key = random.fold(0, "w", 0)
    whole = fw.array(random.words(fw.xp, key, 0, 100, like(fw)))
    parts = [fw.array(random.words(fw.xp, key, s, 25, like(fw))) for s in (0, 25, 50, 75)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("args", KEYS, ids=repr)
def test_keys_and_steps_may_be_tensors(fw, args):
    seed, name, step = args
    numbers = random.fold(seed, name, step)
    tensors = random.fold(seed, name, fw.tensor(np.int64(step)))
    assert tuple(int(fw.array(word)) for word in tensors) == numbers
    for make in (random.words, random.uniform):
        np.testing.assert_array_equal(
            fw.array(make(fw.xp, tensors, 3, 50, like(fw))),
            fw.array(make(fw.xp, numbers, 3, 50, like(fw))),
        )


def test_below_is_the_rule(fw):
    key, limits = random.fold(0, "w", 9), np.array([1, 2, 3, 100, 2**31 - 1] * 50, np.int64)
    got = fw.array(random.below(fw.xp, key, fw.tensor(limits)))
    want = [int(w) * int(n) >> 32 for w, n in zip(reference.words(key, 0, limits.size), limits)]
    assert got.dtype == np.int64
    assert got.tolist() == want
    assert (got < limits).all()
    assert (got >= 0).all()


# Quality, on the reference, which the package equals ------------------------------------------


def chi_square_is_right(counts, expected):
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom), statistic


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_bytes_are_uniform(shift):
    words = reference.words(reference.key(0, "w", 0), 0, 200_000)
    counts = np.bincount((words >> np.uint32(shift)) & np.uint32(255), minlength=256)
    chi_square_is_right(counts, words.size / 256)


def test_first_words_of_steps_and_names_are_uniform():
    by_step = [int(reference.words(reference.key(0, "w", s), 0, 1)[0]) for s in range(20_000)]
    by_name = [int(reference.words(reference.key(0, f"w{i}", 0), 0, 1)[0]) for i in range(20_000)]
    for values in (by_step, by_name):
        assert len(set(values)) > 19_900
        chi_square_is_right(np.bincount(np.array(values) >> 24, minlength=256), 20_000 / 256)


def test_neighbours_are_independent():
    u = reference.uniform(reference.key(0, "w", 0), 0, 100_000).astype(np.float64)
    for lag in (1, 2, 7, 1024):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / np.sqrt(u.size)
    steps = [reference.uniform(reference.key(0, "w", s), 0, 20_000) for s in range(4)]
    correlation = np.corrcoef(steps) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)


def test_one_changed_bit_changes_half_of_all():
    for other in ((1, "w", 0), (0, "v", 0), (0, "w", 1), (0, "w", 2**20)):
        a = reference.words(reference.key(0, "w", 0), 0, 20_000)
        b = reference.words(reference.key(*other), 0, 20_000)
        bits = np.unpackbits((a ^ b).view(np.uint8)).mean()
        assert abs(bits - 0.5) < 5 * 0.5 / np.sqrt(32 * 20_000), other


def test_both_frameworks_give_the_same_words():
    key = random.fold(0, "w", 0)
    a, b = (
        fw.array(random.words(fw.xp, key, 0, 10_000, like(fw)))
        for fw in map(frameworks.load, frameworks.NAMES)
    )
    np.testing.assert_array_equal(a, b)
