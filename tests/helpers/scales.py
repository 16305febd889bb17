"""The scale of a layer in the arguments of `plan`, which takes Muon's from the shape of its matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

from equilibria.theory import Muon, Rule


def plan_scale(rule: Rule, *, unit_grad_sq: float, dim: float) -> dict[str, Any]:
    """The arguments of `plan`; for Muon a square matrix of ``dim`` rows."""
    if isinstance(rule, Muon):
        return {"shape": (int(dim), int(dim))}
    return {"unit_grad_sq": unit_grad_sq, "dim": dim}


def recursion_scale(rule: Rule, *, unit_grad_sq: float, dim: float) -> tuple[Rule, dict[str, float]]:
    """The rule and the arguments of `evolve` for the same layer."""
    if isinstance(rule, Muon):
        rule = dataclasses.replace(rule, shape=(int(dim), int(dim)))
        dim = rule.update_sq(rule.shape)
    return rule, {"unit_grad_sq": unit_grad_sq, "dim": dim}
