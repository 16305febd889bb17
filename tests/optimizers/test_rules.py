"""Every optimizer of torch has a law or a reason why not."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from equilibria.optimizers.rules import follows, law_of
from equilibria.theory import SGD, AdamW, Lion
from equilibria.theory.rules import SGDW, AdamL2, Muon, Rule

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
WITH_LAW = {"SGD", "Adam", "AdamW", "Muon"}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 3))]


def law(optimizer: torch.optim.Optimizer):
    return law_of(optimizer, optimizer.param_groups[0])


def test_there_are_optimizers_to_ask():
    assert len(CLASSES) > 10


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_of_torch_has_a_law_or_a_reason(name):
    found = law(CLASSES[name](parameters(), lr=0.1))
    if name in WITH_LAW:
        assert isinstance(found.rule, Rule)
        assert found.reason == ""
    else:
        assert found.rule is None
        assert found.reason == f"no law for {name}"


@pytest.mark.parametrize("name", CLASSES)
def test_the_law_is_the_same_before_and_after_the_first_step(name):
    """torch wraps `step` for its hooks when the first instance is made."""
    (param,) = parameters()
    optimizer = CLASSES[name]([param], lr=0.1)
    before = law(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer.register_step_post_hook(lambda *_: None)
    param.grad = (torch.ones(3, 3).to_sparse() if name == "SparseAdam" else torch.ones(3, 3)).detach()
    optimizer.step((lambda: torch.tensor(1.0)) if name == "LBFGS" else None)
    assert law(optimizer) == before


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (torch.optim.SGD(parameters(), lr=0.1), SGD(0.1)),
        (
            torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01),
            SGD(0.1, 0.01, momentum=0.9, dampening=0.5),
        ),
        (
            torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, nesterov=True, maximize=True),
            SGD(0.1, momentum=0.9, nesterov=True),
        ),
        (torch.optim.Adam(parameters(), lr=0.1, weight_decay=0.01), AdamL2(0.1, 0.01)),
        (torch.optim.AdamW(parameters(), lr=0.1, betas=(0.8, 0.9)), AdamW(0.1, 0.01, betas=(0.8, 0.9))),
        (torch.optim.AdamW(parameters(), lr=torch.tensor(0.5), capturable=True), AdamW(0.5, 0.01)),
        (torch.optim.Muon(parameters(), lr=0.1), Muon(0.1, 0.1)),
        (
            torch.optim.Muon(parameters(), lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw"),
            Muon(0.1, 0.1, nesterov=False, adjust_lr_fn="match_rms_adamw"),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Rule) else "",
)
def test_rules_have_the_settings_of_the_group(optimizer, rule):
    assert law(optimizer).rule == rule


def test_decoupled_decay_is_read_from_the_group_not_from_the_class():
    adam = torch.optim.Adam(parameters(), lr=0.1, weight_decay=0.01, decoupled_weight_decay=True)
    assert law(adam).rule == AdamW(0.1, 0.01)
    adamw = torch.optim.AdamW(parameters(), lr=0.1, weight_decay=0.01)
    adamw.param_groups[0]["decoupled_weight_decay"] = False
    assert law(adamw).rule == AdamL2(0.1, 0.01)


def test_settings_that_are_tensors():
    optimizer = torch.optim.SGD(parameters(), lr=torch.tensor(0.25), momentum=0.5)
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.125)
    optimizer.param_groups[0]["momentum"] = torch.tensor(0.75)
    assert law(optimizer).rule == SGD(0.25, 0.125, momentum=0.75)
    adam = torch.optim.AdamW(parameters(), lr=torch.tensor(0.25))
    adam.param_groups[0]["betas"] = (torch.tensor(0.5), torch.tensor(0.75))
    assert law(adam).rule == AdamW(0.25, 0.01, betas=(0.5, 0.75))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_amsgrad_has_no_law(kind):
    assert law(kind(parameters(), lr=0.1, amsgrad=True)).reason == f"no law for {kind.__name__} with amsgrad"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"momentum": 1.5}, "momentum=1.5"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "fast"}, "fast"),
        ({"weight_decay": None}, "NoneType"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov"),
    ],
    ids=str,
)
def test_settings_without_a_law_are_a_reason_and_no_error(changes, words):
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    found = law_of(optimizer, {**optimizer.param_groups[0], **changes})
    assert found.rule is None
    assert found.reason.startswith("no law for SGD with these settings")
    assert words in found.reason


def test_a_group_that_lacks_a_setting_is_a_reason_and_no_error():
    assert law_of(torch.optim.SGD(parameters(), lr=0.1), {"lr": 0.1}).rule is None


class Renamed(torch.optim.SGD):
    """Steps as SGD does."""


class OwnStep(torch.optim.SGD):
    """Does something else."""

    def step(self, closure=None):
        return None


class OwnStepTwice(OwnStep):
    pass


def test_a_subclass_has_the_law_only_while_it_leaves_step_alone():
    for kind in (Renamed, OwnStep, OwnStepTwice, Renamed):
        optimizer = kind(parameters(), lr=0.1)
        expected = kind is Renamed
        assert follows(optimizer, torch.optim.SGD) == expected
        assert (law(optimizer).rule is not None) == expected
    assert law(OwnStep(parameters(), lr=0.1)).reason == "no law for OwnStep"
    assert not follows(torch.optim.AdamW(parameters()), torch.optim.SGD)


def with_rule(answer) -> torch.optim.Optimizer:
    """An optimizer of somebody else's, which says what rule it follows."""

    class Own(OwnStep):
        def equilibria_rule(self, group):
            return answer(group) if callable(answer) else answer

    return Own(parameters(), lr=0.1, weight_decay=0.01)


def test_an_optimizer_may_say_its_own_rule():
    assert law(with_rule(lambda group: Lion(group["lr"], group["weight_decay"]))).rule == Lion(0.1, 0.01)
    assert law(with_rule(SGDW(0.1))).rule == SGDW(0.1)


def test_the_rule_an_optimizer_says_itself_comes_before_ours():
    class Own(torch.optim.SGD):
        def equilibria_rule(self, group):
            return SGDW(group["lr"], group["weight_decay"])

    assert law(Own(parameters(), lr=0.1)).rule == SGDW(0.1)


@pytest.mark.parametrize("answer", [None, "sgd", 3.0, SGD])
def test_an_answer_that_is_no_rule_is_a_reason_and_no_error(answer):
    found = law(with_rule(lambda _group: answer))
    assert found.rule is None
    assert "expected a rule of the theory" in found.reason


@pytest.mark.parametrize("error", [ValueError("what?"), KeyError("beta3"), ZeroDivisionError(), RuntimeError("no")])
def test_an_error_in_somebody_elses_rule_is_a_reason_and_no_error(error):
    def fail(_group):
        raise error

    found = law(with_rule(fail))
    assert found.rule is None
    assert type(error).__name__ in found.reason
