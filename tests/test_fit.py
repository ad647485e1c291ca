"""What is said when an optimizer and a compressor do not go together."""

import pytest
import torch

from horovod_gradcomp.core.fit import doubts, unused_rules
from horovod_gradcomp.core.settings import make

W = [torch.nn.Parameter(torch.zeros(3))]
SGD = torch.optim.SGD(W, lr=0.1)
HEAVY = torch.optim.SGD(W, lr=0.1, momentum=0.9)
ADAPTIVE = [
    torch.optim.Adam(W),
    torch.optim.AdamW(W),
    torch.optim.NAdam(W),
    torch.optim.RMSprop(W),
    torch.optim.Adadelta(W),
]


def said(name, options, optimizer):
    return doubts(make(name, options), optimizer.param_groups)


def test_momentum_is_not_to_be_had_twice():
    (text,) = said("topk", {"memory": "momentum"}, HEAVY)
    assert "momentum=0" in text
    assert said("topk", {"memory": "momentum"}, SGD) == []
    assert said("topk", {}, HEAVY) == []
    assert "momentum=0" in said("dgc", {}, HEAVY)[0]


@pytest.mark.parametrize("optimizer", ADAPTIVE, ids=lambda o: type(o).__name__)
def test_adaptive_optimizers_want_a_dense_start(optimizer):
    (text,) = said("topk", {}, optimizer)
    assert "start_after" in text
    assert said("topk", {"start_after": 100}, optimizer) == []
    assert said("topk", {"memory": "none"}, optimizer) == []
    assert said("fp16", {}, optimizer) == []
    assert said("topk", {}, SGD) == []


def test_a_rule_that_matches_nothing_is_named():
    settings = make("topk", {"rules": [("embed.*", None), ("fc.*", "fp16")]})
    (text,) = unused_rules(settings, ["fc1.weight", "fc1.bias"])
    assert "'embed.*'" in text
    assert "fc1.weight" in text
