"""The share of noise in a gradient, and how much norm and angle fluctuate in equilibrium because of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, within
from equilibria.theory import approach, moments
from equilibria.theory._reals import reals
from equilibria.theory.approach import Linearisation
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import constant_update_point
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule, closed_rule
from equilibria.theory.targets import targets


@dataclass(frozen=True, slots=True)
class Fluctuation:
    """Stationary fluctuations around equilibrium, relative to the equilibrium values.

    Attributes:
        norm_sq_variance: Var(||w||^2) / ||w*||^4.
        norm_variance: Var(||w||) / ||w*||^2, to first order a quarter of ``norm_sq_variance``.
        angle_variance: Var(angle) / angle*^2.
        mean_angle: E[angle] / angle*; the root mean square stays at angle*: compare that with the equilibrium.
    """

    norm_sq_variance: float
    norm_variance: float
    angle_variance: float
    mean_angle: float


@law(
    "smd",
    "Thm 1, Thm 2, eq. (20)-(22)",
    corrected="true variances from the linearised map; the printed bounds are 4 to 5900 times too large",
)
def fluctuation(
    rule: Rule,
    grad_variance: float,
    *,
    unit_grad_sq: float | None = None,
    dim: float | None = None,
) -> Fluctuation:
    """Stationary variance of norm and angle, from the linearised moment recursion (discrete Lyapunov equation).

    To first order in eps = lr wd, for heavy ball with momentum a and V = Var(L), ``Var(||w||^2)/||w||^4 = (V/L^2) eps /
    (2 (1-a))``, ``Var(angle)/angle^2 = (V/4L^2)(1-a^2)/(1+a^2)``. Lion's updates have constant size, so the radial part
    of its sign noise dominates: ``Var(||w||^2)/||w||^4 = 2 (S - S_linear) / (d S)`` to first order (random-walk
    gradients; good to about 15 % at 2 eps / (1-b2) = 0.2). Where ||g||^2 and <v, g> act differently (Nesterov; Adam,
    whose second moment sees ||g||^2 alone) V is split as in the random walk; Adam is good to about 15 % for b2 >= 0.99.

    Args:
        rule: the optimizer.
        grad_variance: V / L^2, relative variance of the rule's own L (for momentum that of
            (||g||^2 + 2 a <v, g>) ||w||^2, for Nesterov with a^2 in place of a); see `random_walk_variance`.
            Lion does not use it.
        unit_grad_sq: L, needed by Adam with L2.
        dim: number of entries, needed by Adam with L2 and Lion; AdamW then counts the scatter of its second moments
            over the entries too, which adds (1-b2)/(2 dim) or so to the variance of ||w||^2.

    Returns:
        The fluctuations; good to a few per cent for V/L^2 up to about 0.5 (SGD, SGDW).

    Raises:
        EquilibriaError: the rule has no law (Muon), or an input is missing.

    Example:
        >>> from equilibria.theory import SGD
        >>> f = fluctuation(SGD(0.5, 0.002), 0.03)
        >>> f"{f.norm_sq_variance:.3e} {f.angle_variance:.3e}"  # 0.03 * 1e-3 / 2,  0.03 / 4
        '1.502e-05 7.495e-03'
    """
    rule = closed_rule(rule)
    noise = within("grad_variance", grad_variance, low=0)
    if isinstance(rule, Lion):
        if dim is None:
            raise EquilibriaError(
                "got dim=None; expected the number of entries: Lion's fluctuation falls as 1/dim", argument="dim"
            )
        return _lion(rule, dim=within("dim", dim, low=1))
    if isinstance(rule, Muon):
        raise EquilibriaError(
            "got a Muon rule; expected SGD, SGDW, AdamW, AdamL2 or Lion: no law is known for Muon", argument="rule"
        )
    if isinstance(rule, AdamW | AdamL2):
        return _adam(rule, noise, unit_grad_sq=unit_grad_sq, dim=dim)
    rule.equilibrium()  # raises where there is no equilibrium
    if isinstance(rule, SGD) and rule.nesterov:
        return _nesterov(rule, noise)
    eps = _resolved(rule.decay_per_step, rule.momentum)
    step = moments.sgdw_step if isinstance(rule, SGDW) else moments.heavy_ball_step
    linear = approach.map_linearisation(step, 1.0, eps, rule.momentum)
    return _sum([(noise, linear)], smaller=rule.decay_per_step / eps)


@dataclass(frozen=True, slots=True)
class MeanFieldShift:
    """What fluctuations change in the mean, relative to the equilibrium law.

    Attributes:
        norm: rms norm over the law's, minus 1.
        angle: rms angle over the law's, minus 1.
    """

    norm: float
    angle: float


@law("smd", "Thm 1, Thm 2", derived="second order in the fluctuation of ||w||^2, which the laws leave out")
def mean_field_shift(rule: SGD | SGDW, grad_variance: float) -> MeanFieldShift:
    """Correction of norm and angle for weights of few entries at a large lr * wd.

    The laws put E[1/P] = 1/E[P] for P = ||w||^2. With v = Var(P)/P^2 the push E[L/P] is larger by 1 + v, hence the norm
    by 1 + v/4, while all mean moments keep their ratios. The angle follows from the second order of cos = <w, w'> /
    (||w|| ||w'||) in the fluctuations. Plain SGD: ``v = eps (2-eps) V / (4 (1-eps)^2)`` with V = ``grad_variance``.

    Args:
        rule: SGD or SGDW; the updates of the other rules have a fixed size, and they need no such correction.
        grad_variance: V / L^2 as in `fluctuation`; 2/(d-1) for d entries without momentum (`random_walk_variance`).

    Returns:
        The shifts; to a factor of 1.5 for shifts up to 5 %.

    Example:
        >>> shift = mean_field_shift(SGD(1.0, 0.2), random_walk_variance(8))  # simulated: 0.010, -0.010
        >>> round(shift.norm, 3), round(shift.angle, 3)
        (0.01, -0.011)
    """
    noise = within("grad_variance", grad_variance, low=0)
    a, eps = rule.momentum, positive("lr * weight_decay", rule.decay_per_step)
    targets(rule, rule.lr)  # raises where there is no equilibrium
    step: moments.MomentStep = moments.sgdw_step
    if isinstance(rule, SGD):
        step = moments.nesterov_step if rule.nesterov else moments.heavy_ball_step
    if eps < _TINY_RATE * (1 - a):
        return MeanFieldShift(0.0, 0.0)
    matrix = moments.step_map(step, 1.0, eps, a)
    state, unit_grad_sq = approach.fixed_point(step, 1.0, eps, a)
    linear = approach.map_linearisation(step, 1.0, eps, a)
    covariance = noise * linear.covariance()
    by_state = matrix[3, :3] - matrix[3, 3] * unit_grad_sq * np.eye(3)[0]  # of ||w'-w||^2
    by_noise = noise * matrix[3, 3] * unit_grad_sq
    spread = float(covariance[0, 0])
    both = float(linear.jacobian[0] @ covariance[:, 0])  # of P and P'
    total = 2 * (spread + both)  # variance of P + P'
    together = covariance[:, 0] + covariance @ linear.jacobian[0]
    moved = float(by_state @ together + by_noise * linear.by_unit_grad_sq[0])
    moved_spread = float(by_state @ covariance @ by_state + by_noise**2 / noise) if noise else 0.0
    cosine = 1 - float(matrix[3] @ [*state, unit_grad_sq]) / 2
    mean = cosine + cosine * (3 / 8 * total - both / 2) - (total - moved) / 4
    # <w, w'> = (P + P' - D)/2, so cos varies by (p + p' - D)/2 - cos (p + p')/2.
    variance = ((1 - cosine) ** 2 * total - 2 * (1 - cosine) * moved + moved_spread) / 4
    angle = math.acos(cosine)
    sine = math.sin(angle)
    bend = (1 - angle * cosine / sine) / sine**2  # half the second derivative of angle^2 by the cosine
    mean_sq = angle**2 - 2 * angle / sine * (mean - cosine) + bend * variance
    return MeanFieldShift(spread / 4, math.sqrt(max(mean_sq, 0.0)) / angle - 1)


_TINY_RATE = 1e-7  # lr * wd / (1 - momentum) below which the Lyapunov equation loses its digits


def _resolved(eps: float, momentum: float) -> float:
    """``eps``, or the smallest lr * wd at which float64 can solve the linearised recursion if that is larger.

    Below that limit first order suffices: the variance of ||w||^2 is proportional to lr * wd, that of the angle
    constant.
    """
    return max(eps, _TINY_RATE * (1 - momentum))


def _result(norm_sq: float, angle: float) -> Fluctuation:
    return Fluctuation(norm_sq, norm_sq / 4, angle, 1 - angle / 2)


def _lion(rule: Lion, *, dim: float) -> Fluctuation:
    """Moments (P, Q, R) = (||w||^2, <w, m>, ||m||^2) of Lion in units of lr = 1 and unit gradients.

    sign(c) is a linear part, ``gain c`` with a gain that falls as 1/||c||, plus distortion that has a radial part.
    """
    rule.equilibrium()  # raises where there is no equilibrium
    (b1, b2), eps = rule.betas, _resolved(rule.decay_per_step, rule.betas[1])  # to first order eps drops out
    s = 1 - eps
    r = (1 - b2) / (1 + b2)
    c_sq = (1 - b1) ** 2 + b1**2 * r
    gain = math.sqrt(2 * dim / (math.pi * c_sq))
    c_dot_m = b1 * b2 * r + (1 - b1) * (1 - b2)
    q = -gain * c_dot_m / (1 - s * b2)
    p = dim * constant_update_point(1.0, eps, rule.memory).norm_sq
    # Derivatives of (P', Q', R') by R and by <m, g>; the middle terms are the gain's 1/||c||. The scatter of ||g||^2
    # itself is left out: it adds less than 1 % where the law holds.
    d_r = np.array([s * gain * b1 * q * b1**2 / c_sq, gain * (c_dot_m * b1**2 / c_sq / 2 - b1 * b2), b2 * b2])
    cross = 2 * b1 * (1 - b1) / c_sq
    d_mg = np.array(
        [s * gain * b1 * q * cross, gain * (c_dot_m * cross / 2 - b1 * (1 - b2) - b2 * (1 - b1)), 2 * b2 * (1 - b2)]
    )
    jacobian = np.column_stack([[s * s, 0, 0], [-2 * s * gain * b1, s * b2, 0], d_r])
    noise = np.outer(d_mg, d_mg) * r / max(dim - 1, 1)
    distortion = rule.memory.total() - 2 / (math.pi * c_sq)
    noise[0, 0] += 4 * s * s * p * distortion
    covariance = np.linalg.solve(np.eye(9) - np.kron(jacobian, jacobian), noise.ravel()).reshape(3, 3)
    variance = float(covariance[0, 0]) / p**2
    # The distortion is correlated over some steps: its total counts in the long run, 1 - 2/pi between two steps.
    next_step = float((jacobian @ covariance)[0, 0]) / p**2 + 2 * s * s * (distortion - 1 + 2 / math.pi) / p
    # log chord^2 = log ||w'-w||^2 - (log P + log P') / 2, and ||w'-w||^2 follows from P and P'.
    moved = 2 * p * constant_update_point(1.0, eps, rule.memory).one_minus_cos
    by_now, by_next = eps * p / moved - 0.5, -eps * p / (s * moved) - 0.5
    log_chord_sq = (by_now**2 + by_next**2) * variance + 2 * by_now * by_next * next_step
    return _result(variance, log_chord_sq / 4)


def _adam(rule: AdamW | AdamL2, noise: float, *, unit_grad_sq: float | None, dim: float | None) -> Fluctuation:
    """Sums three noises: ||g||^2 in both moments, <m, g> in the first, scatter of the second over the entries."""
    b1, b2 = rule.betas
    star = rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim)
    decoupled = isinstance(rule, AdamW)
    own_eps = rule.decay_per_step if isinstance(rule, AdamW) else rule.decay_share(unit_grad_sq=unit_grad_sq, dim=dim)
    eps = _resolved(own_eps, b1)
    linear = approach.adam_linearisation(eps, betas=rule.betas, decoupled=decoupled)
    own = (1 - b1 * b1) / (1 + b1 * b1)  # share of the noise that is in ||g||^2
    overlap = approach.adam_linearisation(eps, betas=rule.betas, decoupled=decoupled, into_second=False)
    result = _sum([(noise * own, linear), (noise * (1 - own), overlap)], smaller=own_eps / eps)
    if star.norm is not None:
        # Entry i moves by m_i / sqrt(v_i), and v_i scatters by 2 (1-b2)/(1+b2): not quite orthogonal to w any more.
        kept = 1 - eps if decoupled else 1.0
        scatter = (rule.lr * kept / float(star.norm)) ** 2 * 2 * (1 - b2) / (1 + b2) * (eps / own_eps)
        direction = np.eye(len(linear.by_unit_grad_sq))[0]
        radial = dataclasses.replace(linear, by_unit_grad_sq=direction, chord_by_unit_grad_sq=0.0)
        more = _sum([(scatter, radial)])
        result = _result(result.norm_sq_variance + more.norm_sq_variance, result.angle_variance + more.angle_variance)
    return result


def _sum(parts: list[tuple[float, Linearisation]], *, smaller: float = 1.0) -> Fluctuation:
    """Sum of independent noises, each with its relative variance; ``smaller`` is lr * wd over `_resolved`."""
    return _result(
        smaller * sum(size * part.norm_sq_variance() for size, part in parts),
        sum(size * part.angle_variance() for size, part in parts),
    )


def _nesterov(rule: SGD, noise: float) -> Fluctuation:
    """Sums two noises: ||g||^2 and <v, g>, which moves the weight one step earlier than under heavy ball."""
    a, eps = rule.momentum, _resolved(rule.decay_per_step, rule.momentum)
    unit_map = moments.step_map(moments.nesterov_step, 1.0, eps, a)
    linear = approach.map_linearisation(moments.nesterov_step, 1.0, eps, a)
    _, unit_grad_sq_star = approach.fixed_point(moments.nesterov_step, 1.0, eps, a)
    gain = moments.nesterov_correlation(eps, a, 1.0)  # L / N at <v, g> = ||g||^2
    overlapping = gain * moments.step_map(moments.nesterov_step, 1.0, eps, a, 1.0)
    per_overlap = (overlapping - unit_map)[:, 3] * unit_grad_sq_star / (gain - 1)
    chord_change = float(per_overlap[3] / linear.chord_sq - per_overlap[0] / 2)
    overlap = dataclasses.replace(linear, by_unit_grad_sq=per_overlap[:3], chord_by_unit_grad_sq=chord_change)
    own = 1 / _nesterov_noise(a)
    return _sum([(noise * own, linear), (noise * (1 - own), overlap)], smaller=rule.decay_per_step / eps)


def _nesterov_noise(a: float) -> float:
    """V of ||g||^2 + 2 a^2 <v, g> over that of ||g||^2, random walk."""
    return 1 + 2 * a**4 / (1 - a * a)


@law("smd+", "C, D", derived="Var of (||g||^2 + 2 a <v, g>) ||w||^2 when the gradient is an isotropic random walk")
def random_walk_variance(dim: float, *, momentum: float = 0.0, nesterov: bool = False) -> float:
    """Relative variance V / L^2 of the random-walk model: isotropic Gaussian gradients tangent to the weight.

    With d = ``dim`` and a = ``momentum``, ``2/(d-1) (1+a^2)/(1-a^2)``: the term 2 a <v, g> dominates, and makes
    Var(angle)/angle^2 = 1/(2(d-1)) for every a. Nesterov: ``2/(d-1) (1 + 2 a^4/(1-a^2))``.

    Args:
        dim: number of entries d.
        momentum: a.
        nesterov: torch's Nesterov variant, whose L counts <v, g> with 2 a^2.

    Returns:
        The relative variance.

    Example:
        >>> from equilibria.theory import SGD
        >>> noise = random_walk_variance(400, momentum=0.9)
        >>> abs(fluctuation(SGD(0.1, 1e-4, momentum=0.9), noise).angle_variance * 2 * 399 - 1) < 1e-2
        True
    """
    d = within("dim", dim, low=2)
    a = within("momentum", momentum, low=0, below=1)
    return 2 / (d - 1) * (_nesterov_noise(a) if nesterov else (1 + a * a) / (1 - a * a))


# ---- the share of noise in a gradient


@dataclass(frozen=True, slots=True)
class NoiseSplit:
    """A mean square gradient split into signal and noise.

    Attributes:
        signal_sq: ||E g||^2, unbiased (may come out slightly negative when it is small).
        noise_sq: trace of the covariance of one micro-batch gradient.
        batches: number of micro-batches m that one step averages.
    """

    signal_sq: float
    noise_sq: float
    batches: int

    @property
    def fraction(self) -> float:
        """Share of noise in the mean square gradient of the averaged step; 1 is the noise-dominated regime."""
        noise = self.noise_sq / self.batches
        total = noise + max(self.signal_sq, 0.0)
        return noise / total if total > 0 else 0.0

    def mean_square(self, batches: float) -> float:
        """E||g||^2 when one step averages ``batches`` such micro-batches: signal + noise / batches."""
        return self.signal_sq + self.noise_sq / positive("batches", batches)


@law("smd+", "Fig. 1, assumption 1", derived="unbiased estimators from m micro-batch gradients")
def noise_split(gradients: ArrayLike) -> NoiseSplit:
    """Split the gradient of one step into signal and noise, from its micro-batch gradients.

    ``noise = sum ||g_i - mean||^2 / (m-1)``, ``signal = ||mean||^2 - noise / m``.

    Args:
        gradients: m micro-batch gradients, shape (m, entries), m >= 2.

    Returns:
        The split.

    Example:
        >>> split = noise_split([[1.0, 1.0], [1.0, -1.0]])
        >>> split.noise_sq, split.signal_sq, split.fraction
        (2.0, 0.0, 1.0)
    """
    g = reals("gradients", gradients)
    if g.ndim != 2 or len(g) < 2:
        raise EquilibriaError(
            f"got gradients of shape {g.shape}; expected (m, entries) with m >= 2 micro-batches", argument="gradients"
        )
    mean = g.mean(axis=0)
    noise = float(np.sum((g - mean) ** 2) / (len(g) - 1))
    return NoiseSplit(float(mean @ mean) - noise / len(g), noise, len(g))
