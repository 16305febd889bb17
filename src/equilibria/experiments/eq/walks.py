"""Real optimizers on the random-walk model, for eq-optimizers: where their norm and angle settle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.experiments.experiment import Arrays
from equilibria.experiments.smd.random_walk import tangent_noise, turned
from equilibria.theory.equilibrium import Equilibrium
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule

if TYPE_CHECKING:
    import torch

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
        """What theory says; for Muon with what was measured of its update, if given."""
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
    """All replicas as the rows of one tensor, which element-wise optimizers do not see."""
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
    optimizer = make(config.rule(name), params)
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


def make(rule: Rule, params: list[torch.Tensor]) -> Any:
    """The torch optimizer that a rule describes; torch has no SGDW and no Lion, so these are this package's."""
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
    return torch.optim.Muon(params, **common, momentum=rule.momentum, nesterov=rule.nesterov)


def _muon_update(config: Config, name: str, rng: np.random.Generator) -> Arrays:
    """Size and memory of Muon's update on white noise, apart from any walk: what its law asks to be measured."""
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
