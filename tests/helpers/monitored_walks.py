"""Scale-invariant weights on a random walk under every optimizer, written out in numpy float64.

Gradients are Gaussian, orthogonal to the weight and proportional to 1 / ||w||; nothing here knows of the theory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from equilibria.monitor.predictor import OptimizerMemory
from equilibria.monitor.reading import MeasuredStep
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule

Array = NDArray[np.float64]
NAN = float("nan")


@dataclass
class Walk:
    """Weights side by side: what is measured of every step, and the optimizer's memory before it."""

    dim: int
    steps: list[MeasuredStep] = field(default_factory=list)
    memories: list[OptimizerMemory] = field(default_factory=list)

    def column(self, name: str) -> Array:
        return np.array([getattr(step, name) for step in self.steps])

    @property
    def entries(self) -> Array:
        return np.full(len(self.steps[0].ww), float(self.dim))


def dot(a: Array, b: Array) -> Array:
    return np.einsum("ij,ij->i", a, b)


def walk(
    rules: Sequence[Rule],
    *,
    weights: int = 32,
    dim: int = 150,
    norm: float = 1.0,
    unit_grad_sq: Sequence[float] | float = 1.0,
    persistence: float = 0.0,
    skipped: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Walk:
    """Let weights walk, one rule per step; ``persistence`` is the correlation of a gradient with the last one."""
    draw = np.random.default_rng(seed)
    w = draw.normal(size=(weights, dim))
    w *= norm / np.linalg.norm(w, axis=1, keepdims=True)
    m, v, noise = np.zeros_like(w), np.zeros_like(w), draw.normal(size=w.shape)
    drives = np.broadcast_to(unit_grad_sq, len(rules))
    found, done = Walk(dim), 0
    for at, (rule, drive) in enumerate(zip(rules, drives, strict=True)):
        noise = persistence * noise + np.sqrt(1 - persistence**2) * draw.normal(size=w.shape)
        ww = dot(w, w)[:, np.newaxis]
        g = noise - dot(noise, w)[:, np.newaxis] / ww * w
        g *= np.sqrt(drive / (dim - 1) / ww)
        found.memories.append(
            OptimizerMemory(dot(w, m), dot(m, m), v.mean(axis=1), float(done), np.ones(len(w), dtype=bool))
        )
        has_momentum = isinstance(rule, SGD) and rule.momentum > 0
        pull = dot(m, g) if has_momentum else np.full(weights, NAN)
        after, shrink, buffers = take_step(rule, w, g, m, v, done)
        e = after - (1 - shrink) * w
        measured = MeasuredStep(
            ww=ww[:, 0],
            wg=dot(w, g),
            gg=dot(g, g),
            we=dot(w, e),
            ee=dot(e, e),
            vg=pull,
            shrink=np.full(weights, shrink),
        )
        found.steps.append(measured)
        if at not in skipped:
            w, (m, v), done = after, buffers, done + 1
    return found


def take_step(
    rule: Rule, w: Array, g: Array, m: Array, v: Array, done: int
) -> tuple[Array, float, tuple[Array, Array]]:
    """The weight after the step, the share that decay took, and the buffers after it."""
    lr, wd = rule.lr, rule.weight_decay
    if isinstance(rule, SGD):
        h, a = g + wd * w, rule.momentum
        if a == 0:
            return w - lr * h, lr * wd, (m, v)
        own = 1.0 if not m.any() else 1.0 - rule.dampening
        m = a * m + own * h
        update = h + a * m if rule.nesterov else m
        share = lr * wd * (1 + a * own if rule.nesterov else own)
        return w - lr * update, share, (m, v)
    if isinstance(rule, SGDW):
        m = rule.momentum * m + g
        return (1 - lr * wd) * w - lr * m, lr * wd, (m, v)
    if isinstance(rule, AdamW | AdamL2):
        b1, b2 = rule.betas
        h = g + wd * w if isinstance(rule, AdamL2) else g
        kept = 1.0 if isinstance(rule, AdamL2) else 1 - lr * wd
        m, v = b1 * m + (1 - b1) * h, b2 * v + (1 - b2) * h * h
        update = (m / (1 - b1 ** (done + 1))) / (np.sqrt(v / (1 - b2 ** (done + 1))) + 1e-30)
        return kept * w - lr * update, 1 - kept, (m, v)
    if isinstance(rule, Lion):
        b1, b2 = rule.betas
        update = np.sign(b1 * m + (1 - b1) * g)
        return (1 - lr * wd) * w - lr * update, lr * wd, (b2 * m + (1 - b2) * g, v)
    assert isinstance(rule, Muon)
    a = rule.momentum
    m = a * m + (1 - a) * g
    c = (1 - a) * g + a * m if rule.nesterov else m
    update = (
        3.0 * c / np.maximum(np.linalg.norm(c, axis=1, keepdims=True), 1e-300)
    )  # of constant size, as an orthogonal matrix is
    return (1 - lr * wd) * w - lr * update, lr * wd, (m, v)
