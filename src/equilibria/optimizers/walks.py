"""The experiment behind `equilibria.identify`: a copy of an optimizer on a random walk that nothing but it decides.

The weight is a float64 tensor, its gradient is noise orthogonal to the weight and as long as 1 / ||w||: the gradient of
a scale-invariant weight in its plainest form. The norm is free to move.

Two twins walk side by side. They start at w and (1 + d) w and get the same gradients, so that their difference shrinks
by decay alone, whatever the optimizer does with a gradient: decoupled, coupled, through momentum or a preconditioner.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibria.optimizers.copies import MakeCopy, step_function
from equilibria.theory.moments import chord_sq

Array: TypeAlias = NDArray[np.float64]

_APART = 0.02  # relative distance of the twins at the start
_FADED, _FRESH = 0.01, 0.3  # shares of that distance: the decay is read until it has faded
_CLOCK = 100_000.0  # steps by which counters are put forward
_COPY_COSINE = 0.9  # of a state tensor and the weight, from which on it is a copy of the weight


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a walk.

    Attributes:
        lr: learning rate.
        weight_decay: weight decay.
        norm: ||w|| at the start.
        unit_grad: ||g|| ||w||.
        shape: of the weight.
        seed: of its direction and its gradients.
    """

    lr: float
    weight_decay: float
    norm: float
    unit_grad: float
    shape: tuple[int, ...]
    seed: int = 0

    @property
    def entries(self) -> int:
        """Numbers in the weight."""
        return math.prod(self.shape)

    @property
    def settings(self) -> dict[str, float]:
        """The optimizer's settings."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    def enlarged(self) -> Conditions:
        """The same with four times the entries of the same size: twice as many along two axes, or all along one."""
        first, *others = self.shape
        shape = (2 * first, 2 * others[0], *others[1:]) if others else (4 * first,)
        return replace(self, shape=shape, norm=2 * self.norm)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What some steps of a walk did.

    Attributes:
        log_norm: mean of ln ||w||.
        norm_sq: mean of ||w||^2.
        drift: mean of ln(||w'|| / ||w||).
        share: of the weight that decay removes per step.
        angle_sq: mean squared angle.
        step_sq: mean of ||u||^2, u the step without the decay.
        correlation: of successive u.
        trend: ln of step_sq in the second half over that in the first.
    """

    log_norm: float
    norm_sq: float
    drift: float
    share: float
    angle_sq: float
    step_sq: float
    correlation: float
    trend: float

    @property
    def growth(self) -> float:
        """The drift of ln ||w|| that steps cause, memory included."""
        return self.drift + self.share

    @property
    def log_balance(self) -> float:
        """ln(growth / decay), 0 in equilibrium; from the angle alone where rounding leaves nothing of the growth."""
        least = self.angle_sq / 20
        return math.log(max(self.growth, least) / self.share)


class Walk:
    """A random walk of an optimizer's copy.

    Args:
        make: makes the copies.
        conditions: of the walk.
        twins: whether a second copy walks along, to measure the decay.

    Attributes:
        gradient: of the last step.
        gradient_factor: by which gradients are longer than the conditions say.
    """

    def __init__(self, make: MakeCopy, conditions: Conditions, *, twins: bool = True) -> None:
        self._torch: Any = sys.modules["torch"]
        self._conditions = conditions
        self._rng = np.random.default_rng([conditions.seed, 7])
        start = self._rng.standard_normal(conditions.shape)
        start *= conditions.norm / np.linalg.norm(start)
        self._first = start.ravel()
        weights = [start, (1 + _APART) * start][: 2 if twins else 1]
        self._params = [self._torch.nn.Parameter(self._torch.from_numpy(weight.copy())) for weight in weights]
        self._copies = [make([param], conditions.settings) for param in self._params]
        self._step = step_function(type(self._copies[0]))
        self._before_sq = [float(self._first @ self._first)]
        self._after_sq: list[float] = []
        self._moved_sq: list[float] = []
        self._lagged: list[float] = []
        self._apart: list[float] = [1.0]
        self.gradient_factor = 1.0
        self.gradient = np.zeros(conditions.shape)
        self._taken_out = 1.0  # the product of all factors that brought the weight back
        self._last = np.zeros(conditions.entries)

    @property
    def optimizer(self) -> Any:
        """The copy."""
        return self._copies[0]

    @property
    def param(self) -> Any:
        """Its weight."""
        return self._params[0]

    @property
    def norm(self) -> float:
        """||w|| now."""
        return math.sqrt(self._before_sq[-1])

    @property
    def norms(self) -> Array:
        """||w|| before each step and after the last."""
        return np.sqrt(self._before_sq)

    def __len__(self) -> int:
        return len(self._moved_sq)

    def advance(self, steps: int, *, hold: bool = False) -> Walk:
        """Take some steps; ``hold`` brings the weight back to its first norm after each."""
        scale, generator = (
            self._conditions.unit_grad / math.sqrt(self._conditions.entries),
            self._torch.default_generator,
        )
        for _ in range(steps):
            before = self._flat(0).copy()
            gradient = self._rng.standard_normal(before.size)
            norm_sq = self._before_sq[-1]
            gradient -= (gradient @ before) / norm_sq * before
            gradient *= self.gradient_factor * scale / math.sqrt(norm_sq)
            self.gradient = shaped = gradient.reshape(self._conditions.shape)
            for param, copy in zip(self._params, self._copies, strict=True):
                param.grad = self._torch.from_numpy(shaped.copy())
                generator.manual_seed(len(self))  # twins draw the same noise, if they draw any
                self._step(copy)
            after = self._flat(0)
            moved = after - before
            self._moved_sq.append(float(moved @ moved))
            self._lagged.append(float(moved @ self._last))
            self._after_sq.append(float(after @ after))
            self._last = moved
            if len(self._params) == 2:
                apart = (self._flat(1) - after) @ self._first
                self._apart.append(float(apart) / (_APART * self._before_sq[0] * self._taken_out))
            self._before_sq.append(self._after_sq[-1])
            if hold:
                self._bring_back()
        return self

    def _bring_back(self) -> None:
        factor = math.sqrt(self._before_sq[0] / self._before_sq[-1])
        for param in self._params:
            param.detach().mul_(factor)
        self._taken_out *= factor
        self._before_sq[-1] = self._before_sq[0]

    def _flat(self, index: int) -> Array:
        flat: Array = self._params[index].detach().numpy().ravel()
        return flat

    def measure(self, *, burn: int, share: float | None = None) -> Stretch:
        """What all steps did from number ``burn`` on; a ``share`` that is known replaces the measured one."""
        before, after = np.array(self._before_sq[burn:-1]), np.array(self._after_sq[burn:])
        moved_sq, lagged = np.array(self._moved_sq[burn:]), np.array(self._lagged[burn:])
        share = self._share(burn) if share is None else share
        # u = w' - w + share w, from products of w and w' - w
        along = (after - before - moved_sq) / 2  # <w' - w, w>
        step_sq = moved_sq + 2 * share * along + share**2 * before
        previous = (before[1:] - before[:-1] + moved_sq[:-1]) / 2  # <w_t, w_t - w_(t-1)>
        pairs = lagged[1:] + share * (previous + along[1:] - lagged[1:]) + share**2 * before[1:]
        half = len(step_sq) // 2
        squares = np.where(step_sq > 0, step_sq, np.nan)
        return Stretch(
            log_norm=float(np.log(before).mean() / 2),
            norm_sq=float(before.mean()),
            drift=float(np.log(after / before).mean() / 2),
            share=share,
            angle_sq=float(np.mean(chord_sq(before, after, moved_sq))),
            step_sq=float(step_sq.mean()),
            correlation=float(pairs.mean() / step_sq.mean()),
            trend=float(np.log(np.nanmean(squares[half:]) / np.nanmean(squares[:half]))),
        )

    def _share(self, burn: int) -> float:
        """Decay per step from the distance of the twins; NaN without twins, or if it does not shrink smoothly."""
        apart = np.array(self._apart)
        if len(apart) == 1:
            return math.nan
        begin = burn
        if abs(apart[burn]) < _FRESH:  # a fast decay: read it earlier
            begin = int(np.flatnonzero(np.abs(apart[:burn]) > _FRESH)[-1])
        low = np.flatnonzero(np.abs(apart[begin:]) < _FADED * abs(apart[begin]))
        end = begin + int(low[0]) if len(low) else len(apart) - 1
        ratio = apart[end] / apart[begin]
        return -math.expm1(math.log(ratio) / (end - begin)) if ratio > 0 and end > begin else math.nan

    # ---- what the copy keeps

    def counters(self) -> list[tuple[Any, Any]]:
        """Where the copy counts its steps: dictionaries and keys of numbers that one more step raises by exactly 1."""
        before = self._numbers()
        self.advance(1)
        now = self._numbers()
        return [key for key, value in now.items() if before.get(key) == value - 1]

    def put_clock_forward(self) -> bool:
        """Add many steps to every counter; whether there is one."""
        found = self.counters()
        for where, key in found:
            holder = self._holders()[where]
            holder[key] = holder[key] + (_CLOCK if self._is_float(holder[key]) else int(_CLOCK))
        return bool(found)

    def own_settings(self) -> list[str]:
        """Names of the group's numbers that a step changes, counters aside."""
        before = self._numbers()
        self.advance(2)
        now = self._numbers()
        changed = [key for key, value in now.items() if key[0] == "group" and before.get(key) not in (value, value - 2)]
        return sorted({str(key) for _, key in changed})

    def weight_copies(self) -> list[str]:
        """Names of state tensors that are a copy of the weight."""
        weight, found = self._flat(0), []
        for name, value in self.optimizer.state[self.param].items():
            if isinstance(value, self._torch.Tensor) and value.numel() == weight.size and weight.size > 1:
                other = value.detach().to(self._torch.float64).numpy().ravel()
                length = np.linalg.norm(other)
                alike = 0.5 < length / self.norms[-1] < 2
                if alike and weight @ other > _COPY_COSINE * length * self.norms[-1]:
                    found.append(str(name))
        return found

    def _holders(self) -> dict[str, Any]:
        (group,) = self.optimizer.param_groups
        return {"group": group, "state": self.optimizer.state[self.param], "optimizer": vars(self.optimizer)}

    def _numbers(self) -> dict[tuple[str, Any], float]:
        return {
            (where, key): float(value)
            for where, holder in self._holders().items()
            for key, value in holder.items()
            if self._is_number(value)
        }

    def _is_number(self, value: Any) -> bool:
        if isinstance(value, self._torch.Tensor):
            return bool(value.numel() == 1)
        return isinstance(value, int | float) and not isinstance(value, bool)

    def _is_float(self, value: Any) -> bool:
        return bool(value.is_floating_point()) if isinstance(value, self._torch.Tensor) else isinstance(value, float)
