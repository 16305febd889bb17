"""Every torch optimizer has a rule or a reason why not; several groups have one rule or an error."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from equilibria.control import Lion as TorchLion
from equilibria.errors import EquilibriaError
from equilibria.optimizers.rules import follows, rule_of_group, rule_of_optimizer
from equilibria.theory import SGD, AdamW, Identified, Lion
from equilibria.theory.rules import SGDW, AdamL2, Muon, Rule

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
WITH_RULE = {"SGD", "Adam", "AdamW", "Muon"}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 3))]


def first_rule(optimizer: torch.optim.Optimizer):
    return rule_of_group(optimizer, optimizer.param_groups[0])


def test_torch_has_more_than_ten_optimizers():
    assert len(CLASSES) > 10


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_of_torch_has_a_rule_or_a_reason(name):
    result = first_rule(CLASSES[name](parameters(), lr=0.1))
    if name in WITH_RULE:
        assert isinstance(result.rule, Rule)
        assert result.reason == ""
    else:
        assert result.rule is None
        assert result.reason == f"no law for {name}"


@pytest.mark.parametrize("name", CLASSES)
def test_the_rule_is_the_same_before_and_after_the_first_step(name):
    """torch wraps `step` for its hooks when the first instance is made."""
    (param,) = parameters()
    optimizer = CLASSES[name]([param], lr=0.1)
    before = first_rule(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer.register_step_post_hook(lambda *_: None)
    param.grad = (torch.ones(3, 3).to_sparse() if name == "SparseAdam" else torch.ones(3, 3)).detach()
    optimizer.step((lambda: torch.tensor(1.0)) if name == "LBFGS" else None)
    assert first_rule(optimizer) == before


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
    assert first_rule(optimizer).rule == rule


def test_decoupled_decay_is_read_from_the_group_not_from_the_class():
    adam = torch.optim.Adam(parameters(), lr=0.1, weight_decay=0.01, decoupled_weight_decay=True)
    assert first_rule(adam).rule == AdamW(0.1, 0.01)
    adamw = torch.optim.AdamW(parameters(), lr=0.1, weight_decay=0.01)
    adamw.param_groups[0]["decoupled_weight_decay"] = False
    assert first_rule(adamw).rule == AdamL2(0.1, 0.01)


def test_settings_that_are_tensors():
    optimizer = torch.optim.SGD(parameters(), lr=torch.tensor(0.25), momentum=0.5)
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.125)
    optimizer.param_groups[0]["momentum"] = torch.tensor(0.75)
    assert first_rule(optimizer).rule == SGD(0.25, 0.125, momentum=0.75)
    adam = torch.optim.AdamW(parameters(), lr=torch.tensor(0.25))
    adam.param_groups[0]["betas"] = (torch.tensor(0.5), torch.tensor(0.75))
    assert first_rule(adam).rule == AdamW(0.25, 0.01, betas=(0.5, 0.75))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_amsgrad_has_no_rule(kind):
    assert first_rule(kind(parameters(), lr=0.1, amsgrad=True)).reason == f"no law for {kind.__name__} with amsgrad"


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
def test_settings_without_a_rule_give_a_reason_not_an_error(changes, words):
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    result = rule_of_group(optimizer, {**optimizer.param_groups[0], **changes})
    assert result.rule is None
    assert result.reason.startswith("no law for SGD with these settings")
    assert words in result.reason


def test_a_group_without_a_setting_gives_a_reason_not_an_error():
    assert rule_of_group(torch.optim.SGD(parameters(), lr=0.1), {"lr": 0.1}).rule is None


class Renamed(torch.optim.SGD):
    """Steps as SGD does."""


class OwnStep(torch.optim.SGD):
    """Does something else."""

    def step(self, closure=None):
        return None


class OwnStepTwice(OwnStep):
    pass


def test_a_subclass_has_the_rule_only_while_it_leaves_step_alone():
    for kind in (Renamed, OwnStep, OwnStepTwice, Renamed):
        optimizer = kind(parameters(), lr=0.1)
        expected = kind is Renamed
        assert follows(optimizer, torch.optim.SGD) == expected
        assert (first_rule(optimizer).rule is not None) == expected
    assert first_rule(OwnStep(parameters(), lr=0.1)).reason.startswith("no law for OwnStep: its steps on trial tensors")
    assert not follows(torch.optim.AdamW(parameters()), torch.optim.SGD)


def with_rule(answer) -> torch.optim.Optimizer:
    """A custom optimizer with a method equilibria_rule."""

    class Own(OwnStep):
        def equilibria_rule(self, group):
            return answer(group) if callable(answer) else answer

    return Own(parameters(), lr=0.1, weight_decay=0.01)


def test_a_custom_optimizer_may_name_its_rule():
    assert first_rule(with_rule(lambda group: Lion(group["lr"], group["weight_decay"]))).rule == Lion(0.1, 0.01)
    assert first_rule(with_rule(SGDW(0.1))).rule == SGDW(0.1)


def test_equilibria_rule_takes_precedence_over_the_class():
    class Own(torch.optim.SGD):
        def equilibria_rule(self, group):
            return SGDW(group["lr"], group["weight_decay"])

    assert first_rule(Own(parameters(), lr=0.1)).rule == SGDW(0.1)


@pytest.mark.parametrize("answer", [None, "sgd", 3.0, SGD])
def test_equilibria_rule_without_a_rule_gives_a_reason_not_an_error(answer):
    result = first_rule(with_rule(lambda _group: answer))
    assert result.rule is None
    assert "expected a rule of the theory" in result.reason


@pytest.mark.parametrize("error", [ValueError("what?"), KeyError("beta3"), ZeroDivisionError(), RuntimeError("no")])
def test_an_error_in_equilibria_rule_gives_a_reason_not_an_error(error):
    def fail(_group):
        raise error

    result = first_rule(with_rule(fail))
    assert result.rule is None
    assert type(error).__name__ in result.reason


# ---- the one rule of an optimizer


def groups(*settings: dict) -> list[dict]:
    return [{"params": parameters(), **group} for group in settings]


def test_the_first_group_that_decays_gives_the_rule_of_an_optimizer():
    optimizer = torch.optim.AdamW(groups({"weight_decay": 0.0}, {"weight_decay": 0.1}, {"weight_decay": 0.1}), lr=1e-3)
    assert rule_of_optimizer(optimizer) == AdamW(1e-3, 0.1)


def test_without_any_decay_the_first_group_gives_the_rule():
    assert rule_of_optimizer(torch.optim.SGD(groups({}, {"lr": 0.01}), lr=0.1)) == SGD(0.1)


def test_groups_may_differ_in_what_a_schedule_replaces():
    optimizer = torch.optim.SGD(groups({}, {"lr": 0.01}), lr=0.1, weight_decay=5e-4)
    assert rule_of_optimizer(optimizer) == SGD(0.1, 5e-4)
    optimizer.param_groups[1]["weight_decay"] = 1e-4
    assert rule_of_optimizer(optimizer, scheduled=("lr", "weight_decay")) == SGD(0.1, 5e-4)


def test_groups_with_different_rules_are_an_error_that_names_them():
    optimizer = torch.optim.SGD(groups({}, {"weight_decay": 1e-4}), lr=0.1, weight_decay=5e-4)
    with pytest.raises(EquilibriaError, match=r"group 0: SGD\(lr=0.1, wd=0.0005\); group 1: .* for group 1"):
        rule_of_optimizer(optimizer)


def test_an_optimizer_without_a_rule_is_an_error_with_a_remedy():
    with pytest.raises(
        EquilibriaError, match=r"no law for RMSprop \(no decay\): without weight decay there is no equilibrium"
    ):
        rule_of_optimizer(torch.optim.RMSprop(parameters()))


def test_lion_of_this_library_has_a_rule():
    assert rule_of_optimizer(TorchLion(parameters(), lr=1e-4, weight_decay=1.0)) == Lion(1e-4, 1.0)


def test_a_muon_of_other_coefficients_is_measured():
    """Its updates have another size: five steps of torch's own coefficients are what the closed law knows."""
    weight = torch.nn.Parameter(torch.ones(24, 12))
    optimizer = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, ns_steps=3)
    (group,) = optimizer.param_groups
    assert "its law is for (3.4445, -4.775, 2.0315) and 5" in rule_of_group(optimizer, group).reason
    measured = rule_of_group(optimizer, group, measure=True).rule
    assert isinstance(measured, Identified) and measured.name == "Muon"
    assert 0.5 < measured.equilibrium(dim=288).norm / Muon(0.02, 0.1).equilibrium(shape=(24, 12)).norm < 0.99
