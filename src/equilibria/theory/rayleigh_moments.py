r"""The risk curve of a two-level noisy Rayleigh quotient without a closure: all moments of the alignment at once.

At norm ``M`` and with ``x = lr/M`` the alignment ``f`` has the generator
``x^2 sigma^2 [2 f (1-f) d^2 + (1 - p f) d] + 2 x gap f (1-f) d``. The first bracket has the Jacobi polynomials of the
weight ``f^(-1/2) (1-f)^((p-3)/2)`` as eigenfunctions, with eigenvalues ``-n (2n + p - 2)``; its commutator with ``f``
is ``4 f (1-f) d + (1 - p f)``, so the second part couples neighbours only. The means of these polynomials thus obey a
tridiagonal linear equation, and the first of them is the risk.
"""

from __future__ import annotations

import math

import numpy as np

from equilibria.errors import EquilibriaError, within
from equilibria.theory._reals import Array
from equilibria.theory.citations import law
from equilibria.theory.rayleigh import NoisyRayleigh
from equilibria.theory.rayleigh_curve import RiskCurve, _check_diffusive, _settings
from equilibria.theory.schedules import ScheduleLike

_RATE_PER_STAGE = 0.05  # the method of order 2 then errs by less than 1e-4 of the risk
_GAMMA = 1 - math.sqrt(0.5)  # with it the two stages are of order 2 and forget fast modes at once
_MODES = 8.0  # per root of the concentration: the modes left out are exp(-64) of the density exp(b f)
_MOST_MODES = 20_000


class _Modes:
    """Means of the orthonormal Jacobi polynomials, and the tridiagonal equation they obey."""

    def __init__(self, dim: int, count: int) -> None:
        n = np.arange(count, dtype=np.float64)
        self.decay: Array = n * (2 * n + dim - 2)
        self.centre, self.side = _recurrence(dim, count)
        step = np.diff(self.decay)
        self.below: Array = self.side / 4 * (dim - step)  # from mode n + 1 to mode n; above: from n to n + 1
        self.above: Array = self.side / 4 * (dim + step)
        self.middle: Array = (dim * self.centre - 1) / 4

    def start(self, alignment: float | None) -> Array:
        """The means at one alignment, or of a uniformly random direction if it is None."""
        means = np.zeros(len(self.decay))
        means[0] = 1.0
        if alignment is None:
            return means
        means[1] = (alignment - self.centre[0]) / self.side[0]
        for n in range(1, len(means) - 1):
            ahead = (alignment - self.centre[n]) * means[n] - self.side[n - 1] * means[n - 1]
            means[n + 1] = ahead / self.side[n]
        return means

    def risk(self, means: Array) -> float:
        """``1 - E f`` from the first two means."""
        return float(1 - self.centre[0] - self.side[0] * means[1])

    def advance(self, means: Array, *, noise: float, pull: float) -> Array:
        """One unit of time at rates ``noise = (lr sigma/M)^2`` and ``pull = 2 gap lr/M``."""
        from scipy.linalg.lapack import dgttrf, dgttrs

        count = math.ceil(pull / _RATE_PER_STAGE) or 1
        upper, lower = pull / count * self.below, pull / count * self.above
        middle = pull / count * self.middle - noise / count * self.decay
        factors = dgttrf(-_GAMMA * lower, 1 - _GAMMA * middle, -_GAMMA * upper)[:-1]
        for _ in range(count):
            first = dgttrs(*factors, _applied(lower, middle, upper, means))[0]
            half = means + (1 - _GAMMA) * first
            second = dgttrs(*factors, _applied(lower, middle, upper, half))[0]
            means = half + _GAMMA * second
        return means


def _applied(lower: Array, middle: Array, upper: Array, means: Array) -> Array:
    result = middle * means
    result[:-1] += upper * means[1:]
    result[1:] += lower * means[:-1]
    return result


def _recurrence(dim: int, count: int) -> tuple[Array, Array]:
    """``f phi_n = side_n phi_(n+1) + centre_n phi_n + side_(n-1) phi_(n-1)`` of the orthonormal polynomials."""
    a, b = (dim - 3) / 2, -0.5
    n = np.arange(1, count, dtype=np.float64)
    twice = 2 * n + a + b
    centre = np.concatenate(([(b - a) / (a + b + 2)], (b**2 - a**2) / (twice * (twice + 2))))
    square = np.empty(count - 1)
    square[0] = 4 * (1 + a) * (1 + b) / ((2 + a + b) ** 2 * (3 + a + b))  # the general form is 0/0 in two dimensions
    n, twice = n[1:], twice[1:]
    square[1:] = 4 * n * (n + a) * (n + b) * (n + a + b) / (twice**2 * (twice**2 - 1))
    return (1 + centre) / 2, np.sqrt(square) / 2


@law(
    "nrq",
    "Eqs. 16 and 17, Figure 2",
    derived="The Kolmogorov equation of f in Jacobi polynomials, where it is tridiagonal; no closure.",
)
def exact_risk_curve(
    model: NoisyRayleigh,
    steps: int,
    *,
    risk: float | None = None,
    norm_sq: float | None = None,
    lr: ScheduleLike | None = None,
    weight_decay: ScheduleLike | None = None,
    rescale: bool = False,
) -> RiskCurve:
    """Risk, norm and angular update of a two-level model's diffusion, step by step, under any schedule.

    Solves the equation of all moments of ``f`` (see the module), with a numerical error below 1e-4 of the risk.
    `rayleigh_curve.risk_curve` is faster but assumes a Watson law of the same mean and is off by up to 0.14 in the
    first descent. The discrete step differs from the diffusion by a share of about ``gap lr/M`` in all rates.

    Args:
        model: a two-level noisy Rayleigh quotient.
        steps: number of optimizer steps.
        risk: risk at the start, the same in every trial; without it the direction is uniformly random.
        norm_sq: ``M_0 = ||X_0||^2``; by default the equilibrium of the first step's learning rate and weight decay.
        lr: learning rate or schedule instead of ``model.lr``.
        weight_decay: weight decay or schedule instead of ``model.weight_decay``.
        rescale: divide the weights by ``k^(1/4)`` whenever the learning rate is divided by ``k``.

    Returns:
        `RiskCurve`.

    Raises:
        EquilibriaError: the spectrum has more than two levels, an argument is out of range, a step turns by more than
            a diffusion can describe, or the alignment is so concentrated that it needs more than 20,000 polynomials.

    Example:
        It ends at the Watson law's risk:

        >>> from equilibria.theory.rayleigh_risk import stationary_risk
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> curve = exact_risk_curve(model, 2000)
        >>> bool(abs(curve.risk[-1] / stationary_risk(model).risk - 1) < 1e-6)
        True
    """
    settings = _settings(model, steps, norm_sq=norm_sq, lr=lr, weight_decay=weight_decay, rescale=rescale)
    rates, factors = settings.lr, settings.factors
    norms = _norms(settings.norm_sq, rates, settings.weight_decay, unit_grad_sq=model.unit_grad_sq, factors=factors)
    middle = np.sqrt((norms[:-1] ** 2 + _before_rescale(norms, factors) ** 2) / 2)
    speed, first_speed, size = rates / middle, rates / norms[:-1], math.sqrt(model.unit_grad_sq)
    fastest = int(np.argmax(first_speed))
    _check_diffusive(size * first_speed[fastest], model.gap * first_speed[fastest], step=fastest)
    modes = _Modes(model.dim, _mode_count(model, speed))
    means = modes.start(None if risk is None else 1 - within("risk", risk, low=0, high=1))
    risks = [modes.risk(means)]
    for x in speed.tolist():
        means = modes.advance(means, noise=(x * model.noise) ** 2, pull=2 * model.gap * x)
        risks.append(modes.risk(means))
    turn = size * np.append(rates, rates[-1]) / norms
    return RiskCurve(np.array(risks), norms, turn)


def _norms(start: float, lr: Array, weight_decay: Array, *, unit_grad_sq: float, factors: Array) -> Array:
    """``M`` before each step, after its rescale, and after the last."""
    square, squares = start**2, np.empty(len(lr) + 1)
    exponent = 4 * lr * weight_decay
    keep, gain = np.exp(-exponent), 2 * lr**2 * unit_grad_sq
    gain = np.where(exponent > 0, -np.expm1(-exponent) / np.where(exponent > 0, exponent, 1.0), 1.0) * gain
    for n, (kept, gained, factor) in enumerate(zip(keep.tolist(), gain.tolist(), factors.tolist(), strict=True)):
        square *= factor
        squares[n] = square
        square = kept * square + gained
    squares[-1] = square
    result: Array = np.sqrt(squares)
    return result


def _before_rescale(norms: Array, factors: Array) -> Array:
    """``M`` at the end of each step."""
    result: Array = norms[1:] / np.sqrt(np.append(factors[1:], 1.0))
    return result


def _mode_count(model: NoisyRayleigh, speed: Array) -> int:
    moving = speed[speed > 0]
    concentration = model.gap / (model.noise**2 * moving.min()) if moving.size else 0.0
    count = 32 + math.ceil(_MODES * math.sqrt(concentration))
    if count > _MOST_MODES:
        raise EquilibriaError(
            f"got noise={model.noise:g}, so little that {count:,} polynomials are needed; expected at most "
            f"{_MOST_MODES:,}: use rayleigh_curve.risk_curve"
        )
    return count
