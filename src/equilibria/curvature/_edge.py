"""Detection of the edge of stability: is a run stable, approaching the edge, or at it?

`StepMotion` watches every step: at the edge each step reverses the one before. `EdgeDetector` combines that with the
stability ratios R that the tracker measures now and then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from equilibria.curvature._crossing import Crossing, Query, forecast_crossing, observed_crossing
from equilibria.errors import one_of
from equilibria.records.tables import APPROACHING_EDGE, DIVERGED, DIVERGING, EDGE, EDGE_STATES, PAST, STABLE

_WINDOW = 10  # steps
_VISIBLE = 1e-5  # of the norm: shorter steps may be rounding, which reverses too
_BAND = 2e-3  # around R = 1: within it a run stays on the side where it was
_REVERSING, _NOT_REVERSING = 0.8, 0.5  # share of steps that turn back
_LEFT_BELOW = 0.9  # R below which a run whose steps no longer turn back has left the edge
_GROWTH = 1.01  # times the loss of the query before: the loss grows
_FAR = 10.0  # times the loss at the first query: a run that still grows beyond it diverges
_MOST_QUERIES = 96  # that a forecast remembers: beyond, every second one is forgotten


class StepMotion:
    """Compares consecutive steps of the weights, or of their direction.

    At the edge of stability every step turns back on the one before, and the secant (the change of the gradient along a
    step, over the length of the step) is the largest curvature up to a few per cent. Before the edge the secant says
    nothing about it.

    Args:
        spherical: whether to compare directions of the weights, with the gradient at unit norm.

    Attributes:
        secant: the curvature along the last step; None if it is unknown.
    """

    def __init__(self, *, spherical: bool) -> None:
        self._spherical = spherical
        self._reversals: deque[bool] = deque(maxlen=_WINDOW)
        self.reset()

    def reset(self) -> None:
        """Start over, if the next point does not directly follow the last."""
        self._point: Tensor | None = None
        self._step: Tensor | None = None
        self._gradient: Tensor | None = None
        self._reversals.clear()
        self.secant: float | None = None

    @property
    def turned_back(self) -> float | None:
        """The share of the last ten steps that turned back on the one before; None before there are ten."""
        return sum(self._reversals) / _WINDOW if len(self._reversals) == _WINDOW else None

    def update(self, point: Tensor, gradient: Tensor | None) -> None:
        """Add the weights before a step, and their gradient if every step minimises the same loss."""
        if self._spherical:
            norm = torch.linalg.vector_norm(point)
            point, gradient = point / norm, None if gradient is None else gradient * norm
        step = None if self._point is None else point - self._point
        self._compare(step, point, gradient)
        self._point, self._step, self._gradient = point, step, gradient

    def _compare(self, step: Tensor | None, point: Tensor, gradient: Tensor | None) -> None:
        self.secant = None
        if step is None:
            return
        products = [step @ step, point @ point]
        if self._step is not None:
            products.append(step @ self._step)
        if gradient is not None and self._gradient is not None:
            products.append((gradient - self._gradient) @ step)
        length_sq, norm_sq, *others = torch.stack(products).tolist()  # one transfer from the device
        if self._step is not None:
            self._reversals.append(others.pop(0) < 0 and length_sq > _VISIBLE**2 * norm_sq)
        if others and length_sq > 0:
            self.secant = others[0] / length_sq


@dataclass(frozen=True, slots=True)
class EdgeState:
    """State of a run relative to the edge of stability.

    Attributes:
        state: one of `equilibria.records.tables.EDGE_STATES`.
        ratio_mean: R averaged over this step and the one before, if both were queried; else R.
        crossing: where R reaches 1: a forecast, or the observed one once R is above 1; None if it is unknown.
    """

    state: str
    ratio_mean: float
    crossing: Crossing | None = None


class EdgeDetector:
    """Tracks R from query to query.

    Where two consecutive steps were queried, their mean counts, because at the edge R alternates from step to step. The
    run is at the edge once R has crossed 1 and steps turn back on each other: after the crossing the oscillation has to
    grow out of rounding first. If the caller passes the loss, it must also have stopped growing: in a valley that does
    not become flatter off its floor nothing limits the oscillation, and the run diverges. A scale-invariant loss always
    limits it, because the weights grow and the effective learning rate falls.

    Example:
        >>> detector = EdgeDetector()
        >>> settings = {"sharpness": 1.0, "decay": (0.1, 0.01)}
        >>> states = [detector.take(step, 0.5 * math.exp(2e-3 * step), turned_back=0.4, **settings)
        ...           for step in range(0, 450, 50)]
        >>> [state.state for state in states[4:]]
        ['stable', 'approaching', 'approaching', 'past the edge', 'past the edge']
        >>> [round(state.crossing.step) for state in states[5:]]  # ln 2 / 2e-3
        [347, 347, 347, 347]
        >>> detector.take(401, 1.1, turned_back=1.0, **settings).state
        'edge of stability'
    """

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None
        self._losses: list[float] = []  # the first, and the last four
        self._state = STABLE
        self._decay: tuple[float, float] | None = None
        self._queries: list[Query] = []  # below R = 1, under the present settings
        self._crossed: Crossing | None = None

    def take(
        self,
        step: int,
        ratio: float,
        *,
        turned_back: float | None,
        sharpness: float,
        decay: tuple[float, float] | None,
        loss: float | None = None,
    ) -> EdgeState:
        """Add a query and return the state after it.

        Args:
            step: of the query.
            ratio: R.
            turned_back: share of the last steps that turned back; None if unknown.
            sharpness: spherical, if ``decay`` is given.
            decay: lr and weight decay of gradient descent on a scale-invariant loss, where both are positive; None for
                every other run, whose crossing is not forecast.
            loss: None if it cannot grow without limit, as a scale-invariant one.
        """
        self._losses = [*self._losses[:1], *self._losses[1:][-3:], *([] if loss is None else [loss])]
        follows = self._before is not None and step == self._before[0] + 1
        mean = (ratio + self._before[1]) / 2 if self._before is not None and follows else ratio
        if self._state == EDGE and self._has_left(mean, turned_back):
            self._queries.clear()  # the run is in another part of the valley now
            self._crossed = None
        crossing = self._crossing(step, ratio, sharpness, decay)
        self._state = self._next(mean, turned_back, approaching=crossing is not None)
        self._before = step, ratio
        return EdgeState(self._state, mean, crossing)

    def _crossing(
        self, step: int, ratio: float, sharpness: float, decay: tuple[float, float] | None
    ) -> Crossing | None:
        """The forecast, or the observed crossing while R stays above 1 or the run at the edge."""
        if self._crossed is not None and (ratio > 1 - _BAND or self._state == EDGE):
            return self._crossed
        self._crossed = None
        if decay != self._decay:  # R has jumped, or grows at another rate from now on
            self._queries.clear()
        self._decay = decay
        if decay is None or not (0 < ratio < math.inf and sharpness > 0):
            return None
        if ratio > 1:
            if self._queries:
                self._crossed = observed_crossing(self._queries[-1], step, math.log(ratio))
            return self._crossed
        self._queries.append(Query(step, math.log(ratio), math.log(sharpness)))
        if len(self._queries) > _MOST_QUERIES:
            self._queries = [*self._queries[:-1:2], self._queries[-1]]
        return forecast_crossing(self._queries, decay_growth=-2 * math.log1p(-decay[0] * decay[1]))

    def state_dict(self) -> dict[str, Any]:
        """The last query, the losses that count, the state and the crossing, for a checkpoint."""
        return {
            "before": self._before,
            "losses": list(self._losses),
            "state": self._state,
            "decay": self._decay,
            "queries": [astuple(query) for query in self._queries],
            "crossed": None if self._crossed is None else astuple(self._crossed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; in those of earlier versions there is no forecast yet."""
        before, crossed, decay = state["before"], state.get("crossed"), state.get("decay")
        self._before = None if before is None else (int(before[0]), float(before[1]))
        self._losses = [float(loss) for loss in state["losses"]]
        self._state = one_of("state", state["state"], EDGE_STATES)
        self._decay = None if decay is None else (float(decay[0]), float(decay[1]))
        self._queries = [Query(*query) for query in state.get("queries", ())]
        self._crossed = None if crossed is None else Crossing(*crossed)

    def _next(self, mean: float, turned_back: float | None, *, approaching: bool) -> str:
        turns = self._state == EDGE if turned_back is None else turned_back >= _REVERSING
        beyond = mean > 1 - _BAND if self._state in (PAST, DIVERGING) else mean > 1 + _BAND
        growing, far = self._is_growing(), self._is_far()
        if beyond and growing and far and turned_back != 0.0:
            return DIVERGING
        if self._state == EDGE and not self._has_left(mean, turned_back):
            return EDGE
        if beyond:
            return EDGE if turns and not growing else PAST
        if far:  # R is small again: a dead network has no curvature
            return DIVERGED
        return APPROACHING_EDGE if approaching else STABLE

    def _is_growing(self) -> bool:
        """Whether the loss has grown at each of the last three queries, or at all if there were fewer."""
        recent = self._losses[-4:]
        return len(recent) > 1 and all(now > _GROWTH * before for before, now in pairwise(recent))

    def _is_far(self) -> bool:
        return bool(self._losses) and self._losses[-1] > _FAR * self._losses[0] > 0

    def _has_left(self, mean: float, turned_back: float | None) -> bool:
        return mean < _LEFT_BELOW and turned_back is not None and turned_back < _NOT_REVERSING
