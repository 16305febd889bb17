"""One frozen dataclass of settings per optimizer, with the conventions of torch.optim; and the L that fixes its norm.

Weight decay is defined as in torch: coupled (L2) decay is added to the gradient (`SGD`, `AdamL2`), decoupled
decay shrinks the weight by lr * weight_decay per step (`SGDW`, `AdamW`, `Lion`, `Muon`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, one_of, positive, whole, within
from equilibria.theory import equilibrium as fixed_points
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import Equilibrium
from equilibria.theory.identified import Identified
from equilibria.theory.memory import Memory, lion_memory, muon_memory
from equilibria.theory.moments import nesterov_correlation
from equilibria.theory.muon import orthogonal_update

AdjustLr: TypeAlias = Literal["original", "match_rms_adamw", "spectral_norm", "none"]


class _Settings:
    """Settings common to all rules."""

    __slots__ = ()
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        within("lr", self.lr, low=0)
        within("weight_decay", self.weight_decay, low=0)
        self._check()

    def _check(self) -> None:
        """Check the settings that only this rule has."""

    @property
    def decay_per_step(self) -> float:
        """eps = lr * weight_decay."""
        return self.lr * self.weight_decay


def _sides(shape: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) as two whole numbers."""
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise EquilibriaError(f"got shape={shape!r}; expected (rows, columns)", argument="shape")
    rows, columns = (whole("shape", side, low=1) for side in shape)
    return rows, columns


def _check_betas(betas: tuple[float, float]) -> None:
    if not isinstance(betas, tuple) or len(betas) != 2:
        raise EquilibriaError(f"got betas={betas!r}; expected two numbers (beta1, beta2)", argument="betas")
    within("beta1", betas[0], low=0, below=1)
    within("beta2", betas[1], low=0, below=1)


@law("smd", "§2, eq. (1), (2)")
@dataclass(frozen=True, slots=True)
class SGD(_Settings):
    """torch.optim.SGD: momentum, dampening, Nesterov, coupled (L2) weight decay.

    Attributes:
        lr: learning rate.
        weight_decay: added to the gradient as weight_decay * w.
        momentum: 0 <= momentum < 1.
        dampening: share of each gradient kept out of the buffer, 0 <= dampening < 1; set to 0 without momentum,
            where torch ignores it.
        nesterov: torch's Nesterov variant; needs momentum > 0 and no dampening.

    Example:
        >>> SGD(lr=0.1, weight_decay=5e-4, momentum=0.9).equilibrium(unit_grad_sq=10.0).angle
        0.00725...
    """

    lr: float
    weight_decay: float = 0.0
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def _check(self) -> None:
        within("momentum", self.momentum, low=0, below=1)
        within("dampening", self.dampening, low=0, below=1)
        if self.momentum == 0 and not self.nesterov:
            object.__setattr__(self, "dampening", 0.0)  # torch has no buffer to damp
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise EquilibriaError(
                f"got nesterov=True with momentum={self.momentum:g}, dampening={self.dampening:g}; "
                "expected momentum > 0 and dampening = 0, as torch does",
                argument="nesterov",
            )

    @property
    def decay_per_step(self) -> float:
        """eps = lr * weight_decay * (1 - dampening)."""
        return self.lr * self.weight_decay * (1 - self.dampening)

    def equilibrium(
        self, unit_grad_sq: ArrayLike | None = None, *, dim: ArrayLike | None = None, correlation: float = 0.0
    ) -> Equilibrium:
        """Equilibrium of this optimizer, by `equilibrium.heavy_ball` or `equilibrium.nesterov`.

        Args:
            unit_grad_sq: L = E[||g||^2 ||w||^2], one number or one per layer; without it the norm is None.
            dim: number of entries, not needed; few of them shift norm and angle at a large lr * wd (see validity).
            correlation: E<v, g>/E||g||^2, which changes the angle under Nesterov only.

        Returns:
            The equilibrium.
        """
        if self.nesterov:
            result = fixed_points.nesterov(
                self.lr,
                self.weight_decay,
                momentum=self.momentum,
                unit_grad_sq=unit_grad_sq,
                correlation=correlation,
            )
        else:
            result = fixed_points.heavy_ball(
                self.lr,
                self.weight_decay,
                momentum=self.momentum,
                dampening=self.dampening,
                unit_grad_sq=unit_grad_sq,
            )
        return _assuming(self, result, dim)


@law("rotational", "SGDM with decoupled decay")
@dataclass(frozen=True, slots=True)
class SGDW(_Settings):
    """SGD with momentum and decoupled weight decay: ``v = momentum v + g;  w = (1 - lr wd) w - lr v``.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled; the weight shrinks by lr * weight_decay per step.
        momentum: 0 <= momentum < 1.
    """

    lr: float
    weight_decay: float = 0.0
    _: KW_ONLY
    momentum: float = 0.0

    def _check(self) -> None:
        within("momentum", self.momentum, low=0, below=1)

    def equilibrium(self, unit_grad_sq: ArrayLike | None = None, *, dim: ArrayLike | None = None) -> Equilibrium:
        """Equilibrium of this optimizer, by `equilibrium.sgdw`. ``dim`` is not needed."""
        result = fixed_points.sgdw(self.lr, self.weight_decay, momentum=self.momentum, unit_grad_sq=unit_grad_sq)
        return _assuming(self, result, dim)


@law("rotational", "AdamW")
@dataclass(frozen=True, slots=True)
class AdamW(_Settings):
    """torch.optim.AdamW (and Adam with decoupled_weight_decay=True), without amsgrad, which has no such law.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled; the weight shrinks by lr * weight_decay per step.
        betas: (beta1, beta2).

    Example:
        >>> round(AdamW(lr=1e-3, weight_decay=0.1).equilibrium(dim=1_000_000).norm, 2)
        70.68
    """

    lr: float
    weight_decay: float = 0.01
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)

    def _check(self) -> None:
        _check_betas(self.betas)

    def equilibrium(
        self, *, unit_grad_sq: ArrayLike | None = None, dim: ArrayLike | None = None, update_gain: ArrayLike = 1.0
    ) -> Equilibrium:
        """Equilibrium of this optimizer, by `equilibrium.adamw`. ``unit_grad_sq`` is not needed."""
        result = fixed_points.adamw(self.lr, self.weight_decay, betas=self.betas, dim=dim, update_gain=update_gain)
        return _assuming(self, result, dim)


@law("rotational", "Adam with L2")
@dataclass(frozen=True, slots=True)
class AdamL2(_Settings):
    """torch.optim.Adam with weight_decay > 0: the decay is coupled (L2) and is divided by sqrt(v) like the gradient.

    ``decay_per_step`` is lr * weight_decay before that division; see `decay_share` for the share in equilibrium.

    Attributes:
        lr: learning rate.
        weight_decay: added to the gradient as weight_decay * w.
        betas: (beta1, beta2).
    """

    lr: float
    weight_decay: float = 0.0
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)

    def _check(self) -> None:
        _check_betas(self.betas)

    def equilibrium(
        self,
        *,
        unit_grad_sq: float | None = None,
        dim: float | None = None,
        homogeneity: float = 1.0,
        update_gain: float = 1.0,
    ) -> Equilibrium:
        """Equilibrium of this optimizer, by `equilibrium.adam_l2`. Needs both ``unit_grad_sq`` and ``dim``."""
        grad_sq, d = self._scale(unit_grad_sq, dim)
        result = fixed_points.adam_l2(
            self.lr,
            self.weight_decay,
            betas=self.betas,
            dim=d,
            unit_grad_sq=grad_sq,
            homogeneity=homogeneity,
            update_gain=update_gain,
        )
        return _assuming(self, result, dim)

    def decay_share(self, *, unit_grad_sq: float | None = None, dim: float | None = None) -> float:
        """Share by which decay shrinks the weight per step in equilibrium, lr * wd / sqrt(v)."""
        grad_sq, d = self._scale(unit_grad_sq, dim)
        return fixed_points.adam_l2_decay(self.lr, self.weight_decay, betas=self.betas, dim=d, unit_grad_sq=grad_sq)

    @staticmethod
    def _scale(unit_grad_sq: float | None, dim: float | None) -> tuple[float, float]:
        if unit_grad_sq is None or dim is None:
            raise EquilibriaError(
                f"got unit_grad_sq={unit_grad_sq}, dim={dim}; expected both: the angle of Adam with L2 depends on the "
                "gradient scale (use AdamW for one that does not)"
            )
        return unit_grad_sq, dim


@law("rotational", "Lion", corrected="sum of arcsine correlations instead of its linearisation")
@dataclass(frozen=True, slots=True)
class Lion(_Settings):
    """Lion: ``u = sign(beta1 m + (1-beta1) g);  m = beta2 m + (1-beta2) g;  w = (1 - lr wd) w - lr u``.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled; the weight shrinks by lr * weight_decay per step.
        betas: (beta1, beta2).
    """

    lr: float
    weight_decay: float = 0.0
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.99)

    def _check(self) -> None:
        _check_betas(self.betas)

    @property
    def memory(self) -> Memory:
        """Autocorrelation of the sign update."""
        return lion_memory(self.betas)

    def equilibrium(
        self,
        *,
        unit_grad_sq: ArrayLike | None = None,
        dim: ArrayLike | None = None,
        memory_total: float | None = None,
    ) -> Equilibrium:
        """Equilibrium of this optimizer, by `equilibrium.constant_update` with U = ``dim``, the number of entries.

        Args:
            unit_grad_sq: not needed.
            dim: number of entries, one number or one per layer; without it the norm is None.
            memory_total: measured S of `memory.lion_total`, by which correlated gradients change norm and angle; by
                default that of uncorrelated ones.

        Returns:
            The equilibrium.
        """
        entries = None if dim is None else reals("dim", dim, above=0)
        memory = self.memory if memory_total is None else self.memory.scaled_to(memory_total)
        result = fixed_points.constant_update(self.lr, self.weight_decay, memory=memory, update_sq=entries)
        return _assuming(self, result, dim)


@law("", "torch.optim.Muon", derived="linear filter followed by orthogonalisation")
@dataclass(frozen=True, slots=True)
class Muon(_Settings):
    """torch.optim.Muon: orthogonalised momentum on matrices; weight decay uses the unadjusted learning rate.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled; the weight shrinks by lr * weight_decay per step.
        momentum: 0 <= momentum < 1.
        nesterov: as in torch.
        adjust_lr_fn: factor on the update; torch has "original" sqrt(max(1, rows/columns)), also Keller Jordan's, and
            "match_rms_adamw" 0.2 sqrt(max(rows, columns)), also Moonshot's; others use "spectral_norm"
            sqrt(rows/columns), or "none".
        shape: (rows, columns) of the matrix, on which size and memory of the update depend; None for an optimizer of
            many matrices, whose memory is then that of the momentum.

    Example:
        >>> rule = Muon(lr=0.02, weight_decay=0.1)
        >>> round(rule.equilibrium(shape=(64, 64)).angle / rule.equilibrium().angle, 1)
        1.2
    """

    lr: float
    weight_decay: float = 0.1
    _: KW_ONLY
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: AdjustLr = "original"
    shape: tuple[int, int] | None = None

    def _check(self) -> None:
        within("momentum", self.momentum, low=0, below=1)
        one_of("adjust_lr_fn", self.adjust_lr_fn, get_args(AdjustLr))
        if self.shape is not None:
            object.__setattr__(self, "shape", _sides(self.shape))

    @property
    def memory(self) -> Memory:
        """Autocorrelation of the update; of the momentum before orthogonalisation if the rule has no shape."""
        return muon_memory(self.momentum, nesterov=self.nesterov, shape=self.shape)

    def gain(self, shape: tuple[int, int]) -> float:
        """The factor on the update of a matrix of this shape."""
        rows, columns = _sides(shape)
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        if self.adjust_lr_fn == "none":
            return 1.0
        ratio = rows / columns
        return math.sqrt(ratio if self.adjust_lr_fn == "spectral_norm" else max(1.0, ratio))

    def update_sq(self, shape: tuple[int, int]) -> float:
        """Mean square of the update per lr^2, the factor included, of a matrix of this shape."""
        return self.gain(shape) ** 2 * orthogonal_update(*_sides(shape)).size

    def equilibrium(
        self,
        *,
        unit_grad_sq: ArrayLike | None = None,
        dim: ArrayLike | None = None,
        shape: tuple[int, int] | None = None,
        update_sq: float | None = None,
        memory_total: float | None = None,
    ) -> Equilibrium:
        """Equilibrium of this optimizer, by `equilibrium.constant_update`.

        Args:
            unit_grad_sq: not needed.
            dim: not needed; the norm follows from ``shape``.
            shape: (rows, columns), by default the rule's; without either the norm is None.
            update_sq: measured ||O||^2 of the orthogonalised update; by default that of Gaussian gradients.
            memory_total: measured S = 1 + 2 sum of the update's correlations; by default that of Gaussian gradients.

        Returns:
            The equilibrium.
        """
        rule = self if shape is None else dataclasses.replace(self, shape=shape)
        memory = rule.memory if memory_total is None else rule.memory.scaled_to(memory_total)
        if rule.shape is None:
            result = fixed_points.constant_update(self.lr, self.weight_decay, memory=memory)
        else:
            gain = self.gain(rule.shape)
            size = rule.update_sq(rule.shape) / gain**2 if update_sq is None else positive("update_sq", update_sq)
            result = fixed_points.constant_update(self.lr, self.weight_decay, memory=memory, update_sq=size, gain=gain)
        return _assuming(rule, result, None)


ClosedRule: TypeAlias = SGD | SGDW | AdamW | AdamL2 | Lion | Muon
"""The rules with laws in closed form."""

Rule: TypeAlias = ClosedRule | Identified

RULES: dict[str, type[ClosedRule]] = {
    "sgd": SGD,
    "sgdw": SGDW,
    "adamw": AdamW,
    "adam": AdamL2,
    "lion": Lion,
    "muon": Muon,
}

EQUILIBRIUM_LAWS: dict[type[Rule], str] = {
    SGD: "equilibrium.heavy_ball",
    SGDW: "equilibrium.sgdw",
    AdamW: "equilibrium.adamw",
    AdamL2: "equilibrium.adam_l2",
    Lion: "equilibrium.constant_update",
    Muon: "equilibrium.constant_update",
    Identified: "identified.identified_point",
}
"""Name, for `cite`, of the law behind each rule's equilibrium."""


def check_rule(rule: object) -> None:
    """Raise EquilibriaError unless ``rule`` is one of the rules.

    Example:
        >>> check_rule("sgd")
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got rule='sgd'; expected one of: SGD, SGDW, AdamW, AdamL2, ...
    """
    kinds = get_args(Rule)
    if not isinstance(rule, kinds):
        raise EquilibriaError(
            f"got rule={rule!r}; expected one of: {', '.join(kind.__name__ for kind in kinds)}", argument="rule"
        )


def _assuming(rule: Rule, result: Equilibrium, dim: ArrayLike | None) -> Equilibrium:
    """The equilibrium with the assumptions about weight, gradients and number format added to those of the settings."""
    from equilibria.theory.violations import assumptions  # which imports this module

    entries = None if dim is None else float(np.min(np.asarray(dim, dtype=np.float64)))
    more = assumptions(rule, entries, result.time_constant)
    return dataclasses.replace(result, validity=(*more, *result.validity))


def closed_rule(rule: Rule) -> ClosedRule:
    """The rule itself, if its laws are in closed form.

    Raises:
        EquilibriaError: it is the measured law of an identified optimizer.
    """
    check_rule(rule)
    if isinstance(rule, Identified):
        kinds = ", ".join(kind.__name__ for kind in get_args(ClosedRule))
        raise EquilibriaError(
            f"got the measured law of {rule.name}; expected a rule with closed forms: {kinds}", argument="rule"
        )
    return rule


# ---- the unit gradient L of each optimizer, which fixes its norm


@law(
    "smd",
    "Thm 2",
    corrected="the factor of <v, g> depends on dampening and on Nesterov; the plain 2 a is up to 3.8 % off there",
)
def momentum_unit_grad_sq(rule: Rule, grad_sq: ArrayLike, *, buffer_dot_grad: ArrayLike) -> Array:
    """The unit gradient L that fixes the norm of an optimizer with momentum.

    With N = ||g||^2 ||w||^2 and C = <v, g> ||w||^2, buffer and weight before the step: heavy ball and SGDW
    ``N + 2 a C``, with dampening ``N + 2 a C / (1 - dampening)``, Nesterov ``N + 2 a^2 (1+a) C / D``,
    D = 1 + a + a eps (1 + 2a). AdamW, Lion and Muon, whose update has a fixed size, and Adam with L2: ``N``.

    Args:
        rule: the optimizer.
        grad_sq: N, one number or one per layer.
        buffer_dot_grad: C.

    Returns:
        L.

    Example:
        >>> from equilibria.theory import SGD
        >>> float(momentum_unit_grad_sq(SGD(0.1, 5e-4, momentum=0.9), 10.0, buffer_dot_grad=-0.5))
        9.1
    """
    check_rule(rule)
    n, c = reals("grad_sq", grad_sq, low=0), reals("buffer_dot_grad", buffer_dot_grad)
    if isinstance(rule, SGDW):
        return n + 2 * rule.momentum * c
    if not isinstance(rule, SGD):
        return n
    if rule.nesterov:
        return np.asarray(n + (nesterov_correlation(rule.decay_per_step, rule.momentum, 1.0) - 1) * c)
    return n + 2 * rule.momentum * c / (1 - rule.dampening)


@law("smd", "Thm 2", derived="first order in eps of the exact fixed point with correlated gradients")
def nesterov_angle_factor(momentum: float, *, correlation: ArrayLike) -> Array:
    """Factor on the equilibrium angle of Nesterov momentum when gradients correlate with the buffer.

    ``f^2 = (1 + 2a - 2a^3 + 2 a^2 rho (1 + a - a^2)) / ((1 + 2 a^2 rho)(1 + 2a - 2a^3))``, to first order in eps; use
    `SGD.equilibrium(correlation=...)` for the exact number of one layer.

    Args:
        momentum: a.
        correlation: rho = E<v, g> / E||g||^2, one number or one per layer.

    Returns:
        Angle / angle at rho = 0; NaN where rho is so negative that there is no equilibrium.

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 1e-4, momentum=0.9, nesterov=True)
        >>> exact = rule.equilibrium(correlation=0.1).angle / rule.equilibrium().angle
        >>> round(float(nesterov_angle_factor(0.9, correlation=0.1)), 3) == round(exact, 3)
        True
    """
    a, rho = momentum, reals("correlation", correlation)
    plain = 1 + 2 * a - 2 * a**3
    squared = (plain + 2 * a * a * rho * (1 + a - a * a)) / ((1 + 2 * a * a * rho) * plain)
    return np.sqrt(np.where((1 + 2 * a * a * rho > 0) & (squared > 0), squared, np.nan))
