"""Exact folding of weight decay into the learning rate, for any schedule, and its inverse.

For a scale-invariant loss, SGD with momentum and coupled weight decay visits ``w_t`` while SGD without weight
decay, at a growing learning rate, visits ``P_t w_t``: the same network at every step (with batch statistics).
The recursion runs in log space, since ``P`` outgrows every float. Conventions are those of
``torch.optim.SGD`` with ``dampening=0``: ``buf_t = momentum_t buf_{t-1} + grad_t + weight_decay_t w_t`` and
``w_{t+1} = w_t - lr_t buf_t``.

Gradient clipping by norm and weight averaging are not scale invariant and break the equivalence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, number, whole, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.exponential import LARGEST, decay_limit, decay_roots
from equilibria.theory.schedules import Schedule

Setting = float | ArrayLike | Callable[[int], float]
"""A constant, one value per step, or a function of the step."""

_LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class FoldState:
    """State of a folded run between two steps: stored weights are ``w P / 2^exponent``.

    A run switched from weight decay to folding starts at ``FoldState()`` with weights and buffer unchanged.
    A skipped step (no gradient, or a non-finite one) must not advance the state.

    Attributes:
        log_scale: ``log P_t``.
        q: radial velocity that decay and momentum have put into the weight-decay run's buffer, in units of
            ``weight_decay``; 0 whenever the optimizer holds no buffer.
        exponent: power of two divided out of the stored weights so far.
    """

    log_scale: float = 0.0
    q: float = 0.0
    exponent: int = 0

    def __post_init__(self) -> None:
        number("log_scale", self.log_scale)
        number("q", self.q)

    def renormalised(self, exponent: int) -> FoldState:
        """The state after the stored weights were divided by ``2^exponent`` (see `Renormalisation`)."""
        shift = number("exponent", exponent)
        if not shift.is_integer():
            raise EquilibriaError(f"got exponent={exponent}; expected a whole number", argument="exponent")
        return replace(self, exponent=self.exponent + int(shift))


@dataclass(frozen=True, slots=True)
class FoldStep:
    """One step of a folded run.

    Attributes:
        state: the state after the step.
        lr: learning rate to use in this step, without weight decay; ``inf`` beyond float64.
        log_lr: its natural logarithm.
        alpha: decay factor of the step, ``P_t/P_{t+1}``.
    """

    state: FoldState
    lr: float
    log_lr: float
    alpha: float

    @property
    def running_mean(self) -> float:
        """Factor on the running mean of the batch norm right after a folded weight, to apply after the step."""
        return 1 / self.alpha

    @property
    def running_var(self) -> float:
        """Factor on that batch norm's running variance."""
        return self.running_mean**2


def _lifted(lr: Array, log_gain: Array, exponent: int) -> Array:
    """``lr · exp(log_gain) / 4^exponent`` with a mantissa that does not depend on the exponent, to the bit."""
    whole_part = np.rint(log_gain / _LN2)
    mantissa = lr * np.exp(log_gain - whole_part * _LN2)
    with np.errstate(over="ignore"):
        return np.ldexp(mantissa, whole_part.astype(np.int64) - 2 * exponent)


def _radial_step(
    q: float, lr: float, weight_decay: float, momentum: float, *, step: int | None = None
) -> tuple[float, float]:
    """``1 - alpha`` of one step and ``q`` after it; raises EquilibriaError if ``alpha <= 0``."""
    velocity = weight_decay + momentum * q
    shrink = lr * velocity
    if shrink >= 1:
        where = "" if step is None else f" at step {step}"
        raise EquilibriaError(
            f"got lr={lr:g}, weight_decay={weight_decay:g} (lr*weight_decay={lr * weight_decay:g}), "
            f"momentum={momentum:g}{where}; expected a decay factor alpha > 0 but alpha={1 - shrink:g}: weight decay, "
            "with the momentum it has built up, would change the sign of the weights. Constant settings need "
            f"lr*weight_decay <= (1-sqrt(momentum))^2 = {decay_limit(momentum):g}; a sudden rise of lr needs less"
        )
    return shrink, velocity / (1 - shrink) if momentum else 0.0


@law(
    "explr",
    "Theorem 2.5, eq. 6",
    corrected="0-indexed and division-free: the buffer's radial velocity q replaces lr_t/lr_{t-1} (1 - 1/alpha), so"
    " lr = 0 is allowed",
)
def advance(state: FoldState, lr: float, *, weight_decay: float, momentum: float = 0.0) -> FoldStep:
    """Advance a folded run by one step, for settings that become known as the run goes.

    ``u = weight_decay + momentum q``, ``alpha = 1 - lr u``, ``P' = P/alpha``, ``lr~ = P P' lr / 4^exponent``,
    ``q' = u/alpha``; with ``momentum == 0`` there is no buffer afterwards (delete a stale one), so ``q' = 0``.
    Call it for every step taken, also at ``lr == 0``; not for a skipped one. Li & Arora, Theorem 2.5.

    Args:
        state: the state before the step.
        lr: the original learning rate, at least 0.
        weight_decay: the original coupled weight decay, at least 0.
        momentum: in [0, 1).

    Returns:
        `FoldStep` with the learning rate to use and the new state.

    Raises:
        EquilibriaError: bad input, or ``alpha <= 0``.

    Example:
        >>> step = advance(FoldState(), 0.1, weight_decay=0.5)
        >>> print(f"{step.alpha:.2f} {step.lr:.6f} {0.1 / 0.95:.6f}")
        0.95 0.105263 0.105263
    """
    eta, decay = within("lr", lr, low=0), within("weight_decay", weight_decay, low=0)
    g = within("momentum", momentum, low=0, below=1)
    shrink, q = _radial_step(state.q, eta, decay, g)
    log_scale = state.log_scale - math.log1p(-shrink)
    gain = state.log_scale + log_scale
    after = FoldState(log_scale, q, state.exponent)
    log_lr = gain + math.log(eta) - 2 * state.exponent * _LN2 if eta else -math.inf
    return FoldStep(after, float(_lifted(np.array(eta), np.array(gain), state.exponent)), log_lr, 1 - shrink)


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """A schedule with its weight decay folded in; ``T`` steps.

    Attributes:
        lr: learning rate per step for the run without weight decay, length T; ``inf`` beyond float64.
        log_lr: its natural logarithm, ``-inf`` where the learning rate is 0.
        log_scale: ``log P_t`` before each step and after the last, length T + 1.
        alpha: decay factor of each step, ``P_t/P_{t+1}``, length T.
        q: radial velocity in the buffer before each step and after the last, length T + 1.
        growth_per_step: factor per step that folding puts on the learning rate: the asymptotic ``z1^-2`` if
            lr, weight decay and momentum are constant (and have real roots), otherwise ``alpha^-2`` of the
            last step. A change of the original learning rate itself is not part of it.
    """

    lr: Array
    log_lr: Array
    log_scale: Array
    alpha: Array
    q: Array
    growth_per_step: float

    def growth_per_epoch(self, steps_per_epoch: int) -> float:
        """``growth_per_step`` compounded over an epoch."""
        return float(self.growth_per_step ** whole("steps_per_epoch", steps_per_epoch, low=1))

    def state(self, step: int) -> FoldState:
        """The state before ``step`` (0 to T), without renormalisation."""
        t = int(within("step", whole("step", step), high=self.lr.size))
        return FoldState(float(self.log_scale[t]), float(self.q[t]))

    @property
    def overflow(self) -> dict[str, int | None]:
        """First step at which ``P²`` (batch-norm variances, sums of squares) or the learning rate exceeds each type.

        Weights are taken to be of order 1 at step 0. None: not within these steps
        (`equilibria.theory.exponential.overflow_horizon` looks further for constant settings).
        """
        largest = np.maximum(2 * self.log_scale[:-1], self.log_lr)
        broken = {name: largest > math.log(limit) for name, limit in LARGEST.items()}
        return {name: int(np.argmax(bad)) if bad.any() else None for name, bad in broken.items()}


def _shape(name: str, value: ArrayLike) -> tuple[int, ...]:
    try:
        return np.shape(value)
    except ValueError:
        raise EquilibriaError(
            f"got a ragged {name}; expected a number, one value per step, or a function", argument=name
        ) from None


def _step_count(settings: dict[str, Setting], steps: int | None) -> int:
    """The number of steps that ``steps`` and the arrays among the settings agree on."""
    shapes = {name: _shape(name, value) for name, value in settings.items() if not callable(value)}
    arrays = {name: shape for name, shape in shapes.items() if shape}
    counts = {shape[0] for shape in arrays.values()}
    if steps is not None:
        counts.add(whole("steps", steps, low=1))
    if len(counts) != 1 or 0 in counts or any(len(shape) > 1 for shape in arrays.values()):
        raise EquilibriaError(
            f"got steps={steps} and arrays of shape {arrays}; expected one number of steps, at least 1: "
            "give steps=, or one-dimensional arrays of that length",
            argument="steps",
        )
    return counts.pop()


def _sampled(value: Setting, steps: int) -> ArrayLike:
    if isinstance(value, Schedule):
        return value.values(steps)
    if callable(value):
        return [value(t) for t in range(steps)]
    return value


def _logarithms(log_lr: ArrayLike) -> Array:
    """Finite logarithms, or ``-inf`` for a learning rate of 0."""
    array = np.array(log_lr, dtype=object)
    zero = array == -math.inf
    return np.where(zero, -math.inf, reals("log(lr)", np.where(zero, 0.0, array)))


def _per_step(
    lr: Setting, weight_decay: Setting, momentum: Setting, *, steps: int | None, log: bool = False
) -> tuple[Array, Array, Array]:
    """The settings, checked, as one float per step each; ``log``: the learning rate is a logarithm."""
    count = _step_count({"lr": lr, "weight_decay": weight_decay, "momentum": momentum}, steps)
    rate = _sampled(lr, count)
    settings = (
        _logarithms(rate) if log else reals("lr", rate, low=0),
        reals("weight_decay", _sampled(weight_decay, count), low=0),
        reals("momentum", _sampled(momentum, count), low=0, below=1),
    )
    for name, setting in zip(("lr", "weight_decay", "momentum"), settings, strict=True):
        if setting.shape not in {(), (count,)}:
            raise EquilibriaError(
                f"got a function {name} that returns arrays; expected one number per step", argument=name
            )
    rates, decays, momenta = (np.broadcast_to(setting, count) for setting in settings)
    return rates, decays, momenta


def _check_foldable(optimizer: str, *, nesterov: bool, dampening: float, decoupled: bool) -> None:
    """Raise EquilibriaError, with the reason, for settings that this recursion cannot fold."""
    if optimizer != "sgd":
        raise EquilibriaError(
            f"got optimizer={optimizer!r}; expected 'sgd': only with an update linear in the gradient and coupled "
            "weight decay does a learning rate alone replace decay. For the same angles at another weight decay, use "
            "translate(rule, weight_decay=...)",
            argument="optimizer",
        )
    if nesterov:
        raise EquilibriaError(
            "got nesterov=True; expected False: the look-ahead update has no weight-decay-free equivalent "
            "with the same momentum",
            argument="nesterov",
        )
    if number("dampening", dampening) != 0:
        raise EquilibriaError(
            f"got dampening={dampening:g}; expected 0: the recursion holds for gradient and decay entering the "
            "buffer with weight 1",
            argument="dampening",
        )
    if decoupled:
        raise EquilibriaError(
            "got decoupled=True; expected False: decay outside the buffer would also need another momentum, "
            "momentum_t*alpha_t (at momentum 0 both decays are the same update)",
            argument="decoupled",
        )


@law(
    "explr",
    "Theorem 2.5, eq. 6 and Definition 2.6",
    corrected="signs of the start velocity and its division by lr_{-1}; P_t as the product of 1/alpha_i; a new learning"
    " rate enters at alpha_{T_I+1}",
)
def fold(
    lr: Setting,
    weight_decay: Setting,
    *,
    momentum: Setting = 0.0,
    steps: int | None = None,
    nesterov: bool = False,
    dampening: float = 0.0,
    decoupled: bool = False,
    optimizer: Literal["sgd"] = "sgd",
) -> Folded:
    """Fold weight decay into the learning rate: the schedule without weight decay that trains the same network.

    ``lr~_t = P_t P_{t+1} lr_t`` with ``P_{t+1} = P_t/alpha_{t+1}``, ``alpha_{t+1} = 1 - lr_t u_t``,
    ``u_t = weight_decay_t + momentum_t q_t`` and ``q_{t+1} = u_t/alpha_{t+1}``, from ``P_0 = 1`` and
    ``q_0 = 0``: same start weights, same buffer, same momentum. A step with momentum exactly 0 leaves no
    buffer (``q = 0``), as in PyTorch with a stale buffer deleted. Li & Arora, Theorem 2.5, in division-free
    form.

    Args:
        lr: learning rate: a number, one value per step, or a function of the step; at least 0.
        weight_decay: coupled weight decay, likewise.
        momentum: likewise, in [0, 1).
        steps: number of steps; may be omitted if one setting is an array.
        nesterov: only False can be folded.
        dampening: only 0 can be folded.
        decoupled: only coupled decay (False) can be folded.
        optimizer: only ``"sgd"`` can be folded.

    Returns:
        `Folded`.

    Raises:
        EquilibriaError: bad input, a rule that has no equivalent, or ``alpha <= 0`` at some step.

    Example:
        >>> folded = fold(0.1, 5e-4, momentum=0.9, steps=100_000)
        >>> print(f"{folded.growth_per_step:.10f} {folded.growth_per_epoch(391):.7f} {folded.overflow['float32']}")
        1.0010053006 1.4812334 88309
    """
    _check_foldable(optimizer, nesterov=nesterov, dampening=dampening, decoupled=decoupled)
    rates, decays, momenta = _per_step(lr, weight_decay, momentum, steps=steps)
    shrink, q = _radial_motion(rates, decays, momenta)
    log_scale = np.concatenate([[0.0], -np.cumsum(np.log1p(-shrink))])
    gain = log_scale[:-1] + log_scale[1:]
    with np.errstate(divide="ignore"):
        log_lr = np.log(rates) + gain
    alpha = 1 - shrink
    growth = _growth(rates, decays, momenta, last_alpha=float(alpha[-1]))
    return Folded(_lifted(rates, gain, 0), log_lr, log_scale, alpha, q, growth)


def _radial_motion(rates: Array, decays: Array, momenta: Array) -> tuple[Array, Array]:
    """``1 - alpha`` per step and ``q`` per state; plain floats, because each step needs the one before."""
    shrinks: list[float] = []
    qs = [0.0]
    for step, settings in enumerate(zip(rates.tolist(), decays.tolist(), momenta.tolist(), strict=True)):
        shrink, q = _radial_step(qs[-1], *settings, step=step)
        shrinks.append(shrink)
        qs.append(q)
    return np.array(shrinks), np.array(qs)


def _growth(rates: Array, decays: Array, momenta: Array, *, last_alpha: float) -> float:
    constant = all(np.ptp(setting) == 0 for setting in (rates, decays, momenta))
    product, g = rates[0] * decays[0], momenta[0]
    if constant and product <= decay_limit(g):
        return float(decay_roots(rates[0], decays[0], momentum=g).growth)
    return last_alpha**-2


@dataclass(frozen=True, slots=True, eq=False)
class Unfolded:
    """A schedule with weight decay that is equivalent to one without; ``T`` steps.

    Attributes:
        lr: learning rate per step for the run with weight decay, length T.
        log_scale: ``log P_t``, length T + 1.
        q: radial velocity in the buffer, length T + 1.
    """

    lr: Array
    log_scale: Array
    q: Array


@law(
    "",
    "inverse of Theorem 2.5 of Li & Arora",
    derived="lr~ = P² lr/(1 - lr u) is linear in lr: lr = e/(1 + e u) with e = lr~/P², and 1/alpha = 1 + e u",
)
def unfold(
    lr: Setting,
    weight_decay: Setting,
    *,
    momentum: Setting = 0.0,
    steps: int | None = None,
    log: bool = False,
) -> Unfolded:
    """Learning rate that, with a given weight decay, trains the same network as ``lr`` without; inverse of `fold`.

    With ``e_t = lr~_t/P_t²`` and ``u_t = weight_decay_t + momentum_t q_t``: ``lr_t = e_t/(1 + e_t u_t)``,
    ``P_{t+1} = P_t (1 + e_t u_t)``, ``q_{t+1} = u_t (1 + e_t u_t)``. A solution always exists. Derived here.

    Args:
        lr: weight-decay-free learning rate, or its natural logarithm if ``log``: a number, an array or a
            function.
        weight_decay: the coupled weight decay wanted, likewise.
        momentum: likewise, in [0, 1).
        steps: number of steps; may be omitted if one setting is an array.
        log: read ``lr`` as a logarithm (``-inf`` for 0), which survives beyond float64.

    Returns:
        `Unfolded`.

    Raises:
        EquilibriaError: bad input, or a learning rate that float64 cannot hold.

    Example:
        >>> folded = fold([0.1, 0.1, 0.01], 5e-3, momentum=0.9)
        >>> print(np.round(unfold(folded.lr, 5e-3, momentum=0.9).lr, 12).tolist())
        [0.1, 0.1, 0.01]
    """
    log_rates, decays, momenta = _per_step(lr, weight_decay, momentum, steps=steps, log=log)
    if not log:
        with np.errstate(divide="ignore"):
            log_rates = np.log(log_rates)
    rates, log_scales, qs = [], [0.0], [0.0]
    for t, (log_rate, decay, g) in enumerate(zip(log_rates.tolist(), decays.tolist(), momenta.tolist(), strict=True)):
        velocity = decay + g * qs[-1]
        log_effective = log_rate - 2 * log_scales[-1]
        effective = math.exp(log_effective) if log_effective < 709 else math.inf
        growth = 1 + effective * velocity
        if not math.isfinite(effective + velocity * growth):
            raise EquilibriaError(
                f"got log(lr)={log_rate:g} at step {t} with weight_decay={decay:g}; expected a learning rate that "
                f"grows no faster than this weight decay explains: float64 cannot hold exp({log_effective:g})"
            )
        rates.append(effective / growth)
        log_scales.append(log_scales[-1] + math.log1p(effective * velocity))
        qs.append(velocity * growth if g else 0.0)
    return Unfolded(np.array(rates), np.array(log_scales), np.array(qs))
