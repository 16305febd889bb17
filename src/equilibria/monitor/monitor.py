"""Monitor: optimizer hooks -> readings -> samples -> history and sinks, without ever disturbing training.

The way of one sample:

    optimizer.step()
      -> OptimizerHooks (hooks.py) asks the Sampler (sampler.py) whether the step is due and reads it: StepReading
      -> Monitor._receive sums the inner products of sharded tensors over all processes and queues the reading
      -> SampleBuilder (sample_rows.py) turns it into columns, with the Predictor's (predictor.py) numbers
      -> History (history.py) keeps them in memory; sinks write them to disk or send them to loggers
"""

from __future__ import annotations

import contextlib
import contextvars
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa
import torch
from torch import nn

from equilibria._version import __version__
from equilibria.errors import EquilibriaError, WatchWarning, described, warn_in_training, whole
from equilibria.findings import Finding, Findings, warnings_first
from equilibria.monitor.coverage import added_later, bypassed, in_no_optimizer, listed, sum_of
from equilibria.monitor.description import describe_controller, describe_optimizer, describe_rule, describe_units
from equilibria.monitor.history import History, read_only
from equilibria.monitor.hooks import OptimizerHooks
from equilibria.monitor.metrics import MetricLog
from equilibria.monitor.reading import PRODUCTS, StepReading
from equilibria.monitor.sample_rows import SampleBuilder
from equilibria.monitor.sampler import Sampler
from equilibria.monitor.step_memory import DiffusionLog
from equilibria.optimizers.budget import Every
from equilibria.optimizers.controllers import control_log
from equilibria.optimizers.rules import GroupRule
from equilibria.tensors.invariance import Invariant, with_invariance
from equilibria.tensors.layout import local
from equilibria.tensors.parameters import (
    Granularity,
    Select,
    Watched,
    checked_granularity,
    find_watched,
    plain_name,
    select_patterns,
    selection,
    unwrap_optimizer,
    unwrap_optimizers,
)
from equilibria.tensors.sharding import any_sharded, sum_over_processes

_MOST_PENDING = 16  # readings that wait on a device, so that the host waits for it less often
_LONGEST_WAIT = 1.0  # seconds for which a reading may wait
_MOST_CHANGES = 4  # in place since the last step, as loading a checkpoint makes; more are steps that no hook saw
_STEPS_TO_CHANGE = 20  # optimizers that take turns, as in a GAN, have each taken one by then


class Sink(Protocol):
    """Receives samples as they are taken: columns of the sample table by name."""

    def append(self, columns: Mapping[str, Any]) -> None:
        """Take the rows of one sampled step. The columns are read-only: history, record and other sinks share them."""

    def close(self) -> None:
        """Finish: no more rows follow."""


class Monitor:
    """Samples the weights of a model while it is trained; `equilibria.watch` adds a record and views.

    Training is not changed by a single bit. The first error in here becomes one `WatchWarning` and stops the sampling.

    Args:
        model: the network, wrapped or not.
        optimizers: a torch optimizer, wrapped or not, or several of them (a list, or the values of a dict).
        every: steps from one sample to the next; "auto" costs up to a second at the start of a run, then about one
            per cent of the training time.
        select: names, patterns such as ``"layer1.*"``, or a function of name and tensor; None for all tensors with at
            least two axes.
        granularity: "tensor", "row" for one sample per row (output channel, token), or one of them by name or pattern.
        steps_per_epoch: converts steps to settle into epochs.
        batch_size: examples in a batch, all processes together: converts gradient noise scales into examples.
        invariant: the scale-invariant weights: names, tensors, or the result of `equilibria.symmetries`. Only these get
            predictions. Without it the mean cosine of weight and gradient decides, once, which weights look invariant.
        sinks: receive the samples as they are taken.

    Raises:
        EquilibriaError: if an argument is not what is described here.
    """

    _closed = True  # until __init__ has finished

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        *,
        every: Every = "auto",
        select: Select | None = None,
        granularity: Granularity = "tensor",
        steps_per_epoch: int | None = None,
        batch_size: int | None = None,
        invariant: Invariant | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise EquilibriaError(
                f"got model of type {type(model).__name__}; expected a torch.nn.Module", argument="model"
            )
        self._granularity, self._every = checked_granularity(granularity), every
        self._steps_per_epoch = None if steps_per_epoch is None else whole("steps_per_epoch", steps_per_epoch, low=1)
        self._batch_size = None if batch_size is None else whole("batch_size", batch_size, low=1)
        unwrapped = unwrap_optimizers(optimizers)
        self._model = weakref.ref(model)
        self._select = select if select is None or callable(select) else select_patterns(select)
        watched = find_watched(model, unwrapped, select=self._select, granularity=self._granularity)
        watched = watched if invariant is None else with_invariance(watched, invariant, model=model)
        in_model = {id(param): place for place, param in enumerate(model.parameters())}
        self._places = {id(layer.param): in_model.get(id(layer.param), len(in_model)) for layer in watched}
        self._frozen = _frozen(model, watched, self._select)
        stepped = {id(p) for optimizer in unwrapped for group in optimizer.param_groups for p in group["params"]}
        outside = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped}
        self._outside = {name: sum_of(p) for name, p in outside.items()}
        self._sinks: list[Sink] = []
        if not isinstance(sinks, Iterable):
            raise EquilibriaError(
                f"got sinks of type {type(sinks).__name__}; expected a list of sinks", argument="sinks"
            )
        for sink in sinks:
            self._sinks.append(_checked_sink(sink, argument="sinks"))
        by_optimizer = [[layer for layer in watched if layer.optimizer == index] for index in range(len(unwrapped))]
        self._is_sharded = any_sharded(watched)
        self._leaders = {
            index for index, layers in enumerate(by_optimizer) if any_sharded(layers) or not self._is_sharded
        }
        self._sampler = Sampler(every, optimizers=len(unwrapped), leaders=self._leaders)
        self._builders = [SampleBuilder(layers, steps_per_epoch=self._steps_per_epoch) for layers in by_optimizer]
        self._hooks = [
            OptimizerHooks(optimizer, layers, index=index, sampler=self._sampler, on_reading=self._receive)
            for index, (optimizer, layers) in enumerate(zip(unwrapped, by_optimizer, strict=True))
        ]
        for hooks in self._hooks:
            _ = hooks.laws  # an optimizer without a closed law is measured here: no training step waits for it
        self._not_in_force = tuple(finding for hooks in self._hooks for finding in hooks.settings_not_in_force())
        self._history = History()
        self.metric_log = MetricLog()
        self.diffusion_log = DiffusionLog()
        self._pending: list[tuple[int, StepReading]] = []
        self._flushed = time.monotonic()
        self._others_know = False  # whether the other processes know that this one has failed
        self._closed = self._has_warned = False

    @property
    def step(self) -> int:
        """Optimizer steps taken while watching; steps that several optimizers take in turn count once."""
        return max(hooks.last_step for hooks in self._hooks) + 1

    @property
    def every(self) -> int:
        """Steps from one sample to the next at present."""
        return self._sampler.every

    @property
    def failure(self) -> str | None:
        """The error that stopped the sampling, or None."""
        return self._sampler.failure

    @property
    def closed(self) -> bool:
        """Whether the hooks are off and the sinks closed."""
        return self._closed

    @property
    def metadata(self) -> dict[str, Any]:
        """Versions, sampling, optimizers, controllers and every watched weight with its law, in values for JSON.

        Weights come in the order of the model, those that it does not contain last.
        """
        optimizers = [hooks.optimizer for hooks in self._hooks]
        laws = [hooks.laws for hooks in self._hooks]
        rules = [[None if law.rule is None else describe_rule(law.rule) for law in of_groups] for of_groups in laws]
        return {
            "equilibria": __version__,
            "torch": str(torch.__version__),
            "every": self._every,
            "granularity": self._granularity,
            "frozen": self._frozen,
            "steps_per_epoch": self._steps_per_epoch,
            "batch_size": self._batch_size,
            "optimizers": [describe_optimizer(*pair) for pair in zip(optimizers, laws, strict=True)],
            "controllers": [
                {"optimizer": index, **describe_controller(controller)}
                for index, optimizer in enumerate(optimizers)
                for controller in control_log(optimizer).controllers
            ],
            "skipped": [
                {"optimizer": index, "steps": hooks.skipped.count, "before": hooks.skipped.before, "taken": hooks.count}
                for index, hooks in enumerate(self._hooks)
                if hooks.skipped.count
            ],
            "params": [
                unit
                for hooks, of_groups, described, layer in sorted(
                    (
                        (hooks, of_groups, described, layer)
                        for hooks, of_groups, described in zip(self._hooks, laws, rules, strict=True)
                        for layer in hooks.watched
                    ),
                    key=lambda entry: self._places[id(entry[3].param)],
                )
                for unit in (
                    describe_units(layer, of_groups[layer.group], described[layer.group])
                    if hooks.promised(layer) is None
                    else describe_units(layer, GroupRule(None), None, promised_by=type(hooks.turned_by).__name__)
                )
            ],
        }

    def samples(self) -> pa.Table:
        """The sample table so far; see `equilibria.records.tables` for its columns."""
        self.flush()
        return self._history.table()

    def metrics(self) -> pa.Table:
        """The numbers that the training logged so far: columns ``step``, ``name`` and ``value``, sorted by step."""
        return self.metric_log.table()

    def diffusion(self) -> pa.Table:
        """How far weights have turned over 1 to 1,024 steps: columns ``step``, ``param``, ``distance``, ``turned``."""
        self.flush()
        return self.diffusion_log.table()

    def log(self, numbers: Mapping[str, Any], *, step: int | None = None) -> None:
        """Take numbers of the training itself, such as its loss, for the present step or the one that is named."""
        if self._closed and not self._has_warned:
            self._has_warned = True
            warn_in_training("numbers logged after close() are kept in memory, not recorded", WatchWarning)
        self.metric_log.log(numbers, taken=self.step, step=step)

    def findings(self) -> Findings:
        """What the samples mean, warnings first."""
        from equilibria.diagnosis import diagnose

        diagnosed = diagnose(self.samples(), metadata=self.metadata, metrics=self.metrics())
        return warnings_first((*self.findings_about_watching(), *diagnosed))

    def findings_about_watching(self) -> tuple[Finding, ...]:
        """The findings that no sample shows: weights unseen, not watched or not trained; settings not in force."""
        silent = [hooks for hooks in self._hooks if hooks.changes_since_last_step > _MOST_CHANGES]
        unwatched, untrained = self._unwatched(), self._untrained()
        return (
            *(bypassed(hooks.count) for hooks in silent),
            *([added_later(unwatched)] if unwatched else []),
            *([in_no_optimizer(untrained, self.step)] if untrained else []),
            *self._not_in_force,
        )

    def flush(self) -> None:
        """Turn all queued readings into samples, and read all logged numbers."""
        try:
            self.metric_log.settle(final=self._closed)
            self._process_pending(wait=True)
        except Exception as error:
            self._sampler.fail(error)

    def add_sink(self, sink: Sink) -> None:
        """Send all further samples to a sink.

        Raises:
            EquilibriaError: if it lacks ``append(columns)`` or ``close()``.
        """
        self._sinks.append(_checked_sink(sink, argument="sink"))

    def remove_sink(self, sink: Sink) -> None:
        """Send no further samples to a sink."""
        self._sinks = [other for other in self._sinks if other is not sink]

    def reattach(self, optimizer: Any) -> None:
        """Continue with another optimizer of the same tensors, such as a copy: copying drops hooks.

        Raises:
            EquilibriaError: if the monitor is closed, or the optimizer does not train the watched tensors.
        """
        if self._closed:
            raise EquilibriaError("got a monitor that is closed; expected an open one: call equilibria.watch again")
        inner = unwrap_optimizer(optimizer)
        trained = {id(param) for group in inner.param_groups for param in group["params"]}
        for hooks in self._hooks:
            if hooks.watched and all(id(layer.param) in trained for layer in hooks.watched):
                hooks.attach(inner)
                hooks.restart_predictions()
                return
        raise EquilibriaError(
            "got an optimizer that does not train the watched tensors; expected one that does. A copy of the model "
            "has other tensors: call equilibria.watch on it",
            argument="optimizer",
        )

    def close(self) -> None:
        """Remove the hooks, process all queued readings and close the sinks; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for hooks in self._hooks:
            hooks.detach()
        self.flush()
        for sink in self._sinks:
            self._try_sink(sink, sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody holds the monitor or its optimizer any more: write the last samples, free the directory. In a context
        # of its own: Python up to 3.11 crashes if a collected object sets a context variable, as np.errstate does,
        # while another one is being set (cpython#148891).
        if not self._closed:
            contextvars.copy_context().run(self.close)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Numbers, words and tensors with which a resumed run continues as if it had not stopped."""
        self.flush()
        return {
            "hooks": [hooks.state_dict() for hooks in self._hooks],
            "builders": [builder.state_dict() for builder in self._builders],
            "metrics": self.metric_log.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint; call it after the model and the optimizer were loaded.

        Raises:
            EquilibriaError: if it is not the state of a monitor, or that of other weights.
        """
        self._check_state(state)
        before = self.state_dict()
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._load(before)
            raise EquilibriaError(
                f"got a damaged state ({error!r}); expected the result of monitor.state_dict()", argument="state"
            ) from error
        self.metric_log.load_state_dict(state.get("metrics", {}), taken=self.step)
        self.diffusion_log.drop_from(self.step)

    def mark_weights(self) -> None:
        """Count every change of the weights before the next step as a change from outside.

        Call it when a checkpoint is loaded completely: loading changes the weights too.
        """
        for hooks in self._hooks:
            hooks.mark_weights()

    def _load(self, state: Mapping[str, Any]) -> None:
        for part, saved in zip(self._hooks, state["hooks"], strict=True):
            part.load_state_dict(saved)
        for builder, saved in zip(self._builders, state["builders"], strict=True):
            builder.load_state_dict(saved)
        self._sampler.resume(self.step)

    def _check_state(self, state: object) -> None:
        if not isinstance(state, Mapping) or {"hooks", "builders"} - set(state):
            raise EquilibriaError(f"got {_shown(state)}; expected the result of monitor.state_dict()", argument="state")
        saved, own = [part["names"] for part in state["builders"]], [builder.names for builder in self._builders]
        if saved != own:
            raise EquilibriaError(
                f"got the state of a monitor that watches {listed(saved)}; expected this one's {listed(own)}: same "
                "model, optimizers, select and granularity",
                argument="state",
            )
        groups = [len(hooks.settings) for hooks in self._hooks]
        if [len(part["settings"]) for part in state["hooks"]] != groups:
            raise EquilibriaError(
                f"got the state of other parameter groups; expected {groups} groups per optimizer", argument="state"
            )

    # ---- readings

    def _receive(self, optimizer: int, reading: StepReading | None) -> None:
        """Take the reading of a sampled step, None if an error prevented it. Called by the hooks.

        Other processes that hold parts of the same tensors wait for this one's sums, so that a process that has failed
        has to join once more, to tell them.
        """
        awaited = self._is_sharded and optimizer in self._leaders

        def take() -> None:
            nonlocal awaited
            assert reading is not None
            if reading.grown and (unwatched := self._unwatched()):
                warn_in_training(f"{added_later(unwatched).subject}: call equilibria.watch again", WatchWarning)
            wish = self._sampler.wish(optimizer, reading.step)
            if self._is_sharded:
                awaited = False
                wish = self._sum(optimizer, reading.products, wish)
            self._sampler.plan_next(optimizer, reading.step, wish)
            # In main memory there is nothing to wait for. On a device, wait for a few more readings, then take
            # those whose numbers have arrived.
            is_at_hand = _in_main_memory(reading.products)
            reading.send_to_host()
            self._pending.append((optimizer, reading))
            waited = time.monotonic() - self._flushed > _LONGEST_WAIT
            if is_at_hand or len(self._pending) >= _MOST_PENDING or waited:
                self._process_pending(wait=len(self._pending) > 2 * _MOST_PENDING)

        if reading is not None:
            self._sampler.attempt(take)
        if self._sampler.failure is not None and awaited and not self._others_know:
            self._join_once_more(optimizer)

    def _sum(self, optimizer: int, products: torch.Tensor, wish: float) -> float:
        """Add up the products of all processes; if one of them has failed, all of them stop here."""
        self._others_know = has_failed = self._sampler.failure is not None
        extra = torch.tensor([wish, float(has_failed)], dtype=torch.float64, device="cpu")
        extra = sum_over_processes(self._hooks[optimizer].watched, products, extra)
        if extra[1] > 0 and not has_failed:
            self._others_know = True
            raise RuntimeError("watching has stopped in another process")
        return float(extra[0])

    def _join_once_more(self, optimizer: int) -> None:
        watched = self._hooks[optimizer].watched
        shape = sum(layer.units for layer in watched), PRODUCTS
        nothing = torch.zeros(shape, dtype=torch.float64, device=local(watched[0].param).device)
        with contextlib.suppress(Exception):
            self._sum(optimizer, nothing, 1.0)

    def _process_pending(self, *, wait: bool) -> None:
        """Turn readings into samples; without ``wait`` only those whose numbers a device has sent."""
        self._flushed = time.monotonic()
        while self._pending and (wait or self._pending[0][1].has_arrived()):
            optimizer, reading = self._pending.pop(0)
            self._sampler.add_cost(reading.wait())
            rows = self._builders[optimizer].build(reading)
            if rows.restart:
                self._hooks[optimizer].restart_predictions()
            hooks = self._hooks[optimizer]
            hooks.copied_too = (hooks.copied_too - rows.exact) | rows.rounded
            columns = read_only(rows.columns)
            self._history.append(columns)
            for sink in self._sinks:
                self._try_sink(sink, lambda sink=sink, columns=columns: sink.append(columns))  # type: ignore[misc]
        for hooks, builder in zip(self._hooks, self._builders, strict=True):
            for comparison in hooks.memory.take_comparisons(wait=wait):
                self.diffusion_log.add(comparison, builder.names, builder.steady_norms)

    def _try_sink(self, sink: Sink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.remove_sink(sink)
            warn_in_training(
                f"{type(sink).__name__} takes no more samples: {described(error)}; watching goes on",
                WatchWarning,
            )

    def _unwatched(self) -> list[str]:
        """Tensors that would be watched, had they been trained when watching began."""
        model, known = self._model(), {id(layer.param) for hooks in self._hooks for layer in hooks.watched}
        if model is None:
            return []
        try:
            now = find_watched(
                model, [hooks.optimizer for hooks in self._hooks], select=self._select, granularity="tensor"
            )
        except Exception:  # the user's selection may fail on tensors that it was not written for
            return []
        return [layer.name for layer in now if id(layer.param) not in known]

    def _untrained(self) -> list[str]:
        """Parameters in no watched optimizer that require a gradient and have not changed since watching began."""
        model = self._model()
        if model is None or self.step < _STEPS_TO_CHANGE or not self._outside:
            return []
        stepped = {id(p) for hooks in self._hooks for group in hooks.optimizer.param_groups for p in group["params"]}
        return [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) not in stepped and name in self._outside and self._outside[name] == sum_of(p)
        ]


def _frozen(model: nn.Module, watched: Sequence[Watched], select: Select | None) -> list[dict[str, Any]]:
    """The parameters that would be watched if they required a gradient."""
    frozen = {plain_name(name): param for name, param in model.named_parameters() if not param.requires_grad}
    wanted = selection(select, [name for layer in watched for name in (layer.name, *layer.aliases)])
    return [{"name": name, "shape": list(param.shape)} for name, param in frozen.items() if wanted(name, param)]


def _checked_sink(sink: Sink, *, argument: str) -> Sink:
    lacking = [name for name in ("append", "close") if not callable(getattr(sink, name, None))]
    if lacking:
        raise EquilibriaError(
            f"got a sink of type {type(sink).__name__} without {' and '.join(f'{name}()' for name in lacking)}; "
            "expected an object with append(columns) and close(), not a class",
            argument=argument,
        )
    return sink


def _in_main_memory(products: torch.Tensor) -> bool:
    """Whether there is nothing to wait for. Training may pause, or be killed, at any moment."""
    return products.device.type == "cpu"


def _shown(state: object) -> str:
    if isinstance(state, Mapping):
        return f"a dict with {', '.join(map(repr, list(state)[:5])) or 'nothing in it'}"
    return f"state of type {type(state).__name__}"
