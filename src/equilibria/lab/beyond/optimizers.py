"""eq-optimizers: equilibrium norm and angle of common optimizers, theory against torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, identity, not_demanded
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.papers.smd.random_walk import tangent_noise, turned
from equilibria.theory.equilibrium import Equilibrium, second_moment_shift
from equilibria.theory.fluctuation import fluctuation, random_walk_variance
from equilibria.theory.rules import EQUILIBRIUM_LAWS, SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.states import cold_start
from equilibria.theory.transient import evolve

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes


Array = NDArray[np.float64]
LABELS = {
    "sgd": "SGD",
    "heavy-ball": "SGD, momentum",
    "nesterov": "SGD, Nesterov",
    "dampening": "SGD, dampening",
    "sgdw": "SGDW",
    "adamw": "AdamW",
    "adamw-short": "AdamW, short $\\beta_2$",
    "adam-l2": "Adam + L2",
    "lion": "Lion",
    "muon-square": "Muon, square",
    "muon-tall": "Muon, 4:1",
}
LAGS = 150  # momentum 0.95 is forgotten by then
_COMPUTED_UPDATE = 0.03  # error of the angle that the law allows itself when it computes Muon's update from the shape


@dataclass(frozen=True)
class Config:
    """Runs start at ``start`` times the equilibrium norm, and are measured after ten time constants.

    ``decay`` is lr*wd of SGD, SGDW, AdamW and Lion; SGD's momentum variants forget faster and have a quarter of it.
    """

    dim: int = 400
    replicas: int = 16
    steps: int = 12_000
    decay: float = 2e-3
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    short_beta: float = 0.95
    lion_betas: tuple[float, float] = (0.9, 0.99)
    adam_l2: tuple[float, float] = (2e-3, 0.02)
    square: int = 40
    muon_replicas: int = 4
    muon_steps: int = 4_000
    muon_update_steps: int = 16_000
    start: float = 1.5
    seed: int = 0

    def rule(self, name: str) -> Rule:
        """The optimizer's settings."""
        lr, a = 0.1, self.momentum
        wd, slow = self.decay / lr, self.decay / lr / 4
        rules: dict[str, Rule] = {
            "sgd": SGD(lr, wd),
            "heavy-ball": SGD(lr, slow, momentum=a),
            "nesterov": SGD(lr, slow, momentum=a, nesterov=True),
            "dampening": SGD(lr, 2 * slow, momentum=a, dampening=0.5),
            "sgdw": SGDW(lr, wd, momentum=a),
            "adamw": AdamW(lr, wd, betas=self.betas),
            "adamw-short": AdamW(lr, wd, betas=(self.betas[0], self.short_beta)),
            "adam-l2": AdamL2(*self.adam_l2, betas=self.betas),
            "lion": Lion(lr, wd / 2, betas=self.lion_betas),
        }
        return rules[name] if name in rules else Muon(lr, wd)

    def shape(self, name: str) -> tuple[int, int]:
        """Of Muon's matrix; about the same number of entries for both."""
        return (self.square, self.square) if name == "muon-square" else (2 * self.square, self.square // 2)

    def equilibrium(self, name: str, *, update_sq: float | None = None, memory: float | None = None) -> Equilibrium:
        """The equilibrium by theory; for Muon from the measured size and memory of its update, if given."""
        rule = self.rule(name)
        if isinstance(rule, Muon):
            return rule.equilibrium(shape=self.shape(name), update_sq=update_sq, memory_total=memory)
        return rule.equilibrium(unit_grad_sq=1.0, dim=self.dim)


def tasks(config: Config) -> dict[str, str]:
    """A walk per optimizer."""
    return {name: name for name in LABELS}


def run_task(config: Config, name: str) -> Arrays:
    """Mean squared norm and angle of every replica in equilibrium, and how the norm got there."""
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng([config.seed, list(LABELS).index(name)])
    if name.startswith("muon"):
        return {**_muon_update(config, name, rng), **_walk(config, name, rng, _matrices)}
    return _walk(config, name, rng, _rows)


Weights = tuple[list["torch.Tensor"], Callable[[], Array], Callable[[Array], Sequence["torch.Tensor"]]]


def _rows(config: Config, name: str, start: Array) -> Weights:
    """All replicas as the rows of one tensor: element-wise optimizers treat them independently."""
    import torch

    w = torch.from_numpy(start).requires_grad_()
    return [w], lambda: w.detach().numpy(), lambda gradient: [torch.from_numpy(gradient)]


def _matrices(config: Config, name: str, start: Array) -> Weights:
    """A matrix per replica."""
    import torch

    shape = config.shape(name)
    params = [torch.from_numpy(row.reshape(shape).copy()).requires_grad_() for row in start]
    return (
        params,
        lambda: np.stack([param.detach().numpy().ravel() for param in params]),
        lambda gradient: [torch.from_numpy(row.reshape(shape)) for row in gradient],
    )


def _walk(
    config: Config, name: str, rng: np.random.Generator, weights: Callable[[Config, str, Array], Weights]
) -> Arrays:
    muon = name.startswith("muon")
    dim = math.prod(config.shape(name)) if muon else config.dim
    law = config.equilibrium(name)
    assert law.norm is not None
    start = rng.standard_normal((config.muon_replicas if muon else config.replicas, dim))
    start *= config.start * float(law.norm) / np.linalg.norm(start, axis=1, keepdims=True)
    params, read, as_gradients = weights(config, name, start)
    optimizer = make_optimizer(config.rule(name), params)
    approach, steps = round(10 * law.time_constant), config.muon_steps if muon else config.steps
    path, norms, angles = np.empty(approach), np.zeros(len(start)), np.zeros(len(start))
    before = read().copy()
    for step in range(approach + steps):
        norm_sq = np.einsum("ij,ij->i", before, before)
        for param, gradient in zip(params, as_gradients(tangent_noise(before, rng, unit_grad_sq=1.0)), strict=True):
            param.grad = gradient
        optimizer.step()
        after = read().copy()
        if step < approach:
            path[step] = norm_sq.mean()
        else:
            norms += norm_sq
            angles += turned(before, after) ** 2
        before = after
    shown = np.unique(np.linspace(0, approach - 1, 300).astype(int))
    return {"norm_sq": norms / steps, "angle_sq": angles / steps, "shown": shown, "path": path[shown]}


def make_optimizer(rule: Rule, params: list[torch.Tensor]) -> Any:
    """The torch optimizer that a rule describes; SGDW and Lion, which torch lacks, are this package's."""
    import torch

    from equilibria import control

    common: dict[str, Any] = {"lr": rule.lr, "weight_decay": rule.weight_decay}
    if isinstance(rule, SGD):
        own: dict[str, Any] = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
        return torch.optim.SGD(params, **common, **own)
    if isinstance(rule, SGDW):
        return control.SGDW(params, **common, momentum=rule.momentum)
    if isinstance(rule, AdamW):
        return torch.optim.AdamW(params, **common, betas=rule.betas, eps=1e-30)
    if isinstance(rule, AdamL2):
        return torch.optim.Adam(params, **common, betas=rule.betas, eps=1e-30)
    if isinstance(rule, Lion):
        return control.Lion(params, **common, betas=rule.betas)
    assert isinstance(rule, Muon)
    return torch.optim.Muon(params, **common, momentum=rule.momentum, nesterov=rule.nesterov)


def _muon_update(config: Config, name: str, rng: np.random.Generator) -> Arrays:
    """Measure size and memory of Muon's update on white noise, which its law needs."""
    import torch

    rule = config.rule(name)
    assert isinstance(rule, Muon)
    shape, steps = config.shape(name), config.muon_update_steps
    w = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    optimizer: Any = torch.optim.Muon([w], lr=1.0, weight_decay=0.0, momentum=rule.momentum, nesterov=rule.nesterov)
    updates = np.empty((steps, math.prod(shape)), np.float32)
    for step in range(-LAGS, steps):
        w.grad = torch.from_numpy(rng.standard_normal(shape))
        optimizer.step()
        if step >= 0:
            updates[step] = -w.detach().numpy().ravel() / rule.gain(shape)
        w.data.zero_()
    products = [float(np.vdot(updates[: steps - lag], updates[lag:])) / (steps - lag) for lag in range(LAGS + 1)]
    correlations = np.array(products) / products[0]
    return {"update_sq": np.asarray(products[0]), "memory": np.asarray(1 + 2 * correlations[1:].sum())}


_SHOWN_APPROACH = ("sgd", "heavy-ball", "adamw-short", "lion")


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge squared norm and rms angle of each optimizer, and of Muon also without measuring its update."""
    claims = [claim for name in LABELS for claim in _judge(config, name, results[name])]
    claims += [_judge_unmeasured(config, name, results[name]) for name in ("muon-square", "muon-tall")]
    return Outcome(claims, {name: _numbers(config, name, results[name]) for name in LABELS})


def _judge(config: Config, name: str, run: Arrays) -> list[Claim]:
    expected, error, resolution = _expected(config, name, run), _left_out(config, name), _resolution(config, name)
    rule = config.rule(name)
    nesterov = isinstance(rule, SGD) and rule.nesterov
    source = Source("", "beyond", law="equilibrium.nesterov" if nesterov else EQUILIBRIUM_LAWS[type(rule)])
    label = LABELS[name].replace("$\\beta_2$", "beta2")
    measured = {"norm_sq": run["norm_sq"], "angle": np.sqrt(run["angle_sq"])}
    texts = {"norm_sq": "||w||^2 in equilibrium", "angle": "rms angle per step"}
    claims = [
        source.says(f"{label}: {text}").near(
            expected[key],
            float(measured[key].mean()),
            relative=error[key] + resolution[key],
            interval=_interval(measured[key]),
            unit="rad" if key == "angle" else "",
        )
        for key, text in texts.items()
    ]
    if name == "sgd":  # log cos of plain SGD's steps adds up to the change of the norm: the same number twice
        claims[1] = identity(claims[1])
    # Of a small matrix the orthogonalised noise has a part along the weight that the law leaves out: some 15 entries'.
    small = isinstance(rule, Muon) and math.prod(config.shape(name)) < 1000
    return [not_demanded(claim) for claim in claims] if small else claims


def _expected(config: Config, name: str, run: Arrays) -> dict[str, float]:
    """The law, for AdamW with the first-order effect of its second moment's finite average."""
    law, rule = _law(config, name, run), config.rule(name)
    assert law.norm is not None
    norm_sq, angle = float(law.norm) ** 2, float(law.angle)
    if isinstance(rule, AdamW):
        norm_shift, size_shift = second_moment_shift(*rule.betas)
        turning = (1 + size_shift) / (1 + norm_shift)
        return {"norm_sq": norm_sq * (1 + norm_shift), "angle": angle * math.sqrt(turning)}
    return {"norm_sq": norm_sq, "angle": angle}


def _coupling(first: float, second: float) -> tuple[float, float]:
    """Shared weight of AdamW's two averages, and the variance of the second over its mean squared."""
    return (1 - first) * (1 - second) / (1 - first * second), 2 * (1 - second) / (1 + second)


def _law(config: Config, name: str, run: Arrays) -> Equilibrium:
    if "memory" not in run:
        return config.equilibrium(name)
    return config.equilibrium(name, update_sq=float(run["update_sq"]), memory=float(run["memory"]))


def _interval(values: Array) -> tuple[float, float]:
    """The mean over replicas with three standard errors either way."""
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean - 3 * error, mean + 3 * error


def _resolution(config: Config, name: str) -> dict[str, float]:
    """Relative resolution of a walk of this length: six of the standard errors that theory expects.

    Three are for the interval around the measured mean, three for its position. The norm decorrelates in a time
    constant. The angles of SGD and SGDW add up to the decay, except for the norms at the ends of the window; those of
    the others are inverse to the norm.
    """
    rule = config.rule(name)
    if isinstance(rule, Muon):
        # Its memory is itself measured: a sum over lags has a relative variance of 4 lags over the numbers that it is
        # taken from. ||w||^2 is proportional to it. For the noise of the walk there is no law; it is smaller.
        error = 3 * math.sqrt(4 * LAGS / (config.muon_update_steps * math.prod(config.shape(name))))
        return {"norm_sq": error, "angle": error / 2}
    variance = fluctuation(rule, _noise(config, name), unit_grad_sq=1.0, dim=config.dim).norm_sq_variance
    count = config.replicas * config.steps
    norm_sq = 6 * math.sqrt(variance * 2 * config.equilibrium(name).time_constant / count)
    if not isinstance(rule, SGD | SGDW):
        return {"norm_sq": norm_sq, "angle": norm_sq / 2}
    ends = 1 - rule.momentum if isinstance(rule, SGD) else 1.0  # momentum gives back most of what the ends take
    turned = 4 * rule.decay_per_step * config.steps * math.sqrt(config.replicas)
    return {"norm_sq": norm_sq, "angle": 6 * ends * math.sqrt(2 * variance) / turned}


def _noise(config: Config, name: str) -> float:
    """Relative variance on the walk of the squared unit gradient that the rule balances."""
    rule = config.rule(name)
    if isinstance(rule, SGD):
        return random_walk_variance(config.dim, momentum=rule.momentum, nesterov=rule.nesterov)
    momentum = rule.momentum if isinstance(rule, SGDW) else config.betas[0]
    return random_walk_variance(config.dim, momentum=momentum)


def _left_out(config: Config, name: str) -> dict[str, float]:
    """Relative error of the law's approximations, of ||w||^2 and of the angle."""
    rule = config.rule(name)
    if isinstance(rule, SGD | SGDW):  # the mean of 1/||w||^2 is not one over the mean
        scatter = 2 * fluctuation(rule, _noise(config, name)).norm_sq_variance
        return {"norm_sq": scatter, "angle": scatter}
    if isinstance(rule, Lion):  # the arcsine law is for many entries, and good to 0.3 % in what it sums up
        return {"norm_sq": 6e-3 + 1.1 / config.dim, "angle": 3e-3 + 0.7 / config.dim}
    if isinstance(rule, AdamW):  # the square of the first order of its second moment's finite average; angles are roots
        coupling, variance = _coupling(*rule.betas)
        second_order = (2 * coupling + variance) ** 2
        return {"norm_sq": second_order, "angle": second_order / 2}
    if isinstance(rule, AdamL2):
        # The second moment's average is finite. All of this may be in the memory, whose root divides the angle.
        shift = abs(second_moment_shift(*rule.betas)[0])
        coupled = _stated(config.equilibrium(name), "decay small relative to the gradient")
        return {"norm_sq": 1.25 * shift + coupled, "angle": 0.625 * shift + coupled}
    # Orthogonalised noise is no longer orthogonal to the weight. What that does has no law, only what simulations of
    # other shapes have shown: 1 % of ||w||^2 and 1.6 % of the angle.
    return {"norm_sq": 0.01, "angle": 0.016}


def _stated(law: Equilibrium, about: str) -> float:
    """The error of the angle that the law states for one of its assumptions."""
    return next(float(item.angle_error or 0.0) for item in law.validity if item.name.startswith(about))


def _judge_unmeasured(config: Config, name: str, run: Arrays) -> Claim:
    law = config.equilibrium(name)
    return (
        Source("", "beyond", law="equilibrium.constant_update")
        .says(f"{LABELS[name]}, its update not measured but computed from the shape: how far the rms angle is off")
        .at_most(_COMPUTED_UPDATE, abs(float(np.sqrt(run["angle_sq"]).mean()) / float(law.angle) - 1))
    )


def _numbers(config: Config, name: str, run: Arrays) -> dict[str, float]:
    expected = _expected(config, name, run)
    numbers = {
        "norm_sq_over_theory": float(run["norm_sq"].mean() / expected["norm_sq"]),
        "angle_over_theory": float(np.sqrt(run["angle_sq"]).mean() / expected["angle"]),
    }
    if "memory" in run:
        smaller = min(config.shape(name))
        numbers |= {"update_sq_over_rank": float(run["update_sq"]) / smaller, "memory": float(run["memory"])}
    return numbers


def draw(config: Config, results: TaskResults) -> Figures:
    """Norm and angle of all optimizers over theory, and the approach of some of them."""
    figure, (norms, angles, approach) = panels(1, 3, width=2.9, height=3.0)
    _draw_ratios(norms, config, results, key="norm_sq")
    label_panel(norms, "a", "norm in equilibrium", ylabel="", xlabel="$||w||^2$ / theory")
    _draw_ratios(angles, config, results, key="angle")
    angles.set_xlabel("rms angle / theory")
    angles.set_yticklabels([])
    label_panel(angles, "b", "angle per step", ylabel="")
    _draw_approach(approach, config, results)
    label_panel(approach, "c", "approach")
    return {"optimizers": figure}


def _draw_ratios(axes: Axes, config: Config, results: TaskResults, *, key: str) -> None:
    for row, name in enumerate(LABELS):
        run = results[name]
        measured = run["norm_sq"] if key == "norm_sq" else np.sqrt(run["angle_sq"])
        ratio = measured / _expected(config, name, run)[key]
        room = _left_out(config, name)[key] + _resolution(config, name)[key]
        axes.plot([1 - room, 1 + room], [row, row], color="#d5d9de", lw=7, solid_capstyle="butt")
        low, high = _interval(ratio)
        axes.errorbar(ratio.mean(), row, xerr=(high - low) / 2, fmt="o", color=COLOURS[0], capsize=2, elinewidth=0.9)
    axes.axvline(1, color=THEORY, lw=0.9)
    axes.set_yticks(range(len(LABELS)), list(LABELS.values()))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_approach(axes: Axes, config: Config, results: TaskResults) -> None:
    for name, colour in zip(_SHOWN_APPROACH, COLOURS, strict=False):
        run, law, rule = results[name], config.equilibrium(name), config.rule(name)
        assert law.norm is not None
        steps = run["shown"]
        axes.plot(steps / law.time_constant, run["path"] / law.norm**2, color=colour, label=LABELS[name])
        start = cold_start(rule, config.start * float(law.norm))
        theory = evolve(rule, int(steps[-1]), start=start, unit_grad_sq=1.0, dim=config.dim)
        axes.plot(steps / law.time_constant, theory.norm_sq[steps] / law.norm**2, color=THEORY, ls="--", lw=0.8)
    axes.plot([], [], color=THEORY, ls="--", lw=0.8, label="recursion")
    axes.set(xlabel="steps / time constant", ylabel="$||w||^2$ / equilibrium", xlim=(0, 6))
    axes.legend()


EXPERIMENT = Experiment(
    id="eq-optimizers",
    version=2,
    title="Equilibrium norm and angle of the optimizers in use, theory against torch.optim",
    source="beyond the papers",
    scales={
        "smoke": Config(
            dim=100,
            replicas=8,
            steps=1_000,
            decay=4e-3,
            betas=(0.9, 0.98),
            adam_l2=(4e-3, 0.05),
            muon_replicas=2,
            muon_steps=400,
            muon_update_steps=400,
            square=16,
        ),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
