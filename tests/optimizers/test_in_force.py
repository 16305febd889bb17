"""Settings in force: planted bugs are found with both numbers, healthy optimizers get no finding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from equilibria.control import SGDW, Lion
from equilibria.optimizers.in_force import decay_in_low_precision, settings_in_force


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(0.1 * torch.randn(48, 32))]


class Planted(torch.optim.Optimizer):
    """AdamW, SGD or Muon with one bug."""

    def __init__(self, params, *, bug, lr=0.01, weight_decay=0.1, betas=None, momentum=None, **flags):
        rates = {"betas": betas} if betas else {"momentum": momentum} if momentum is not None else {}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "bug": bug, **rates, **flags})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.move(param, group)

    def move(self, param, group):
        state, bug, lr, decay = self.state[param], group["bug"], group["lr"], group["weight_decay"]
        gradient = param.grad + (decay * param if bug in ("coupled", "coupled sgd", "coupled sign", "both") else 0.0)
        first, second = group["betas"] if "betas" in group else (group.get("momentum", 0.0), None)
        first = 0.9 if bug == "beta1 ignored" else first
        second = 0.95 if bug == "beta2 ignored" else second
        if bug == "no memory":
            state.clear()
        if second is None:
            update = state["buffer"] = first * state.get("buffer", 0.0) + gradient
            update = update.sign() if bug == "coupled sign" else update
        else:
            state["step"] = state.get("step", 0) + 1
            state["m"] = first * state.get("m", 0.0) + (1 - first) * gradient
            state["v"] = second * state.get("v", 0.0) + (1 - second) * gradient**2
            corrected = 1 - first ** state["step"], 1 - second ** state["step"]
            update = state["m"] / corrected[0] / ((state["v"] / corrected[1]).sqrt() + 1e-12)
        if bug in ("transposed", "no root"):
            rows, columns = param.shape
            factor = math.sqrt(max(1.0, columns / rows)) if bug == "transposed" else max(1.0, rows / columns)
            update = factor * update / update.norm() * math.sqrt(min(rows, columns))
        factor = {
            "ignored": 0.0,
            "twice": 2 * lr * decay,
            "lr squared": lr * lr * decay,
            "without lr": 0.01 * decay,
            "coupled": 0.0,
            "coupled sgd": 0.0,
            "coupled sign": 0.0,
        }.get(bug, lr * decay)
        step = 1e-3 if bug == "lr ignored" else lr
        param.mul_(1 - factor).sub_(step * update)


class PlantedW(Planted):
    """Declares decoupled decay by its name."""


class PlantedMuon(Planted):
    """A Muon by its name."""


ADAM, MOMENTUM = {"betas": (0.9, 0.95)}, {"momentum": 0.9}


@pytest.mark.parametrize(
    ("kind", "bug", "settings", "severity", "words"),
    [
        (Planted, "ignored", ADAM, "warning", "declares weight_decay=0.1, and decays by 0 per step"),
        (Planted, "ignored", MOMENTUM, "warning", "declares weight_decay=0.1, and decays by 0 per step"),
        (Planted, "twice", ADAM, "warning", "(lr x wd = 0.001), and decays by 0.002 per step, 2 times as much"),
        (Planted, "both", MOMENTUM, "warning", "applies its weight decay twice"),
        (PlantedW, "coupled", ADAM, "warning", "declares weight_decay=0.1, decoupled, and decays by"),
        (PlantedW, "coupled sign", MOMENTUM, "warning", "where gradients are ten times as large"),
        (
            Planted,
            "both",
            ADAM,
            "warning",
            "applies its weight decay twice: it declares weight_decay=0.1 (lr x wd = 0.001)",
        ),
        (
            Planted,
            "coupled",
            {**ADAM, "decoupled_weight_decay": True},
            "warning",
            "where gradients are ten times as large",
        ),
        (PlantedW, "coupled sgd", MOMENTUM, "warning", "times as much: it passes through the momentum"),
        (Planted, "lr squared", ADAM, "note", "decays by 1e-05 per step at lr=0.01, by 2.5e-06 at half of it"),
        (Planted, "without lr", ADAM, "note", "decays by 0.001 per step at lr=0.01, by 0.001 at half of it"),
        (Planted, "no memory", MOMENTUM, "warning", "the momentum of Planted has no effect"),
        (Planted, "beta1 ignored", ADAM, "warning", "with half of beta1"),
        (Planted, "beta2 ignored", ADAM, "warning", "with half of beta2"),
        (Planted, "lr ignored", {**ADAM, "weight_decay": 0.0}, "warning", "the lr of Planted has no effect"),
        (PlantedMuon, "transposed", MOMENTUM, "note", "64x32 matrix is 0.71 times as long as one of a 32x64"),
        (PlantedMuon, "no root", MOMENTUM, "note", "a 32x64 matrix, 2.00 times as one of a 32x32 matrix"),
    ],
)
def test_a_planted_bug_is_found(kind, bug, settings, severity, words):
    findings = settings_in_force(
        kind(matrix(), bug=bug, **settings), kind(matrix(), bug=bug, **settings).param_groups[0]
    )
    assert len(findings) == 1, findings
    assert findings[0].severity == severity
    assert words in str(findings[0]) and "(measured on a copy of" in findings[0].evidence


class Forgetful(Planted):
    """Momentum enters the step, but each step starts another buffer."""

    def move(self, param, group):
        with torch.no_grad():
            update = param.grad * (1 + group["momentum"])
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


def test_momentum_without_memory_is_found():
    optimizer = Forgetful(matrix(), bug="", momentum=0.9)
    (finding,) = settings_in_force(optimizer, optimizer.param_groups[0])
    assert "declares momentum=0.9, and successive steps correlate by" in finding.evidence


class Habit(torch.optim.Optimizer):
    """Momentum with decoupled decay, and a bug or an unusual habit."""

    def __init__(self, params, *, habit, lr=0.01, weight_decay=0.1, momentum=0.9, **settings):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, **settings})
        self.habit = habit

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        (param,) = group["params"]
        state, habit, lr, decay = self.state[param], self.habit, group["lr"], group["weight_decay"]
        state["step"] = count = state.get("step", 0) + 1
        gradient = param.grad
        if habit == "divided by one number":  # AdamS
            size = state["size"] = 0.9 * state.get("size", 0.0) + 0.1 * gradient.square().mean()
            gradient, decay = gradient / size.sqrt(), decay / size.sqrt()
        if habit == "accumulates":
            state["sum"] = state.get("sum", 0.0) + gradient
            if count % group["every"]:
                return
            gradient, state["sum"] = state["sum"], 0.0
        if habit == "hidden momentum":
            gradient, decay = gradient + decay * param, 0.0
        rate = {"hidden momentum": 0.5, "averages": group.get("mu", 0.0)}.get(habit, group["momentum"])
        kept = 1 - group.get("dampening", 0.0) if habit != "dampening" else 1.0
        buffer = state["buffer"] = rate * state.get("buffer", 0.0) + kept * gradient
        update = buffer
        if group.get("nesterov") and habit != "nesterov":
            update = gradient + rate * buffer
        if group.get("maximize") and habit != "maximize":
            update = -update
        lr = 0.02 if group.get("own_lr") else lr
        if group.get("use_momentum") is False:
            update = gradient
        decay = {"defaults": 0.05, "grows": -decay, "late": decay * (count > 500)}.get(habit, decay)
        times = {"thrice": 3, "every 50": 50 if count % 50 == 0 else 0, "starts late": count > 100}.get(habit, 1)
        param.mul_(1 - times * lr * decay)
        param.sub_(lr * (habit != "starts late" or count > 100) * update)


@pytest.mark.parametrize(
    ("habit", "settings", "words"),
    [
        ("defaults", {}, "declares weight_decay=0.1 (lr x wd = 0.001), and decays by 0.0005 per step, with half of it"),
        ("grows", {}, "declares weight_decay=0.1 (lr x wd = 0.001), and grows by 0.001 per step"),
        ("thrice", {}, "decays by 0.003 per step, 3 times as much"),
        ("nesterov", {"nesterov": True}, "declares nesterov=True, and"),
        ("maximize", {"maximize": True}, "declares maximize=True, and"),
        ("dampening", {"dampening": 0.5}, "declares dampening=0.5, and"),
    ],
)
def test_a_bug_that_leaves_a_setting_without_its_effect_is_found(habit, settings, words):
    optimizer = Habit(matrix(), habit=habit, **settings)
    (finding,) = settings_in_force(optimizer, optimizer.param_groups[0])
    assert finding.severity == "warning" and words in finding.evidence


@pytest.mark.parametrize(
    ("habit", "settings"),
    [
        ("late", {}),
        ("every 50", {}),
        ("starts late", {}),
        ("accumulates", {"every": 4}),
        ("accumulates", {"every": 64}),
        ("hidden momentum", {"momentum": 0.0}),
        ("averages", {"mu": 0.9, "betas": (0.9, 0.95), "momentum": 0.0}),
        ("", {"use_momentum": False}),
        ("", {"own_lr": True, "weight_decay": 0.0}),
        ("divided by one number", {"decoupled_weight_decay": True}),
        ("", {"nesterov": True, "dampening": 0.0, "maximize": True}),
        ("", {"nesterov": True, "momentum": 0.0}),
    ],
)
def test_an_unusual_habit_is_no_finding(habit, settings):
    optimizer = Habit(matrix(), habit=habit, **settings)
    assert settings_in_force(optimizer, optimizer.param_groups[0]) == ()


HEALTHY = {
    **{
        f"SGD {index}": (torch.optim.SGD, {"lr": lr, "weight_decay": 1e-3, **options})
        for index, (lr, options) in enumerate(
            [
                (0.1, {}),
                (0.1, {"momentum": 0.9}),
                (0.01, {"momentum": 0.5}),
                (0.1, {"momentum": 0.9, "nesterov": True}),
                (0.1, {"momentum": 0.9, "dampening": 0.5}),
                (0.1, {"momentum": 0.5, "dampening": 0.9}),
            ]
        )
    },
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW, tiny decay": (torch.optim.AdamW, {"lr": 1e-5, "weight_decay": 1e-3}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
    "Adam, decoupled": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "Adam, no decay": (torch.optim.Adam, {"lr": 1e-3}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-3, "weight_decay": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-3, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-3, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.9}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "weight_decay": 1e-3}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "Lion": (Lion, {"lr": 1e-4, "weight_decay": 1.0}),
    "SGDW": (SGDW, {"lr": 0.1, "weight_decay": 1e-3, "momentum": 0.9}),
    "Muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_optimizer_has_no_finding(name):
    kind, settings = HEALTHY[name]
    optimizer = kind(matrix(), **settings)
    assert settings_in_force(optimizer, optimizer.param_groups[0]) == ()


# ---- low precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_decay_that_rounding_swallows_is_found(dtype):
    params = [nn.Parameter(torch.randn(32, 16).to(dtype))]
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, eps=1e-4)
    finding = decay_in_low_precision(optimizer, optimizer.param_groups[0])
    assert "declares weight_decay=0.1 (lr x wd = 1e-05), and decays by 0 per step in this type" in finding.evidence


@pytest.mark.parametrize(("dtype", "lr"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_decay_that_rounding_leaves_is_no_finding(dtype, lr):
    params = [nn.Parameter(torch.randn(32, 16).to(dtype))]
    optimizer = torch.optim.SGD(params, lr=lr, weight_decay=0.5)
    assert decay_in_low_precision(optimizer, optimizer.param_groups[0]) is None
