"""Which tensors are compressed, and how they are laid out in buckets."""

import pytest

from horovod_gradcomp.core.plan import buckets
from horovod_gradcomp.core.policy import choose
from horovod_gradcomp.core.settings import make

ENTRIES = [("a", (10, 10)), ("b", (50,)), ("c", ()), ("d", (3, 4, 5)), ("e", (1000,))]


@pytest.mark.parametrize("most", [4, 400, 600, 4000, 10**9])
@pytest.mark.parametrize("together", [True, False])
def test_every_parameter_lies_in_one_place(most, together):
    out = buckets(ENTRIES, most, together=together)
    assert [(m.name, m.shape) for b in out for m in b.members] == ENTRIES
    assert len({b.name for b in out}) == len(out)
    for bucket in out:
        at = 0
        for member in bucket.members:
            assert member.start == at
            at += member.numel
        assert bucket.numel == at
        assert bucket.shapes == tuple(m.shape for m in bucket.members)
        assert len(bucket.members) == 1 or (together and 4 * bucket.numel <= most)


def test_buckets_are_full():
    assert [b.name for b in buckets(ENTRIES, 604, together=True)] == ["a+2", "d", "e"]
    assert [b.name for b in buckets(ENTRIES, 10**9, together=True)] == ["a+4"]
    assert [b.name for b in buckets(ENTRIES, 10**9, together=False)] == list("abcde")


def test_names_follow_from_the_first_member_alone():
    longer = [*ENTRIES, ("f", (7,))]
    before = {b.name for b in buckets(ENTRIES, 604, together=True)}
    after = {b.name for b in buckets(longer, 604, together=True)}
    assert {"a+2", "d"} <= before & after


def test_no_parameters():
    assert buckets([], 100, together=True) == []


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        ({}, (32, 32), True),
        ({}, (31, 33), False),
        ({}, (1024,), False),
        ({}, (), False),
        ({}, (0, 10), False),
        ({"skip_1d": False}, (1024,), True),
        ({"min_numel": 0, "skip_1d": False}, (), True),
        ({"min_numel": 0}, (1, 1), True),
        ({"min_numel": 0}, (5, 0), False),
        ({"min_numel": 1}, (2, 1), True),
    ],
)
def test_policy(options, shape, expected):
    settings = make("topk", options)
    assert choose(settings, "w", shape) is (settings if expected else None)


def test_rules_decide_by_name():
    rules = [
        ("embed.*", None),
        (r"fc\d\.weight", "acp:rank=2"),
        (".*bias", "fp16"),
        ("h.*", "qsgd"),
    ]
    settings = make("topk", {"rules": rules, "min_numel": 100, "seed": 5})
    big, small = (64, 64), (3,)
    assert choose(settings, "embed.weight", big) is None
    assert choose(settings, "my.embed.weight", big) is settings
    fc = choose(settings, "fc1.weight", big)
    assert fc.codec.describe().startswith("acp:rank=2")
    assert fc.options.seed == 5
    assert choose(settings, "fc1.weight", big) is fc
    assert choose(settings, "fc12.weight", big) is settings
    assert choose(settings, "fc1.bias", small).codec.describe() == "fp16"  # whatever its size
    assert choose(settings, "fc1.bias", (0, 4)) is None
    assert choose(settings, "norm.weight", small) is None
    assert choose(settings, "head", big).memory.slots == ()
    first = make("topk", {"rules": [("a.*", "fp16"), ("a", None)]})
    assert choose(first, "a", big).codec.describe() == "fp16"


def test_rules_have_the_memory_of_their_codec():
    settings = make("topk", {"memory": "ef21", "rules": [("a", "qsgd"), ("b", "linear")]})
    assert choose(settings, "a", (64, 64)).memory.slots == ()
    assert choose(settings, "b", (64, 64)).memory.slots == ("residual",)
    assert choose(settings, "c", (64, 64)).memory.slots == ("own", "mean")
    assert "rules" in settings.describe()
