"""The scale of a layer in the arguments of `plan`, which takes Muon's from the shape of its matrix."""

from __future__ import annotations

from equilibria.theory import Muon, Rule


def plan_scale(rule: Rule, *, unit_grad_sq: float, dim: float) -> dict[str, object]:
    """What `evolve` calls ``dim``: a square matrix of that many rows has an update of that squared length."""
    if isinstance(rule, Muon):
        return {"shape": (int(dim), int(dim))}
    return {"unit_grad_sq": unit_grad_sq, "dim": dim}
