"""Runs whose truth is known: weights that random tangent gradients push about, sampled into the sample table.

Every layer is a vector with an isotropic Gaussian gradient, projected orthogonal to it and of size sqrt(L) / ||w||:
the random-walk model. The optimizers are written out by hand, the measured columns are exact (float64), and the
predicted columns come from the theory, driven by the measured L, as a monitor would fill them in. The keyword arguments
of `world` plant defects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.errors import EquilibriaError
from equilibria.records.tables import (
    CHANGED_OUTSIDE,
    DISTURBED,
    NO_EQUILIBRIUM,
    NOT_FINITE,
    NUMBERS,
    SAMPLE_FIELDS,
    SETTLED,
    SETTLING,
    SKIPPED,
)
from equilibria.theory import SGD, SGDW, AdamW, Rule, cold_start, evolve, settled
from equilibria.theory.rules import momentum_unit_grad_sq
from equilibria.theory.settling import relaxation

SMOOTHED = 100  # steps over which L is averaged before it drives a prediction: h~ may be negative in one step
STEPS_PER_EPOCH = 100


@dataclass(frozen=True)
class World:
    samples: pa.Table
    metadata: dict[str, Any]


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even, as a bfloat16 weight is."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def same(values: np.ndarray) -> np.ndarray:
    return values


class Optimizer:
    """SGD (heavy ball, Nesterov), SGDW and AdamW on rows, one row per layer."""

    def __init__(self, rule: Rule, shape: tuple[int, int]) -> None:
        self.rule, self.buffer, self.second, self.count = rule, np.zeros(shape), np.zeros(shape), 0

    def step(self, w: np.ndarray, g: np.ndarray, lr: float, wd: float) -> np.ndarray:
        rule = self.rule
        self.count += 1
        if isinstance(rule, AdamW):
            b1, b2 = rule.betas
            self.buffer = b1 * self.buffer + (1 - b1) * g
            self.second = b2 * self.second + (1 - b2) * g * g
            mean, square = self.buffer / (1 - b1**self.count), self.second / (1 - b2**self.count)
            return (1 - lr * wd) * w - lr * mean / np.sqrt(square)
        if isinstance(rule, SGDW):
            self.buffer = rule.momentum * self.buffer + g
            return (1 - lr * wd) * w - lr * self.buffer
        assert isinstance(rule, SGD)
        pull = g + wd * w
        keep = 1.0 if self.count == 1 else 1 - rule.dampening
        self.buffer = rule.momentum * self.buffer + keep * pull
        return w - lr * (pull + rule.momentum * self.buffer if rule.nesterov else self.buffer)


def world(
    rule: Rule,
    steps: int,
    *,
    layers: Sequence[str] = ("conv1.weight", "conv2.weight", "conv3.weight"),
    dim: int = 256,
    start: float = 1.0,
    scale: float = 1.0,
    unit_grad_sq: Callable[[int], float] = lambda step: 1.0,
    lr: Callable[[int], float] | None = None,
    every: int = 1,
    correlation: float = 0.0,
    radial: float = 0.0,
    dominated: float = 1.0,
    dtype: str = "float32",
    kept_as: Callable[[np.ndarray], np.ndarray] = same,
    not_finite: Sequence[int] = (),
    skipped: Sequence[int] = (),
    changed_outside: dict[int, float] | None = None,
    buffer_too: bool = False,
    invariant: bool | None = None,
    seed: int = 0,
) -> World:
    """Simulate, sample and describe a run.

    Args:
        rule: the optimizer at its first settings.
        steps: optimizer steps.
        layers: names; all layers have the same settings.
        dim: entries of each layer.
        start: ||w|| at the start over its equilibrium (over 1 without weight decay).
        scale: multiplies every weight; lr then goes with its square, and weight decay with the inverse.
        unit_grad_sq: L at each step.
        lr: learning rate of each step, the rule's own by default.
        every: sample each so many steps.
        correlation: of successive gradients (AR(1)).
        radial: part of the gradient along the weight, as a share of the weight decay.
        dominated: share of the entries that get nearly all of the gradient.
        dtype: what the metadata say.
        kept_as: how a weight is rounded after each step.
        not_finite: steps whose gradient is not finite, and which are not taken.
        skipped: steps that are not taken.
        changed_outside: step -> factor by which the weights are multiplied before it.
        buffer_too: and the momentum buffer by its inverse.
        invariant: the label that the metadata hold.
        seed: of the noise.
    """
    lrs = np.array([rule.lr if lr is None else lr(step) for step in range(steps)])
    rng = np.random.default_rng(seed)
    first = dataclasses.replace(rule, lr=lrs[0])
    norm = start * scale * _equilibrium_norm(first, unit_grad_sq(0), dim)
    w = rng.standard_normal((len(layers), dim))
    w = kept_as(w * (norm / np.linalg.norm(w, axis=1, keepdims=True)))
    optimizer, noise = Optimizer(rule, w.shape), rng.standard_normal(w.shape)
    sizes = np.where(np.arange(dim) < dominated * dim, 1 / math.sqrt(dominated), 1e-4)
    out = {name: np.full((steps, len(layers)), np.nan) for name in NUMBERS}
    notes = np.full((steps, len(layers)), None, dtype=object)
    wd = rule.weight_decay / scale**2
    for step in range(steps):
        noise = correlation * noise + np.sqrt(1 - correlation**2) * rng.standard_normal(w.shape)
        if step in (changed_outside or {}):
            w, notes[step] = w * changed_outside[step], CHANGED_OUTSIDE
            optimizer.buffer = optimizer.buffer / (changed_outside[step] if buffer_too else 1.0)
        size = np.linalg.norm(w, axis=1, keepdims=True)
        tangent = sizes * noise - w * (np.sum(sizes * noise * w, axis=1, keepdims=True) / size**2)
        g = tangent * np.sqrt(unit_grad_sq(step) / (dim - 1)) / size
        per_entry = np.sqrt(unit_grad_sq(step) / dim) / size if isinstance(rule, AdamW) else 1.0  # what Adam divides by
        g = g + radial * wd * w * per_entry
        taken = step not in not_finite and step not in skipped
        notes[step] = NOT_FINITE if step in not_finite else SKIPPED if step in skipped else notes[step]
        cross = np.sum(optimizer.buffer * g, axis=1)
        new = kept_as(optimizer.step(w, g, lrs[step] * scale**2, wd)) if taken else w
        _measure(out, step, w, g if taken else g * np.nan, new)
        if taken and getattr(rule, "momentum", 0.0):
            n = out["unit_grad_sq"][step]
            out["momentum_unit_grad_sq"][step] = momentum_unit_grad_sq(rule, n, buffer_dot_grad=cross * size[:, 0] ** 2)
        out["lr"][step], out["weight_decay"][step] = lrs[step] * scale**2, wd
        out["momentum"][step] = rule.betas[0] if isinstance(rule, AdamW) else rule.momentum
        w = new
    _predict(out, rule, lrs, dim=dim, scale=scale, restarts=changed_outside or {})
    states = _states(out, notes)
    return World(_table(out, states, notes, layers, every), _metadata(rule, layers, dim, dtype, every, invariant))


def _equilibrium_norm(rule: Rule, unit_grad_sq: float, dim: int) -> float:
    try:
        return float(np.sqrt(settled(rule, unit_grad_sq=unit_grad_sq, dim=dim).norm_sq))
    except EquilibriaError:  # no weight decay
        return 1.0


def _measure(out: dict, step: int, w: np.ndarray, g: np.ndarray, new: np.ndarray) -> None:
    norm, grad = np.linalg.norm(w, axis=1), np.linalg.norm(g, axis=1)
    out["norm"][step], out["grad_norm"][step] = norm, grad
    out["cosine"][step] = np.sum(w * g, axis=1) / (norm * grad)
    out["unit_grad_sq"][step] = (grad * norm) ** 2
    if np.isnan(grad).any():
        return
    chord = np.linalg.norm(new / np.linalg.norm(new, axis=1, keepdims=True) - w / norm[:, None], axis=1)
    out["angle"][step] = 2 * np.arcsin(chord / 2)
    out["update_norm"][step] = np.linalg.norm(new - w, axis=1)
    out["relative_update"][step] = out["update_norm"][step] / norm


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over the last steps; what is missing is filled with the value before."""
    filled = values.copy()
    for step in range(1, len(filled)):
        filled[step] = np.where(np.isnan(filled[step]), filled[step - 1], filled[step])
    total = np.cumsum(np.vstack([np.repeat(filled[:1], SMOOTHED, axis=0), filled]), axis=0)
    return (total[SMOOTHED:] - total[:-SMOOTHED]) / SMOOTHED


def _predict(out: dict, rule: Rule, lrs: np.ndarray, *, dim: int, scale: float, restarts: dict) -> None:
    """The four predicted columns and the time to settle."""
    forcing = out["unit_grad_sq"]
    if isinstance(rule, SGD | SGDW) and rule.momentum:
        forcing = np.where(np.isnan(out["momentum_unit_grad_sq"]), forcing, out["momentum_unit_grad_sq"])
    forcing = _smoothed(forcing)
    bounds = [0, *sorted(restarts), len(lrs)]
    for begin, end in pairwise(bounds):
        part = slice(begin, end)
        begin_rule = dataclasses.replace(rule, lr=lrs[begin])
        state = cold_start(begin_rule, out["norm"][begin] / scale)
        path = evolve(rule, end - begin, start=state, lr=lrs[part], unit_grad_sq=forcing[part], dim=np.full(1, dim))
        out["angle_predicted"][part], out["norm_predicted"][part] = path.angle, path.norm[:-1] * scale
    out["effective_lr"][:] = lrs[:, None] * scale**2 / out["norm"] ** 2
    if rule.weight_decay == 0:
        return
    for value in np.unique(lrs):
        rows, here = lrs == value, dataclasses.replace(rule, lr=value)
        out["angle_equilibrium"][rows] = here.equilibrium(unit_grad_sq=1.0, dim=dim).angle
        where = settled(here, unit_grad_sq=forcing[rows].ravel(), dim=dim).norm_sq
        out["norm_equilibrium"][rows] = scale * np.sqrt(where.reshape(-1, forcing.shape[1]) if where.ndim else where)
        out["steps_to_settle"][rows] = _steps_to_settle(here, (out["norm"] / out["norm_equilibrium"])[rows])
    out["epochs_to_settle"][:] = out["steps_to_settle"] / STEPS_PER_EPOCH


def _steps_to_settle(rule: Rule, ratios: np.ndarray) -> np.ndarray:
    """Steps until the angle is within 5 % of equilibrium: the closed form, for many ratios of the norm at once."""
    how = relaxation(rule)
    excess = ratios**how.power - 1
    edge = np.where(excess > 0, 0.95**-2 - 1, 1.05**-2 - 1)
    return np.log(np.maximum(excess / edge, 1.0)) / how.rate


def _states(out: dict, notes: np.ndarray) -> np.ndarray:
    """Settled within 5 % in angle; disturbed after a change of lr or of the weights; as a monitor decides it."""
    states = np.full(notes.shape, NO_EQUILIBRIUM, dtype=object)
    implied = out["steps_to_settle"]
    for layer in range(notes.shape[1]):
        was_settled, disturbed = False, False
        for step in range(len(notes)):
            if np.isnan(implied[step, layer]):
                continue
            changed = step > 0 and out["lr"][step, layer] != out["lr"][step - 1, layer]
            disturbed |= was_settled and (changed or notes[step, layer] == CHANGED_OUTSIDE)
            is_settled = implied[step, layer] == 0
            disturbed &= not is_settled
            states[step, layer] = SETTLED if is_settled else DISTURBED if disturbed else SETTLING
            was_settled = is_settled or disturbed
    return states


def _table(out: dict, states: np.ndarray, notes: np.ndarray, layers: Sequence[str], every: int) -> pa.Table:
    sampled = slice(None, None, every)
    steps = np.arange(len(notes))[sampled]
    columns: dict[str, Any] = {"step": np.repeat(steps, len(layers)), "param": list(layers) * len(steps)}
    for name, values in out.items():
        flat = values[sampled].ravel()
        columns[name] = pa.array(flat, mask=np.isnan(flat))
    columns["state"], columns["note"] = list(states[sampled].ravel()), list(notes[sampled].ravel())
    columns["law"] = [None] * len(columns["param"])
    return pa.table(
        {field.name: pa.array(columns[field.name], type=field.type) for field in SAMPLE_FIELDS}, schema=SAMPLE_FIELDS
    )


def _metadata(
    rule: Rule, layers: Sequence[str], dim: int, dtype: str, every: int, invariant: bool | None
) -> dict[str, Any]:
    kind = type(rule).__name__
    told = {name: getattr(rule, name, None) for name in ("momentum", "nesterov", "dampening")}
    told["betas"] = list(rule.betas) if hasattr(rule, "betas") else None
    entry = {
        "aliases": [], "shape": [dim], "entries": dim, "dtype": dtype, "optimizer": 0, "group": 0,
        "law": kind, "no_law": None, "rule": {"kind": kind, **told},
        "invariant": invariant,
    }  # fmt: skip
    return {
        "every": every,
        "granularity": "tensor",
        "steps_per_epoch": STEPS_PER_EPOCH,
        "optimizers": [{"class": kind, "settings": str(rule)}],
        "params": [{"name": name, **entry} for name in layers],
    }


def together(*worlds: World) -> World:
    """Worlds with different layers as one run."""
    samples = pa.concat_tables([each.samples for each in worlds]).sort_by("step")
    params = [entry for each in worlds for entry in each.metadata["params"]]
    return World(samples, {**worlds[0].metadata, "params": params})


def edited(samples: pa.Table, **columns: Any) -> pa.Table:
    """The table with some columns replaced."""
    for name, values in columns.items():
        field = SAMPLE_FIELDS.field(name)
        place = samples.column_names.index(name)
        samples = samples.set_column(place, field, pa.array(values, type=field.type, from_pandas=True))
    return samples


def rescaled_units(samples: pa.Table, factor: float) -> pa.Table:
    """The same run with every weight ``factor`` times as large: lr goes with its square, weight decay with 1/it."""
    powers = {"norm": 1, "norm_equilibrium": 1, "norm_predicted": 1, "update_norm": 1, "grad_norm": -1}
    powers |= {"lr": 2, "weight_decay": -2}
    return edited(samples, **{name: samples[name].to_numpy() * factor**power for name, power in powers.items()})
