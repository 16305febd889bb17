"""Settings with the same dynamics at another initial scale, batch size, weight decay or optimizer.

A translation lists the quantities it keeps and those it changes: two optimizers with the same angle per step need not
have the same time constant, and a larger batch that turns as far per sample takes larger single steps.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from equilibria.errors import EquilibriaError, one_of, positive, scale_number
from equilibria.theory.angles import angular_diffusion
from equilibria.theory.approach import MomentumKind, oscillation_threshold
from equilibria.theory.citations import law
from equilibria.theory.rules import RULES, SGD, SGDW, AdamL2, AdamW, ClosedRule, Lion, Muon, Rule, closed_rule
from equilibria.theory.states import settled


@dataclass(frozen=True, slots=True)
class Translation:
    """A translated rule, with the quantities that it keeps and changes.

    Attributes:
        rule: the new settings.
        weight: factor for the initial weights (1 unless the initial scale changes).
        kept: quantities that stay the same.
        changed: quantities that change, with their factors.
        alternative: another usual translation, with what it keeps and loses; "" if there is none.
    """

    rule: Rule
    weight: float
    kept: tuple[str, ...]
    changed: tuple[str, ...]
    alternative: str = ""


@law(
    "nrq",
    "Corollary 3",
    derived="(k, k^2, 1/k^2) for SGD and SGDW; the exponents of the other rules follow from their update",
)
def translate_scale(rule: Rule, k: float) -> Translation:
    """Settings with exactly the same path of directions from initial weights that are ``k`` times as large.

    SGD, SGDW: ``lr k^2, wd / k^2``. AdamW, Lion, Muon: ``lr k, wd / k`` (the update has no scale). Adam with L2:
    ``lr k, wd / k^2``.

    Args:
        rule: the settings for the original weights.
        k: factor on the initial weights.

    Returns:
        The translation; exact for a scale-invariant weight (Adam's eps aside).

    Example:
        >>> from equilibria.theory import SGD
        >>> t = translate_scale(SGD(0.1, 0.01), 10.0)
        >>> round(t.rule.lr, 9), round(t.rule.weight_decay, 9)
        (10.0, 0.0001)
    """
    rule = closed_rule(rule)
    factor = positive("scale", k)
    lr, weight_decay = rule.lr * factor, rule.weight_decay / factor
    if isinstance(rule, SGD | SGDW):
        lr *= factor
    if isinstance(rule, SGD | SGDW | AdamL2):
        weight_decay /= factor
    for before, after in ((rule.lr, lr), (rule.weight_decay, weight_decay)):
        if before > 0 and not sys.float_info.min <= after <= sys.float_info.max:
            raise EquilibriaError(
                f"got scale={factor:g}, which requires lr={lr:g} and weight_decay={weight_decay:g}; expected a scale "
                "closer to 1, which leaves both within the range of float64",
                argument="scale",
            )
    kept, changed = _split_factors({"norm": (factor, " throughout")})
    return Translation(
        dataclasses.replace(rule, lr=lr, weight_decay=weight_decay),
        factor,
        ("every direction, angle and loss, step by step (momentum buffers start empty)", *kept),
        changed,
    )


def _split_factors(factors: dict[str, tuple[float, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The quantities with factor 1 to four digits, and the others with their factor and a remark."""
    shown = {name: (f"{factor:.4g}", remark) for name, (factor, remark) in factors.items()}
    kept = tuple(name for name, (factor, _) in shown.items() if factor == "1")
    changed = tuple(f"{name}: x {factor}{remark}" for name, (factor, remark) in shown.items() if factor != "1")
    return kept, changed


@law(
    "smd",
    "§6",
    corrected="linear scaling keeps diffusion and time constant per sample, with momentum too; sqrt for Adam+L2, and on"
    " both lr and wd where the update has a fixed size",
)
def translate_batch(rule: Rule, factor: float) -> Translation:
    """Settings for a batch ``factor`` times as large that turn the weights as far per sample, at the same norm.

    SGD, SGDW: ``lr x factor``, weight decay unchanged. AdamW, Lion, Muon: ``lr x sqrt(factor)`` and
    ``wd x sqrt(factor)``; ``alternative`` says what the linear rule, ``lr x factor``, keeps and loses. Adam with L2:
    ``lr x sqrt(factor)``, weight decay unchanged. For noise-dominated gradients, L(B) proportional to 1/B, over many
    steps.

    Args:
        rule: the settings at the present batch size.
        factor: new batch size / present batch size.

    Returns:
        The translation.

    Example:
        >>> from equilibria.theory import SGD, AdamW
        >>> translate_batch(SGD(0.1, 5e-4, momentum=0.9), 4).rule.lr
        0.4
        >>> translate_batch(AdamW(1e-3, 0.1), 4).rule
        AdamW(lr=0.002, weight_decay=0.2, betas=(0.9, 0.999))
    """
    rule = closed_rule(rule)
    b = positive("batch", factor)
    root = math.sqrt(b)
    if isinstance(rule, SGD | SGDW):
        new: Rule = dataclasses.replace(rule, lr=rule.lr * b)
    elif isinstance(rule, AdamL2):
        new = dataclasses.replace(rule, lr=rule.lr * root)
    else:
        new = dataclasses.replace(rule, lr=rule.lr * root, weight_decay=rule.weight_decay * root)
    if not isinstance(rule, AdamL2):  # its range depends on the gradient scale
        new.equilibrium()  # raises beyond the learning rates that have an equilibrium
    has_fixed_size = isinstance(rule, AdamW | Lion | Muon)
    kept = (
        "angular diffusion per sample, while gradients are noise-dominated (up to the critical batch size)",
        "equilibrium norm" if has_fixed_size else "equilibrium norm (L falls as 1/batch while lr rises)",
    )
    sizes = {"angle per step": (root, "")}
    if _has_momentum(rule):
        sizes["momentum memory in samples"] = (b, "")
    also_kept, changed = _split_factors(sizes)
    settling_kept, settling_changed = _settling_per_sample(rule, new, b)
    alternative = _linear_instead(rule, b) if has_fixed_size and b != 1 else ""
    return Translation(new, 1.0, (*kept, *settling_kept, *also_kept), (*changed, *settling_changed), alternative)


def _linear_instead(rule: Rule, batch: float) -> str:
    """What the linear rule keeps and loses where the update has a fixed size."""
    root = math.sqrt(batch)
    return (
        f"lr x {batch:.4g} alone (linear: lr={rule.lr * batch:.4g}, weight_decay={rule.weight_decay:.4g}) has the same "
        "lr x wd, so it keeps angular diffusion and settling time per sample as well; it loses the equilibrium norm, "
        f"x {root:.4g}. Until the norm gets there, the angle per step is {root:.4g} times the wanted one, and weights "
        f"that are not scale-invariant move x {batch:.4g} per step instead of x {root:.4g}"
    )


def _settling_per_sample(rule: Rule, new: Rule, batch: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    name = "settling time in samples (epochs)"
    if isinstance(rule, AdamL2):  # its time constant depends on the gradient scale
        memory = f"{1 / (1 - rule.betas[1]):.4g} steps"
        return (), (f"{name}: longer, unless it is far above {memory}, the memory of the second moment",)
    ratio = batch * new.equilibrium().time_constant / rule.equilibrium().time_constant
    if abs(ratio - 1) < 0.01:
        return (name,), ()
    return (), (f"{name}: x {ratio:.4g} (near equilibrium; the optimizer's own memory, in steps, does not shrink)",)


def _has_momentum(rule: ClosedRule) -> bool:
    return bool(rule.betas[0] if isinstance(rule, AdamW | AdamL2 | Lion) else rule.momentum)


@law("smd", "eq. (4), (5)", derived="angle and time constant depend on lr * wd only, so the pair may slide along it")
def translate_decay(rule: Rule, weight_decay: float) -> Translation:
    """Learning rate that keeps the equilibrium angle at another weight decay.

    Keeps ``lr wd`` (Adam with L2: ``lr^2 wd``).

    Args:
        rule: the present settings.
        weight_decay: the new weight decay.

    Returns:
        The translation; the norm moves to its new equilibrium unless the weights are rescaled with it.

    Example:
        >>> from equilibria.theory import SGD
        >>> t = translate_decay(SGD(0.1, 5e-4, momentum=0.9), 2.5e-4)
        >>> t.rule.lr, t.changed[0]
        (0.2, 'equilibrium norm: x 1.414')
    """
    rule = closed_rule(rule)
    ratio = positive("rule.weight_decay", rule.weight_decay) / positive("weight_decay", weight_decay)
    lr = rule.lr * (math.sqrt(ratio) if isinstance(rule, AdamL2) else ratio)
    new = dataclasses.replace(rule, lr=lr, weight_decay=weight_decay)
    norm = ratio ** (0.5 if isinstance(rule, SGD | SGDW | AdamL2) else 1.0)
    kept, changed = _split_factors({"equilibrium norm": (norm, "")})
    if changed:
        changed = (*changed, "until the norm gets there the angle is off; rescale the weights to skip that")
    return Translation(new, 1.0, ("angle per step", "time constant", "angular diffusion", *kept), changed)


Match: TypeAlias = Literal["angle", "diffusion", "time_constant"]
Translatable: TypeAlias = Literal["sgd", "sgdw", "adamw", "lion"]
MATCHES: tuple[Match, ...] = get_args(Match)


@law("rotational", "Table 1", derived="lr * wd from the matched quantity, lr / wd from the matched norm")
def translate_optimizer(
    rule: Rule,
    to: Translatable,
    *,
    match: Match = "angle",
    unit_grad_sq: float | None = None,
    dim: float | None = None,
    momentum: float | None = None,
    dampening: float | None = None,
    nesterov: bool | None = None,
    betas: tuple[float, float] | None = None,
) -> Translation:
    """Settings of another optimizer with the same equilibrium norm and the same angle, diffusion or time constant.

    ``lr * wd`` follows from the matched quantity (angle per step, angular diffusion per step, or the time constant near
    equilibrium, `Equilibrium.time_constant`), ``lr / wd`` from the norm. Angle and time constant cannot both be
    matched: angle^2 x time constant is (1-a)/(2(1+a)) for SGD, twice that for AdamW.

    Args:
        rule: the present settings.
        to: "sgd", "sgdw", "adamw" or "lion".
        match: "angle", "diffusion" or "time_constant".
        unit_grad_sq: L, needed when SGD, SGDW or Adam with L2 is involved.
        dim: number of entries d, needed unless both are SGD-type.
        momentum: of the new optimizer ("sgd", "sgdw"), like the three settings below; by default that of ``rule`` where
            both optimizers have it, else the new optimizer's default.
        dampening: of "sgd".
        nesterov: of "sgd".
        betas: of "adamw" and "lion".

    Returns:
        The translation.

    Raises:
        EquilibriaError: a setting that the new optimizer does not have, a missing scale, or Muon, whose update size
            depends on the shape of each matrix.

    Example:
        >>> from equilibria.theory import AdamW
        >>> t = translate_optimizer(AdamW(1e-3, 0.1), "lion", dim=10_000)
        >>> f"{t.rule.lr:.3g} {t.rule.weight_decay:.3g}"
        '0.00023 1.03'
    """
    rule = closed_rule(rule)
    _refuse_muon("rule" if isinstance(rule, Muon) else "to", rule, to)
    one_of("to", to, get_args(Translatable))
    one_of("match", match, MATCHES)
    kind = RULES[to]
    own = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "betas": betas}
    settings: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    _refuse_other_settings(to, settings)
    settings = {**_inherited(rule, kind), **settings}
    scale = _needed_scale(rule, kind, unit_grad_sq=unit_grad_sq, dim=dim)
    wanted = _speed(rule, match, **scale)
    product = _solve_product(kind, match, wanted, settings)
    norm_sq = float(settled(rule, **scale).norm_sq)
    trial = kind(1.0, product, **settings)
    power = 1 if isinstance(trial, SGD | SGDW) else 2
    # At fixed lr * wd the equilibrium ||w||^2 is proportional to lr (SGD-type) or lr^2 (constant-size updates).
    lr = (norm_sq / float(settled(trial, **scale).norm_sq)) ** (1 / power)
    new = kind(lr, product / lr, **settings)
    names = {"angle": "angle per step", "diffusion": "angular diffusion per step", "time_constant": "time constant"}
    ratios = {names[other]: (_speed(new, other, **scale) / _speed(rule, other, **scale), "") for other in MATCHES}
    kept, changed = _split_factors(ratios)
    return Translation(new, 1.0, (*kept, "equilibrium norm"), changed)


def _refuse_muon(argument: str, rule: Rule, to: str) -> None:
    if isinstance(rule, Muon) or to == "muon":
        raise EquilibriaError(
            f"got {'Muon(...) as the rule' if argument == 'rule' else f'to={to!r}'}; expected a translation between "
            "sgd, sgdw, adamw, adam and lion: the size of Muon's update depends on the shape of each matrix, so that "
            "one lr and weight decay cannot match a whole network. Compare the angle and norm of one matrix, with "
            "Muon(lr, weight_decay).equilibrium(shape=(rows, columns)), with those of the other optimizer",
            argument=argument,
        )


def _refuse_other_settings(to: str, settings: Mapping[str, object]) -> None:
    """Raise for a setting that the new optimizer does not have."""
    known = [field.name for field in dataclasses.fields(RULES[to]) if field.name not in ("lr", "weight_decay")]
    for name in settings:
        if name not in known:
            users = [other for other in get_args(Translatable) if name in RULES[other].__slots__]
            raise EquilibriaError(
                f"got {name} with to={to!r}, which has no such setting; expected it only with to: {', '.join(users)} "
                f"({to} takes {', '.join(known)})",
                argument=name,
            )


def _inherited(rule: Rule, kind: type[Rule]) -> dict[str, Any]:
    """Settings that mean the same in both optimizers."""
    names: set[str] = set()
    if kind is type(rule):
        names = {field.name for field in dataclasses.fields(kind)} - {"lr", "weight_decay"}
    elif {kind, type(rule)} == {SGD, SGDW}:
        names = {"momentum"}
    elif {kind, type(rule)} == {AdamW, AdamL2}:
        names = {"betas"}
    return {name: getattr(rule, name) for name in names}


def _needed_scale(rule: Rule, kind: type[Rule], *, unit_grad_sq: float | None, dim: float | None) -> dict[str, float]:
    by_gradient = [r for r in (type(rule), kind) if r in (SGD, SGDW, AdamL2)]
    by_entries = [r for r in (type(rule), kind) if r in (AdamW, AdamL2, Lion)]
    if by_gradient and by_entries and (unit_grad_sq is None or dim is None):
        raise EquilibriaError(
            f"got unit_grad_sq={unit_grad_sq}, dim={dim}; expected both, to match the norms of "
            f"{type(rule).__name__} and {kind.__name__} (measure L = E||g||^2 ||w||^2 of one layer)",
            argument="unit_grad_sq" if unit_grad_sq is None else "dim",
        )
    return {
        "unit_grad_sq": 1.0 if unit_grad_sq is None else scale_number("unit_grad_sq", unit_grad_sq),
        "dim": 1.0 if dim is None else scale_number("dim", dim),
    }


def _speed(rule: Rule, match: Match, *, unit_grad_sq: float, dim: float) -> float:
    if match == "diffusion":
        return angular_diffusion(rule, unit_grad_sq=unit_grad_sq, dim=dim)
    star = rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim)
    return star.time_constant if match == "time_constant" else float(star.angle)


def _solve_product(kind: type[Rule], match: Match, wanted: float, settings: dict[str, Any]) -> float:
    """lr * wd of the new rule, by bisection in its logarithm: every speed is monotone in it."""

    def speed(product: float) -> float:
        return _speed(kind(1.0, product, **settings), match, unit_grad_sq=1.0, dim=1.0)

    low, high = 1e-13, _largest_product(kind, match, settings)  # below, the linearised rate of Adam rounds to 1
    rising = speed(high) > speed(low)
    if not min(speed(low), speed(high)) <= wanted <= max(speed(low), speed(high)):
        raise EquilibriaError(
            f"got a {match} of {wanted:g}; expected one between {min(speed(low), speed(high)):.4g} and "
            f"{max(speed(low), speed(high)):.4g}, which {kind.__name__} reaches with lr*weight_decay up to {high:.3g}"
        )
    for _ in range(200):
        middle = math.sqrt(low * high)
        if (speed(middle) < wanted) == rising:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _largest_product(kind: type[Rule], match: Match, settings: dict[str, Any]) -> float:
    """Largest lr * wd up to which the speed is monotone: beyond the oscillation threshold the time constant is not."""
    momentum: float = settings.get("momentum", 0.0)
    dampening: float = settings.get("dampening", 0.0)
    if match != "time_constant" or kind not in (SGD, SGDW) or momentum == 0:
        return 0.25 if match == "time_constant" else 0.5  # without momentum the norm settles in one step near 0.29
    variant: MomentumKind = "sgdw" if kind is SGDW else "nesterov" if settings.get("nesterov") else "heavy_ball"
    return oscillation_threshold(momentum, kind=variant) / (1 - dampening)
