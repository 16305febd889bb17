"""The whole risk curve of a two-level noisy Rayleigh quotient under any schedule, and the escape it shows.

The risk obeys ``r' = -2 gap (lr/M) E f(1-f) + (lr sigma/M)^2 ((p-1) - p r)`` exactly. To close this equation, ``f`` is
assumed to follow the Watson law with the same mean, which is exact in every stationary state (`risk_curve`).

`exact_risk_curve` needs no closure: it follows all moments of the alignment at once. At norm ``M`` and with
``x = lr/M`` the alignment ``f`` has the generator
``x^2 sigma^2 [2 f (1-f) d^2 + (1 - p f) d] + 2 x gap f (1-f) d``. The first bracket has the Jacobi polynomials of the
weight ``f^(-1/2) (1-f)^((p-3)/2)`` as eigenfunctions, with eigenvalues ``-n (2n + p - 2)``; its commutator with ``f``
is ``4 f (1-f) d + (1 - p f)``, so the second part couples neighbours only. The means of these polynomials thus obey a
tridiagonal linear equation, and the first of them is the risk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.theory._reals import Array
from equilibria.theory.citations import law
from equilibria.theory.rayleigh import NoisyRayleigh, equilibrium_norm_sq
from equilibria.theory.schedules import ScheduleLike, as_schedule
from equilibria.theory.watson import watson_concentration, watson_moments

_RATE_PER_STAGE = 0.1  # Runge-Kutta of order 4 then errs by less than 1e-7 per unit of r
_LOG_ODDS = 16.0  # from here on E f(1-f) differs from r (1-r) by less than 1e-6 of itself
_SPACING = 0.1


class _Mixing:
    """``E f(1-f)`` of the Watson law as a function of the risk, tabulated for one dimension.

    The ratio to ``r (1-r)`` is a smooth function of the log-odds of ``r`` and tends to 1 at both ends; its cubic spline
    is accurate to 1e-6.
    """

    def __init__(self, dim: int) -> None:
        from scipy.interpolate import CubicSpline
        from scipy.special import expit

        count = math.ceil((2 * _LOG_ODDS + math.log(dim)) / _SPACING)
        odds = -_LOG_ODDS + _SPACING * np.arange(count + 1)
        moments = watson_moments(watson_concentration(expit(odds), dim), dim)
        self.pieces: list[list[float]] = CubicSpline(odds, moments.mixing / (moments.risk * moments.mean)).c.T.tolist()

    def __call__(self, risk: float) -> float:
        if not 0 < risk < 1:
            return 0.0
        place = math.log(risk / (1 - risk)) + _LOG_ODDS
        index = int(place / _SPACING)
        if place < 0 or index >= len(self.pieces):
            return risk * (1 - risk)
        x = place - index * _SPACING
        a, b, c, d = self.pieces[index]
        return risk * (1 - risk) * (((a * x + b) * x + c) * x + d)


@lru_cache(maxsize=32)
def _mixing(dim: int) -> _Mixing:
    return _Mixing(dim)


@dataclass(frozen=True, slots=True)
class Escape:
    """The dip of the risk below its final value.

    Attributes:
        step: the step of the lowest risk.
        lowest: the risk there.
        final: the risk at the end of the curve.
        ratio: ``final / lowest``; 1 when there is no escape.
    """

    step: int
    lowest: float
    final: float
    ratio: float


@dataclass(frozen=True, slots=True)
class RiskCurve:
    """Risk, norm and angular update before each step and after the last: arrays of ``steps + 1`` numbers.

    Attributes:
        risk: ``1 - E f``.
        norm_sq: ``M = ||X||^2``, after a rescale if there is one at that step.
        angular_update: radians per step, with the learning rate of that step.
    """

    risk: Array
    norm_sq: Array
    angular_update: Array

    def escape(self, *, after: int = 0) -> Escape:
        """The dip of the risk at or after a step, as at a learning-rate drop.

        Example:
            >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
            >>> curve = risk_curve(model, 3000, risk=0.0624, norm_sq=14.42)
            >>> round(curve.escape().lowest, 3)
            0.039
        """
        start = whole("after", after)
        if start >= len(self.risk):
            raise EquilibriaError(
                f"got after={start}; expected a step of the curve, 0 to {len(self.risk) - 1}", argument="after"
            )
        step = start + int(np.argmin(self.risk[start:]))
        lowest, final = float(self.risk[step]), float(self.risk[-1])
        return Escape(step, lowest, final, final / lowest if lowest > 0 else math.inf)


class _Integrator:
    """One optimizer step of the pair (risk, M^2) at a constant learning rate and weight decay."""

    def __init__(self, model: NoisyRayleigh) -> None:
        self.gap, self.dim, self.noise_sq = model.gap, model.dim, model.noise**2
        self.size = math.sqrt(model.unit_grad_sq)
        self.mixing = _mixing(model.dim)

    def drift(self, risk: float, x: float) -> float:
        return x * (self.noise_sq * x * (self.dim - 1 - self.dim * risk) - 2 * self.gap * self.mixing(risk))

    def stages(self, x: float, *, step: int) -> int:
        pull = self.gap * x
        _check_diffusive(self.size * x, pull, step=step)
        return math.ceil((2 * pull + self.noise_sq * self.dim * x * x) / _RATE_PER_STAGE) or 1

    def advance(self, risk: float, square: float, *, lr: float, weight_decay: float, step: int) -> tuple[float, float]:
        start = lr / math.sqrt(square)
        count = self.stages(start, step=step)
        h = 1 / count
        exponent = 2 * weight_decay * lr * h  # half a stage of the rate 4 wd lr
        keep = math.exp(-exponent)
        gain = (lr * self.size) ** 2 * h * (-math.expm1(-exponent) / exponent if exponent else 1.0)
        for _ in range(count):
            middle = keep * square + gain
            square = keep * middle + gain
            half, end = lr / math.sqrt(middle), lr / math.sqrt(square)
            k1 = self.drift(risk, start)
            k2 = self.drift(risk + h / 2 * k1, half)
            k3 = self.drift(risk + h / 2 * k2, half)
            k4 = self.drift(risk + h * k3, end)
            risk += h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            start = end
        return min(max(risk, 0.0), 1.0), square


def _check_diffusive(turn: float, pull: float, *, step: int) -> None:
    if turn >= 1 or pull >= 1:
        raise EquilibriaError(
            f"got an angular update of {turn:.3g} and a relative gradient step of {pull:.3g} at step {step}; "
            "expected both below 1, where a diffusion describes the steps: use a larger norm_sq or a lower lr"
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of every step of a two-level model, checked.

    Attributes:
        lr: learning rates.
        weight_decay: weight decays.
        factors: factor on ``M^2`` before each step; 1 without rescaling.
        norm_sq: ``M`` at the start.
    """

    lr: Array
    weight_decay: Array
    factors: Array
    norm_sq: float


def _settings(
    model: NoisyRayleigh,
    steps: int,
    *,
    norm_sq: float | None,
    lr: ScheduleLike | None,
    weight_decay: ScheduleLike | None,
    rescale: bool,
) -> _Settings:
    if model.gap != model.spread:
        raise EquilibriaError(
            f"got eigenvalues from {model.spectrum[1]:g} to {model.spectrum[-1]:g} above the lowest; expected one"
        )
    count = whole("steps", steps, low=1)
    rates = as_schedule(model.lr if lr is None else lr, name="lr").values(count)
    decay_schedule = as_schedule(model.weight_decay if weight_decay is None else weight_decay, name="weight_decay")
    decays, factors = decay_schedule.values(count), np.ones(count)
    if rescale:
        if np.any(rates <= 0):
            raise EquilibriaError(
                f"got lr={rates.min():g} with rescale=True; expected lr > 0 at every step", argument="lr"
            )
        factors[1:] = rates[1:] / rates[:-1]
    if norm_sq is None:
        norm_sq = float(equilibrium_norm_sq(rates[0], decays[0], unit_grad_sq=model.unit_grad_sq))
    return _Settings(rates, decays, factors, positive("norm_sq", norm_sq))


@law(
    "nrq",
    "Eqs. 16 and 17, Figure 2",
    derived="The exact equation of the mean of f, closed by the Watson law of the same mean.",
)
def risk_curve(
    model: NoisyRayleigh,
    steps: int,
    *,
    risk: float,
    norm_sq: float | None = None,
    lr: ScheduleLike | None = None,
    weight_decay: ScheduleLike | None = None,
    rescale: bool = False,
) -> RiskCurve:
    """Risk, norm and angular update of a two-level model, step by step, under any schedule.

    ``r' = -2 gap (lr/M) Phi(r) + (lr sigma/M)^2 ((p-1) - p r)``, ``Phi(r) = ((p-1) - p r)/(2 b(r))`` with ``b(r)`` of
    `watson_concentration`; ``(M^2)' = -4 wd lr M^2 + 2 lr^2 S^2``. With ``rescale`` the weights are divided by
    ``k^(1/4)`` whenever the learning rate is divided by ``k``, which keeps the norm in equilibrium and removes the
    escape.

    How far to trust it: every stationary state is exact, and the escape after a learning-rate drop agrees with
    simulation within 3 %. While ``f`` is far from its Watson law, as in the first descent from a random direction
    or from one fixed ``f``, the risk is off by up to 0.14 and reaches a given level 10-25 % early or late. The
    integration itself errs by less than 2e-6 of the risk. `exact_risk_curve` has no closure.

    Args:
        model: a two-level noisy Rayleigh quotient.
        steps: number of optimizer steps.
        risk: risk at the start, in [0, 1]; ``1 - 1/p`` for a random direction.
        norm_sq: ``M_0 = ||X_0||^2``; by default the equilibrium of the first step's learning rate and weight decay.
        lr: learning rate or schedule instead of ``model.lr``.
        weight_decay: weight decay or schedule instead of ``model.weight_decay``.
        rescale: divide the weights whenever the learning rate changes.

    Returns:
        `RiskCurve`.

    Raises:
        EquilibriaError: the spectrum has more than two levels, an argument is out of range, or a step turns by more
            than a diffusion can describe.

    Example:
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> curve = risk_curve(model, 2000, risk=0.9)
        >>> round(float(curve.risk[-1]), 4)
        0.0676
    """
    settings = _settings(model, steps, norm_sq=norm_sq, lr=lr, weight_decay=weight_decay, rescale=rescale)
    rates = settings.lr
    r, square = within("risk", risk, low=0, high=1), settings.norm_sq**2
    integrator = _Integrator(model)
    risks, squares = np.empty(len(rates) + 1), np.empty(len(rates) + 1)
    columns = (values.tolist() for values in (rates, settings.weight_decay, settings.factors))
    for n, (eta, decay, factor) in enumerate(zip(*columns, strict=True)):
        square *= factor
        risks[n], squares[n] = r, square
        r, square = integrator.advance(r, square, lr=eta, weight_decay=decay, step=n)
    risks[-1], squares[-1] = r, square
    norms = np.sqrt(squares)
    return RiskCurve(risks, norms, integrator.size * np.append(rates, rates[-1]) / norms)


# ---- all moments of the alignment at once


_MODES_RATE_PER_STAGE = 0.05  # the method of order 2 then errs by less than 1e-4 of the risk
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

        count = math.ceil(pull / _MODES_RATE_PER_STAGE) or 1
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
    `risk_curve` is faster but assumes a Watson law of the same mean and is off by up to 0.14 in the
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
            f"{_MOST_MODES:,}: use risk_curve"
        )
    return count
