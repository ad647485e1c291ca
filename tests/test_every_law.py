"""Laws 1, 2, 6 and 7 of every codec with every memory that suits it, on simulated ranks.

Real ranks meet the same pairs in ``tests/distributed``.
"""

import numpy as np
import pytest

from horovod_gradcomp.testing import frameworks
from tests import checks, lockstep, table

PAIRS = table.all_pairs()
FEWER = table.trained_pairs()
"""TensorFlow, one operation at a time, is slow."""
CASES = [("torch", label) for label in PAIRS] + [("tensorflow", label) for label in FEWER]
SUMS = [case for case in CASES if {**FEWER, **PAIRS}[case[1]].codec.additive]
"""All but the vote of ``sign``, of which nothing can be said of what is left."""


def ranks_of(framework, label, numel):
    settings = (PAIRS if framework == "torch" else FEWER)[label]
    fw = frameworks.load(framework)
    return lockstep.Ranks(fw, settings.codec, settings.memory, size=2, numel=numel)


def test_every_codec_has_a_memory_and_every_memory_a_codec():
    names = {settings.codec.registered for settings in FEWER.values()}
    assert names == set(table.SETTINGS) - {"none"}
    for memory in table.MEMORIES:
        assert sum(f" {memory}" in label for label in FEWER) > len(FEWER) / 6


@pytest.mark.parametrize(("framework", "label"), SUMS)
def test_books_and_equal_ranks(framework, label):
    ranks = ranks_of(framework, label, 1001)
    checks.every_memory_keeps_its_books(ranks, steps=6 if framework == "torch" else 3)


@pytest.mark.parametrize(("framework", "label"), CASES)
def test_a_run_goes_on(framework, label):
    checks.goes_on_bit_for_bit(ranks_of(framework, label, 600), steps=2)


@pytest.mark.parametrize(("framework", "label"), CASES)
def test_a_bad_step_leaves_no_trace(framework, label):
    grads = np.random.default_rng(3).standard_normal((2, 600)).astype(np.float32)
    checks.bad_ranks_are_seen_by_all(ranks_of(framework, label, 600), grads)
