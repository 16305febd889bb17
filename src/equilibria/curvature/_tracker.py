"""Follows the sharpness of a training run through an optimizer hook, and never gets in its way."""

from __future__ import annotations

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
from equilibria.curvature import HessianProducts
from equilibria.curvature._batches import as_chunks
from equilibria.curvature._edge import EdgeDetector, Motion, Standing
from equilibria.curvature._hvp import selected
from equilibria.curvature._invariance import is_invariant
from equilibria.curvature._pace import Pace
from equilibria.curvature._sharpness import Sharpness, sharpness_of
from equilibria.curvature._thresholds import Limits, adam_preconditioner, is_adam, limits_of
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.errors import EquilibriaError, WatchWarning, positive, warn_caller, whole
from equilibria.findings import Finding
from equilibria.objectives._objective import Objective
from equilibria.optimizers.rules import law_of, rule_text
from equilibria.records.tables import APPROACHING_EDGE, EDGE, PAST, SHARPNESS_FIELDS, STABLE
from equilibria.tensors.parameters import Select, unwrap_optimizer
from equilibria.theory.stability import ROUNDING_FLOOR, edge_of_stability, effective_lr, eos_delay

_SAME_GRADIENT = 1e-2  # relative difference; another batch differs by more, rounding in half precision by less
_LOST = 0.2  # by which a search from scratch may exceed a warm one at the same weights without a word
_NEAR = 0.9  # of the threshold: a secant beyond it calls for a query

Row = dict[str, Any]


class SharpnessSink(Protocol):
    """Takes rows of the sharpness table as they come, as columns by name."""

    def append(self, columns: Mapping[str, Any]) -> None:
        """Take a row."""

    def close(self) -> None:
        """There are no more."""


class SharpnessMonitor:
    """Follows the largest curvature of a loss while an optimizer minimises it; made as `equilibria.SharpnessTracker`.

    Args:
        objective: of `equilibria.objective` or `equilibria.Objective`, around the tensors that are trained.
        optimizer: torch.optim.SGD (with or without momentum), Adam or AdamW.
        batch: what the loss is evaluated on: the full batch, or one fixed batch; see `equilibria.sharpness`. A
            DataLoader is read once, here, and its batches are kept.
        every: a query every so many steps; "auto" spends less than a tenth of the training time.
        select: the parameters: names, patterns or a function; default: all of the objective's that are trained.
        spherical: whether the loss is scale-invariant in them together; None to find out.
        tol: of the relative error of each value, estimated where a query began at the one before it.
        recheck: after this many warm queries, one that begins at random again.
        sinks: where rows go as they come.

    Raises:
        EquilibriaError: for an optimizer without a known threshold, parameters that it does not train, or a loss that
            cannot be evaluated or is not scale-invariant where it must be.
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
        self._pace, self._asked_every = Pace(every), every
        self._tol, self._recheck = positive("tol", tol), whole("recheck", recheck, low=1)
        self._optimizer = unwrap_optimizer(optimizer)
        self._params = _trained(objective, self._optimizer, select)
        limits_of(self._optimizer, list(self._params.values()), scale_invariant=False)  # refuses what it does not know
        # A DataLoader is read now and never again: training may be reading it.
        self._objective, self._data = objective, as_chunks(objective, batch)
        self.spherical = self._find_out(spherical)
        self._law = self._limits().law
        self._motion, self._detector = Motion(spherical=self.spherical), EdgeDetector()
        self._found: dict[int, Sharpness] = {}  # the last at even steps, and at odd ones
        self._difference: float | None = None  # of training's gradient from that of our batch, at the first query
        self._lost: dict[str, float] | None = None
        self._state = STABLE
        self._threshold = math.inf
        self._rows: list[Row] = []
        self._sinks = list(sinks)
        self._steps = 0
        self._failure: str | None = None
        self._stopped = 0  # the step of it
        self._hook = self._optimizer.register_step_pre_hook(self._before_step)
        self._closed = False

    # ---- what people ask

    @property
    def step(self) -> int:
        """How many optimizer steps were taken while tracking."""
        return self._steps

    @property
    def every(self) -> float:
        """The present number of steps from one query to the next."""
        return self._pace.every

    @property
    def state(self) -> str:
        """As of the last query: one of `equilibria.records.tables.STATES`."""
        return self._state

    @property
    def failure(self) -> str | None:
        """Why tracking has stopped, or None."""
        return self._failure

    @property
    def closed(self) -> bool:
        """Whether the hook is off and the sinks are closed."""
        return self._closed

    @property
    def metadata(self) -> dict[str, Any]:
        """What is tracked, as JSON can hold it."""
        rules = [law_of(self._optimizer, group).rule for group in self._optimizer.param_groups]
        kind = type(self._optimizer).__name__
        settings = dict.fromkeys(kind if rule is None else rule_text(rule) for rule in rules)
        return {
            "equilibria": __version__,
            "torch": str(torch.__version__),
            "optimizers": [{"class": kind, "settings": "; ".join(settings)}],
            "sharpness": {
                "every": self._asked_every,
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

    def findings(self) -> tuple[Finding, ...]:
        """What the queries mean."""
        return sharpness_findings(self.samples(), metadata={**self.metadata, "steps": self.step})

    def close(self) -> None:
        """Take the hook off and close the sinks; a second call does nothing."""
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
        self.close()  # nobody holds the tracker or its optimizer any more: write the last rows, free the directory

    # ---- what happens at a step

    def _before_step(self, *_: Any) -> None:
        """The weights are those at which training has just computed its gradient, so both can be compared with ours."""
        if self._failure is not None:
            return
        self._pace.enter()
        try:
            self._look_and_query()
        except Exception as error:
            self._failure, self._stopped = f"{type(error).__name__}: {error}", self._steps
            self._motion.forget()
            warn_caller(f"sharpness tracking has stopped: {self._failure}; training goes on", WatchWarning)
        self._steps += 1
        self._pace.leave()

    def _look_and_query(self) -> None:
        step = self._steps
        if not self._pace.may_look(step):
            self._motion.forget()
            return
        begun = time.perf_counter()
        with torch.no_grad():
            self._motion.see(_flat(self._params), self._training_gradient() if self._full_batch() else None)
        self._pace.looked(time.perf_counter() - begun)
        if is_adam(self._optimizer) and step == 0:
            return  # there is no preconditioner yet
        due = self._pace.is_due(step) and not (self._motion.turned_back is None and self._pace.may_wait(step))
        if due or (self._calls_for_a_query() and self._pace.may_be_early(step)):
            begun = time.perf_counter()
            found = self._query(step)
            self._pace.queried(step, time.perf_counter() - begun, hvps=found.hvps, cold=found.certified)
            self._pace.together = 2 if self._state in (PAST, EDGE) else 1  # there R alternates from step to step

    def _calls_for_a_query(self) -> bool:
        """Whether the last steps look as they do at the edge, and it is not known yet that they are there."""
        if self._state == EDGE or self._motion.secant is None or self._motion.turned_back != 1.0:
            return False
        return self._motion.secant >= _NEAR * self._threshold

    def _query(self, step: int) -> Sharpness:
        products = HessianProducts(self._objective, self._data, select=list(self._params))
        if self._difference is None:
            self._difference = self._gradient_difference(products)
        preconditioner = adam_preconditioner(self._objective, self._optimizer) if is_adam(self._optimizer) else None
        search = partial(sharpness_of, products, preconditioner=preconditioner, tol=self._tol, seed=len(self._rows))
        warm = self._found.get(step % 2) or self._found.get(1 - step % 2)
        found = search() if warm is None else search(warm=warm, recheck=warm.pairs.followed + 1)
        if warm is not None and warm.pairs.followed >= self._recheck:
            found = self._search_again(step, search, found)
        was_at_the_edge = self._state == EDGE
        self._found[step % 2] = found  # at the edge every second step is on the same side of the valley
        self._add(self._row(step, found))
        if self._state == EDGE and not was_at_the_edge:
            self._found.clear()  # the first swing throws the run into another part of the valley: search afresh
        return found

    def _search_again(self, step: int, search: Callable[[], Sharpness], followed: Sharpness) -> Sharpness:
        """From scratch, at the same weights: whether following has lost the top eigenvector."""
        found = search()
        if found.value > (1 + _LOST) * followed.value:
            unit = found.norm_sq if self.spherical else 1.0
            self._lost = {"step": step, "found": unit * found.value, "followed": unit * followed.value}
        return found

    def _row(self, step: int, found: Sharpness) -> Row:
        limits = self._limits()
        unit = found.norm_sq if self.spherical else 1.0
        ratio, intrinsic = limits.ratio(found.value), limits.lr * limits.weight_decay
        lawful = self.spherical and limits.plain and 0 < intrinsic < 1
        growth = -2 * math.log1p(-intrinsic) if lawful else None
        standing = self._detector.take(
            step,
            ratio,
            turned_back=self._motion.turned_back,
            growth=growth,
            loss=None if self.spherical else found.loss,
        )
        self._state, self._threshold = standing.state, unit * limits.threshold
        eta = _effective_lr(limits, found.norm_sq) if self.spherical else None
        return {
            "step": step,
            "sharpness": unit * found.value,
            "bound": found.bound[0],
            "hvps": float(found.hvps),
            "certified": float(found.certified),
            "threshold": self._threshold,
            "ratio": ratio,
            "ratio_mean": standing.ratio_mean,
            "norm_sq": found.norm_sq,
            "lr": limits.lr,
            "weight_decay": limits.weight_decay,
            "effective_lr": eta,
            "secant": self._motion.secant,
            "turned_back": self._motion.turned_back,
            "loss": found.loss,
            "state": standing.state,
            **(self._forecast(standing, ratio, unit * found.value, limits) if lawful else _NO_FORECAST),
        }

    def _limits(self) -> Limits:
        return limits_of(self._optimizer, list(self._params.values()), scale_invariant=self.spherical)

    def _forecast(self, standing: Standing, ratio: float, sharpness: float, limits: Limits) -> Row:
        """What the laws of gradient descent with weight decay on a scale-invariant loss say about the time to come."""
        intrinsic, forecast = limits.lr * limits.weight_decay, dict(_NO_FORECAST)
        if standing.state in (APPROACHING_EDGE, PAST) and ratio > 0:
            crossing = math.log(ratio) / (2 * math.log1p(-intrinsic))
            dtype = str(next(iter(self._params.values())).dtype).removeprefix("torch.")
            delay = float(eos_delay(intrinsic, dtype=dtype)) if dtype in ROUNDING_FLOOR else None
            forecast["steps_to_crossing"] = crossing
            forecast["steps_to_oscillation"] = None if delay is None else crossing + delay
        if sharpness > 0:
            law = edge_of_stability(limits.lr, limits.weight_decay, sharpness=sharpness)
            forecast["loss_predicted"], forecast["period"] = float(law.loss_above_minimum), float(law.period)
        return forecast

    def _find_out(self, spherical: bool | None) -> bool:
        """Whether the loss is scale-invariant; also refuses what cannot be evaluated, before training begins."""
        products = HessianProducts(self._objective, self._data, select=list(self._params))
        if spherical and is_adam(self._optimizer):
            raise EquilibriaError("got spherical=True with Adam, whose sphere is no sphere; expected spherical=False")
        if is_adam(self._optimizer) or spherical is False:
            return False
        found = is_invariant(products)
        if spherical and not found:
            raise EquilibriaError(
                f"got spherical=True for {len(self._params)} parameters in which the loss is not scale-invariant "
                "together; expected select=equilibria.symmetries(objective, batches).largest_uniform(), or "
                "spherical=None"
            )
        return found

    def _training_gradient(self) -> Tensor | None:
        grads = {name: param.grad for name, param in self._params.items()}
        return None if any(grad is None for grad in grads.values()) else _flat(grads)  # type: ignore[arg-type]

    def _full_batch(self) -> bool:
        return self._difference is not None and self._difference <= _SAME_GRADIENT

    def _gradient_difference(self, products: HessianProducts) -> float | None:
        """Of the gradient of training from that of our batch, over the larger; None if training has not told it."""
        gradient = self._training_gradient()
        if gradient is None:
            return None
        gradient = gradient.to(products.gradient)
        compared = gradient - products.gradient, gradient, products.gradient
        apart, *norms = (float(torch.linalg.vector_norm(each)) for each in compared)
        if not math.isfinite(apart):
            return None
        return apart / max(norms) if max(norms) > 0 else 0.0

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        for sink in list(self._sinks):
            columns = {name: [value] for name, value in row.items()}
            self._try_sink(sink, lambda sink=sink, columns=columns: sink.append(columns))  # type: ignore[misc]

    def _try_sink(self, sink: SharpnessSink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._sinks = [each for each in self._sinks if each is not sink]
            warn_caller(
                f"{type(sink).__name__} takes no more rows: {type(error).__name__}: {error}; tracking goes on",
                WatchWarning,
            )


_NO_FORECAST: Row = dict.fromkeys(("steps_to_crossing", "steps_to_oscillation", "loss_predicted", "period"))


def _effective_lr(limits: Limits, norm_sq: float) -> float:
    if limits.lr == 0:
        return 0.0
    if limits.lr * limits.weight_decay >= 1:  # the weights change sign
        return math.inf
    return float(effective_lr(limits.lr, limits.weight_decay, norm_sq=norm_sq))


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def _trained(objective: Objective, optimizer: torch.optim.Optimizer, select: Select | None) -> dict[str, Tensor]:
    """The parameters to look at, as the optimizer holds them, by their names in the objective."""
    if not isinstance(objective, Objective):
        raise EquilibriaError(
            f"got objective of type {type(objective).__name__}; expected equilibria.objective(model, loss)"
        )
    held = {(param.data_ptr(), param.shape): param for group in optimizer.param_groups for param in group["params"]}
    own = selected(objective, select)
    found = {name: held[key] for name, param in own.items() if (key := (param.data_ptr(), param.shape)) in held}
    if not found:
        raise EquilibriaError(
            f"got an optimizer that trains none of the {len(own)} parameters; expected the one that trains this model"
        )
    strangers = [name for name in own if name not in found]
    if strangers and select is not None:
        raise EquilibriaError(
            f"got parameter {strangers[0]!r} in select, which the optimizer does not train; expected parameters that "
            "it trains"
        )
    return found
