"""The scale of a layer: what a plan must be told to know norms, and how far apart they may be."""

from __future__ import annotations

from equilibria.errors import EquilibriaError, positive, within
from equilibria.theory import SGD, SGDW, AdamL2, Muon, Rule


def check_scale(
    rule: Rule,
    init_norm: float | None,
    unit_grad_sq: float | None,
    dim: float | None,
    shape: tuple[int, int] | None,
    *,
    settles: bool,
) -> None:
    """Refuse a scale that this rule does not have, and a start whose norm there is nothing to compare with."""
    if isinstance(rule, AdamL2) and (unit_grad_sq is None or dim is None):
        raise EquilibriaError(
            f"got unit_grad_sq={unit_grad_sq}, dim={dim} for Adam with L2; expected both: its angle depends on the "
            "gradient scale (for AdamW neither is needed)"
        )
    if shape is not None and not isinstance(rule, Muon):
        raise EquilibriaError(f"got shape={shape} for {type(rule).__name__}; expected it only for Muon")
    if dim is not None and isinstance(rule, Muon):
        raise EquilibriaError(f"got dim={dim} for Muon; expected shape=(rows, columns), which fixes its norm")
    name = "unit_grad_sq" if isinstance(rule, SGD | SGDW) else "shape" if isinstance(rule, Muon) else "dim"
    value = {"unit_grad_sq": unit_grad_sq, "shape": shape, "dim": dim}[name]
    if not settles and (init_norm is None or value is None):
        raise EquilibriaError(
            f"got weight_decay=0, without which there is no equilibrium to start from, with init_norm={init_norm}, "
            f"{name}={value}; expected both init_norm and {name}, or a weight_decay > 0"
        )
    if init_norm is not None and value is None:
        raise EquilibriaError(
            f"got init_norm={init_norm} without {name}; expected both: {name} fixes the norm to compare with"
        )


def check_distance(init_norm: float | None, start_norm: float) -> None:
    """Fourth powers of the ratio must stay within float64."""
    if init_norm is not None and not 1e-70 <= positive("init_norm", init_norm) / start_norm <= 1e70:
        raise EquilibriaError(
            f"got init_norm={init_norm:g}, {init_norm / start_norm:.2g} times its equilibrium {start_norm:.3g}; "
            "expected 1e-70 to 1e70 times"
        )


def update_size(rule: Rule, dim: float | None, shape: tuple[int, int] | None) -> float:
    """What the squared norm goes as: the number of entries; for Muon the squared length of the adjusted update."""
    if isinstance(rule, Muon) and shape is not None:
        return rule.gain(shape) ** 2 * min(shape)
    return 1.0 if dim is None else scale_number("dim", dim)


def scale_number(name: str, value: float) -> float:
    """A positive number far enough from the ends of float64 for the squares and ratios that follow from it."""
    return within(name, positive(name, value), low=1e-100, high=1e100)
