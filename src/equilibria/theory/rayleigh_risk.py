"""The risk of the noisy Rayleigh quotient: its drift and diffusion, its limit, its bounds, and when it escapes.

The risk is ``r_t = 1 - E f_t``, ``f`` the squared cosine with the best direction. Notation of `rayleigh`: ``S^2 = (p-1)
sigma^2``, ``D = sqrt(2 lr wd)``, ``gap = a_2 - a_1``, ``spread = a_p - a_1``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.rayleigh import NoisyRayleigh, _grid, _on_grid, _relax
from equilibria.theory.watson import bingham_moments, watson_risk


@dataclass(frozen=True, slots=True)
class AlignmentSDE:
    """``df = drift dt + diffusion dB`` for ``f = (e_1'x)^2``; both per step.

    Attributes:
        drift: expected change of ``f`` per step.
        diffusion: standard deviation of ``f`` per square root of a step.
    """

    drift: Array
    diffusion: Array


@law("nrq", "Eq. 16", corrected="The drift's first term needs a factor 2, and its L_t means the quotient rho = 2 L.")
def alignment_sde(f: ArrayLike, quotient: ArrayLike, *, model: NoisyRayleigh, norm_sq: ArrayLike) -> AlignmentSDE:
    """Drift and diffusion of the alignment ``f`` with the best direction.

    ``df = [2 (lr/M) (rho - a_1) f + (lr sigma/M)^2 (1 - p f)] dt + 2 (lr sigma/M) sqrt(f (1-f)) dB``.

    Args:
        f: alignment in [0, 1].
        quotient: ``rho = x'Ax = 2 L``, between ``a_1`` and ``a_p``.
        model: spectrum, noise and learning rate.
        norm_sq: ``M = ||X||^2``.

    Returns:
        `AlignmentSDE`, broadcast over ``f``, ``quotient`` and ``norm_sq``.

    Raises:
        EquilibriaError: ``f`` outside [0, 1], ``quotient`` outside the spectrum, or ``norm_sq`` not positive.

    Example:
        At a uniform direction (f = 1/p) the noise does not push ``f`` either way:

        >>> model = NoisyRayleigh([1.0, 2.0, 2.0, 2.0], noise=1.0, lr=0.1, weight_decay=0.01)
        >>> sde = alignment_sde(0.25, 1.75, model=model, norm_sq=2.0)
        >>> round(float(sde.drift), 12) == round(2 * 0.05 * 0.75 * 0.25, 12)
        True
    """
    x = reals("f", f, low=0, high=1)
    rho = reals("quotient", quotient, low=model.spectrum[0], high=model.spectrum[-1])
    speed = model.lr / reals("norm_sq", norm_sq, above=0)
    jitter = speed * model.noise
    drift = 2 * speed * (rho - model.spectrum[0]) * x + jitter**2 * (1 - model.dim * x)
    return AlignmentSDE(drift, 2 * jitter * np.sqrt(x * (1 - x)))


@dataclass(frozen=True, slots=True)
class QuotientBounds:
    """Bounds on the quotient ``rho = 2 L`` from the alignment alone.

    Attributes:
        low: ``rho`` is at least this.
        high: ``rho`` is at most this.
    """

    low: Array
    high: Array


@law("nrq", "Section 3, before Eq. 16", corrected="The sandwich is about the quotient rho = 2 L, not L.")
def quotient_bounds(f: ArrayLike, model: NoisyRayleigh) -> QuotientBounds:
    """Bounds on the quotient from the alignment; for a two-level spectrum they coincide.

    ``a_1 + (a_2-a_1)(1-f) <= rho <= a_1 + (a_p-a_1)(1-f)``.

    Args:
        f: alignment in [0, 1].
        model: the spectrum.

    Returns:
        `QuotientBounds` of the shape of ``f``.

    Raises:
        EquilibriaError: ``f`` outside [0, 1].

    Example:
        >>> model = NoisyRayleigh([1.0, 2.0, 4.0], noise=1.0, lr=0.1, weight_decay=0.01)
        >>> bounds = quotient_bounds(0.5, model)
        >>> float(bounds.low), float(bounds.high)
        (1.5, 2.5)
    """
    risk = 1 - reals("f", f, low=0, high=1)
    return QuotientBounds(model.spectrum[0] + model.gap * risk, model.spectrum[0] + model.spread * risk)


def _gaps(model: NoisyRayleigh) -> Array:
    values: Array = np.array(model.spectrum)
    result: Array = values[1:] - values[0]
    return result


@dataclass(frozen=True, slots=True)
class StationaryRisk:
    """Stationary state of the diffusion; all without unit except the loss, which has the unit of the spectrum.

    Attributes:
        risk: ``lim r_t``, exact for the diffusion.
        excess_loss: ``lim E L - a_1/2``, exact for the diffusion.
        risk_leading: ``risk`` to leading order in ``D``.
        excess_loss_leading: ``excess_loss`` to leading order in ``D``: ``S D / 4`` for every spectrum.
        finite_step: factor on ``risk`` of the discrete step, to first order in ``D``.
        finite_step_norm_sq: factor on ``M*`` of the discrete step, to first order in ``D``.
    """

    risk: float
    excess_loss: float
    risk_leading: float
    excess_loss_leading: float
    finite_step: float
    finite_step_norm_sq: float


@law(
    "nrq",
    "Theorem 2, Eq. 26",
    corrected="Eq. 26 prints roughly lim E f and misses a factor 1/2; extended here to every spectrum (Bingham law).",
)
def stationary_risk(model: NoisyRayleigh) -> StationaryRisk:
    """The limiting risk and loss in equilibrium.

    The direction has density proportional to ``exp(-c x'Ax)``, ``c = sqrt(p-1)/(sigma D)``; a two-level spectrum gives
    ``risk = r*(c gap)`` of `watson_risk`. To leading order
    ``r* = sigma D / (2 sqrt(p-1)) sum_{i>=2} 1/(a_i - a_1)`` and ``E L - a_1/2 = S D / 4``: every direction carries the
    same share of the excess loss, independent of its curvature. A discrete step multiplies the risk by
    ``1 + (D/S) (h/2 - m/4)`` and ``M*`` by ``1 + (D/S) m/4``, ``h`` and ``m`` the harmonic and arithmetic mean of
    ``a_i - a_1``; for a two-level spectrum both are ``1 + gap D / (4 S)``.

    Args:
        model: the noisy Rayleigh quotient.

    Returns:
        `StationaryRisk`.

    Example:
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> limit = stationary_risk(model)
        >>> round(limit.risk, 4), round(0.5 + limit.excess_loss, 4)
        (0.0676, 0.5338)
    """
    gaps, turn, size = _gaps(model), model.angular_update, np.sqrt(model.unit_grad_sq)
    if model.gap == model.spread:
        risk = float(watson_risk(model.gap * model.inverse_temperature, model.dim))
        excess = model.gap * risk / 2
    else:
        moments = bingham_moments(model.spectrum, model.inverse_temperature).second_moments[1:]
        risk, excess = float(moments.sum()), float(gaps @ moments) / 2
    harmonic, mean = 1 / np.mean(1 / gaps), gaps.mean()
    return StationaryRisk(
        risk=risk,
        excess_loss=excess,
        risk_leading=float(size * turn / (2 * harmonic)),
        excess_loss_leading=float(size * turn / 4),
        finite_step=float(1 + turn / size * (harmonic / 2 - mean / 4)),
        finite_step_norm_sq=float(1 + turn / size * mean / 4),
    )


@law(
    "nrq",
    "Theorem 1, Eqs. 18-19",
    corrected="A factor 2 was missing in the rate, and an lr at Delta was too many.",
)
def risk_lower_bound(times: ArrayLike, angular_update: ArrayLike, *, model: NoisyRayleigh, risk: ArrayLike) -> Array:
    r"""Lower bound on the risk of any noisy Rayleigh quotient with a given angular update.

    ``r_t >= e^(-G(t)) [r_0 + \int_0^t Delta^2 e^G ds]``, ``G = \int 2 spread Delta/S + p/(p-1) Delta^2``. The integrals
    are of second order in the spacing of ``times``.

    Args:
        times: increasing times in steps.
        angular_update: ``Delta`` at each time, radians per step, or one number if it is constant.
        model: spectrum and noise; its learning rate and weight decay are not used.
        risk: ``r_0`` at the first time, in [0, 1].

    Returns:
        The bound at each time.

    Raises:
        EquilibriaError: times do not increase, the number of samples differs, or ``risk`` is outside [0, 1].

    Example:
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> bound = risk_lower_bound(np.arange(1001.0), model.angular_update, model=model, risk=0.9)
        >>> round(float(bound[-1]), 4)
        0.0624
    """
    grid = _grid(times)
    turn = _on_grid("angular_update", angular_update, grid=grid)
    rate = 2 * model.spread * turn / np.sqrt(model.unit_grad_sq) + model.dim / (model.dim - 1) * turn**2
    return _relax(grid, rate, source=turn**2, start=reals("risk", risk, low=0, high=1))


@law(
    "nrq",
    "Theorem 1, Eqs. 20-21",
    corrected="A factor 2 was missing twice, an lr was spurious, e^(-G) inside is e^(+H(s)), eps(t) is eps(s).",
)
def risk_upper_bound(
    times: ArrayLike,
    angular_update: ArrayLike,
    *,
    model: NoisyRayleigh,
    risk: ArrayLike,
    xi: float,
    tail: ArrayLike,
) -> Array:
    r"""Upper bound on the risk of any noisy Rayleigh quotient with a given angular update and tail probability.

    ``r_t <= e^(-H(t)) [r_0 + \int_0^t (2 gap xi tail Delta/S + Delta^2) e^(H(s)) ds]``,
    ``H = \int 2 xi gap Delta/S + p/(p-1) Delta^2``. The integrals are of second order in the spacing of ``times``.

    Args:
        times: increasing times in steps.
        angular_update: ``Delta`` at each time, radians per step, or one number if it is constant.
        model: spectrum and noise; its learning rate and weight decay are not used.
        risk: ``r_0`` at the first time, in [0, 1].
        xi: level in (0, 1).
        tail: ``P(f < xi)`` at each time, or one number; in the limit `watson_cdf` of a two-level model.

    Returns:
        The bound at each time.

    Raises:
        EquilibriaError: times do not increase, the number of samples differs, or a probability is outside [0, 1].

    Example:
        With ``xi`` near 1 and no tail it meets the lower bound of a two-level spectrum:

        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> t = np.arange(1001.0)
        >>> high = risk_upper_bound(t, 0.04, model=model, risk=0.9, xi=1 - 1e-12, tail=0.0)
        >>> bool(np.allclose(high, risk_lower_bound(t, 0.04, model=model, risk=0.9), rtol=1e-10))
        True
    """
    grid = _grid(times)
    turn = _on_grid("angular_update", angular_update, grid=grid)
    pull = 2 * within("xi", xi, above=0, below=1) * model.gap * turn / np.sqrt(model.unit_grad_sq)
    source = pull * _on_grid("tail", tail, grid=grid, high=1) + turn**2
    rate = pull + model.dim / (model.dim - 1) * turn**2
    return _relax(grid, rate, source=source, start=reals("risk", risk, low=0, high=1))


@dataclass(frozen=True, slots=True)
class EquilibriumRiskBounds:
    """The bounds of Corollary 1; rates per step, risks without unit.

    Attributes:
        fastest: the risk approaches its limit at most at this rate.
        risk_low: the limiting risk is at least this.
        slowest: the risk approaches its limit at least at this rate.
        risk_up: the limiting risk is at most this, plus the tail probability.
    """

    fastest: float
    risk_low: float
    slowest: float
    risk_up: float

    def lower(self, times: ArrayLike, risk: float) -> Array:
        """``r_low + (r_0 - r_low) e^(-fastest t)``, a lower bound on the risk at all ``times``."""
        gone = np.exp(-self.fastest * reals("times", times, low=0))
        result: Array = self.risk_low + (within("risk", risk, low=0, high=1) - self.risk_low) * gone
        return result

    def upper(self, times: ArrayLike, risk: float, *, tail: float) -> Array:
        """``u + (r_0 - u) e^(-slowest t)``, ``u = r_up + tail``: an upper bound while ``P(f < xi) <= tail``."""
        limit = self.risk_up + within("tail", tail, low=0, high=1)
        gone = np.exp(-self.slowest * reals("times", times, low=0))
        result: Array = limit + (within("risk", risk, low=0, high=1) - limit) * gone
        return result


@law(
    "nrq",
    "Corollary 1, Eqs. 22-24",
    corrected="Rates need a factor 2, risks 1/2; the second rate has xi (a_2-a_1); the assumption is on M_0^2.",
)
def equilibrium_risk_bounds(model: NoisyRayleigh, *, xi: float) -> EquilibriumRiskBounds:
    """Rates and limits of the risk bounds while the norm stays in equilibrium.

    ``fastest = 2 spread D/S + p D^2/(p-1)``, ``r_low = D^2/fastest``, ``slowest = 2 xi gap D/S + p D^2/(p-1)``,
    ``r_up = D^2/slowest``. To leading order ``r_low = S D/(2 spread)`` and ``r_up = S D/(2 xi gap)``: a larger angular
    update converges faster, to a higher floor.

    Args:
        model: the noisy Rayleigh quotient; the norm must start at ``model.norm_sq``.
        xi: level in (0, 1) of the tail probability ``P(f < xi)``.

    Returns:
        `EquilibriumRiskBounds`.

    Raises:
        EquilibriaError: ``xi`` outside (0, 1).

    Example:
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> bounds = equilibrium_risk_bounds(model, xi=0.8)
        >>> round(bounds.fastest, 4), round(bounds.risk_low, 4)
        (0.032, 0.0624)
    """
    level = within("xi", xi, above=0, below=1)
    turn, size = model.angular_update, np.sqrt(model.unit_grad_sq)
    spin = model.dim / (model.dim - 1) * turn**2
    fastest = float(2 * model.spread * turn / size + spin)
    slowest = float(2 * level * model.gap * turn / size + spin)
    return EquilibriumRiskBounds(fastest, turn**2 / fastest, slowest, turn**2 / slowest)


@law(
    "nrq",
    "Corollary 2",
    corrected="Half the printed threshold suffices; M_0 is the squared norm. Sufficient, not sharp.",
)
def escape_norm_sq(model: NoisyRayleigh, *, risk: float, xi: float, tail: float = 0.0) -> float:
    """The squared norm above which the risk first falls and then climbs back: an "escape".

    ``M_0 > (p-1) sigma^2 lr / (2 xi gap (r_0 - tail))``. From ``r_0`` at the lower bound of the limiting risk, a larger
    ``M_0`` makes the risk fall at the start although its limit is not below ``r_0``. The condition is sufficient: a
    smaller norm may show an escape too.

    Args:
        model: the noisy Rayleigh quotient.
        risk: ``r_0``, the risk at the start, in (tail, 1].
        xi: level in (0, 1).
        tail: an upper bound on ``P(f < xi)``.

    Returns:
        The threshold on ``M_0 = ||X_0||^2``.

    Raises:
        EquilibriaError: ``xi`` outside (0, 1), or ``risk`` not above ``tail``.

    Example:
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> low = equilibrium_risk_bounds(model, xi=0.8).risk_low
        >>> round(escape_norm_sq(model, risk=low, xi=0.8), 2)
        9.01
    """
    margin = positive("risk - tail", within("risk", risk, low=0, high=1) - within("tail", tail, low=0, high=1))
    return model.unit_grad_sq * model.lr / (2 * within("xi", xi, above=0, below=1) * model.gap * margin)


_CELLS = 2000  # of the angle, and more for a high concentration; their second-order error of the rate is below 1e-3
_CELLS_PER_ROOT = 40.0  # of the concentration, whose inverse root is the width of the stationary density
_DROP = 80.0  # exp(-80) of the stationary density lies before the first cell


@law(
    "nrq",
    "Theorem 2, Eq. 27",
    derived="the theorem states that some rate mu exists; it is the spectral gap of the Fokker-Planck operator of f",
)
def spectral_gap(model: NoisyRayleigh) -> float:
    """The rate ``mu`` at which a two-level model in equilibrium forgets its start.

    ``|P(f_t < xi) - P*| <= C e^(-mu t)``, with P* the stationary probability. With ``f = cos^2 t`` the angle t diffuses
    at the rate ``(lr sigma/M*)^2/2`` in the density ``exp(b cos^2 t) sin^(p-2) t``, ``b = gap M*/(lr sigma^2)``; mu is
    the smallest positive eigenvalue of its operator. For a small gap it is ``p (lr sigma/M*)^2 = p D^2/(p-1)``. For a
    large one it is ``gap lr/M* = gap D/S``, in proportion to the angular update: the rate of leaving the equator
    ``f = 0``, an unstable point, where some trials linger. The mean risk of trials that start near the best direction,
    far from the equator, falls twice as fast.

    Args:
        model: a two-level noisy Rayleigh quotient.

    Returns:
        The rate per step.

    Raises:
        EquilibriaError: the spectrum has more than two levels.

    Example:
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=1e-6)
        >>> leading = model.gap * model.angular_update / model.unit_grad_sq**0.5
        >>> round(spectral_gap(model) / leading, 2)
        1.0
    """
    from scipy.linalg import eigh_tridiagonal

    if model.gap != model.spread:
        raise EquilibriaError(
            f"got eigenvalues from {model.spectrum[1]:g} to {model.spectrum[-1]:g} above the lowest; expected one",
            argument="model",
        )
    speed = model.angular_update / np.sqrt(model.unit_grad_sq)  # lr/M*
    b = model.gap * model.inverse_temperature
    width = np.pi / 2 / max(_CELLS, int(_CELLS_PER_ROOT * np.sqrt(b + model.dim)))
    middles = np.arange(width / 2, np.pi / 2, width)

    def log_density(angle: Array) -> Array:
        result: Array = (model.dim - 2) * np.log(np.sin(angle)) - b * np.sin(angle) ** 2
        return result

    inside = log_density(middles)
    first = int(np.argmax(inside > inside.max() - _DROP))  # in many dimensions nothing is near the best direction
    inside, through = inside[first:], log_density(middles[first:-1] + width / 2)
    side = np.exp(through - (inside[:-1] + inside[1:]) / 2)
    centre = np.zeros(len(inside))
    centre[:-1] -= np.exp(through - inside[:-1])
    centre[1:] -= np.exp(through - inside[1:])
    last = len(inside) - 1
    top = eigh_tridiagonal(centre, side, eigvals_only=True, select="i", select_range=(last - 1, last))
    return float(-top[0] * (speed * model.noise / width) ** 2 / 2)
