"""Optimizers of other people are recognised by their steps, exactly those that follow a rule."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import equilibria as eq
from equilibria.control import Lion as OwnLion
from equilibria.objectives._isolation import preserved_rng
from equilibria.optimizers import recognition
from equilibria.optimizers.copies import rule_groups
from equilibria.optimizers.rules import rule_of_group, rule_of_optimizer
from equilibria.theory.muon import orthogonalised
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4, 6))]


def mixed() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(2, 3, 3, 3))]


def law(optimizer: torch.optim.Optimizer, index: int = 0):
    return rule_of_group(optimizer, optimizer.param_groups[index])


class Own(torch.optim.Optimizer):
    """Calls ``move`` for every tensor."""

    def __init__(self, params, **defaults):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.move(param, group, self.state[param])


# ---- optimizers that follow a rule, with other names and insides


class EvoSign(Own):
    """Lion, with a momentum that is interpolated and a decay that is subtracted."""

    def move(self, param, group, state):
        if not state:
            state["m"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        direction = torch.sign(torch.lerp(param.grad, state["m"], beta1))
        state["m"].lerp_(param.grad, 1 - beta2)
        param.sub_(group["lr"] * (direction + group["weight_decay"] * param))


class Decoupled(Own):
    """AdamW, with bias corrections folded into the step size and moments in float32."""

    decay_first = True

    def move(self, param, group, state):
        if not state:
            state.update(t=0, a=torch.zeros_like(param).float(), b=torch.zeros_like(param).float())
        state["t"] += 1
        beta1, beta2 = group["betas"]
        state["a"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
        state["b"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        root = (1 - beta2 ** state["t"]) ** 0.5
        update = root / (1 - beta1 ** state["t"]) * state["a"] / (state["b"].sqrt() + group["eps"] * root)
        param.mul_(1 - self.decay(group)).sub_(group["lr"] * self.masked(update, param.grad))

    def decay(self, group):
        return group["lr"] * group["weight_decay"]

    def masked(self, update, grad):
        return update


class Ridge(Own):
    """Adam with coupled decay."""

    def move(self, param, group, state):
        grad = param.grad + group["weight_decay"] * param
        inner = state.setdefault("moments", [torch.zeros_like(param), torch.zeros_like(param), 0])
        inner[2] += 1
        for moment, value, beta in zip(inner, (grad, grad**2), group["betas"], strict=False):
            moment.mul_(beta).add_((1 - beta) * value)
        first, second = (m / (1 - beta ** inner[2]) for m, beta in zip(inner, group["betas"], strict=False))
        param.sub_(group["lr"] * first / (second.sqrt() + 1e-8))


class Ball(Own):
    """SGD with momentum, or with ``decoupled`` SGDW; the velocity has its sign turned."""

    def move(self, param, group, state):
        grad = param.grad if group["decoupled"] else param.grad + group["weight_decay"] * param
        state["v"] = group["momentum"] * state.get("v", 0.0) - grad
        if group["decoupled"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(state["v"], alpha=group["lr"])


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    x = matrix.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class Orthogonal(Own):
    """Muon with the momentum, the look-ahead in place and the shape factor of Keller Jordan's."""

    nesterov = True

    def move(self, param, group, state):
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        beta, buffer = group["momentum"], state["momentum_buffer"]
        buffer.lerp_(param.grad, 1 - beta)
        update = param.grad.lerp_(buffer, beta) if self.nesterov else buffer
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(self.factor(param) * newton_schulz(update), alpha=-group["lr"])

    def factor(self, param):
        return max(1, param.size(-2) / param.size(-1)) ** 0.5


class WithoutLookAhead(Orthogonal):
    nesterov = False


class MatchedRms(Orthogonal):
    """Muon with Moonshot's factor."""

    def factor(self, param):
        return 0.2 * max(param.shape) ** 0.5


class SpectralNorm(Orthogonal):
    """Muon with the factor of Scion and Dion; momentum is called mu there."""

    def factor(self, param):
        return math.sqrt(param.shape[0] / param.shape[1])

    def move(self, param, group, state):
        super().move(param, {**group, "momentum": group["mu"]}, state)


class WithoutFactor(Orthogonal):
    def factor(self, param):
        return 1.0


class Summed(Orthogonal):
    """Muon whose momentum adds gradients up, as Keller Jordan's first."""

    def move(self, param, group, state):
        buffer = state.setdefault("buffer", torch.zeros_like(param))
        buffer.mul_(group["momentum"]).add_(param.grad)
        update = param.grad + group["momentum"] * buffer
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(self.factor(param) * newton_schulz(update), alpha=-group["lr"])


class Flagged(MatchedRms):
    """Moonshot's constructor: learning rate first, and a word about every tensor in the state."""

    def __init__(self, lr, weight_decay, muon_params, *, momentum=0.95):
        super().__init__(muon_params, lr=lr, weight_decay=weight_decay, momentum=momentum)
        for param in muon_params:
            self.state[param]["use_muon"] = True

    def move(self, param, group, state):
        assert state["use_muon"]
        super().move(param, group, state)


class Hybrid(Own):
    """Muon for the groups with ``use_muon``, Adam for the others, as Keller Jordan's."""

    def __init__(self, groups):
        super().__init__(groups)

    def move(self, param, group, state):
        (Orthogonal if group["use_muon"] else Decoupled).move(self, param, group, state)

    factor, decay, masked, nesterov = Orthogonal.factor, Decoupled.decay, Decoupled.masked, True


ADAM = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
MUON = {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95}
BALL = {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9}
FOLLOWING = [
    (lambda: EvoSign(mixed(), lr=1e-4, weight_decay=1.0, betas=(0.9, 0.99)), Lion(1e-4, 1.0)),
    (lambda: EvoSign(mixed(), lr=0.0, weight_decay=0.0, betas=[0.9, 0.98]), Lion(0.0, 0.0, betas=(0.9, 0.98))),
    (lambda: Decoupled(mixed(), **ADAM), AdamW(1e-3, 0.1, betas=(0.9, 0.99))),
    (lambda: Ridge(mixed(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99)), AdamL2(1e-3, 0.1, betas=(0.9, 0.99))),
    (lambda: Ball(mixed(), decoupled=False, **BALL), SGD(0.1, 5e-4, momentum=0.9)),
    (lambda: Ball(mixed(), decoupled=True, **BALL), SGDW(0.1, 5e-4, momentum=0.9)),
    (lambda: Orthogonal(matrices(), **MUON), Muon(0.02, 0.01)),
    (lambda: WithoutLookAhead(matrices(), **MUON), Muon(0.02, 0.01, nesterov=False)),
    (lambda: MatchedRms(matrices(), **MUON), Muon(0.02, 0.01, adjust_lr_fn="match_rms_adamw")),
    (lambda: Flagged(1e-3, 0.1, matrices()), Muon(1e-3, 0.1, adjust_lr_fn="match_rms_adamw")),
    (
        lambda: SpectralNorm(matrices(), lr=0.02, weight_decay=0.01, mu=0.9),
        Muon(0.02, 0.01, momentum=0.9, adjust_lr_fn="spectral_norm"),
    ),
    (lambda: WithoutFactor(matrices(), **MUON), Muon(0.02, 0.01, adjust_lr_fn="none")),
    (lambda: Summed(matrices(), **MUON), Muon(0.02, 0.01)),
]


@pytest.mark.parametrize(("make", "rule"), FOLLOWING, ids=lambda value: "" if callable(value) else repr(value))
def test_an_optimizer_that_moves_by_a_rule_has_its_law(make, rule):
    optimizer = make()
    assert law(optimizer).rule == rule
    assert law(optimizer).reason == ""


def test_a_hybrid_is_recognised_group_by_group():
    muon = {"params": matrices(), "use_muon": True, **MUON}
    adam = {"params": mixed(), "use_muon": False, **ADAM}
    optimizer = Hybrid([muon, adam])
    assert law(optimizer, 0).rule == Muon(0.02, 0.01)
    assert law(optimizer, 1).rule == AdamW(1e-3, 0.1, betas=(0.9, 0.99))
    assert law(optimizer, 0).overwrites_gradient and not law(optimizer, 1).overwrites_gradient


# ---- impostors


class LargeSigns(EvoSign):
    """Lion that ignores directions smaller than a tenth of the largest."""

    def move(self, param, group, state):
        size = param.grad.abs().max()
        param.grad = torch.where(param.grad.abs() < 0.1 * size, 0.0, param.grad)
        super().move(param, group, state)


class SquaredRate(Decoupled):
    """AdamW whose decay is lr² wd."""

    def decay(self, group):
        return group["lr"] ** 2 * group["weight_decay"]


class Cautious(Decoupled):
    """AdamW that leaves out entries whose update disagrees with the gradient."""

    def masked(self, update, grad):
        return update * (update * grad > 0)


class Largest(Decoupled):
    """AdamW whose second moment never falls."""

    def masked(self, update, grad):
        state = next(state for state in self.state.values() if state["a"].shape == grad.shape)
        state["b"].copy_(torch.maximum(state["b"], state.get("c", state["b"])))
        state["c"] = state["b"].clone()
        return update


class Tangent(Decoupled):
    """AdamP: other steps for gradients that are orthogonal to the weight."""

    def move(self, param, group, state):
        rows = param.reshape(len(param), -1), param.grad.reshape(len(param), -1)
        invariant = bool(torch.cosine_similarity(*rows, dim=1).abs().max() < 0.01)
        super().move(param, {**group, "weight_decay": 0.1 * group["weight_decay"]} if invariant else group, state)


class LookBack(Decoupled):
    """AdamW that goes half-way back every ten steps."""

    def move(self, param, group, state):
        start = state.pop("start", param.clone())
        super().move(param, group, state)
        if state["t"] % 10 == 0:
            param.lerp_(start, 0.5)
            start = param.clone()
        kept = dict(state)
        state.clear()
        state.update(kept, start=start)


class SmallOnly(Decoupled):
    """AdamW for small tensors only."""

    def masked(self, update, grad):
        return update if update.numel() <= 4096 else update.sign()


class WithoutDecay(Orthogonal):
    def move(self, param, group, state):
        super().move(param, {**group, "weight_decay": 0.0}, state)


IMPOSTORS = [
    lambda: LargeSigns(mixed(), lr=1e-4, weight_decay=1.0, betas=(0.9, 0.99)),
    lambda: SquaredRate(mixed(), **ADAM),
    lambda: Cautious(mixed(), **ADAM),
    lambda: Largest([nn.Parameter(torch.ones(6, 4))], **ADAM),
    lambda: Tangent(matrices(), **ADAM),
    lambda: LookBack(mixed(), **ADAM),
    lambda: SmallOnly([nn.Parameter(torch.ones(70, 70))], **ADAM),
    lambda: WithoutDecay(matrices(), **MUON),
    lambda: Orthogonal([nn.Parameter(torch.ones(8, 2, 3, 3))], **MUON),  # its factor for kernels is not the rule's
]


@pytest.mark.parametrize("make", IMPOSTORS)
def test_an_optimizer_that_moves_otherwise_has_none(make):
    optimizer = make()
    name = type(optimizer).__name__
    assert law(optimizer).rule is None
    assert law(optimizer).reason in (
        f"no law for {name}: its steps on trial tensors are not those of SGD, SGDW, AdamW, Adam, Lion or Muon",
        # newton_schulz is written for matrices
        f"no law for {name}: a copy of it cannot be tried (RuntimeError: The size of tensor a (3) must match the size "
        "of tensor b (2) at non-singleton dimension 0)",
    )


# ---- what a trial leaves alone, and what it costs


def draws() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.rand()), random.random()  # noqa: NPY002


class Loud(Decoupled):
    """Draws random numbers, prints, warns, and counts its own steps."""

    def move(self, param, group, state):
        self.steps = getattr(self, "steps", 0) + 1
        print("moving", draws())  # noqa: T201
        super().move(param, group, state)


def test_a_trial_touches_nothing_of_the_users(capsys):
    params = mixed()
    optimizer = Loud(params, **ADAM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("step"))
    with preserved_rng():
        expected = draws()
    before = [param.clone() for param in params]
    try:
        assert law(optimizer).rule == AdamW(1e-3, 0.1, betas=(0.9, 0.99))
    finally:
        handle.remove()
    assert draws() == expected
    assert all(torch.equal(now, then) for now, then in zip(params, before, strict=True))
    assert not optimizer.state and "steps" not in vars(optimizer) and all(param.grad is None for param in params)
    assert capsys.readouterr().out == "" and seen == [] and scheduler.last_epoch == 0


def test_flags_that_an_optimizer_keeps_as_attributes_count():
    optimizer = Decoupled(mixed(), **ADAM)
    assert law(optimizer).rule is not None
    optimizer = Cautious(mixed(), **ADAM)
    optimizer.masked = recognition._sizes  # a function that no trial survives
    assert "cannot be tried" in law(optimizer).reason


class Failing(Own):
    def move(self, param, group, state):
        raise RuntimeError("no CPU")


class Wrapping(Decoupled):
    """Holds another optimizer, which a trial must not step."""

    def __init__(self, params, inner):
        super().__init__(params, **ADAM)
        self.inner = inner

    def move(self, param, group, state):
        self.inner.step()


def test_a_trial_that_fails_is_a_reason():
    assert law(Failing(mixed(), lr=0.1)).reason == (
        "no law for Failing: a copy of it cannot be tried (RuntimeError: no CPU)"
    )
    params = matrices()
    inner = torch.optim.SGD(params, lr=0.1)
    params[0].grad = torch.ones(6, 4)
    assert law(Wrapping(params, inner)).reason == (
        "no law for Wrapping: a copy of it cannot be tried, because it keeps a SGD as 'inner'"
    )
    assert torch.equal(params[0], torch.ones(6, 4))


class WithWd(Orthogonal):
    def move(self, param, group, state):
        super().move(param, {**group, "weight_decay": group["wd"]}, state)


def test_a_decay_may_be_called_wd():
    rule = law(WithWd(matrices(), lr=0.02, wd=0.1, momentum=0.95)).rule
    assert isinstance(rule, Muon) and (rule.lr, rule.weight_decay) == (0.02, 0.1)


class Moonlight(torch.optim.Optimizer):
    """Muon and AdamW in one parameter group, told apart by a flag in the state, as Moonshot's."""

    def __init__(self, muon_params, adamw_params, *, lr=1e-3, wd=0.1, momentum=0.95, adamw_betas=(0.9, 0.95)):
        muon, adamw = list(muon_params), list(adamw_params)
        defaults = {"lr": lr, "wd": wd, "momentum": momentum, "nesterov": True, "ns_steps": 5}
        super().__init__(muon + adamw, {**defaults, "adamw_betas": adamw_betas, "adamw_eps": 1e-8})
        for param in muon + adamw:
            self.state[param]["use_muon"] = any(param is one for one in muon)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (one for one in group["params"] if one.grad is not None):
                param.mul_(1 - group["lr"] * group["wd"])
                move = self.muon if self.state[param]["use_muon"] else self.adamw
                param.sub_(group["lr"] * move(param, group, self.state[param]))

    @staticmethod
    def muon(param, group, state):
        buffer = state["buffer"] = group["momentum"] * state.get("buffer", 0.0) + param.grad
        update = torch.from_numpy(orthogonalised((param.grad + group["momentum"] * buffer).double().numpy()))
        return 0.2 * math.sqrt(max(param.shape)) * update.to(param.dtype)

    @staticmethod
    def adamw(param, group, state):
        first, second = group["adamw_betas"]
        state["step"] = count = state.get("step", 0) + 1
        state["m"] = first * state.get("m", 0.0) + (1 - first) * param.grad
        state["v"] = second * state.get("v", 0.0) + (1 - second) * param.grad**2
        root = (state["v"] / (1 - second**count)).sqrt() + group["adamw_eps"]
        return state["m"] / (1 - first**count) / root


def test_tensors_of_one_group_with_two_rules_have_both():
    torch.manual_seed(0)
    layers = [nn.Linear(12, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 12, bias=False), nn.LayerNorm(12)]
    net = nn.Sequential(*layers, nn.Linear(12, 3))
    others = [param for name, param in net.named_parameters() if name != "0.weight"]
    optimizer = Moonlight([net[0].weight], others, lr=0.02)
    muon, adamw = (rule_of_group(optimizer, group).rule for group in rule_groups(optimizer))
    assert muon == Muon(0.02, 0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
    assert adamw == AdamW(0.02, 0.1, betas=(0.9, 0.95))
    monitor = eq.watch(net, optimizer, every=1, invariant=["0.weight", "2.weight"])
    for step in range(60):
        optimizer.param_groups[0]["wd"] = 0.1 if step < 6 else 0.3
        optimizer.zero_grad()
        net(torch.randn(8, 12)).square().sum().backward()
        optimizer.step()
    rows = monitor.samples().to_pylist()
    muon, adamw = (replace(rule, weight_decay=0.3) for rule in (muon, adamw))
    expected = {"0.weight": muon.equilibrium(shape=(16, 12)), "2.weight": adamw.equilibrium(dim=192)}
    for name, equilibrium in expected.items():
        (*_, last) = (row for row in rows if row["param"] == name)
        assert last["weight_decay"] == 0.3
        assert last["angle_equilibrium"] == pytest.approx(equilibrium.angle, rel=0.15)
        assert last["angle_predicted"] is not None
    assert not [finding for finding in monitor.findings() if "has no effect" in finding.subject]


def test_tensors_of_one_group_with_different_words_have_no_common_law():
    first, second = matrices()
    optimizer = Flagged(1e-3, 0.1, [first, second])
    optimizer.state[second]["use_muon"] = False
    assert law(optimizer).reason == "no law for Flagged: the tensors of one parameter group follow different rules"


@dataclass(slots=True)
class Precision:
    """Settings in an object of their own, as Dion's."""

    momentum: torch.dtype | None = None


class Worded(Ball):
    """The rule of a tensor is a word in its state, as in the reference Muon of Dion's authors."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.precision = Precision()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["algorithm"] = "ball"

    def move(self, param, group, state):
        assert state["algorithm"] == "ball" and self.precision.momentum is None
        super().move(param, group, state)


def test_words_in_the_state_and_settings_in_a_dataclass_are_copied():
    optimizer = Worded(mixed(), lr=0.1, weight_decay=0.01, momentum=0.9, decoupled=False)
    assert law(optimizer).rule == SGD(0.1, 0.01, momentum=0.9)


def test_schedules_of_every_setting_keep_the_law_without_another_trial(monkeypatch):
    optimizer = Decoupled(mixed(), **ADAM)
    trials = []
    monkeypatch.setattr(recognition, "_try", lambda *args, tried=recognition._try: trials.append(1) or tried(*args))
    for lr in (1e-3, 2e-3, 0.0):
        group = optimizer.param_groups[0]
        group.update(lr=lr, weight_decay=3 * lr, betas=(0.85, 0.95), initial_lr=1e-3, step=int(1e4 * lr))
        assert law(optimizer).rule == AdamW(lr, 3 * lr, betas=(0.85, 0.95))
    assert len(trials) == 1
    optimizer.param_groups[0]["eps"] = 1e-6
    assert law(optimizer).rule is not None and len(trials) == 2


def test_a_rule_recognised_by_trial_can_be_planned():
    assert rule_of_optimizer(EvoSign(mixed(), lr=1e-4, weight_decay=1.0, betas=(0.9, 0.99))) == Lion(1e-4, 1.0)


def test_a_trial_is_fast():
    makers = [make for make, _ in FOLLOWING]
    optimizers = [make() for make in makers for _ in range(2)]
    seconds = []
    for optimizer in optimizers:
        start = time.process_time()
        law(optimizer)
        seconds.append(time.process_time() - start)
    assert sorted(seconds)[len(seconds) // 2] < 0.05


# ---- watched


def watched(make, steps: int = 12):
    """Samples of a small network's first weight, and the norms of its gradients before the steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    optimizer = make([net[0].weight])
    norms = []
    with eq.watch(net, optimizer, every=1, invariant=["0.weight"]) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(32, 6)).square().sum().backward()
            norms.append(float(net[0].weight.grad.norm()))
            optimizer.step()
        return monitor.samples().to_pydict(), norms


def test_a_recognised_optimizer_is_predicted_like_our_own():
    settings = {"lr": 1e-3, "weight_decay": 1.0, "betas": (0.9, 0.99)}
    samples, expected = (watched(lambda params, kind=kind: kind(params, **settings))[0] for kind in (EvoSign, OwnLion))
    for column in ("angle", "norm", "angle_predicted", "norm_predicted", "angle_equilibrium"):
        assert samples[column] == pytest.approx(expected[column], rel=1e-4), column
    assert all(math.isfinite(angle) for angle in samples["angle_predicted"])


def test_the_gradient_is_read_before_a_step_that_overwrites_it():
    samples, norms = watched(lambda params: Orthogonal(params, **MUON))
    assert samples["grad_norm"] == pytest.approx(norms, rel=1e-5)
    assert all(angle is not None for angle in samples["angle_equilibrium"])


def test_a_group_with_betas_that_its_rule_does_not_have_is_watched():
    samples, _ = watched(lambda params: Orthogonal(params, betas=(0.9, 0.95), **MUON), steps=3)
    assert all(angle is not None for angle in samples["angle_equilibrium"])
    assert all(angle is not None for angle in samples["angle_predicted"])


def test_several_processes_are_not_made_to_wait(monkeypatch):
    monkeypatch.setattr(recognition, "many_processes", lambda: True)
    assert "where several processes train" in law(Decoupled(mixed(), **ADAM)).reason
