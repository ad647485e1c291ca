"""What is said where ranks are set differently."""

import pytest

from horovod_gradcomp import SettingsError
from horovod_gradcomp.core.agreement import check


def test_equal_facts_are_fine():
    check({})
    check({2: {"codec": "topk"}, 5: {"codec": "topk"}})


def test_every_difference_is_named_with_its_ranks():
    facts = {rank: {"codec": "topk", "seed": str(rank // 6)} for rank in range(8)}
    facts[3]["codec"] = "fp16"
    del facts[7]["seed"]
    with pytest.raises(SettingsError) as caught:
        check(facts)
    text = str(caught.value)
    assert "codec: topk on ranks 0, 1, 2, 4 and 3 more, fp16 on rank 3" in text
    assert "seed: 0 on ranks 0, 1, 2, 3 and 2 more, 1 on rank 6, nothing on rank 7" in text
