"""The law of an optimizer whose motion was measured: power laws for its step and its decay, and the step's memory.

`equilibria.identify` measures them on a throw-away copy of an optimizer that has no closed law. With s the share of
the weight that decay removes per step, l the length of a step, and the autocorrelation of the steps,

    ||w'||^2 = (1-s)^2 ||w||^2 + l^2 + 2 (1-s) l z,      z = sum_k r_k (1-s)^(k-1) l_(t-k)

which is the law of constant-size updates (`memory`), with a size and a decay that may depend on gradient and norm. Both
are power laws of lr, weight decay, gradient, norm and number of entries, so that the law holds along a schedule. In
equilibrium ``||w||^2 = l^2 S / (s (2-s))``, S = 1 + 2 sum_k r_k (1-s)^k, and the angle is about sqrt(2 s / S).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, number, within
from equilibria.theory._reals import reals
from equilibria.theory.approach import Approach
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import Assumption, Equilibrium, FixedPoint, constant_update_point, equilibrium_from
from equilibria.theory.memory import Memory

_ROUNDS = 60  # of the fixed-point iteration, which contracts by about s per round


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """A product of powers, ``factor lr^a wd^b ||g||^c ||w||^d entries^e``.

    Attributes:
        factor: its value where everything else is 1.
        lr: power of the learning rate.
        weight_decay: power of the weight decay.
        grad: power of the gradient's norm.
        norm: power of the weight's norm.
        entries: power of the number of entries.

    Example:
        AdamW's step is as long as lr times the square root of the number of entries, up to a factor:

        >>> PowerLaw(0.23, lr=1.0, entries=0.5)(lr=1e-3, weight_decay=0.1, grad=5.0, norm=2.0, entries=10_000)
        0.023
    """

    factor: float
    _: KW_ONLY
    lr: float = 0.0
    weight_decay: float = 0.0
    grad: float = 0.0
    norm: float = 0.0
    entries: float = 0.0

    def __post_init__(self) -> None:
        within("factor", self.factor, low=0)
        for name in ("lr", "weight_decay", "grad", "norm", "entries"):
            number(name, getattr(self, name))

    def __call__(self, *, lr: Any, weight_decay: Any, grad: Any, norm: Any, entries: Any) -> Any:
        """The value at these settings; numbers and arrays alike."""
        value: Any = self.factor
        for base, power in (
            (lr, self.lr),
            (weight_decay, self.weight_decay),
            (grad, self.grad),
            (norm, self.norm),
            (entries, self.entries),
        ):
            if power:
                value = value * base**power
        return value

    @property
    def radial(self) -> float:
        """The power of the norm at constant unit gradient, where the gradient falls as 1 / ||w||."""
        return self.norm - self.grad


@law("", "equilibria.identify", derived="constant-size updates whose size and decay are measured power laws")
@dataclass(frozen=True, slots=True)
class Identified:
    """An optimizer whose law was measured by `equilibria.identify`, with its present settings.

    Attributes:
        lr: learning rate.
        weight_decay: weight decay, as the optimizer defines it.
        name: class of the optimizer.
        step: length of its step without decay.
        decay: share of the weight that decay removes per step in the long run.
        memory: autocorrelation of its steps.

    Example:
        >>> step, decay = PowerLaw(1.0, lr=1.0, entries=0.5), PowerLaw(1.0, lr=1.0, weight_decay=1.0)
        >>> sign = Identified(1e-3, 0.1, name="SignSGD", step=step, decay=decay, memory=Memory((), ()))
        >>> round(sign.equilibrium(dim=10_000).norm, 3), round(sign.equilibrium().angle, 5)
        (7.071, 0.01414)
    """

    lr: float
    weight_decay: float
    _: KW_ONLY
    name: str
    step: PowerLaw
    decay: PowerLaw
    memory: Memory

    def __post_init__(self) -> None:
        within("lr", self.lr, low=0)
        within("weight_decay", self.weight_decay, low=0)

    @property
    def decay_per_step(self) -> float:
        """The decay at these settings; where it depends on gradient and norm, at 1 of each, as with Adam and L2."""
        if self.lr == 0 or self.weight_decay == 0:
            return 0.0
        unit = {"grad": 1.0, "norm": 1.0, "entries": 1.0}
        return float(self.decay(lr=self.lr, weight_decay=self.weight_decay, **unit))

    @property
    def is_coupled(self) -> bool:
        """Whether the decay depends on the gradient or the norm."""
        return bool(self.decay.grad or self.decay.norm or self.decay.entries)

    @property
    def slope(self) -> float:
        """d ln(growth / decay) / d ln ||w||: negative where there is an equilibrium; -4 for SGD, -2 for AdamW."""
        return 2 * self.step.radial - 2 - self.decay.radial

    @property
    def first_order_norm(self) -> float:
        """||w|| of the equilibrium to first order in the decay per step, where L and the number of entries are 1.

        Both enter it as powers, so that the ratio of two settings holds for all.
        """
        unit = {"lr": self.lr, "weight_decay": self.weight_decay, "grad": 1.0, "norm": 1.0, "entries": 1.0}
        growth_over_decay = self.step(**unit) ** 2 * self.memory.total() / (2 * self.decay(**unit))
        return float(growth_over_decay ** (-1 / self.slope))

    def motion(self, norm_sq: Any, *, unit_grad_sq: Any, dim: Any) -> tuple[Any, Any]:
        """Length of the next step, and the share of the weight that decay removes, at this ||w||^2."""
        norm = norm_sq**0.5
        where = {"lr": self.lr, "weight_decay": self.weight_decay, "norm": norm, "entries": dim}
        grad = unit_grad_sq**0.5 / norm
        return self.step(**where, grad=grad), self.decay(**where, grad=grad)

    def equilibrium(self, *, unit_grad_sq: ArrayLike | None = None, dim: ArrayLike | None = None) -> Equilibrium:
        """Equilibrium of this optimizer, by `identified_point`.

        Args:
            unit_grad_sq: L = E[||g||^2 ||w||^2]; needed for the norm if the step depends on the gradient, and for all
                if the decay does.
            dim: number of entries; needed for the norm if the step depends on it, and for all if the decay does.

        Returns:
            The equilibrium.
        """
        _check_settings(self, unit_grad_sq, dim)
        lacks = (unit_grad_sq is None and self.step.grad != 0) or (dim is None and self.step.entries != 0)
        grad_sq = reals("unit_grad_sq", 1.0 if unit_grad_sq is None else unit_grad_sq, above=0)
        entries = reals("dim", 1.0 if dim is None else dim, above=0)
        point = identified_point(self, self.lr, self.weight_decay, unit_grad_sq=grad_sq, dim=entries)
        if not np.all(np.isfinite(point.norm_sq)):
            raise EquilibriaError(
                f"got lr={self.lr:g}, weight_decay={self.weight_decay:g} for {self.name}, whose decay removes "
                f"{self.decay_per_step:.3g} of the weight per step; expected less than 1"
            )
        share = float(np.max(self.motion(point.norm_sq, unit_grad_sq=grad_sq, dim=entries)[1]))
        memory = max(self.memory.decay, default=0.0)
        rate = (1 - share) ** -self.slope
        how = Approach(rate, -1 / math.log(rate), -self.slope * share < 0.25 * (1 - memory))
        norm: Any = np.sqrt(point.norm_sq)
        measured = Assumption(
            "measured law",
            None,
            0.02,
            0.04,
            "norm, angle",
            f"the law of {self.name} was measured on random gradients of equal size in all entries; other gradients "
            "may change it",
        )
        at_once = Assumption(
            "no average of squared gradients in the step",
            None,
            None,
            None,
            "rate, time_constant",
            "such an average lags behind the norm and makes the time constant longer: AdamW's, at lr wd = 1e-4 and "
            "beta2 = 0.999, by 24 %",
        )
        return equilibrium_from(
            None if lacks else float(norm) if norm.ndim == 0 else norm,
            float(np.max(point.one_minus_cos)),
            how,
            measured,
            *([] if self.step.grad else [at_once]),
        )


def identified_from(content: Mapping[str, Any]) -> Identified:
    """A measured law from its fields, as `dataclasses.asdict` and JSON leave them.

    Raises:
        KeyError, TypeError, ValueError: these are not the fields of a law.

    Example:
        >>> import dataclasses
        >>> step, decay = PowerLaw(1.0, lr=1.0, entries=0.5), PowerLaw(1.0, lr=1.0, weight_decay=1.0)
        >>> rule = Identified(1e-3, 0.1, name="SignSGD", step=step, decay=decay, memory=Memory((0.5,), (0.9,)))
        >>> identified_from(dataclasses.asdict(rule)) == rule
        True
    """
    memory = content["memory"]
    return Identified(
        content["lr"],
        content["weight_decay"],
        name=str(content["name"]),
        step=PowerLaw(**content["step"]),
        decay=PowerLaw(**content["decay"]),
        memory=Memory(tuple(memory["first"]), tuple(memory["decay"])),
    )


def _check_settings(rule: Identified, unit_grad_sq: ArrayLike | None, dim: ArrayLike | None) -> None:
    if rule.decay_per_step == 0:
        raise EquilibriaError(
            f"got lr={rule.lr:g}, weight_decay={rule.weight_decay:g}; expected both above 0: without decay there is no "
            "equilibrium",
            argument="weight_decay" if rule.weight_decay == 0 else "lr",
        )
    if not rule.slope < 0:
        raise EquilibriaError(
            f"got a law of {rule.name} by which steps grow with the norm as fast as decay, or faster (slope "
            f"{rule.slope:g}); expected a negative slope: there is no stable equilibrium",
            argument="step",
        )
    if rule.is_coupled and (unit_grad_sq is None or dim is None):
        raise EquilibriaError(
            f"got unit_grad_sq={unit_grad_sq!r}, dim={dim!r}; expected both: the decay of {rule.name} depends on the "
            "gradient, as that of Adam with L2 does"
        )


@law("", "equilibria.identify", derived="fixed point of a measured step, decay and memory")
def identified_point(
    rule: Identified, lr: Any, weight_decay: Any, *, unit_grad_sq: Any, dim: Any, size: Any = 1.0
) -> FixedPoint:
    """Fixed point of a measured law: ``||w||^2 = l^2 S / (s (2-s))``, with l and s at that very norm.

    Args:
        rule: the measured law.
        lr: learning rate, a number or an array as all below.
        weight_decay: weight decay.
        unit_grad_sq: L.
        dim: number of entries.
        size: measured length of the steps over that of the law.

    Returns:
        ||w||^2 itself and 1 - cos(angle); NaN where decay would remove all of the weight.

    Example:
        >>> step, decay = PowerLaw(1.0, lr=1.0, grad=1.0), PowerLaw(1.0, lr=1.0, weight_decay=1.0)
        >>> rule = Identified(0.1, 0.01, name="SGDW", step=step, decay=decay, memory=Memory((), ()))
        >>> from equilibria.theory.equilibrium import sgdw_point
        >>> norm_sq = identified_point(rule, 0.1, 0.01, unit_grad_sq=1.0, dim=1.0).norm_sq
        >>> bool(abs(norm_sq / sgdw_point(0.1, 0.01, 0.0).norm_sq - 1) < 1e-12)
        True
    """
    with np.errstate(all="ignore"):
        unit_grad = np.sqrt(np.asarray(unit_grad_sq, dtype=np.float64))
        shape = np.broadcast_shapes(*map(np.shape, (lr, weight_decay, unit_grad, dim, size)))
        unit: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "grad": unit_grad, "norm": 1.0, "entries": dim}
        first_order = (size * rule.step(**unit)) ** 2 * rule.memory.total() / (2 * rule.decay(**unit))
        log_norm = np.broadcast_to(-np.log(first_order) / rule.slope, shape)
        for _ in range(_ROUNDS if rule.is_coupled else 2):  # without coupling the first round is exact
            norm = np.exp(log_norm)
            at: dict[str, Any] = {
                "lr": lr,
                "weight_decay": weight_decay,
                "grad": unit_grad / norm,
                "norm": norm,
                "entries": dim,
            }
            share = rule.decay(**at)
            point = constant_update_point(1.0, np.where(share < 1, share, np.nan), rule.memory)
            excess = np.log((size * rule.step(**at)) ** 2 * point.norm_sq) - 2 * log_norm
            log_norm = log_norm - excess / rule.slope
        return FixedPoint(np.exp(2 * log_norm), point.one_minus_cos)


def identified_step(
    rule: Identified,
    p: Any,
    traces: Sequence[Any],
    unit_grad_sq: Any,
    dim: Any,
    lr: float,
    weight_decay: float,
    size: Any = 1.0,
) -> tuple[Any, Any, list[Any]]:
    """One step of a measured law on P = ||w||^2 and the traces of past steps; numbers and arrays alike.

    Args:
        rule: the measured law.
        p: P.
        traces: one per component of its memory: past step lengths, each faded by memory and decay.
        unit_grad_sq: L.
        dim: number of entries.
        lr: learning rate.
        weight_decay: weight decay.
        size: measured length of the steps over that of the law.

    Returns:
        P', ||w' - w||^2 and the traces after the step.
    """
    norm = p**0.5
    where: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "grad": unit_grad_sq**0.5 / norm, "norm": norm}
    length = size * rule.step(**where, entries=dim)
    share = rule.decay(**where, entries=dim) if lr and weight_decay else 0.0
    kept, pull = 1.0 - share, 0.0
    for first, trace in zip(rule.memory.first, traces, strict=True):
        pull = pull + first * trace
    moved = share * share * p + (length - 2 * share * pull) * length
    after = kept * kept * p + (length + 2 * kept * pull) * length
    faded = [length + kept * decay * trace for decay, trace in zip(rule.memory.decay, traces, strict=True)]
    return after, moved, faded
