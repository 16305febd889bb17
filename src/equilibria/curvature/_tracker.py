"""Tracks the sharpness of a training run from an optimizer hook.

Before every step `SharpnessMonitor` watches how the weights move (cheap), and at some steps it queries the sharpness
(a few Hessian-vector products). Training is never changed: an error stops the tracking with a warning, not the run.
"""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa
import torch
from torch import Tensor

from equilibria._version import __version__
from equilibria.curvature._batches import as_weighted_batches
from equilibria.curvature._edge import EdgeDetector, EdgeState, StepMotion
from equilibria.curvature._hvp import HessianProducts, selected_params
from equilibria.curvature._invariance import loss_is_scale_invariant
from equilibria.curvature._query_schedule import QuerySchedule
from equilibria.curvature._sharpness import Sharpness, sharpness_of
from equilibria.curvature._thresholds import StabilityLimit, adam_preconditioner, is_adam, stability_limit
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.errors import EquilibriaError, WatchWarning, described, positive, warn_in_training, whole
from equilibria.findings import Findings
from equilibria.objectives._objective import Objective
from equilibria.optimizers.rules import rule_of_group, rule_text
from equilibria.records.tables import APPROACHING_EDGE, EDGE, PAST, SHARPNESS_FIELDS, STABLE
from equilibria.tensors.parameters import Select, unwrap_optimizer
from equilibria.theory.stability import ROUNDING_FLOOR, edge_of_stability, effective_lr, eos_delay

_SAME_GRADIENT = 1e-2  # relative difference; another batch differs by more, rounding in half precision by less
_LOST = 0.2  # relative excess of a cold search over a warm one at the same weights that is reported
_NEAR = 0.9  # of the threshold: a larger secant calls for a query

Row = dict[str, Any]


class SharpnessSink(Protocol):
    """Receives the rows of the sharpness table as they are measured, as columns by name."""

    def append(self, columns: Mapping[str, Any]) -> None:
        """Receive a row."""

    def close(self) -> None:
        """No more rows follow."""


class SharpnessMonitor:
    """Tracks the largest curvature of a loss during training; the core of `equilibria.SharpnessTracker`.

    Args:
        objective: from `equilibria.objective`, or an `equilibria.Objective` of the tensors in training.
        optimizer: torch.optim.SGD (with or without momentum), Adam or AdamW.
        batch: the data of the loss: the full batch, or one fixed batch; see `equilibria.sharpness`. A DataLoader is
            read once, here, and its batches are kept.
        every: steps between queries; "auto" spends less than a tenth of the training time.
        select: the parameters: names, patterns or a function; default: all of the objective's that are trained.
        spherical: whether the loss is scale-invariant in them together; None to find out.
        tol: tolerance of the relative error of each value, which is estimated in a warm query.
        recheck: after this many warm queries, one begins at random again.
        sinks: receive the rows as they are measured.

    Raises:
        EquilibriaError: if the optimizer has no known threshold or does not train the parameters, or if the loss cannot
            be evaluated or is not scale-invariant where it must be.
    """

    _closed = True  # until there is something to close

    def __init__(
        self,
        objective: Objective,
        optimizer: Any,
        batch: Any,
        *,
        every: int | str = "auto",
        select: Select | None = None,
        spherical: bool | None = None,
        tol: float = 1e-2,
        recheck: int = 100,
        sinks: Iterable[SharpnessSink] = (),
    ) -> None:
        self._schedule, self._every_setting = QuerySchedule(every), every
        self._tol, self._recheck = positive("tol", tol), whole("recheck", recheck, low=1)
        self._optimizer = unwrap_optimizer(optimizer)
        self._params = _trained(objective, self._optimizer, select)
        # Before anything is computed: raises if the optimizer has no known threshold.
        stability_limit(self._optimizer, list(self._params.values()), scale_invariant=False)
        # A DataLoader is read now and never again: training may be reading it.
        self._objective, self._data = objective, as_weighted_batches(objective, batch)
        self.spherical = self._is_spherical(spherical)
        self._law = self._limit().law
        self._motion, self._detector = StepMotion(spherical=self.spherical), EdgeDetector()
        self._last: dict[int, Sharpness] = {}  # parity of the step -> last result
        self._difference: float | None = None  # between the gradients of training and of `batch`, at the first query
        self._lost: dict[str, float] | None = None
        self._state = STABLE
        self._threshold = math.inf
        self._rows: list[Row] = []
        self._sinks = list(sinks)
        self._steps = 0
        self._failure: str | None = None
        self._stopped = 0  # the step of the failure
        self._hook = self._optimizer.register_step_pre_hook(self._before_step)
        self._closed = False

    # ---- results

    @property
    def step(self) -> int:
        """Number of optimizer steps since tracking began."""
        return self._steps

    @property
    def every(self) -> float:
        """The present number of steps from one query to the next."""
        return self._schedule.every

    @property
    def state(self) -> str:
        """State at the last query: one of `equilibria.records.tables.EDGE_STATES`."""
        return self._state

    @property
    def failure(self) -> str | None:
        """Why tracking has stopped; None while it runs."""
        return self._failure

    @property
    def closed(self) -> bool:
        """Whether the hook is off and the sinks are closed."""
        return self._closed

    @property
    def metadata(self) -> dict[str, Any]:
        """Settings and state of the tracking, as JSON can hold them."""
        rules = [rule_of_group(self._optimizer, group).rule for group in self._optimizer.param_groups]
        kind = type(self._optimizer).__name__
        settings = dict.fromkeys(kind if rule is None else rule_text(rule) for rule in rules)
        return {
            "equilibria": __version__,
            "torch": str(torch.__version__),
            "optimizers": [{"class": kind, "settings": "; ".join(settings)}],
            "sharpness": {
                "every": self._every_setting,
                "spherical": self.spherical,
                "tol": self._tol,
                "recheck": self._recheck,
                "params": list(self._params),
                "entries": sum(param.numel() for param in self._params.values()),
                "of": len(self._objective.params),
                "preconditioned": is_adam(self._optimizer),
                "law": self._law,
                "gradient_difference": self._difference,
                "lost": self._lost,
                "stopped": None if self._failure is None else {"step": self._stopped, "reason": self._failure},
            },
        }

    def samples(self) -> pa.Table:
        """One row per query so far; see `equilibria.records.tables` for the columns."""
        return pa.Table.from_pylist(self._rows, schema=SHARPNESS_FIELDS)

    def findings(self) -> Findings:
        """Findings about the queries so far."""
        return sharpness_findings(self.samples(), metadata={**self.metadata, "steps": self.step})

    def close(self) -> None:
        """Remove the hook and close the sinks; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        for sink in self._sinks:
            self._try_sink(sink, sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody holds the tracker or its optimizer any more: write the last rows, free the directory. In a context of
        # its own, as `equilibria.monitor.monitor` explains.
        if not self._closed:
            contextvars.copy_context().run(self.close)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Numbers and words with which a resumed run continues; the first query after that starts at random."""
        return {
            "params": list(self._params),
            "step": self._steps,
            "state": self._state,
            "threshold": self._threshold,
            "difference": self._difference,
            "lost": self._lost,
            "detector": self._detector.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; call it after the model and the optimizer were loaded.

        Raises:
            EquilibriaError: if it is not the state of a tracker, or that of other parameters.
        """
        keys = self.state_dict().keys()
        if not isinstance(state, Mapping) or keys - state.keys():
            raise EquilibriaError(
                f"got a state of type {type(state).__name__} without some of {', '.join(keys)}; expected the result of "
                "tracker.state_dict()",
                argument="state",
            )
        if list(state["params"]) != list(self._params):
            raise EquilibriaError(
                f"got the state of a tracker of {len(state['params'])} parameters; expected this one's "
                f"{len(self._params)}: same objective, optimizer and select",
                argument="state",
            )
        self._steps, self._state, self._threshold = int(state["step"]), str(state["state"]), float(state["threshold"])
        self._difference, self._lost = state["difference"], state["lost"]
        self._detector.load_state_dict(state["detector"])
        self._schedule.load_state_dict(state["schedule"])
        self._last.clear()
        self._motion.reset()

    # ---- at every step

    def _before_step(self, *_: Any) -> None:
        """Hook before the update: training has just computed its gradient at the present weights."""
        if self._failure is not None:
            return
        self._schedule.enter()
        try:
            self._watch_and_query()
        except Exception as error:
            self._failure, self._stopped = described(error), self._steps
            self._motion.reset()
            warn_in_training(f"sharpness tracking has stopped: {self._failure}; training goes on", WatchWarning)
        self._steps += 1
        self._schedule.leave()

    def _watch_and_query(self) -> None:
        step = self._steps
        if not self._schedule.may_watch(step):
            self._motion.reset()
            return
        begun = time.perf_counter()
        with torch.no_grad():
            self._motion.update(_flat(self._params), self._training_gradient() if self._is_full_batch() else None)
        self._schedule.add_watch(time.perf_counter() - begun)
        if is_adam(self._optimizer) and step == 0:
            return  # Adam has no preconditioner before its first step
        due = self._schedule.is_due(step) and not (self._motion.turned_back is None and self._schedule.may_wait(step))
        if due or (self._looks_like_the_edge() and self._schedule.may_be_early(step)):
            begun = time.perf_counter()
            result = self._query(step)
            self._schedule.add_query(step, time.perf_counter() - begun, hvps=result.hvps, cold=result.certified)
            self._schedule.together = 2 if self._state in (PAST, EDGE) else 1  # R alternates from step to step there

    def _looks_like_the_edge(self) -> bool:
        """Whether the last steps move as at the edge of stability, while the state is still another one."""
        if self._state == EDGE or self._motion.secant is None or self._motion.turned_back != 1.0:
            return False
        return self._motion.secant >= _NEAR * self._threshold

    def _query(self, step: int) -> Sharpness:
        products = HessianProducts(self._objective, self._data, select=list(self._params))
        if self._difference is None:
            self._difference = self._gradient_difference(products)
        preconditioner = adam_preconditioner(self._objective, self._optimizer) if is_adam(self._optimizer) else None
        search = partial(sharpness_of, products, preconditioner=preconditioner, tol=self._tol, seed=len(self._rows))
        warm = self._last.get(step % 2) or self._last.get(1 - step % 2)
        result = search() if warm is None else search(warm=warm, recheck=warm.pairs.followed + 1)
        if warm is not None and warm.pairs.followed >= self._recheck:
            result = self._recheck_cold(step, search, result)
        was_at_the_edge = self._state == EDGE
        self._last[step % 2] = result  # at the edge every second step is on the same side of the valley
        self._add(self._row(step, result))
        if self._state == EDGE and not was_at_the_edge:
            self._last.clear()  # the first swing moves the run to another part of the valley: start cold next time
        return result

    def _recheck_cold(self, step: int, search: Callable[[], Sharpness], warm: Sharpness) -> Sharpness:
        """Search from scratch at the same weights, to see whether warm starts have lost the top eigenvector."""
        cold = search()
        if cold.value > (1 + _LOST) * warm.value:
            factor = cold.norm_sq if self.spherical else 1.0
            self._lost = {"step": step, "found": factor * cold.value, "followed": factor * warm.value}
        return cold

    def _row(self, step: int, result: Sharpness) -> Row:
        limit = self._limit()
        factor = result.norm_sq if self.spherical else 1.0
        ratio, intrinsic = limit.ratio(result.value), limit.lr * limit.weight_decay
        lawful = self.spherical and limit.plain and 0 < intrinsic < 1
        edge = self._detector.take(
            step,
            ratio,
            turned_back=self._motion.turned_back,
            sharpness=factor * result.value,
            decay=(limit.lr, limit.weight_decay) if lawful else None,
            loss=None if self.spherical else result.loss,
        )
        self._state, self._threshold = edge.state, factor * limit.threshold
        return {
            "step": step,
            "sharpness": factor * result.value,
            "bound": result.bound[0],
            "hvps": float(result.hvps),
            "certified": float(result.certified),
            "threshold": self._threshold,
            "ratio": ratio,
            "ratio_mean": edge.ratio_mean,
            "norm_sq": result.norm_sq,
            "lr": limit.lr,
            "weight_decay": limit.weight_decay,
            "effective_lr": _effective_lr(limit, result.norm_sq) if self.spherical else None,
            "secant": self._motion.secant,
            "turned_back": self._motion.turned_back,
            "loss": result.loss,
            "state": edge.state,
            **(self._forecast(step, edge, factor * result.value, limit) if lawful else _NO_FORECAST),
        }

    def _limit(self) -> StabilityLimit:
        return stability_limit(self._optimizer, list(self._params.values()), scale_invariant=self.spherical)

    def _forecast(self, step: int, edge: EdgeState, sharpness: float, limit: StabilityLimit) -> Row:
        """Forecasts for gradient descent with weight decay on a scale-invariant loss."""
        intrinsic, forecast = limit.lr * limit.weight_decay, dict(_NO_FORECAST)
        if edge.crossing is not None:
            forecast["steps_to_crossing"] = left = edge.crossing.step - step
            forecast["crossing_spread"] = edge.crossing.spread
            dtype = str(next(iter(self._params.values())).dtype).removeprefix("torch.")
            if edge.state in (APPROACHING_EDGE, PAST) and dtype in ROUNDING_FLOOR:
                forecast["steps_to_oscillation"] = left + float(eos_delay(intrinsic, dtype=dtype))
        if sharpness > 0:
            law = edge_of_stability(limit.lr, limit.weight_decay, sharpness=sharpness)
            forecast["loss_predicted"], forecast["period"] = float(law.loss_above_minimum), float(law.period)
        return forecast

    def _is_spherical(self, spherical: bool | None) -> bool:
        """Whether to measure on the sphere; raises before training begins if the loss cannot be evaluated."""
        products = HessianProducts(self._objective, self._data, select=list(self._params))
        if spherical and is_adam(self._optimizer):
            raise EquilibriaError(
                "got spherical=True with Adam, whose preconditioner excludes the sphere; expected spherical=False",
                argument="spherical",
            )
        if is_adam(self._optimizer) or spherical is False:
            return False
        invariant = loss_is_scale_invariant(products)
        if spherical and not invariant:
            raise EquilibriaError(
                f"got spherical=True for {len(self._params)} parameters in which the loss is not scale-invariant "
                "together; expected select=equilibria.symmetries(objective, batches).largest_uniform(), or "
                "spherical=None",
                argument="spherical",
            )
        return invariant

    def _training_gradient(self) -> Tensor | None:
        grads = {name: param.grad for name, param in self._params.items()}
        return None if any(grad is None for grad in grads.values()) else _flat(grads)  # type: ignore[arg-type]

    def _is_full_batch(self) -> bool:
        return self._difference is not None and self._difference <= _SAME_GRADIENT

    def _gradient_difference(self, products: HessianProducts) -> float | None:
        """Relative difference between the gradients of training and of ``batch``; None if training has none."""
        gradient = self._training_gradient()
        if gradient is None:
            return None
        gradient = gradient.to(products.gradient)
        compared = gradient - products.gradient, gradient, products.gradient
        difference, *norms = (float(torch.linalg.vector_norm(vector)) for vector in compared)
        if not math.isfinite(difference):
            return None
        return difference / max(norms) if max(norms) > 0 else 0.0

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        for sink in list(self._sinks):
            columns = {name: [value] for name, value in row.items()}
            self._try_sink(sink, lambda sink=sink, columns=columns: sink.append(columns))  # type: ignore[misc]

    def _try_sink(self, sink: SharpnessSink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._sinks = [other for other in self._sinks if other is not sink]
            warn_in_training(
                f"{type(sink).__name__} receives no more rows: {described(error)}; tracking goes on",
                WatchWarning,
            )


_NO_FORECAST: Row = dict.fromkeys(
    ("steps_to_crossing", "crossing_spread", "steps_to_oscillation", "loss_predicted", "period")
)


def _effective_lr(limit: StabilityLimit, norm_sq: float) -> float:
    if limit.lr == 0:
        return 0.0
    if limit.lr * limit.weight_decay >= 1:  # the weights change sign
        return math.inf
    return float(effective_lr(limit.lr, limit.weight_decay, norm_sq=norm_sq))


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def _trained(objective: Objective, optimizer: torch.optim.Optimizer, select: Select | None) -> dict[str, Tensor]:
    """The selected parameters as the optimizer holds them, by their names in the objective."""
    if not isinstance(objective, Objective):
        raise EquilibriaError(
            f"got objective of type {type(objective).__name__}; expected equilibria.objective(model, loss)",
            argument="objective",
        )
    by_memory = {
        (param.data_ptr(), param.shape): param for group in optimizer.param_groups for param in group["params"]
    }
    params = selected_params(objective, select)
    trained = {
        name: by_memory[key] for name, param in params.items() if (key := (param.data_ptr(), param.shape)) in by_memory
    }
    if not trained:
        raise EquilibriaError(
            f"got an optimizer that trains none of the {len(params)} parameters; expected the one that trains this "
            "model",
            argument="optimizer",
        )
    untrained = [name for name in params if name not in trained]
    if untrained and select is not None:
        raise EquilibriaError(
            f"got parameter {untrained[0]!r} in select, which the optimizer does not train; expected parameters that "
            "it trains",
            argument="select",
        )
    return trained
