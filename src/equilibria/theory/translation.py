"""Settings with the same dynamics at another initial scale, batch size, weight decay or optimizer.

A translation lists the quantities it keeps and those it changes: two optimizers with the same angle per step need not
have the same time constant, and a larger batch that turns as far per sample takes larger single steps.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from equilibria.errors import EquilibriaError, one_of, positive, scale_number
from equilibria.theory.angles import angular_diffusion
from equilibria.theory.approach import MomentumKind, oscillation_threshold
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import constant_update_point
from equilibria.theory.identified import Identified, PowerLaw
from equilibria.theory.rules import RULES, SGD, SGDW, AdamL2, AdamW, AdjustLr, ClosedRule, Muon, Rule, check_rule
from equilibria.theory.settling import memory_lengths
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


def _powers(rule: Rule) -> tuple[PowerLaw, PowerLaw]:
    """How the length of a rule's step, and the share that decay removes, depend on lr, decay, gradient and norm."""
    if isinstance(rule, Identified):
        return rule.step, rule.decay
    step = PowerLaw(1.0, lr=1.0, grad=1.0 if isinstance(rule, SGD | SGDW) else 0.0)
    return step, PowerLaw(1.0, lr=1.0, weight_decay=1.0, grad=-1.0 if isinstance(rule, AdamL2) else 0.0)


@law(
    "nrq",
    "Corollary 3",
    derived="(k, k^2, 1/k^2) for SGD and SGDW; the exponents of the other rules follow from their update",
)
def translate_scale(rule: Rule, k: float) -> Translation:
    """Settings with exactly the same path of directions from initial weights that are ``k`` times as large.

    SGD, SGDW: ``lr k^2, wd / k^2``. AdamW, Lion, Muon: ``lr k, wd / k`` (the update has no scale). Adam with L2:
    ``lr k, wd / k^2``. A measured law: by its powers.

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
    check_rule(rule)
    factor = positive("scale", k)
    step, decay = _powers(rule)
    power = (1 - step.radial) / step.lr
    try:
        lr = rule.lr * factor**power
        weight_decay = rule.weight_decay * factor ** -((decay.radial + decay.lr * power) / decay.weight_decay)
    except OverflowError:
        lr, weight_decay = math.inf, 0.0
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
    ``lr x sqrt(factor)``, weight decay unchanged. A measured law: by its powers. For noise-dominated gradients, L(B)
    proportional to 1/B, over many steps.

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
    check_rule(rule)
    b = positive("batch", factor)
    root = math.sqrt(b)
    step, decay = _powers(rule)
    # At the same norm the gradient is shorter by the root; steps grow by the root, decay by the factor.
    lr_factor = b ** ((1 + step.grad) / (2 * step.lr))
    decay_factor = (b ** (1 + decay.grad / 2) / lr_factor**decay.lr) ** (1 / decay.weight_decay)
    new = dataclasses.replace(rule, lr=rule.lr * lr_factor, weight_decay=rule.weight_decay * decay_factor)
    is_coupled = isinstance(rule, AdamL2) or (isinstance(rule, Identified) and rule.is_coupled)
    if not is_coupled:  # the range of coupled ones depends on the gradient scale
        new.equilibrium()  # raises beyond the learning rates that have an equilibrium
    has_fixed_size = step.grad == 0 and not is_coupled
    kept = (
        "angular diffusion per sample, while gradients are noise-dominated (up to the critical batch size)",
        "equilibrium norm" if has_fixed_size else "equilibrium norm (L falls as 1/batch while lr rises)",
    )
    sizes = {"angle per step": (root, "")}
    if memory_lengths(rule)[0] > 1:
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
    if isinstance(rule, Identified) and rule.is_coupled:
        return (), ()
    ratio = batch * new.equilibrium().time_constant / rule.equilibrium().time_constant
    if abs(ratio - 1) < 0.01:
        return (name,), ()
    return (), (f"{name}: x {ratio:.4g} (near equilibrium; the optimizer's own memory, in steps, does not shrink)",)


@law("smd", "eq. (4), (5)", derived="angle and time constant depend on lr * wd only, so the pair may slide along it")
def translate_decay(rule: Rule, weight_decay: float) -> Translation:
    """Learning rate that keeps the equilibrium angle at another weight decay.

    Keeps ``lr wd`` (Adam with L2: ``lr^2 wd``; a measured law: the decay per step of its powers).

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
    check_rule(rule)
    ratio = positive("rule.weight_decay", rule.weight_decay) / positive("weight_decay", weight_decay)
    step, decay = _powers(rule)
    norm_power = step.lr / (1 - step.radial)  # of lr, at the same decay per step
    lr_factor = ratio ** (decay.weight_decay / (decay.lr + decay.radial * norm_power))
    new = dataclasses.replace(rule, lr=rule.lr * lr_factor, weight_decay=weight_decay)
    norm = lr_factor**norm_power
    kept, changed = _split_factors({"equilibrium norm": (norm, "")})
    if changed:
        changed = (*changed, "until the norm gets there the angle is off; rescale the weights to skip that")
    return Translation(new, 1.0, ("angle per step", "time constant", "angular diffusion", *kept), changed)


Match: TypeAlias = Literal["angle", "diffusion", "time_constant"]
Translatable: TypeAlias = Literal["sgd", "sgdw", "adamw", "lion", "muon"]
MATCHES: tuple[Match, ...] = get_args(Match)


@law("rotational", "Table 1", derived="lr * wd from the matched quantity, lr / wd from the matched norm")
def translate_optimizer(
    rule: Rule,
    to: Translatable | Identified,
    *,
    match: Match = "angle",
    unit_grad_sq: float | None = None,
    dim: float | None = None,
    shape: tuple[int, int] | None = None,
    momentum: float | None = None,
    dampening: float | None = None,
    nesterov: bool | None = None,
    betas: tuple[float, float] | None = None,
    adjust_lr_fn: AdjustLr | None = None,
) -> Translation:
    """Settings of another optimizer with the same equilibrium norm and the same angle, diffusion or time constant.

    ``lr * wd`` follows from the matched quantity (angle per step, angular diffusion per step, or the time constant near
    equilibrium, `Equilibrium.time_constant`), ``lr / wd`` from the norm. Angle and time constant cannot both be
    matched: angle^2 x time constant is (1-a)/(2(1+a)) for SGD, 1/S for updates of constant size, S the sum of the
    correlations of one with all others.

    Args:
        rule: the present settings.
        to: "sgd", "sgdw", "adamw", "lion", "muon", or a measured law, `equilibria.identify(optimizer).rule`.
        match: "angle", "diffusion" or "time_constant".
        unit_grad_sq: L, needed when SGD, SGDW or Adam with L2 is involved.
        dim: number of entries d, needed unless both are SGD-type, or ``shape`` is given.
        shape: (rows, columns) of the matrix, needed from and to Muon: its settings differ from shape to shape.
        momentum: of the new optimizer ("sgd", "sgdw", "muon"), like the settings below; by default that of ``rule``
            where both optimizers have it, else the new optimizer's default.
        dampening: of "sgd".
        nesterov: of "sgd" and "muon".
        betas: of "adamw" and "lion".
        adjust_lr_fn: of "muon".

    Returns:
        The translation.

    Raises:
        EquilibriaError: a setting that the new optimizer does not have, or a missing scale or shape.

    Example:
        >>> from equilibria.theory import AdamW
        >>> t = translate_optimizer(AdamW(1e-3, 0.1), "lion", dim=10_000)
        >>> f"{t.rule.lr:.3g} {t.rule.weight_decay:.3g}"
        '0.00023 1.03'
        >>> t = translate_optimizer(AdamW(1e-3, 0.1), "muon", shape=(512, 2048), adjust_lr_fn="match_rms_adamw")
        >>> f"{t.rule.lr:.1g} {t.rule.weight_decay:.1g}"
        '0.001 0.1'
    """
    check_rule(rule)
    one_of("match", match, MATCHES)
    own = {
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "betas": betas,
        "adjust_lr_fn": adjust_lr_fn,
    }
    settings: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    target = to if isinstance(to, Identified) else RULES[one_of("to", to, get_args(Translatable))]
    _refuse_other_settings(to, settings)
    if isinstance(rule, Muon) or target is Muon:
        sides = _needed_shape(rule, shape, dim)
        dim = float(math.prod(sides))
        rule = dataclasses.replace(rule, shape=sides) if isinstance(rule, Muon) else rule
        settings |= {"shape": sides} if target is Muon else {}
    elif shape is not None:
        dim = float(math.prod(shape)) if dim is None else dim
    scale = _needed_scale(rule, target, unit_grad_sq=unit_grad_sq, dim=dim)
    wanted, norm_sq = _speed(rule, match, **scale), _norm_sq(rule, **scale)
    if isinstance(target, Identified):
        new: Rule = _measured_settings(target, match, wanted, norm_sq, **scale)
    else:
        new = _closed_settings(target, match, wanted, norm_sq, {**_inherited(rule, target), **settings}, scale)
    names = {"angle": "angle per step", "diffusion": "angular diffusion per step", "time_constant": "time constant"}
    ratios = {names[other]: (_speed(new, other, **scale) / _speed(rule, other, **scale), "") for other in MATCHES}
    kept, changed = _split_factors(ratios)
    return Translation(new, 1.0, (*kept, "equilibrium norm"), changed)


def _closed_settings(
    kind: type[ClosedRule],
    match: Match,
    wanted: float,
    norm_sq: float,
    settings: dict[str, Any],
    scale: dict[str, float],
) -> Rule:
    def speed(product: float) -> float:
        return _speed(kind(1.0, product, **settings), match, unit_grad_sq=1.0, dim=1.0)

    product = _solve(speed, wanted, match, high=_largest_product(kind, match, settings), name=kind.__name__)
    trial = kind(1.0, product, **settings)
    power = 1 if isinstance(trial, SGD | SGDW) else 2
    # At fixed lr * wd the equilibrium ||w||^2 is proportional to lr (SGD-type) or lr^2 (constant-size updates).
    lr = (norm_sq / _norm_sq(trial, **scale)) ** (1 / power)
    return kind(lr, product / lr, **settings)


def _measured_settings(
    law_of: Identified, match: Match, wanted: float, norm_sq: float, *, unit_grad_sq: float, dim: float
) -> Identified:
    """The settings of a measured law: its decay per step from the speed, its step from the norm."""

    def speed(share: float) -> float:
        if match == "diffusion":
            return 2 * share
        if match == "time_constant":
            return 1 / (law_of.slope * math.log1p(-share))
        return 2 * math.asin(math.sqrt(constant_update_point(1.0, share, law_of.memory).one_minus_cos / 2))

    share = _solve(speed, wanted, match, high=0.25, name=law_of.name)
    length = math.sqrt(norm_sq * share * (2 - share) / law_of.memory.total(share))
    norm = math.sqrt(norm_sq)
    where = {"grad": math.sqrt(unit_grad_sq) / norm, "norm": norm, "entries": dim}
    lr = (length / law_of.step(lr=1.0, weight_decay=1.0, **where)) ** (1 / law_of.step.lr)
    decay = (share / law_of.decay(lr=lr, weight_decay=1.0, **where)) ** (1 / law_of.decay.weight_decay)
    return dataclasses.replace(law_of, lr=lr, weight_decay=decay)


def _needed_shape(rule: Rule, shape: tuple[int, int] | None, dim: float | None) -> tuple[int, int]:
    own = rule.shape if isinstance(rule, Muon) else None
    if shape is None and own is None:
        raise EquilibriaError(
            f"got {'Muon(...) as the rule' if isinstance(rule, Muon) else 'to=' + repr('muon')} without a shape; "
            "expected shape=(rows, columns): size and memory of Muon's update depend on it, so that matrices of other "
            "sides have another lr and weight decay",
            argument="shape",
        )
    if dim is not None:
        raise EquilibriaError(f"got dim={dim:g} with a shape; expected the shape alone", argument="dim")
    sides = Muon(1.0, shape=own if shape is None else shape).shape
    assert sides is not None
    return sides


def _refuse_other_settings(to: str | Identified, settings: Mapping[str, object]) -> None:
    """Raise for a setting that the new optimizer does not have."""
    kind = Identified if isinstance(to, Identified) else RULES[to]
    fixed = ("lr", "weight_decay", "shape", "name", "step", "decay", "memory")
    known = [field.name for field in dataclasses.fields(kind) if field.name not in fixed]
    for name in settings:
        if name not in known:
            users = [other for other in get_args(Translatable) if name in RULES[other].__slots__]
            target = f"the measured law of {to.name}" if isinstance(to, Identified) else repr(to)
            takes = f" ({to} takes {', '.join(known)})" if known else ""
            raise EquilibriaError(
                f"got {name} with to={target}, which has no such setting; expected it only with to: {', '.join(users)}"
                f"{takes}",
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


def _needed_scale(
    rule: Rule, target: type[ClosedRule] | Identified, *, unit_grad_sq: float | None, dim: float | None
) -> dict[str, float]:
    """L and the number of entries; 1 where the norms of both optimizers depend on them alike, or not at all."""
    uses = [_used_scale(one) for one in (rule, target)]
    is_measured = isinstance(rule, Identified) or isinstance(target, Identified)
    needed = set[str]().union(*uses)
    missing = [name for name, value in (("unit_grad_sq", unit_grad_sq), ("dim", dim)) if value is None]
    if (len(needed) == 2 or is_measured) and needed.intersection(missing):
        expected = "both" if len(needed) == 2 else next(iter(needed))
        first, second = (
            one.name if isinstance(one, Identified) else one.__name__ if isinstance(one, type) else type(one).__name__
            for one in (rule, target)
        )
        raise EquilibriaError(
            f"got unit_grad_sq={unit_grad_sq}, dim={dim}; expected {expected}, to match the norms of "
            f"{first} and {second} (measure L = E||g||^2 ||w||^2 of one layer)",
            argument=missing[0],
        )
    return {
        "unit_grad_sq": 1.0 if unit_grad_sq is None else scale_number("unit_grad_sq", unit_grad_sq),
        "dim": 1.0 if dim is None else scale_number("dim", dim),
    }


def _used_scale(rule: Rule | type[ClosedRule]) -> set[str]:
    """The scales that the norm of a rule depends on."""
    if isinstance(rule, Identified):
        both = (rule.step.grad or rule.is_coupled, rule.step.entries or rule.is_coupled)
        return {name for name, used in zip(("unit_grad_sq", "dim"), both, strict=True) if used}
    kind = rule if isinstance(rule, type) else type(rule)
    if kind is AdamL2:
        return {"unit_grad_sq", "dim"}
    return {"unit_grad_sq"} if kind in (SGD, SGDW) else {"dim"}


def _norm_sq(rule: Rule, *, unit_grad_sq: float, dim: float) -> float:
    """||w||^2 in equilibrium."""
    size = rule.update_sq(rule.shape) if isinstance(rule, Muon) and rule.shape is not None else dim
    return float(settled(rule, unit_grad_sq=unit_grad_sq, dim=size).norm_sq)


def _speed(rule: Rule, match: Match, *, unit_grad_sq: float, dim: float) -> float:
    if match == "diffusion":
        return angular_diffusion(rule, unit_grad_sq=unit_grad_sq, dim=dim)
    star = rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim)
    return star.time_constant if match == "time_constant" else float(star.angle)


def _solve(speed: Callable[[float], float], wanted: float, match: Match, *, high: float, name: str) -> float:
    """Decay per step of the new rule, by bisection in its logarithm: every speed is monotone in it."""
    low = 1e-13  # below, the linearised rate of Adam rounds to 1
    slow, fast = speed(low), speed(high)
    if not min(slow, fast) <= wanted <= max(slow, fast):
        raise EquilibriaError(
            f"got a {match} of {wanted:g}; expected one between {min(slow, fast):.4g} and {max(slow, fast):.4g}, which "
            f"{name} reaches with lr*weight_decay up to {high:.3g}"
        )
    rising = fast > slow
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
