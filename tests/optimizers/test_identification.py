"""Identification by experiment: the closed forms are found again, classes without an equilibrium are named."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import equilibria as eq
from equilibria.control import SGDW, Lion
from equilibria.errors import EquilibriaError
from equilibria.optimizers import experiment, identification
from equilibria.optimizers.copies import copies_of
from equilibria.optimizers.identification import cache_folder, identify
from equilibria.optimizers.in_force import not_in_force, settings_in_force
from equilibria.optimizers.rules import rule_of_group
from equilibria.theory import Identified
from equilibria.theory.schedules import Constant

ANGLE, NORM = 0.02, 0.04  # the accuracy that `identify` promises; `benchmarks/identification.py` measures it
SCALE = {"unit_grad_sq": 9.0, "dim": 2048.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUILIBRIA_CACHE", str(tmp_path))


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(0.1 * torch.randn(64, 32))]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=1e-4),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-5),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda params: SGDW(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
        lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2, betas=(0.9, 0.99)),
        lambda params: torch.optim.Adam(params, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98)),
        pytest.param(lambda params: Lion(params, lr=1e-4, weight_decay=1.0), marks=pytest.mark.slow),
        pytest.param(lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1), marks=pytest.mark.slow),
    ],
)
def test_the_closed_forms_are_found_by_experiment(make):
    optimizer = make(matrix())
    law = rule_of_group(optimizer, optimizer.param_groups[0]).rule
    found, expected = identify(optimizer).equilibrium(**SCALE), law.equilibrium(**SCALE)
    assert found.angle == pytest.approx(float(expected.angle), rel=ANGLE)
    assert found.norm == pytest.approx(float(expected.norm), rel=NORM)


class Signum(torch.optim.Optimizer):
    def __init__(self, params, *, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 0.1)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum.sign(), alpha=group["lr"])


@pytest.mark.slow
def test_a_small_decay_among_scatter_is_balanced():
    """Signs of Gaussian averages with correlations 0.9^k have the correlations 2/pi asin(0.9^k)."""
    torch.manual_seed(0)
    memory = 1 + 2 * sum(2 / math.pi * math.asin(0.9**lag) for lag in range(1, 400))
    for weight_decay in (0.03, 0.1):
        found = identify(Signum(matrix(), lr=1e-3, weight_decay=weight_decay)).equilibrium(dim=2048)
        decay = 1e-3 * weight_decay
        assert found.angle == pytest.approx(math.sqrt(2 * decay / memory), rel=ANGLE)
        assert found.norm == pytest.approx(1e-3 * math.sqrt(2048 * memory / (2 * decay)), rel=NORM)
        assert found.time_constant == pytest.approx(1 / (2 * decay), rel=0.01)


@pytest.mark.slow
def test_muon_is_measured_by_shape():
    """A square matrix turns 17 % faster than a long one."""
    torch.manual_seed(0)
    optimizer = torch.optim.Muon([nn.Parameter(torch.randn(48, 48))], lr=0.02, weight_decay=0.1)
    found = identify(optimizer).equilibrium(dim=48 * 48)
    angle, norm = brute_force(optimizer, unit_grad=10.0, steps=8000, burn=3000)
    assert found.angle == pytest.approx(angle, rel=ANGLE)
    assert found.norm == pytest.approx(norm, rel=NORM)
    closed = rule_of_group(optimizer, optimizer.param_groups[0]).rule.equilibrium().angle
    assert found.angle > 1.1 * float(closed)


def brute_force(optimizer, *, unit_grad: float, steps: int, burn: int) -> tuple[float, float]:
    """Root mean square angle and norm of a walk by the optimizer itself, in its own precision."""
    (param,) = optimizer.param_groups[0]["params"]
    generator, angles, norms = torch.Generator().manual_seed(5), [], []
    for step in range(burn + steps):
        before = param.detach().clone()
        noise = torch.randn(param.shape, generator=generator)
        noise -= (noise * before).sum() / before.square().sum() * before
        param.grad = noise * (unit_grad / math.sqrt(noise.numel()) / before.norm())
        optimizer.step()
        if step >= burn:
            turned = param.detach().double() / param.detach().double().norm() - before.double() / before.double().norm()
            angles.append(float(turned.norm()))
            norms.append(float(before.norm()))
    return (math.sqrt(np.mean(np.square(series))) for series in (angles, norms))


def test_an_optimizer_without_a_closed_law_agrees_with_brute_force():
    optimizer = torch.optim.RMSprop(matrix(), lr=1e-3, weight_decay=0.1, alpha=0.95)
    found = identify(optimizer)
    assert found.rule.is_coupled and found.rule.decay.grad == -1 and found.rule.decay.entries == 0.5
    expected = found.equilibrium(unit_grad_sq=25.0, dim=2048)
    angle, norm = brute_force(optimizer, unit_grad=5.0, steps=4000, burn=2000)
    assert expected.angle == pytest.approx(angle, rel=ANGLE)
    assert expected.norm == pytest.approx(norm, rel=NORM)


# ---- classes without an equilibrium


class Small(torch.optim.Optimizer):
    """Normalised gradients, with one thing that leaves them without an equilibrium."""

    def __init__(self, params, *, lr=0.01, weight_decay=0.1, rule=""):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "rule": rule, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        (param,) = group["params"]
        rule, norm, state = group["rule"], float(param.norm()), self.state[param]
        state["step"] = count = state.get("step", 0) + 1
        if rule == "average":
            param.lerp_(state.setdefault("z", param.clone()).lerp_(param, 0.1), 0.5)
        if rule == "own lr":
            group["d"] *= 1.01
        length = {"norm": norm, "clock": 1 / math.sqrt(1 + count / 3000), "own lr": group["d"]}.get(rule, 1.0)
        if rule != "no decay":
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(group["lr"] * length * param.grad / param.grad.norm())
        if rule == "held":
            param.mul_(norm / param.norm())
        if rule == "forced":
            param.div_(param.norm())


@pytest.mark.parametrize(
    ("rule", "motion", "words"),
    [
        ("held", "norm held", "its steps leave ||w|| as it was"),
        ("forced", "norm forced", "its first step sets ||w|| to 1, whatever it was"),
        ("norm", "step proportional to norm", "no norm balances the two"),
        ("average", "keeps a copy of the weights", "its state 'z' is a copy of the weights"),
        ("own lr", "adapts its own settings", "its steps change 'd' of its own settings"),
        ("no decay", "no decay", "it declares weight_decay=0.1 and removes 0 of the weight per step"),
        ("clock", "own clock", "times as long 100,000 steps later, with the same gradients"),
    ],
)
def test_a_class_is_named_where_there_is_no_equilibrium(rule, motion, words):
    found = identify(Small(matrix(), rule=rule))
    assert (found.motion, found.rule) == (motion, None)
    assert words in found.reason and f"Small: {motion}: " in str(found)
    with pytest.raises(EquilibriaError, match="Small has no equilibrium"):
        found.equilibrium()


@pytest.mark.parametrize(
    ("make", "motion"),
    [
        (lambda params: torch.optim.Adagrad(params, lr=0.01, weight_decay=0.01), "not stationary"),
        (lambda params: torch.optim.ASGD(params, lr=0.1, weight_decay=0.01), "own clock"),
        (lambda params: torch.optim.Rprop(params), "no decay"),
        (lambda params: torch.optim.LBFGS(params), "not identified"),
        pytest.param(
            lambda params: torch.optim.NAdam(params, lr=1e-3, weight_decay=0.1), "own clock", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=1.0, amsgrad=True, betas=(0.9, 0.99)),
            "not stationary",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_torchs_optimizers_without_an_equilibrium(make, motion):
    assert identify(make(matrix())).motion == motion


def test_an_experiment_that_takes_too_long_is_given_up():
    optimizer = torch.optim.RMSprop(matrix(), weight_decay=0.1)
    found = experiment.identify_group(optimizer, optimizer.param_groups[0], seconds=0.01)
    assert (found.motion, found.reason) == (
        "not identified",
        "the experiment takes longer than its budget of CPU time",
    )
    assert not found.repeatable


# ---- nothing of the user's is touched


def test_an_experiment_touches_nothing_of_the_users(capsys):
    torch.manual_seed(3)
    params = matrix()
    optimizer = torch.optim.RMSprop(params, lr=1e-3, weight_decay=0.1, alpha=0.9)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    params[0].grad = torch.randn_like(params[0])
    optimizer.step()
    calls.clear()
    weight, gradient = params[0].detach().clone(), params[0].grad.clone()
    state = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    draws = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    assert identify(optimizer, progress=False).motion == "equilibrium"
    assert (
        not_in_force(optimizer, optimizer.param_groups) == settings_in_force(optimizer, optimizer.param_groups[0]) == ()
    )
    everywhere.remove()
    assert torch.equal(params[0], weight) and torch.equal(params[0].grad, gradient) and not calls
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[params[0]].items())
    assert group == {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert torch.equal(torch.get_rng_state(), draws[0]) and random.getstate() == draws[2]
    assert np.array_equal(np.random.get_state()[1], draws[1])  # noqa: NPY002
    assert capsys.readouterr() == ("", "")


# ---- kept


def fast() -> torch.optim.Optimizer:
    return torch.optim.RMSprop(matrix(), lr=1e-3, weight_decay=0.1, alpha=0.9)


def files() -> list:
    return sorted(cache_folder().glob("*"))


@pytest.fixture
def experiments(monkeypatch):
    """The experiments made, each replaced by a quick one with a number of its own."""
    made = []

    def quick(optimizer, group, **_):
        made.append(type(optimizer).__name__)
        return experiment.Identification(type(optimizer).__name__, "own clock", f"number {len(made)}", None)

    monkeypatch.setattr(identification, "identify_group", quick)
    return made


def test_a_law_is_kept_in_memory_and_on_disk(experiments):
    optimizer = fast()
    first = identify(optimizer)
    assert identify(optimizer) == first and identify(fast()) == first
    assert experiments == ["RMSprop"] and len(files()) == 1
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1e-5, 0.3  # a schedule
    assert identify(optimizer) == first and len(experiments) == 1


def test_other_settings_are_another_experiment(experiments):
    reasons = {identify(fast()).reason}
    reasons.add(identify(torch.optim.RMSprop(matrix(), lr=1e-3, weight_decay=0.1, alpha=0.95)).reason)
    reasons.add(identify(torch.optim.RMSprop(matrix(), lr=2e-3, weight_decay=0.1, alpha=0.9)).reason)
    reasons.add(identify(torch.optim.RMSprop([nn.Parameter(torch.ones(8, 99))], weight_decay=0.1)).reason)
    assert len(reasons) == len(experiments) == 4


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"name": "RMSprop", "motion": "equilibrium"}', b"\xff\xfe"])
def test_a_damaged_file_is_measured_again(experiments, content):
    identify(fast())
    (path,) = files()
    path.write_bytes(content)
    assert identify(fast()).reason == "number 2"
    assert json.loads(path.read_bytes())["reason"] == "number 2"


def test_another_version_is_measured_again(experiments, monkeypatch):
    identify(fast())
    monkeypatch.setattr(identification, "_EXPERIMENT", 999)
    assert identify(fast()).reason == "number 2"


def test_a_folder_that_cannot_be_written_is_no_error(experiments, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("EQUILIBRIA_CACHE", str(blocked))
    assert identify(fast()).reason == "number 1" and identify(fast()).reason == "number 2"


def test_writers_at_the_same_time_leave_a_whole_file(experiments):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: identify(fast()), range(24)))
    assert {one.motion for one in found} == {"own clock"}
    (path,) = files()
    assert json.loads(path.read_bytes())["motion"] == "own clock"


def test_an_experiment_that_failed_is_not_kept(monkeypatch):
    failed = experiment.Identification("RMSprop", "not identified", "too long", None)
    monkeypatch.setattr(identification, "identify_group", lambda optimizer, group, **_: failed)
    assert identify(fast()) == failed and not files()


@pytest.mark.slow
def test_another_process_reads_the_law():
    found = identify(fast())
    code = (
        "import torch; from equilibria.optimizers import identification as i; i.identify_group = None\n"
        "o = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(64, 32))], lr=1e-3, weight_decay=0.1, alpha=0.9)\n"
        "print(i.identify(o).rule)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(found.rule)


@pytest.mark.parametrize(
    ("variables", "platform", "expected"),
    [
        ({"EQUILIBRIA_CACHE": "/a"}, "linux", "/a/identified"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/h"}, "linux", "/b/equilibria/identified"),
        ({"HOME": "/h"}, "linux", "/h/.cache/equilibria/identified"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Caches/equilibria/identified"),
        ({"LOCALAPPDATA": "/l", "HOME": "/h"}, "win32", "/l/equilibria/identified"),
    ],
)
def test_the_folder_follows_the_platform(monkeypatch, variables, platform, expected):
    for name in ("EQUILIBRIA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder().as_posix() == expected


# ---- what it is asked for


def test_the_first_group_that_decays_is_measured(experiments):
    groups = [{"params": [nn.Parameter(torch.ones(9))], "weight_decay": 0.0}, {"params": matrix()}]
    optimizer = torch.optim.RMSprop(groups, weight_decay=0.1)
    assert identify(optimizer) == identify(optimizer, group=1) != identify(optimizer, group=0)


@pytest.mark.parametrize("wrong", [torch.optim.SGD, "adam", None])
def test_anything_but_an_optimizer_is_an_error(wrong):
    with pytest.raises(EquilibriaError, match="expected a torch optimizer"):
        identify(wrong)


def test_a_group_that_does_not_exist_is_an_error():
    with pytest.raises(EquilibriaError, match="got group=3; expected 0 to 0"):
        identify(fast(), group=3)


# ---- used


@pytest.fixture(scope="module")
def measured() -> Identified:
    return experiment.identify_group(fast(), fast().param_groups[0]).rule


def test_plan_takes_an_optimizer_without_a_closed_law(measured, monkeypatch):
    found = experiment.Identification("RMSprop", "equilibrium", "", measured)
    monkeypatch.setattr(identification, "identify_group", lambda optimizer, group, **_: found)
    result = eq.plan(fast(), Constant(1e-3), steps=100, unit_grad_sq=4.0, dim=2048)
    exact = dataclasses.replace(measured, lr=1e-3).equilibrium(unit_grad_sq=4.0, dim=2048)
    assert result.phases[0].end.angle == pytest.approx(exact.angle, rel=1e-6)
    assert "<Plan of RMSprop" in repr(result)
    with pytest.raises(EquilibriaError, match="for RMSprop; expected both: its angle depends on the gradient scale"):
        eq.plan(fast(), Constant(1e-3), steps=100)


def test_watch_predicts_an_optimizer_without_a_closed_law(measured, monkeypatch, tmp_path):
    made = []

    def quick(optimizer, group, **_):
        made.append(group)
        if not group["weight_decay"]:
            return experiment.Identification(
                "RMSprop", "no decay", "without weight decay there is no equilibrium", None
            )
        return experiment.Identification("RMSprop", "equilibrium", "", measured)

    monkeypatch.setattr(identification, "identify_group", quick)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    groups = [
        {"params": [net[0].weight]},
        {"params": [*net[1].parameters(), *net[3].parameters()], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.RMSprop(groups, lr=1e-3, weight_decay=0.1, alpha=0.9)
    monitor = eq.watch(net, optimizer, every=2, log_dir=tmp_path / "run", invariant=["0.weight"])
    assert len(made) == 2  # before training
    for _ in range(400):
        optimizer.zero_grad()
        inputs, labels = torch.randn(32, 16), torch.randint(4, (32,))
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    monitor.close()
    assert len(made) == 2
    for run in (monitor, eq.read_run(tmp_path / "run")):
        rows = run.samples().to_pydict()
        late = [row for row, step in enumerate(rows["step"]) if rows["param"][row] == "0.weight" and step >= 200]
        angle, predicted = (np.square([rows[name][row] for row in late]) for name in ("angle", "angle_predicted"))
        assert math.sqrt(angle.mean() / predicted.mean()) == pytest.approx(1, abs=0.05)
        norm, expected = (np.array([rows[name][row] for row in late]) for name in ("norm", "norm_predicted"))
        assert float(np.mean(norm / expected)) == pytest.approx(1, abs=0.05)
        assert "RMSprop(lr=1e-3, wd=0.1) predicts" in str(run.table()).replace("\n", " ")
        assert any("no law for RMSprop (no decay)" in finding.subject for finding in run.findings())


# ---- optimizers as people write them for themselves


class InHouse(torch.optim.Optimizer):
    """AdamW with betas in the source, not in the group, and one habit."""

    def __init__(self, params, *, lr=1e-3, weight_decay=2.0, habit="", config=None):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.habit, self.config, self.buffers = habit, config or {"scale": 1.0}, []
        if habit == "list":
            self.buffers = [torch.zeros_like(param) for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        (param,) = group["params"]
        state, decay, gradient, habit = self.state[param], group["lr"] * group["weight_decay"], param.grad, self.habit
        state["tick"] = tick = state.get("tick", 0) + 1
        state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * gradient
        state["v"] = 0.99 * state.get("v", 0.0) + 0.01 * gradient**2
        update = state["m"] / (1 - 0.9**tick) / ((state["v"] / (1 - 0.99**tick)).sqrt() + 1e-12)
        if habit == "cautious":
            agrees = (update * gradient > 0).to(update)
            update = update * agrees / agrees.mean()
        if habit == "list":
            update = self.buffers[0].mul_(0.8).add_(update, alpha=0.2)
        pull = {"sign": param.sign(), "cube": 100 * param.square().mean() * param}.get(habit, param)
        param.sub_(decay * pull)
        param.sub_(self.config["scale"] * group["lr"] * update)
        if habit == "shadow":
            state.setdefault("ema", param.clone()).lerp_(param, 0.01)


@pytest.mark.slow
def test_a_memory_that_no_setting_declares_is_no_clock():
    optimizer = InHouse(matrix(), habit="cautious")
    found = identify(optimizer)
    assert found.motion == "equilibrium", found
    expected = found.equilibrium(unit_grad_sq=25.0, dim=2048)
    angle, norm = brute_force(optimizer, unit_grad=5.0, steps=4000, burn=2000)
    assert expected.angle == pytest.approx(angle, rel=ANGLE)
    assert expected.norm == pytest.approx(norm, rel=NORM)


def test_a_copy_of_the_weights_that_no_step_uses_does_not_matter():
    plain, shadow = (identify(InHouse(matrix(), habit=habit)) for habit in ("", "shadow"))
    assert shadow.motion == "equilibrium" and shadow.rule == plain.rule


def test_a_momentum_full_of_coupled_decay_is_no_copy_of_the_weights():
    optimizer = torch.optim.NAdam(matrix(), lr=1e-3, weight_decay=1.0)
    assert identify(optimizer).motion != "keeps a copy of the weights"


@pytest.mark.parametrize(("habit", "words"), [("sign", "decay could not be measured"), ("cube", "not proportional")])
def test_a_decay_that_is_not_proportional_to_the_weight_is_called_so(habit, words):
    found = identify(InHouse(matrix(), habit=habit))
    assert found.motion == "not identified" and words in found.reason


class Listed(InHouse):
    """Its constructor makes buffers."""

    def __init__(self, params, *, lr=1e-3, weight_decay=2.0, habit="list"):
        super().__init__(params, lr=lr, weight_decay=weight_decay, habit=habit)


def test_buffers_that_the_constructor_makes_are_made_again():
    optimizer = Listed(matrix())
    make = copies_of(optimizer, optimizer.param_groups[0])
    (other,) = params = matrix()
    double = make(params, {"lr": 0.5})
    other.grad = torch.ones_like(other)
    double.step()
    assert double.param_groups[0]["lr"] == 0.5 and double.buffers[0].any() and not optimizer.buffers[0].any()


def test_a_constructor_that_would_forget_a_setting_is_not_used():
    assert "keeps a list as 'buffers'" in identify(InHouse(matrix(), habit="list")).reason


def test_settings_in_an_attribute_are_another_experiment(experiments):
    reasons = {identify(InHouse(matrix(), config={"scale": scale})).reason for scale in (1.0, 0.2)}
    assert len(reasons) == len(experiments) == 2


def test_a_class_made_in_a_function_is_not_kept_on_disk(experiments):
    class Local(InHouse):
        """Its source says nothing of what it closes over."""

    identify(Local(matrix()))
    assert not files()
