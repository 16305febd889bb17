"""Bounds on generalisation from spherical sharpness, and the scale of a fixed final batch normalisation.

The PAC-Bayes bound of Theorem C.2 ranks solutions by sharpness; at the scale of networks it is vacuous. The
final-BN laws tie the fixed scale of the last normalisation to label smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import number, positive, whole, within
from equilibria.theory._reals import Array, positive_reals, reals
from equilibria.theory.citations import law


@dataclass(frozen=True, slots=True)
class BoundTerms:
    """A bound on the generalisation gap, term by term, all in loss units.

    Attributes:
        curvature: second-order term, the only one that depends on the sharpness.
        remainder: third-order Taylor remainder.
        complexity: cost of the divergence from the prior and of the confidence.
    """

    curvature: float
    remainder: float
    complexity: float

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return self.curvature + self.remainder + self.complexity


@dataclass(frozen=True, slots=True)
class PacBayesBound:
    """Bounds on ``E L(theta + noise) - L_train(theta)`` for noise of total variance ``sigma^2``.

    Attributes:
        final: the theorem's last line.
        tight: the line before it, with smaller constants; never above ``final``.
        vacuous: whether even the tight bound is at least the largest possible loss.
    """

    final: BoundTerms
    tight: BoundTerms
    vacuous: bool


@law("sharp", "Theorem C.2")
def max_noise(dim: int, samples: int) -> float:
    """Largest noise ``sigma`` that the PAC-Bayes bound allows: ``1/(2 + 2 sqrt(ln(n)/D))``.

    Args:
        dim: number of scale-invariant parameters ``D``.
        samples: size ``n`` of the training set.

    Returns:
        Upper limit of ``sigma``, relative to the unit norm of ``theta``.

    Raises:
        EquilibriaError: ``dim`` is below 1 or ``samples`` below 2.

    Example:
        >>> round(max_noise(100, 50_000), 6)
        0.376241
    """
    d, n = whole("dim", dim, low=1), whole("samples", samples, low=2)
    return float(1 / (2 + 2 * np.sqrt(np.log(n) / d)))


@law("sharp", "Appendix C, eq. (12)")
def noise_radius(sigma: float, dim: int, samples: int) -> float:
    """Radius that noise of total variance ``sigma^2`` leaves with a probability of at most ``1/sqrt(n)``.

    Args:
        sigma: root of the mean squared length of the noise, the same in all directions.
        dim: ``D``.
        samples: ``n``.

    Returns:
        ``h = sigma (1 + sqrt(ln(n)/D))``, at most 1/2 for noise up to `max_noise`.

    Example:
        >>> noise_radius(max_noise(100, 50_000), 100, 50_000)
        0.5
    """
    excess = np.log(whole("samples", samples, low=2)) / whole("dim", dim, low=1)
    return positive("sigma", sigma) * (1 + float(np.sqrt(excess)))


@law("sharp", "Lemma C.3")
def gaussian_divergence(distance: float, *, sigma: float, prior_sigma: float, dim: int) -> float:
    """Kullback-Leibler divergence of one normal distribution from another, nats; both the same in all directions.

    ``(D s^2 + d^2)/(2 p^2) - D/2 + D ln(p/s)``, s = ``sigma`` and p = ``prior_sigma``.

    Args:
        distance: ``d`` between the means.
        sigma: standard deviation per direction.
        prior_sigma: that of the prior.
        dim: ``D``.

    Returns:
        ``KL(Q||P)``.

    Example:
        >>> gaussian_divergence(1.0, sigma=0.5, prior_sigma=0.5, dim=100)
        2.0
    """
    d, ratio = whole("dim", dim, low=1), positive("sigma", sigma) / positive("prior_sigma", prior_sigma)
    gap = within("distance", distance, low=0) / prior_sigma
    return float((d * (ratio**2 - 1 - 2 * np.log(ratio)) + gap**2) / 2)


@law("sharp", "Theorem C.1", corrected="bounds E_Q L - E_Q L_S; the difference is printed with the other sign")
def pac_bayes_gap(divergence: float, *, samples: int, delta: float = 0.05, max_loss: float = 1.0) -> float:
    """Bound on test loss less training loss, averaged over any distribution Q of weights.

    ``l_max sqrt((KL(Q||P) + ln(n/delta))/(2 (n-1)))``; with probability ``1 - delta`` over the data it holds for all
    ``Q`` at once.

    Args:
        divergence: ``KL(Q||P)`` from the prior ``P``, which must not depend on the data.
        samples: size ``n`` of the training set.
        delta: probability of failure.
        max_loss: largest possible loss ``l_max``; the smallest is 0.

    Returns:
        The bound, in loss units.

    Example:
        >>> round(pac_bayes_gap(gaussian_divergence(1.0, sigma=0.1, prior_sigma=0.1, dim=100), samples=50_000), 4)
        0.0253
    """
    n = whole("samples", samples, low=2)
    odds = within("divergence", divergence, low=0) + np.log(n / within("delta", delta, above=0, below=1))
    return positive("max_loss", max_loss) * float(np.sqrt(odds / (2 * (n - 1))))


@law(
    "sharp",
    "Theorem C.2",
    corrected="the proof's '+1' is +1/sqrt(n); the loss must be non-negative",
)
def pac_bayes_bound(
    sharpness: float,
    third_derivative: float,
    *,
    dim: int,
    samples: int,
    sigma: float,
    delta: float = 0.05,
    max_loss: float = 1.0,
    trace: float | None = None,
) -> PacBayesBound:
    """Bound on the gap between perturbed test loss and training loss, with probability ``1 - delta``.

    With ``s = sigma``, ``a = sqrt(ln(n)/D)``: final
    ``s^2 lambda1/2 + (16/3) s^3 rho3 (1 + a^3) + l_max sqrt((D/s^2 + 2 ln(n/delta))/(n-1))``; tight
    ``s^2 lambda1/2 + (4/3) rho3 ((1+a) s)^3 + l_max (sqrt((D/(2s^2) + ln(n/delta))/(2(n-1))) + 1/sqrt(n))``.
    It ranks solutions; it certifies nothing once ``D/s^2`` is of the order of ``n``.

    Args:
        sharpness: spherical sharpness ``lambda1`` of the training loss, not negative.
        third_derivative: ``rho3``, largest norm of the third derivative on the unit sphere.
        dim: number of scale-invariant parameters ``D``.
        samples: size ``n`` of the training set.
        sigma: noise scale; at most `max_noise`.
        delta: probability of failure.
        max_loss: largest possible loss ``l_max``; the smallest is 0.
        trace: trace of the Hessian; if given, ``max(trace/D, 0)`` replaces ``lambda1``, which is never worse.

    Returns:
        The bound and its terms.

    Raises:
        EquilibriaError: a value is not finite or out of range, or ``sigma`` exceeds `max_noise`.

    Example:
        >>> bound = pac_bayes_bound(10.0, 5.0, dim=100, samples=50_000, sigma=0.35)
        >>> round(bound.final.total, 6), round(bound.tight.total, 6)
        (1.926446, 1.35278)
    """
    d, n = whole("dim", dim, low=1), whole("samples", samples, low=2)
    s = within("sigma", sigma, above=0, high=max_noise(d, n))
    rho = within("third_derivative", third_derivative, low=0)
    largest = positive("max_loss", max_loss)
    curve = within("sharpness", sharpness, low=0)
    if trace is not None:
        curve = max(number("trace", trace) / d, 0.0)
    a = float(np.sqrt(np.log(n) / d))
    gap = pac_bayes_gap(d / (2 * s**2), samples=n, delta=delta, max_loss=largest)
    curvature = s**2 / 2 * curve
    tight = BoundTerms(curvature, 4 / 3 * rho * noise_radius(s, d, n) ** 3, gap + largest * n**-0.5)
    # Twice the gap is exactly the theorem's square root.
    final = BoundTerms(curvature, 16 / 3 * s**3 * rho * (1 + a**3), 2 * gap)
    return PacBayesBound(final, tight, tight.total >= largest)


def _logit_gap(scale: Array, classes: Array) -> Array:
    """Correct minus wrong logit at the minimum: ``gamma (sqrt(C-1) + 1/sqrt(C-1)) = gamma C/sqrt(C-1)``."""
    return scale * classes / np.sqrt(classes - 1)


def _classes(value: ArrayLike) -> Array:
    array = reals("classes", value, low=2)
    for entry in array[array != np.floor(array)].ravel()[:1]:
        whole("classes", entry)
    return array


@dataclass(frozen=True, slots=True)
class FinalBnMinimum:
    """The best that a classifier with a fixed final batch normalisation can do on balanced classes.

    Attributes:
        correct_logit: logit of the right class.
        wrong_logit: logit of each other class.
        correct_probability: softmax probability of the right class.
        wrong_probability: softmax probability of each other class.
        loss: mean cross entropy, nats.
    """

    correct_logit: Array
    wrong_logit: Array
    correct_probability: Array
    wrong_probability: Array
    loss: Array


@law("sharp", "Appendix R.2, eqs. (52)-(53)", corrected="each output has variance gamma^2; 'covariance' is printed")
def final_bn_minimum(scale: ArrayLike, classes: ArrayLike) -> FinalBnMinimum:
    """Minimum of the cross entropy when every logit has mean 0 and standard deviation ``scale`` over the data.

    Balanced classes: correct logit ``gamma sqrt(C-1)``, wrong ``-gamma/sqrt(C-1)``,
    ``loss = ln(1 + (C-1) exp(-gamma C/sqrt(C-1)))``.

    Args:
        scale: ``gamma``, the fixed scale of the final batch normalisation (its shift is 0).
        classes: number of classes ``C``, equally frequent.

    Returns:
        Logits, probabilities and loss at the minimum.

    Raises:
        EquilibriaError: ``scale`` is not positive or ``classes`` is not a whole number of at least 2.

    Example:
        >>> best = final_bn_minimum(0.3 * np.log(91), 10)
        >>> round(float(best.correct_probability), 12), round(float(best.loss), 7)  # ln(100/91)
        (0.91, 0.0943107)
    """
    gamma, c = positive_reals("scale", scale), _classes(classes)
    small = np.exp(-_logit_gap(gamma, c))
    total = 1 + (c - 1) * small
    return FinalBnMinimum(
        correct_logit=gamma * np.sqrt(c - 1),
        wrong_logit=-gamma / np.sqrt(c - 1),
        correct_probability=1 / total,
        wrong_probability=small / total,
        loss=np.log1p((c - 1) * small),
    )


@law("sharp", "Appendix R.2")
def label_smoothing(scale: ArrayLike, classes: ArrayLike) -> Array:
    """Label smoothing that a fixed final batch normalisation amounts to.

    ``epsilon = C/((C-1) + exp(gamma C/sqrt(C-1)))``: wrong classes get probability ``epsilon/C`` each.

    Args:
        scale: ``gamma``, scale of the final batch normalisation.
        classes: number of classes ``C``.

    Returns:
        Smoothing ``epsilon``, between 0 and 1.

    Raises:
        EquilibriaError: ``scale`` is not positive or ``classes`` is not a whole number of at least 2.

    Example:
        >>> round(float(label_smoothing(0.3 * np.log(91), 10)), 12)
        0.1
    """
    best = final_bn_minimum(scale, classes)
    return best.wrong_probability * np.asarray(classes, dtype=np.float64)


@law("sharp", "Appendix R.2", derived="inverse of label_smoothing")
def final_bn_scale(smoothing: ArrayLike, classes: ArrayLike) -> Array:
    """Scale of the final batch normalisation that amounts to a given label smoothing.

    ``gamma = (sqrt(C-1)/C) ln(C/epsilon - (C-1))``; the minimal loss is then ``-ln(1 - (1 - 1/C) epsilon)``.

    Args:
        smoothing: ``epsilon``, strictly between 0 and 1.
        classes: number of classes ``C``.

    Returns:
        Scale ``gamma``.

    Raises:
        EquilibriaError: ``smoothing`` is outside (0, 1) or ``classes`` is not a whole number of at least 2.

    Example:
        >>> round(float(final_bn_scale(0.1, 10)), 7)  # 0.3 ln 91
        1.3532579
    """
    epsilon, c = reals("smoothing", smoothing, above=0, below=1), _classes(classes)
    # C/eps - (C-1) = 1 + C (1-eps)/eps: no cancellation when eps is close to 1.
    return np.sqrt(c - 1) / c * np.log1p(c * (1 - epsilon) / epsilon)
