"""Correlated steps: angles over many steps, batch scaling, gradient noise and curvature from correlations in time.

The laws of `angles` assume independent gradients. On a network the loss pulls back what a step did: successive
gradients are anticorrelated, and a layer turns far less over an epoch than its steps suggest. What is stated here holds
for any correlations; they have to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, number, whole, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law

_FEWEST_POINTS = 4  # of a measured curve: the spectrum has three numbers
_REACH = 2.0  # times the longest distance in a fit: one doubling was tested on networks
_LARGEST_RESIDUAL = 0.25  # relative, of a fit that counts as one; on networks it was at most 0.15


@law(
    "smd",
    "Fig. 7",
    derived="exact for plain SGD in equilibrium with any stationary correlations; independent gradients: (1-eps)^n",
)
def cosine_over_steps(correlations: ArrayLike, steps: int, *, decay_per_step: float) -> Array:
    """Expected cosine between weights 0, 1, ..., ``steps`` steps apart, for plain SGD in equilibrium.

    With eps = lr wd and rho_k the correlation of unit gradients k steps apart,
    ``E cos_n = (1-eps)^n - (2 eps - eps^2) sum_{0<=i<j<n} (1-eps)^(n-2-i-j) rho_{j-i}``: a gradient is orthogonal to
    the weight of its own step, so that its inner product with an earlier weight is a sum over the gradients between.

    Args:
        correlations: rho_1, rho_2, ...; those that are missing count as 0. Scale invariance makes the sum of
            (1-eps)^k rho_k vanish, so that a sum broken off too early ends in cosines above 1.
        steps: largest distance n.
        decay_per_step: eps.

    Returns:
        The cosines for n = 0..steps.

    Raises:
        EquilibriaError: a cosine leaves -1 to 1: correlations over longer distances are missing, or are no stationary
            ones.

    Example:
        >>> cosine_over_steps([-0.1], 2, decay_per_step=0.01).round(6).tolist()
        [1.0, 0.99, 0.98211]
    """
    rho, n = _correlations(correlations), whole("steps", steps)
    eps = within("decay_per_step", decay_per_step, above=0, below=1)
    kept = 1 - eps
    cosines, pull = [1.0], 0.0
    for j in range(n):
        # <w_0, g_j> over lr |g|^2: the sum over i < j of (1-eps)^(-1-i) rho_{j-i}, as (1-eps)^j times it
        cosines.append(kept * cosines[-1] - (2 * eps - eps**2) * pull / kept)
        pull = pull / kept + (float(rho[j]) if j < len(rho) else 0.0)
        if not abs(cosines[-1]) <= 1:
            raise EquilibriaError(
                f"got {len(rho)} correlations and steps={n}, with which the cosine over {j + 1} steps is "
                f"{cosines[-1]:.3g}; expected correlations over longer distances, or fewer steps",
                argument="correlations",
            )
    return np.array(cosines)


@law("smd", "Fig. 7", derived="|w_n - w_0|^2 as a double sum over the moves; exact wherever the norm is stationary")
def turning_ratio(correlations: ArrayLike) -> Array:
    """How far n steps turn a weight, over what n uncorrelated steps would: (1 - cos_n) / (n (1 - cos_1)).

    ``1 + 2 sum_{k<n} (1 - k/n) r_k`` with r_k the correlation of whole moves w' - w (weight decay included) k steps
    apart; exact for any optimizer at a stationary norm. With the correlations rho_k of plain SGD's gradients in place
    of r_k it is r = D(n) / (n D(1)), D(n) = -ln E cos_n, to first order: off by n lr wd (1 - r^2)/(2 r), so that
    n lr wd must be far below 2 r.

    Args:
        correlations: r_1, r_2, ...

    Returns:
        The ratio for n = 1, 2, ..., one more than there are correlations.

    Raises:
        EquilibriaError: a ratio is negative: no stationary steps have these correlations.

    Example:
        >>> turning_ratio([-0.13, -0.06]).round(3).tolist()
        [1.0, 0.87, 0.787]
    """
    r = _correlations(correlations)
    n = np.arange(1, len(r) + 2)
    sums, moments = (np.concatenate([[0.0], np.cumsum(part)]) for part in (r, r * np.arange(1, len(r) + 1)))
    ratios = np.asarray(1 + 2 * (sums - moments / n))
    if ratios.min() < 0:
        raise EquilibriaError(
            f"got correlations with which {int(np.argmin(ratios)) + 1} steps turn {ratios.min():.3g} times as far as "
            "uncorrelated ones; expected those of stationary steps, whose ratio is not negative",
            argument="correlations",
        )
    return ratios


@law(
    "smd",
    "§6, Fig. 8",
    derived="n steps of batch B at lr take the angle sqrt(D(n)/(n D(1))) of one step of batch n B at n lr",
)
def measured_scaling_ratio(turned: float, one_step: float, factor: int) -> float:
    """Angle over n small steps, divided by the angle of one step of an n times larger batch at n lr; plain SGD.

    `angles.linear_scaling_ratio` is 1 for independent gradients. Where steps pull back, n of them turn less:
    ``sqrt(D(n) / (n D(1)))`` with D of the run with small steps. Measured on networks: within 5 % for n up to 32.

    Args:
        turned: D(n) = -ln of the mean cosine between weights n steps apart.
        one_step: D(1).
        factor: n.

    Example:
        >>> round(measured_scaling_ratio(4.9e-3, 1e-3, 8), 3)
        0.783
    """
    n = whole("factor", factor, low=1)
    far, near = within("turned", turned, above=0), within("one_step", one_step, above=0)
    return float(np.sqrt(far / (n * near)))


@dataclass(frozen=True, slots=True)
class RelaxationSpectrum:
    """A Gamma distribution of relaxation rates, which describes how turning slows down with the distance.

    ``D(n) = D(1) f(n) / f(1)``, ``f(n) = ((1 + n/memory)^(1-power) - 1) / (1 - power)``: linear in n for n << memory,
    then n^(1-power).

    Attributes:
        one_step: D(1), from the fit.
        memory: steps after which steps begin to be pulled back.
        power: of the decay.
        reach: the largest n that is stated, twice the longest distance of a fit.
        residual: largest relative difference between the fit and a measured D(n).
    """

    one_step: float
    memory: float
    power: float
    reach: float
    residual: float = 0.0

    def turned(self, steps: ArrayLike) -> Array:
        """D(n) = -ln E cos_n for distances n.

        Raises:
            EquilibriaError: if a distance is beyond the reach.
        """
        n = reals("steps", steps, low=0)
        if n.size and n.max() > self.reach:
            raise EquilibriaError(
                f"got steps={n.max():g}; expected at most {self.reach:g}, twice the longest measured distance: measure "
                "over longer distances",
                argument="steps",
            )
        shapes = _shape(n, self.memory, self.power), _shape(np.array(1.0), self.memory, self.power)
        return np.asarray(self.one_step * shapes[0] / shapes[1])


@law(
    "smd",
    "Fig. 7",
    derived="modes of relaxation rate a have rho_k = -(a/2)(1-a)^(k-1); a Gamma density of rates is integrated",
)
def fit_relaxation_spectrum(steps: ArrayLike, turned: ArrayLike) -> RelaxationSpectrum:
    """Fit a spectrum of relaxation rates to D(n) measured at several distances, by least squares in ln D.

    At twice the longest distance it was off by up to 6 % (plain SGD, fitted to 1 <= n <= 32) and, fitted to
    16 <= n <= 128, by up to 18 % with momentum and 15 % with AdamW, 30 % on a network with GroupNorm (single layers of
    three networks; the experiment eq-diffusion). Farther away it fails: it is not stated there. With momentum give
    distances beyond its memory, 2/(1 - momentum) steps; within it, steps add up instead of relaxing.

    Args:
        steps: distances n, at least four different ones.
        turned: D(n) = -ln of the mean cosine between weights n steps apart.

    Raises:
        EquilibriaError: too few distances, or no such spectrum is within 25 % of every D(n).

    Example:
        >>> true = RelaxationSpectrum(one_step=1e-3, memory=5.0, power=0.8, reach=64.0)
        >>> n = [1, 2, 4, 8, 16, 32]
        >>> fitted = fit_relaxation_spectrum(n, true.turned(n))
        >>> round(fitted.memory, 3), round(fitted.power, 3), fitted.reach
        (5.0, 0.8, 64.0)
    """
    from scipy.optimize import least_squares

    n, measured = reals("steps", steps, low=1), reals("turned", turned, above=0)
    if n.ndim != 1 or n.shape != measured.shape or len(np.unique(n)) < _FEWEST_POINTS:
        raise EquilibriaError(
            f"got steps of shape {n.shape} and turned of shape {measured.shape}; expected one D(n) for each of "
            f"at least {_FEWEST_POINTS} different distances"
        )
    logs = np.log(measured)

    def residuals(parameters: Array) -> Array:
        shape = np.log(_shape(n, float(np.exp(parameters[0])), float(parameters[1])))
        difference = shape - logs
        return np.asarray(difference - difference.mean())  # the level fits itself

    best = min(
        (
            least_squares(residuals, [np.log(memory), power], bounds=([-5.0, 0.0], [15.0, 5.0]))
            for memory in (1.0, 10.0, 100.0)
            for power in (0.5, 1.5)
        ),
        key=lambda fit: fit.cost,
    )
    memory, power = float(np.exp(best.x[0])), float(best.x[1])
    level = float(np.exp(np.mean(logs - np.log(_shape(n, memory, power)))))
    residual = float(np.max(np.abs(level * _shape(n, memory, power) / measured - 1)))
    if residual > _LARGEST_RESIDUAL:
        raise EquilibriaError(
            f"got D(n) that a spectrum of relaxation rates misses by up to {100 * residual:.0f} %; expected at most "
            f"{100 * _LARGEST_RESIDUAL:.0f} %: with momentum give distances beyond its memory, 2/(1 - momentum) steps",
            argument="turned",
        )
    return RelaxationSpectrum(
        level * float(_shape(np.array(1.0), memory, power)), memory, power, _REACH * float(n.max()), residual
    )


def _shape(n: Array, memory: float, power: float) -> Array:
    logs = np.log1p(n / memory)
    exponent = 1 - power
    return np.asarray(logs if abs(exponent) < 1e-9 else np.expm1(exponent * logs) / exponent)


@law(
    "smd",
    "§4",
    derived="stationary loss of plain SGD: rho_1 = -1/2 lr_eff g'Hg/|g|^2 = -|E g|^2 / E|g|^2",
)
def mean_gradient_share(correlation: float) -> float:
    """The mean gradient's share of E|g|^2, from the correlation rho_1 of successive gradients; plain SGD, stationary.

    Where the loss neither falls nor rises, what the mean gradient gains in a step, curvature takes back:
    |E g|^2 = -rho_1 E|g|^2. The curvature along the step follows: lr_eff g'Hg/|g|^2 = 2 x this share. Of one layer that
    is its part of the product with the steps of all layers; on two BatchNorm networks it was 1.6 to 3.5 times the
    product with its own block of H.

    Args:
        correlation: rho_1; not above 0, or the loss is not stationary.

    Example:
        >>> mean_gradient_share(-0.13)
        0.13
    """
    return -within("correlation", correlation, low=-1, high=0)


@law(
    "smd",
    "§4",
    derived="per mode h~ = sigma^2 (1 + a/(2(1+gamma)-a)) at momentum gamma; m = (1 - h~/N)(1+gamma)/(2 gamma)",
)
def mean_gradient_share_with_momentum(unit_grad_ratio: float, *, momentum: float) -> float:
    """The mean gradient's share of E|g|^2, from L over N = E|g~|^2 of SGD with momentum; stationary loss.

    Args:
        unit_grad_ratio: `rules.momentum_unit_grad_sq` over the squared unit gradient, h~/N. Below 0.92 the noise scale
            from it was within 30 % on networks; above, it is unreliable.
        momentum: gamma, above 0.

    Example:
        >>> round(mean_gradient_share_with_momentum(0.9, momentum=0.9), 4)
        0.1056
    """
    gamma = within("momentum", momentum, above=0, below=1)
    share = (1 - within("unit_grad_ratio", unit_grad_ratio, low=0)) * (1 + gamma) / (2 * gamma)
    if not abs(share) <= 1:
        raise EquilibriaError(
            f"got unit_grad_ratio={unit_grad_ratio:g} at momentum={gamma:g}, which would make the mean gradient's "
            f"share {share:.3g}; expected a share between -1 and 1",
            argument="unit_grad_ratio",
        )
    return share


@law(
    "smd",
    "§4",
    derived="the two laws above in terms of the last move e: E<g, e> = -a E<g, v>, m = (1+gamma) E<g, e> / (a E|g|^2)",
)
def mean_gradient_share_from_pull(pull: float, own_step: float, *, momentum: float = 0.0) -> float:
    """The mean gradient's share of E|g|^2, from how far gradients pull the last move back; stationary loss.

    ``m = (1 + gamma) E<g, e> / (a E|g|^2)`` where e is the last move and a the factor with which a gradient enters its
    own step: lr for SGD (at momentum 0 this is `mean_gradient_share`), (1 - beta1) lr for Adam. Adam is SGD with
    momentum in coordinates scaled by v^(1/4), so there E|g|^2 and the share are those of g/v^(1/4).

    Args:
        pull: E<g, e>.
        own_step: a E|g|^2, or a E<g, g/sqrt(v)> under Adam.
        momentum: gamma, or beta1.

    Example:
        >>> round(mean_gradient_share_from_pull(0.013, 0.1), 9), mean_gradient_share(-0.13)
        (0.13, 0.13)
    """
    gamma = within("momentum", momentum, low=0, below=1)
    return (1 + gamma) * number("pull", pull) / within("own_step", own_step, above=0)


@law("smd", "§6", derived="E|g|^2 = |E g|^2 + noise/B: the batch size at which both parts are equal")
def gradient_noise_scale(batch_size: float, mean_share: float) -> float:
    """Batch size at which mean and noise of a gradient are equally large: B (1 - m) / m.

    Args:
        batch_size: B, of the measured gradients.
        mean_share: m = |E g|^2 / E|g|^2 at this batch size.

    Example:
        >>> round(gradient_noise_scale(64, 0.115))
        493
    """
    share = within("mean_share", mean_share, above=0, high=1)
    return within("batch_size", batch_size, above=0) * (1 - share) / share


def _correlations(values: ArrayLike) -> Array:
    rho = reals("correlations", values, low=-1, high=1)
    if rho.ndim != 1:
        raise EquilibriaError(f"got correlations of shape {rho.shape}; expected rho_1, rho_2, ... as one list")
    return rho
