"""What is said when an optimizer and a compressor do not go together."""

import pytest
import torch

from horovod_gradcomp.core.fit import doubts, keras_group, unused_rules
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
    torch.optim.Adagrad(W),
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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "SGD", "momentum": 0.9}, "momentum=0"),
        ({"name": "SGD", "momentum": 0.0}, ""),
        ({"name": "Adam", "beta_1": 0.9, "beta_2": 0.999}, "start_after"),
        ({"name": "Lion", "beta_1": 0.9, "beta_2": 0.99}, "start_after"),
        ({"name": "Adafactor", "beta_2_decay": -0.8}, "start_after"),
        ({"name": "Adagrad", "initial_accumulator_value": 0.1}, "start_after"),
        ({"name": "Muon", "adam_beta_1": 0.9, "momentum": 0.0}, "start_after"),
        ({"name": "RMSprop", "rho": 0.9, "momentum": 0.0}, "start_after"),
        (
            {
                "name": "LossScaleOptimizer",
                "inner_optimizer": {"class_name": "Adam", "config": {"beta_1": 0.9}},
            },
            "start_after",
        ),
    ],
)
def test_optimizers_of_keras_are_known_by_their_settings(config, words):
    texts = doubts(make("topk", {"memory": "momentum"}), [keras_group(config)])
    assert len(texts) == bool(words)
    assert words in "".join(texts)


def test_a_rule_that_matches_nothing_is_named():
    settings = make("topk", {"rules": [("embed.*", None), ("fc.*", "fp16")]})
    (text,) = unused_rules(settings, ["fc1.weight", "fc1.bias"])
    assert "'embed.*'" in text
    assert "fc1.weight" in text
