r"""The noisy Rayleigh quotient: the model, how its norm moves and how fast its direction turns.

A weight ``X`` in ``p`` dimensions minimises ``L(X) = X'AX / (2 X'X)``, ``A = diag(a_1 < a_2 <= ... <= a_p)``, by
``X <- (1 - wd lr) X - lr g`` with ``g = P (A x + noise eps) / ||X||``, ``x = X/||X||``, ``P = I - x x'`` and standard
normal ``eps``. ``M`` is the SQUARED norm ``||X||^2`` throughout, ``rho = x'Ax = 2 L`` the quotient, ``f = (e_1'x)^2``
the alignment with the best direction and ``1 - E f`` the risk. Time is counted in optimizer steps.

The laws of the norm hold for any scale-invariant weight; they take ``unit_grad_sq``, ``E ||g||^2 ||X||^2``, which for
noise alone is ``Tr(P Sigma) = (p-1) noise^2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.moments import angle_from_chord_sq


@law(
    "nrq",
    "Section 2.1, Corollary 3",
    corrected="M is the squared norm; Corollary 1's M_0 is M_0^2; the inverse temperature carries the gap.",
)
@dataclass(frozen=True, slots=True)
class NoisyRayleigh:
    """One noisy Rayleigh quotient with isotropic noise, trained at a constant learning rate and weight decay.

    Attributes:
        spectrum: eigenvalues ``a_1 < a_2 <= ... <= a_p``, ascending.
        noise: standard deviation ``sigma`` of the gradient noise per coordinate, at unit norm.
        lr: learning rate.
        weight_decay: coupled weight decay; ``lr * weight_decay < 1``.

    Raises:
        EquilibriaError: the spectrum is not ascending with a simple lowest value, or a number is not positive.

    Example:
        >>> model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
        >>> round(model.norm_sq, 4), round(model.angular_update, 5)
        (6.7082, 0.04472)
    """

    spectrum: Sequence[float]
    _: KW_ONLY
    noise: float
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        values = reals("spectrum", self.spectrum)
        if values.ndim != 1 or values.size < 2 or np.any(np.diff(values) < 0) or values[0] == values[1]:
            raise EquilibriaError(
                f"got spectrum={self.spectrum!r}; expected ascending eigenvalues a_1 < a_2 <= ... <= a_p",
                argument="spectrum",
            )
        object.__setattr__(self, "spectrum", tuple(values.tolist()))
        for name in ("noise", "lr", "weight_decay"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))
        within("lr * weight_decay", self.lr * self.weight_decay, below=1)

    @classmethod
    def two_level(cls, gap: float, dim: int, *, noise: float, lr: float, weight_decay: float) -> NoisyRayleigh:
        """The model of Theorem 2: one eigenvalue 1 and ``dim - 1`` eigenvalues ``1 + gap``."""
        high = 1 + positive("gap", gap)
        spectrum = (1.0, *[high] * (whole("dim", dim, low=2) - 1))
        return cls(spectrum, noise=noise, lr=lr, weight_decay=weight_decay)

    @property
    def dim(self) -> int:
        """The number ``p`` of coordinates."""
        return len(self.spectrum)

    @property
    def gap(self) -> float:
        """``a_2 - a_1``."""
        return self.spectrum[1] - self.spectrum[0]

    @property
    def spread(self) -> float:
        """``a_p - a_1``; equal to `gap` for a two-level spectrum."""
        return self.spectrum[-1] - self.spectrum[0]

    @property
    def unit_grad_sq(self) -> float:
        """``S^2 = (p-1) sigma^2``, the squared norm of the tangent noise at unit norm."""
        return (self.dim - 1) * self.noise**2

    @property
    def norm_sq(self) -> float:
        """The equilibrium squared norm ``M*`` of the diffusion."""
        return float(equilibrium_norm_sq(self.lr, self.weight_decay, unit_grad_sq=self.unit_grad_sq))

    @property
    def angular_update(self) -> float:
        """``D = sqrt(2 lr wd)``, the equilibrium angle of the diffusion, in radians per step."""
        return float(equilibrium_angle(self.lr, self.weight_decay))

    @property
    def inverse_temperature(self) -> float:
        """``M*/(lr sigma^2) = sqrt(p-1)/(sigma D)``: ``x`` has the stationary density exp(-this · x'Ax) / Z."""
        return self.norm_sq / (self.lr * self.noise**2)

    def rescaled(self, k: float) -> NoisyRayleigh:
        """The model whose trajectory is exactly ``k`` times this one's: ``lr k^2`` and ``wd / k^2`` (Corollary 3).

        Start it at ``k X_0`` and give it the same noise; every angle, risk and loss is then the same.

        Example:
            >>> model = NoisyRayleigh([1.0, 2.0], noise=1.0, lr=0.1, weight_decay=0.01)
            >>> model.rescaled(2.0).norm_sq / model.norm_sq
            4.0
        """
        factor = positive("k", k) ** 2
        return replace(self, lr=self.lr * factor, weight_decay=self.weight_decay / factor)


def _product(lr: ArrayLike, weight_decay: ArrayLike) -> Array:
    product = reals("lr", lr, above=0) * reals("weight_decay", weight_decay, above=0)
    return reals("lr * weight_decay", product, below=1)


@law("nrq", "Eqs. 11, 12 and 17", corrected="Holds for the squared norm: M*^2 = ||X||^4.")
def equilibrium_norm_sq(
    lr: ArrayLike, weight_decay: ArrayLike, *, unit_grad_sq: ArrayLike, discrete: bool = False
) -> Array:
    """The squared norm at which weight decay and the gradient balance.

    ``M*^2 = lr L / (2 wd)`` for the diffusion, ``M*^2 = lr L / (wd (2 - lr wd))`` for the discrete step, with
    ``L = unit_grad_sq``. The discrete form is the exact fixed point of ``M <- (1 - lr wd)^2 M + lr^2 L / M``.

    Args:
        lr: learning rate.
        weight_decay: coupled weight decay, ``lr * weight_decay < 1``.
        unit_grad_sq: ``L = E ||g||^2 ||X||^2``; ``(p-1) noise^2`` when noise dominates.
        discrete: the fixed point of the discrete step instead of the diffusion's.

    Returns:
        ``M* = ||X||^2``.

    Raises:
        EquilibriaError: an argument is not positive, or ``lr * weight_decay >= 1``.

    Example:
        >>> m = equilibrium_norm_sq(0.1, 0.01, unit_grad_sq=9.0, discrete=True)
        >>> bool(abs((1 - 0.001) ** 2 * m + 0.1**2 * 9.0 / m - m) < 1e-14)
        True
    """
    product = _product(lr, weight_decay)
    ratio = np.divide(lr, weight_decay) * reals("unit_grad_sq", unit_grad_sq, above=0)
    result: Array = np.sqrt(ratio / (2 - product if discrete else 2.0))
    return result


@law("nrq", "Lemma 1", corrected="The continuous definition of the angular update needs a square root.")
def equilibrium_angle(lr: ArrayLike, weight_decay: ArrayLike, *, discrete: bool = False) -> Array:
    """The angle per step in equilibrium, independent of the gradient's size.

    ``D = sqrt(2 lr wd)`` for the diffusion; ``cos D = 1 - lr wd`` for a discrete step that keeps the norm.

    Args:
        lr: learning rate.
        weight_decay: coupled weight decay, ``lr * weight_decay < 1``.
        discrete: the discrete step's angle instead of the diffusion's.

    Returns:
        Radians per step.

    Raises:
        EquilibriaError: an argument is not positive, or ``lr * weight_decay >= 1``.

    Example:
        The two differ by the factor 1 + lr wd / 12:

        >>> ratio = equilibrium_angle(0.1, 0.12, discrete=True) / equilibrium_angle(0.1, 0.12)
        >>> round(float(ratio), 5)
        1.001
    """
    chord_sq = 2 * _product(lr, weight_decay)
    return angle_from_chord_sq(chord_sq) if discrete else np.sqrt(chord_sq)


@law("nrq", "Eqs. 12 and 17", corrected="Holds for the squared norm.")
def norm_sq_at(
    times: ArrayLike, norm_sq: ArrayLike, *, lr: ArrayLike, weight_decay: ArrayLike, unit_grad_sq: ArrayLike
) -> Array:
    """The squared norm over time while ``unit_grad_sq`` is constant.

    ``M_t^2 = e^(-4 wd lr t) M_0^2 + (1 - e^(-4 wd lr t)) M*^2``, ``M*^2 = lr L / (2 wd)``; without weight decay
    ``M_t^2 = M_0^2 + 2 lr^2 L t``.

    Args:
        times: steps since the start, not necessarily whole.
        norm_sq: ``M_0 = ||X_0||^2``.
        lr: learning rate.
        weight_decay: coupled weight decay; 0 is allowed.
        unit_grad_sq: ``L = E ||g||^2 ||X||^2``.

    Returns:
        ``M_t = ||X_t||^2``, broadcast over all arguments.

    Raises:
        EquilibriaError: a negative or non-finite argument.

    Example:
        >>> norm_sq_at([50, 1000], 30.0, lr=0.1, weight_decay=0.01, unit_grad_sq=9.0).round(3)
        array([27.295,  7.788])
    """
    from scipy.special import exprel

    t, start = reals("times", times, low=0), reals("norm_sq", norm_sq, above=0)
    eta, decay = reals("lr", lr, low=0), reals("weight_decay", weight_decay, low=0)
    exponent = -4 * decay * eta * t
    gain = 2 * eta**2 * reals("unit_grad_sq", unit_grad_sq, low=0) * t
    result: Array = np.sqrt(np.exp(exponent) * start**2 + gain * exprel(exponent))
    return result


@law("smd+", "Lemma D.1, eq. (180), (181)")
def sde_norm_fourth(steps: ArrayLike, norm: float, *, lr: float, weight_decay: float, noise_sq: float) -> Array:
    """E||w_t||^4 over time by the diffusion approximation of SGD.

    The diffusion is ``dw = -lr wd w dt - lr grad dt + lr Sigma^(1/2) dB``, one time unit per step. With gamma = ||w||^4
    / lr^2 and e = lr wd: ``gamma_t = exp(-4 e t) gamma_0 + noise_sq / (2 e) (1 - exp(-4 e t))``. The diffusion drops
    the squared mean gradient, which the discrete step keeps: use L = noise + ||E g||^2 for the latter.

    Args:
        steps: t, a number or an array.
        norm: ||w_0||.
        lr: learning rate.
        weight_decay: weight decay.
        noise_sq: trace of the covariance of the unit gradient.

    Returns:
        ||w_t||^4; its limit is noise_sq lr / (2 wd). The square root is `norm_sq_at`.

    Example:
        >>> round(float(sde_norm_fourth(1e6, 1.0, lr=0.05, weight_decay=0.2, noise_sq=3.0)), 6)
        0.375
    """
    decay, noise = positive("weight_decay", weight_decay), within("noise_sq", noise_sq, low=0)
    times, start = reals("steps", steps, low=0), positive("norm", norm) ** 2
    return norm_sq_at(times, start, lr=positive("lr", lr), weight_decay=decay, unit_grad_sq=noise) ** 2


def _relax(times: Array, rate: Array, *, source: Array, start: Array) -> Array:
    """Solve ``y' = -rate(t) y + source(t)`` on a grid, along the first axis.

    The rate's integral is taken by the trapezoidal rule and the source as linear between grid points; exact when the
    rate is constant and the source piecewise linear, second order otherwise.
    """
    from scipy.special import exprel

    shape = np.broadcast_shapes(rate.shape[1:], source.shape[1:], start.shape)
    out = np.empty((len(times), *shape))
    out[0] = start
    for n, h in enumerate(np.diff(times)):
        z = -h * (rate[n] + rate[n + 1]) / 2
        whole_step, ramp = exprel(z), _ramp(z)
        out[n + 1] = np.exp(z) * out[n] + h * (source[n] * (whole_step - ramp) + source[n + 1] * ramp)
    return out


def _ramp(z: Array) -> Array:
    r"""``\int_0^1 s e^(z (1-s)) ds = (e^z - 1 - z)/z^2``, by its series where the quotient would cancel."""
    from scipy.special import exprel

    small = np.abs(z) < 1e-2
    safe = np.where(small, 1.0, z)
    series = 1 / 2 + z * (1 / 6 + z * (1 / 24 + z * (1 / 120 + z * (1 / 720 + z / 5040))))
    return np.where(small, series, (exprel(safe) - 1) / safe)


def _grid(times: ArrayLike) -> Array:
    grid = reals("times", times, low=0)
    if grid.ndim != 1 or grid.size < 1 or np.any(np.diff(grid) <= 0):
        raise EquilibriaError(
            f"got times of shape {grid.shape}; expected one axis of increasing times", argument="times"
        )
    return grid


def _on_grid(name: str, value: ArrayLike, *, grid: Array, high: float | None = None) -> Array:
    samples = np.atleast_1d(reals(name, value, low=0, high=high))
    if samples.shape[0] not in (1, grid.size):
        raise EquilibriaError(
            f"got {samples.shape[0]} samples of {name}; expected one per time, {grid.size}", argument=name
        )
    return np.broadcast_to(samples, (grid.size, *samples.shape[1:]))


@law("nrq", "Eq. 12", corrected="Holds for the squared norm.")
def norm_sq_along(
    times: ArrayLike, norm_sq: ArrayLike, *, lr: float, weight_decay: float, unit_grad_sq: ArrayLike
) -> Array:
    r"""The squared norm over time while ``unit_grad_sq`` varies, as for anisotropic noise.

    ``M_t^2 = e^(-4 wd lr t) M_0^2 + 2 lr^2 \int_0^t e^(-4 wd lr (t-s)) L_s ds``, with ``L_s = Tr(P_s Sigma)`` linear
    between the samples; the integral is then exact.

    Args:
        times: increasing times in steps; the first is the start.
        norm_sq: ``M`` at the first time.
        lr: learning rate.
        weight_decay: coupled weight decay; 0 is allowed.
        unit_grad_sq: samples of ``L_s`` along the first axis, one per time; further axes are layers or trials.

    Returns:
        ``M`` at each time.

    Raises:
        EquilibriaError: times do not increase, the number of samples differs, or an argument is negative.

    Example:
        A constant ``L`` gives the closed form back:

        >>> grid = np.linspace(0.0, 400.0, 9)
        >>> path = norm_sq_along(grid, 30.0, lr=0.1, weight_decay=0.01, unit_grad_sq=9.0)
        >>> closed = norm_sq_at(grid, 30.0, lr=0.1, weight_decay=0.01, unit_grad_sq=9.0)
        >>> bool(np.allclose(path, closed, rtol=1e-14))
        True
    """
    grid = _grid(times)
    eta, decay = within("lr", lr, low=0), within("weight_decay", weight_decay, low=0)
    source = 2 * eta**2 * _on_grid("unit_grad_sq", unit_grad_sq, grid=grid)
    rate = np.full(grid.size, 4 * decay * eta)
    squares = _relax(grid, rate, source=source, start=reals("norm_sq", norm_sq, above=0) ** 2)
    result: Array = np.sqrt(squares)
    return result


@law("nrq", "Eq. 14, Definition 1 and Lemma 1", corrected="The definition of Delta_t needs a square root.")
def angular_update(norm_sq: ArrayLike, unit_grad_sq: ArrayLike, *, lr: ArrayLike) -> Array:
    """The root mean square angle per step of the diffusion.

    ``Delta_t = lr sqrt(L) / M_t``. With the full ``L = ||P A x||^2 + Tr(P Sigma)`` this is also the leading order of
    the discrete step's root mean square angle.

    Args:
        norm_sq: ``M_t = ||X||^2``.
        unit_grad_sq: ``L``.
        lr: learning rate.

    Returns:
        Radians per step.

    Raises:
        EquilibriaError: a negative or non-finite argument.

    Example:
        In equilibrium it is sqrt(2 lr wd):

        >>> m = equilibrium_norm_sq(0.1, 0.01, unit_grad_sq=9.0)
        >>> round(float(angular_update(m, 9.0, lr=0.1) / (2 * 0.1 * 0.01) ** 0.5), 12)
        1.0
    """
    root = np.sqrt(reals("unit_grad_sq", unit_grad_sq, low=0))
    result: Array = reals("lr", lr, low=0) * root / reals("norm_sq", norm_sq, above=0)
    return result


@law("nrq", "Eq. 13", corrected="Weight decay shrinks the weight within the step: (1 - lr wd) was missing.")
def angle_from_gradient(grad_norm: ArrayLike, norm: ArrayLike, *, lr: ArrayLike, weight_decay: ArrayLike) -> Array:
    """The exact angle of one discrete step with a gradient orthogonal to the weight.

    ``angle = arctan( lr ||g|| / ((1 - lr wd) ||X||) )``.

    Args:
        grad_norm: ``||g||``.
        norm: ``||X||`` (not squared) before the step.
        lr: learning rate.
        weight_decay: coupled weight decay, ``lr * weight_decay < 1``.

    Returns:
        Radians.

    Raises:
        EquilibriaError: a negative or non-finite argument, or ``lr * weight_decay >= 1``.

    Example:
        >>> round(float(angle_from_gradient(3.0, 2.0, lr=0.5, weight_decay=0.5)), 12) == round(np.pi / 4, 12)
        True
    """
    eta = reals("lr", lr, low=0)
    shrink = 1 - reals("lr * weight_decay", eta * reals("weight_decay", weight_decay, low=0), below=1)
    tangent = eta * reals("grad_norm", grad_norm, low=0) / (shrink * reals("norm", norm, above=0))
    result: Array = np.arctan(tangent)
    return result


@law("nrq", "Remarks 1 and 4, Eqs. 7-8", derived="the second moments of a noisy linear recursion")
def noisy_quadratic_loss(
    steps: ArrayLike, spectrum: ArrayLike, *, start: ArrayLike, noise: float, lr: float, weight_decay: float = 0.0
) -> Array:
    """Expected loss of the noisy quadratic model: ``L = X'AX/2`` by SGD with gradients ``A X + noise eps``.

    ``E x_i^2 = q^(2t) x_i^2 + lr^2 noise^2 (1 - q^(2t))/(1 - q^2)``, ``q = 1 - lr (a_i + wd)``. As for the Rayleigh
    quotient a larger learning rate is faster and ends higher, but weight decay changes the floor by a share ``wd/a_i``.

    Args:
        steps: numbers of steps t.
        spectrum: eigenvalues ``a_i`` of A, positive.
        start: ``X_0``, one number per eigenvalue.
        noise: standard deviation of the gradient noise per coordinate.
        lr: learning rate, such that every ``|q| < 1``.
        weight_decay: coupled weight decay.

    Returns:
        Expected loss after each number of steps.

    Raises:
        EquilibriaError: a value is out of range, the numbers of entries differ, or the iteration diverges.

    Example:
        >>> floor = noisy_quadratic_loss(1e9, [1.0, 2.0], start=[1.0, 0.0], noise=1.0, lr=0.1)
        >>> round(float(floor), 6)  # lr/(4 - 2 lr a_i) for each eigenvalue: 0.1/3.8 + 0.1/3.6
        0.054094
    """
    values, first = reals("spectrum", spectrum, above=0), reals("start", start)
    if values.ndim != 1 or first.shape != values.shape:
        raise EquilibriaError(
            f"got spectrum {values.shape} and start {first.shape}; expected one number per eigenvalue", argument="start"
        )
    kept = 1 - positive("lr", lr) * (values + within("weight_decay", weight_decay, low=0))
    if np.any(np.abs(kept) >= 1):
        raise EquilibriaError(
            f"got lr={lr:g} for eigenvalues up to {values.max():g}; expected |1 - lr (a_i + wd)| < 1",
            argument="lr",
        )
    gone = kept ** (2 * reals("steps", steps, low=0)[..., None])
    squares = gone * first**2 + (lr * within("noise", noise, low=0)) ** 2 * (1 - gone) / (1 - kept**2)
    result: Array = squares @ values / 2
    return result
