"""How far a run leaves the equilibrium law when the law's assumptions fail, by the kind and the size of the failure.

The laws of `equilibrium` are exact for gradients that are orthogonal to the weight, uncorrelated in time, even over the
coordinates and Gaussian, in exact arithmetic. `violation_error` states what each failure does to angle and norm. The
derivations are in docs/laws/violations.md. In short:

- A gradient orthogonal to its weight never enters <w, buffer>. So the angle of SGD, SGDW and AdamW in equilibrium does
  not depend on correlations; they change the size of the update alone, and with it the norm. Lion's update has a fixed
  size; there they change the memory, hence both. A signal that lasts as long as AdamW's second moment changes both too
  (`correlated_gradients`).
- Where coordinates are uneven, those with the smallest gradients see little else than the projection that keeps the
  gradient orthogonal to the weight. Adam raises it to full size: these coordinates move radially together.
- Heavy tails and sparse gradients matter to Adam through the scatter of its second moment, to Lion through the many
  steps at which the momentum alone decides the sign.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from equilibria.errors import EquilibriaError, one_of, within
from equilibria.theory._reals import Array
from equilibria.theory.citations import law
from equilibria.theory.correlated_gradients import adamw_correlated, lion_total_correlated
from equilibria.theory.equilibrium import ROUNDED_AWAY, Assumption, constant_update_point, second_moment_shift
from equilibria.theory.fluctuation import mean_field_shift, random_walk_variance
from equilibria.theory.identified import Identified
from equilibria.theory.memory import sign_total
from equilibria.theory.radial import radial_balance, radial_strength
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule, closed_rule, nesterov_angle_factor

Violation: TypeAlias = Literal[
    "radial",
    "correlated",
    "signal",
    "uneven",
    "dominated",
    "sparse",
    "heavy tails",
    "few entries",
    "eps",
    "bfloat16",
]

_QUANTILES = 400  # of a distribution that is averaged over
_MOST_QUANTILES = 100_000
_NEGLIGIBLE = 1e-9
_INVISIBLE = 5e-4  # as a change, in words
_FEWEST_GRADIENTS = 5  # of an entry within 1/(1 - beta2) steps: with fewer, Lion's momentum is far from Gaussian
_MOST_LOST = 0.5  # of a signal, to the projection that keeps gradients orthogonal to the weight
_FEW, _SMALL_SHIFT, _SHIFT = 8.0, 0.01, 0.03  # entries that are few, and changes that may be neglected


@dataclass(frozen=True, slots=True)
class LawError:
    """How far a run is from its law.

    Attributes:
        angle: rms angle of the run over the law's, minus 1.
        norm: rms norm of the run over the law's, minus 1.
    """

    angle: float
    norm: float


@law("", "docs/laws/violations.md", derived="one law per assumption of the equilibrium; each simulated")
def violation_error(
    rule: Rule, kind: Violation, size: float, *, dim: float | None = None, lasting: float | None = None
) -> LawError:
    """Relative error of the equilibrium law when one of its assumptions fails.

    Args:
        rule: the optimizer, with lr and weight decay above 0.
        kind: the failure.
        size: its size; what it is depends on the kind:

            - "radial": the mean cosine of gradient and weight (positive where the gradient step shrinks the weight);
            - "correlated": correlation of successive gradients, AR(1);
            - "signal": share of E||g||^2 in a gradient that changes slowly whatever the weight does; needs ``lasting``.
              The mean gradient at a minimum, `noise()`'s ``mean_share``, is none: it opposes the last moves;
            - "uneven": sigma of lognormal gradient scales over the coordinates; needs ``dim``;
            - "dominated": share of the coordinates that get all of the gradient but for less than 1/dim;
            - "sparse": share of the steps at which an entry has a gradient;
            - "heavy tails": degrees of freedom (above 4) of Student's t for the entries of the gradient;
            - "few entries": their number;
            - "eps": Adam's eps over the root of the second moment;
            - "bfloat16": steps since the weight was in equilibrium, all with bfloat16 weights and float32 moments;
              torch keeps Adam's moments in the weight's format, for which no law is known.
        dim: number of entries, for "uneven".
        lasting: for "signal": steps after which the mean gradient is correlated with itself by 1/e; at most
            1/(2 lr wd), in which norms settle.

    Returns:
        What the run has over the law, minus 1. For SGD and SGDW the law takes L = E||g||^2 ||w||^2, for correlated
        gradients too: `rules.momentum_unit_grad_sq` is the L with which their norm is exact.

    Raises:
        EquilibriaError: bad input, or no law is known for this failure of this rule, or for one of this size.

    Example:
        >>> from equilibria.theory import SGD, AdamW
        >>> error = violation_error(AdamW(1e-3, 0.1), "correlated", 0.3)
        >>> round(error.angle, 2), round(error.norm, 2)
        (0.0, 0.32)
        >>> violation_error(SGD(0.1, 5e-4), "uneven", 2.0, dim=1000)
        LawError(angle=0.0, norm=0.0)
    """
    rule = closed_rule(rule)
    one_of("kind", kind, get_args(Violation))
    if not rule.decay_per_step > 0:
        raise EquilibriaError(f"got {rule!r}; expected lr and weight_decay above 0", argument="rule")
    if kind == "uneven":
        factors = _uneven(rule, size, dim)
    elif kind == "signal":
        factors = _signal(rule, size, lasting)
    else:
        factors = _LAWS[kind](rule, size)
    if factors is None:
        raise EquilibriaError(
            f"got kind={kind!r}, size={size:g} for {type(rule).__name__}; no law is known for it", argument="kind"
        )
    angle, norm = factors
    return LawError(float(angle) - 1, float(norm) - 1)


@functools.lru_cache(maxsize=1024)
def assumptions(rule: Rule, dim: float | None, time_constant: float) -> tuple[Assumption, ...]:
    """The assumptions of a rule's equilibrium about weight, gradients and number format.

    Args:
        rule: the optimizer.
        dim: number of entries of the smallest layer, if known.
        time_constant: of the equilibrium, in steps.
    """
    listed = [_invariant_weight(rule)]
    if not isinstance(rule, SGD | SGDW) or rule.momentum > 0:
        listed.append(_uncorrelated_gradients(rule))
    if not isinstance(rule, SGD | SGDW):
        listed.append(_even_coordinates(rule))
    if isinstance(rule, Lion):
        listed.append(_dense_gradients(rule))
    if isinstance(rule, AdamW | AdamL2):
        text = "eps must be far below sqrt(v), the rms gradient of an entry; at a tenth of it"
        listed.append(_stated(rule, "eps below the gradient", "eps", 0.1, text))
    if isinstance(rule, SGD | SGDW | Lion):
        listed.append(_many_entries(rule, dim))
    if isinstance(rule, Muon):
        listed.append(_known_shape(rule))
    return (*listed, _number_format(rule, time_constant))


def _stated(rule: Rule, name: str, kind: Violation, size: float, condition: str) -> Assumption:
    """An assumption that only a measurement decides, with its error for one size of its failure."""
    error = violation_error(rule, kind, size)
    changed = [key for key in ("norm", "angle") if _is_visible(getattr(error, key))]
    affects = ", ".join(changed) or "norm, angle"
    return Assumption(name, None, error.angle, error.norm, affects, f"{condition} {_in_words(error)}")


def _in_words(error: LawError) -> str:
    if not _is_visible(error.angle) and not _is_visible(error.norm):
        return "neither angle nor norm changes"
    return f"the angle {_change(error.angle)}, the norm {_change(error.norm)}"


def _change(error: float) -> str:
    size = float(f"{100 * abs(error):.2g}")  # 150, not 1.5e+02
    return f"is {size:g} % {'higher' if error > 0 else 'lower'}" if _is_visible(error) else "stays"


def _is_visible(error: float) -> bool:
    return abs(error) >= _INVISIBLE


def _invariant_weight(rule: Rule) -> Assumption:
    """The loss does not change when the weight is scaled; only a measurement can decide this."""
    name, text = "scale-invariant weight", "the weight must feed a normalisation layer and be decayed"
    if isinstance(rule, AdamL2) or _decay_in_force(rule) >= 1:
        return Assumption(name, None, None, None, "norm, angle", text)
    return _stated(rule, name, "radial", 1e-3, f"{text}; with a mean cosine of .001 between weight and gradient")


def _uncorrelated_gradients(rule: Rule) -> Assumption:
    """Successive gradients are uncorrelated."""
    name, text = "noise-dominated gradient", "successive gradients must be nearly uncorrelated"
    if isinstance(rule, Muon):
        measure = "the memory of the update changes; measure it (memory_total)"
        return Assumption(name, None, None, None, "norm, angle", f"{text}; else {measure}")
    if isinstance(rule, SGD | SGDW):
        text += " (or L must count <v, g>)"
    return _stated(rule, name, "correlated", 0.3, f"{text}; at a correlation of .3")


def _even_coordinates(rule: Rule) -> Assumption:
    """All coordinates of the weight see gradients of the same size."""
    name, text = "homogeneous coordinates", "gradients must be alike over the entries"
    if isinstance(rule, AdamL2):
        return Assumption(name, None, None, None, "norm, angle", f"{text}; else give their homogeneity")
    if isinstance(rule, Muon):
        return Assumption(name, None, None, None, "norm, angle", f"{text}; else measure the update (update_sq)")
    if isinstance(rule, Lion):
        return Assumption(name, None, None, None, "norm, angle", f"{text}; no law gives Lion's error if they are not")
    text += "; where a tenth of them gets all of the gradient"
    return _stated(rule, name, "dominated", 0.1, text)


def _dense_gradients(rule: Lion) -> Assumption:
    """Entries have a gradient at most steps; else the momentum alone decides the sign."""
    name, share = "dense gradients", max(0.05, _FEWEST_GRADIENTS * (1 - rule.betas[1]))
    if share >= 1:
        return Assumption(name, None, None, None, "norm, angle", "no law gives the error under sparse gradients")
    return _stated(rule, name, "sparse", share, f"with gradients at {100 * share:.2g} % of the steps only")


def _many_entries(rule: Rule, dim: float | None) -> Assumption:
    """Norms fluctuate little, which they do at a small lr * wd or with many entries."""
    entries = _FEW if dim is None else max(2.0, dim)
    error = violation_error(rule, "few entries", entries)
    small = max(abs(error.angle), abs(error.norm)) < (_SMALL_SHIFT if dim is None else _SHIFT)
    return Assumption(
        "many entries",
        small if dim is not None or small else None,
        error.angle,
        error.norm,
        "norm, angle",
        f"norms of few entries fluctuate: with {entries:,.0f} of them {_in_words(error)}",
    )


def _known_shape(rule: Muon) -> Assumption:
    is_known = rule.shape is not None
    return Assumption(
        "known shape of the matrix",
        is_known,
        0.0 if is_known else 0.2,
        0.0 if is_known else None,
        "norm, angle",
        "orthogonalisation shortens the memory by the shape: without it the angle is 3 % too small for 4:1 matrices, "
        "17-20 % for square ones",
    )


def _number_format(rule: Rule, time_constant: float) -> Assumption:
    """Weights are stored with enough digits to hold decay and updates."""
    name, affects = "weights of enough digits", "norm, angle"
    limits = "float32 rounds away less than 3e-8 of a weight, bfloat16 less than 2e-3 to 4e-3"
    if isinstance(rule, AdamL2):
        text = f"a step must move the weight visibly: {limits}; no law gives the error in bfloat16"
        return Assumption(name, None, None, None, affects, text)
    change = rule.decay_per_step
    if isinstance(rule, SGD):  # its decay is a part of the step, which is rounded as a whole
        change = math.sqrt(2 * change / (1 + rule.momentum))
    what = "turning moves" if isinstance(rule, SGD) else "decay takes"
    text = f"{what} {change:.2g} of the weight per step; {limits}"
    if change > 2 * ROUNDED_AWAY["bfloat16"]:
        return Assumption(name, True, 0.0, 0.0, affects, text)
    if change < ROUNDED_AWAY["float32"]:
        return Assumption(name, False, None, None, affects, text)
    if not isinstance(rule, AdamW):
        return Assumption(name, None, None, None, affects, f"{text}; no law gives the error in bfloat16")
    error = violation_error(rule, "bfloat16", 3 * time_constant)
    text += f": after {3 * time_constant:,.0f} steps in bfloat16 with float32 moments {_in_words(error)}"
    text += "; torch keeps the moments in bfloat16 too, for which no law is known"
    return Assumption(name, None, error.angle, error.norm, affects, text)


_Factors: TypeAlias = tuple[float, float] | None
"""Angle and norm over the law's, or None where no law is known."""


def _decay_in_force(rule: Rule) -> float:
    return rule.decay_per_step / (1 - rule.momentum) if isinstance(rule, SGD) else rule.decay_per_step


# ---- along the weight, and in time


def _radial(rule: Rule, size: float) -> _Factors:
    if isinstance(rule, AdamL2) or _decay_in_force(rule) >= 1:
        return None
    y = float(radial_balance(radial_strength(size, decay_in_force=_decay_in_force(rule))))
    return 1 / y, y ** (1 / norm_power(rule))


def _correlated(rule: Rule, size: float) -> _Factors:
    rho = within("size", size, above=-1, below=1)
    return _with_correlations(rule, [(1.0, rho)])


def _signal(rule: Rule, size: float, lasting: float | None) -> _Factors:
    share, settling = within("size", size, low=0, high=1), 1 / (2 * _decay_in_force(rule))
    if lasting is None or not 0 < lasting <= settling:
        raise EquilibriaError(
            f"got lasting={lasting}; expected for kind='signal' the steps that it lasts, above 0 and at most "
            f"1/(2 lr wd) = {settling:.4g}",
            argument="lasting",
        )
    rho = math.exp(-1 / lasting)
    parts = [(1 - share, 0.0), (share, rho)]
    lost = _lost_to_projection(rule, share, rho)
    if lost > _MOST_LOST:
        raise EquilibriaError(
            f"got size={share:g}, lasting={lasting:g}, a signal that the weight follows: to stay orthogonal to it, the "
            f"gradient would lose {100 * min(lost, 1.0):.0f} % of the signal; no law is known above "
            f"{100 * _MOST_LOST:.0f} %",
            argument="lasting",
        )
    if not isinstance(rule, AdamW):
        return _with_correlations(rule, parts)
    run, plain = (
        adamw_correlated(rule.betas, gradients, decay_per_step=rule.decay_per_step)
        for gradients in (parts, [(1.0, 0.0)])
    )
    if run is None or plain is None:
        return None
    norm_sq, update_sq = run.norm_sq / plain.norm_sq, run.update_sq / plain.update_sq
    return math.sqrt(update_sq / norm_sq), math.sqrt(norm_sq)


def _lost_to_projection(rule: Rule, share: float, rho: float) -> float:
    """The part of a signal along the weight, which has moved along it: 2 eps X^2 / kappa of its share.

    X is the sum over past updates of their product with the present gradient, for an average that forgets by b.
    """
    if isinstance(rule, Lion):
        b = rule.betas[1]
    else:
        b = rule.betas[0] if isinstance(rule, AdamW | AdamL2) else getattr(rule, "momentum", 0.0)
    if isinstance(rule, SGD | SGDW) and not b:
        return 0.0  # without momentum correlations change nothing
    kappa = 1 + 2 * b * share * rho / (1 - b * rho)
    return 2 * _decay_in_force(rule) * share * (rho / (1 - rho) * (1 - b) / (1 - b * rho)) ** 2 / kappa


def _with_correlations(rule: Rule, parts: list[tuple[float, float]]) -> _Factors:
    """For gradients that are sums of AR(1) processes, (share, correlation) each."""

    def overlap(b: float) -> float:
        """<v, g> / ||g||^2 with v the sum of past gradients, each step weighted by b."""
        return sum(share * rho / (1 - b * rho) for share, rho in parts)

    if isinstance(rule, SGD | SGDW):
        a = rule.momentum
        if isinstance(rule, SGD) and rule.nesterov:
            rho = overlap(a)
            return float(nesterov_angle_factor(a, correlation=rho)), (1 + 2 * a * a * rho) ** 0.25
        return 1.0, (1 + 2 * a * overlap(a)) ** 0.25
    if isinstance(rule, AdamW | AdamL2):
        kappa = 1 + 2 * rule.betas[0] * overlap(rule.betas[0])
        return (1.0, kappa**0.5) if isinstance(rule, AdamW) else (kappa ** (1 / 6), kappa ** (1 / 3))
    if isinstance(rule, Muon | Identified):
        return None
    eps = rule.decay_per_step
    total = lion_total_correlated(rule.betas, parts, decay_per_step=eps)
    own = rule.memory.total(eps)
    return math.sqrt(((2 - eps) / total - eps) / ((2 - eps) / own - eps)), math.sqrt(total / own)


def _remembering(rule: Lion, total: float) -> tuple[float, float]:
    """Lion with another memory in place of its own."""
    own, other = (
        constant_update_point(rule.lr, rule.weight_decay, memory)
        for memory in (rule.memory, rule.memory.scaled_to(total))
    )
    return math.sqrt(other.one_minus_cos / own.one_minus_cos), math.sqrt(other.norm_sq / own.norm_sq)


# ---- over the coordinates


def _uneven(rule: Rule, size: float, dim: float | None) -> _Factors:
    from scipy.special import ndtri

    sigma = within("size", size, low=0)
    if dim is None:
        raise EquilibriaError("got dim=None; expected the number of entries for kind='uneven'", argument="dim")
    entries = within("dim", dim, low=2)
    count = min(int(entries), _MOST_QUANTILES)
    scales_sq = np.exp(2 * sigma * ndtri((np.arange(count) + 0.5) / count))
    projected = scales_sq.mean() / entries  # variance that the projection adds to every entry
    return _together(rule, float(np.mean(np.sqrt(projected / (scales_sq + projected)))))


def _dominated(rule: Rule, size: float) -> _Factors:
    return _together(rule, 1 - within("size", size, above=0, high=1))


def _together(rule: Rule, common: float) -> _Factors:
    """A share ``common`` of the entries moves along its own direction, as one random walk; the others walk freely.

    AdamW: ||w||^2 is q + (1-q) x^2 with q the free share and x Gaussian, and the angle^2 over the law's is the mean of
    q/||w||^2 + q (1-q)/||w||^4. Lion's common walk is not Gaussian: where it is small, the momentum alone decides the
    sign.
    """
    if isinstance(rule, SGD | SGDW):
        return 1.0, 1.0
    if not isinstance(rule, AdamW):
        return None
    if common < _NEGLIGIBLE:
        return 1.0, 1.0
    c = (1 - common) / common
    return math.sqrt((1 + (1 + c) * _mean_inverse(c)) / 2), 1.0


def _mean_inverse(c: float) -> float:
    """E 1/(c + x^2), x Gaussian."""
    if c > 400:  # erfc underflows
        return (1 - (1 - 3 / c) / c) / c
    return math.sqrt(math.pi / (2 * c)) * math.exp(c / 2) * math.erfc(math.sqrt(c / 2))


# ---- over the sizes of gradients


def _sparse(rule: Rule, size: float) -> _Factors:
    share = within("size", size, above=0, high=1)
    if isinstance(rule, Lion) and share < _FEWEST_GRADIENTS * (1 - rule.betas[1]) * (1 - _NEGLIGIBLE):
        return None
    return _mixture(rule, np.array([0.0, 1 / share]), np.array([1 - share, share]))


def _heavy_tails(rule: Rule, size: float) -> _Factors:
    from scipy.special import chdtri

    freedom = within("size", size, above=4)
    quantiles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    variances = 1 / np.asarray(chdtri(freedom, quantiles))
    return _mixture(rule, variances / variances.mean(), np.full(_QUANTILES, 1 / _QUANTILES))


def _mixture(rule: Rule, variances: Array, weights: Array) -> _Factors:
    """Gradient entries that are Gaussian with one of several variances of mean 1."""
    if isinstance(rule, SGD | SGDW):
        return 1.0, 1.0
    if isinstance(rule, AdamL2 | Muon | Identified):
        return None
    if isinstance(rule, AdamW):
        norm_sq, update_sq = (1 + _saturating(shift, variances, weights) for shift in second_moment_shift(*rule.betas))
        return math.sqrt(update_sq / norm_sq), math.sqrt(norm_sq)
    b1, b2 = rule.betas
    if b1 < _NEGLIGIBLE:  # no memory, and no update without a gradient
        return 1.0, math.sqrt(float(weights[variances > 0].sum()))

    # The slope of the mean sign in <w, m>, and <sign, m'>; their product is the correlation that sets the memory.
    buffer_sq = (1 - b2) / (1 + b2)
    sizes = np.sqrt(b1**2 * buffer_sq + (1 - b1) ** 2 * variances)
    stored = b1 * b2 * buffer_sq + (1 - b1) * (1 - b2) * variances
    rho = b1 * float(weights @ (1 / sizes)) * float(weights @ (stored / sizes))
    return _remembering(rule, float(sign_total(rho, decay=b2)))


def _saturating(shift: float, variances: Array, weights: Array) -> float:
    """A shift for Gaussian gradients, of first order in E g^4 - 1 = 3 E variance^2 - 1, for another mixture.

    A single gradient cannot change the average by more than itself, so that each size saturates.
    """
    each = 1.5 * shift
    return float(weights @ (each * variances**2 / (1 + abs(each) * variances))) - 0.5 * shift


# ---- few entries, and arithmetic


def _few_entries(rule: Rule, size: float) -> _Factors:
    entries = within("size", size, low=2)
    if isinstance(rule, SGD | SGDW):
        nesterov = isinstance(rule, SGD) and rule.nesterov
        noise = random_walk_variance(entries, momentum=rule.momentum, nesterov=nesterov)
        shift = mean_field_shift(rule, noise)
        return 1 + shift.angle, 1 + shift.norm
    if isinstance(rule, Lion):
        return 1 - 0.7 / entries, math.sqrt(1 + 1.1 / entries)
    return (1.0, 1.0) if isinstance(rule, AdamW) else None


def _eps(rule: Rule, size: float) -> _Factors:
    ratio = within("size", size, low=0)
    if isinstance(rule, AdamW):
        return 1.0, 1 / (1 + ratio)
    return ((1 + ratio) ** (-2 / 3), (1 + ratio) ** (-1 / 3)) if isinstance(rule, AdamL2) else None


def _bfloat16(rule: Rule, size: float) -> _Factors:
    """Decoupled decay is an operation of its own, and is rounded away below half an ulp.

    ||w||^2 then grows as 1 + 2 lr wd t, more slowly where the decay of some entries survives, and no further than to
    the norm at which updates are rounded away too.
    """
    steps = within("size", size, low=0)
    if isinstance(rule, SGD | SGDW):
        turned = math.sqrt(2 * rule.decay_per_step / (1 + rule.momentum))
        return (1.0, 1.0) if isinstance(rule, SGD) and turned > 2 * ROUNDED_AWAY["bfloat16"] else None
    if not isinstance(rule, AdamW):
        return None
    eps, b1 = rule.decay_per_step, rule.betas[0]
    mantissas = 2 ** ((np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    ulp = 2.0**-7  # of the power of two below an entry
    surviving = (
        float(np.mean(np.round(eps * mantissas / ulp) * ulp / mantissas)) / eps
    )  # decay after rounding, over eps
    growth = 2 * eps * steps if surviving == 0 else -math.expm1(-2 * eps * surviving * steps) / surviving
    if growth == 0:
        return 1.0, 1.0
    # Entries spread evenly up to where half an ulp, 2^-8.5 of them on average, exceeds 97 % of the updates.
    update = math.sqrt((1 - b1) / (1 + b1) * 2 * eps)  # over the rms entry in equilibrium
    furthest = (2.2 * update * 2**8.5) ** 2 / 3
    norm_sq = math.exp(-2 * eps * surviving * steps) + 1 / (1 / growth + max(1 - surviving, 0.0) / furthest)
    return 1 / math.sqrt(norm_sq), math.sqrt(norm_sq)


_LAWS: dict[Violation, Callable[[Rule, float], _Factors]] = {
    "radial": _radial,
    "correlated": _correlated,
    "dominated": _dominated,
    "sparse": _sparse,
    "heavy tails": _heavy_tails,
    "few entries": _few_entries,
    "eps": _eps,
    "bfloat16": _bfloat16,
}
