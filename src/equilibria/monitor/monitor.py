"""Watches the weights of a training run through optimizer hooks, and never gets in its way."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from equilibria._version import __version__
from equilibria.diagnosis import diagnose
from equilibria.errors import EquilibriaError, WatchWarning, one_of, warn_caller, whole
from equilibria.findings import Finding
from equilibria.monitor.description import describe
from equilibria.monitor.history import History
from equilibria.monitor.hooks import PRODUCTS, Reading, Tap
from equilibria.monitor.sample_rows import Reckoning
from equilibria.optimizers.budget import Cadence
from equilibria.tensors.invariance import Told, with_symmetries
from equilibria.tensors.layout import local
from equilibria.tensors.parameters import Select, find_watched, unwrap_optimizer
from equilibria.tensors.sharding import any_sharded, sum_over_pieces

_MOST_PENDING = 16  # readings that wait for their turn, so that a device is asked less often
_LONGEST_WAIT = 1.0  # seconds after which the next reading is not kept waiting
_MOST_CHANGES = 4  # in place since the last step, as loading a checkpoint makes; more are steps that we do not see


class Sink(Protocol):
    """Takes samples as they come: columns of the sample table by name."""

    def append(self, columns: Mapping[str, Any]) -> None:
        """Take some rows."""

    def close(self) -> None:
        """There are no more."""


class Monitor:
    """Watches a model while it is trained; made by `equilibria.watch`.

    Training is not changed by a single bit. An error in here is reported once as a `WatchWarning`, and watching ends.

    Args:
        model: the network, wrapped or not.
        optimizers: a torch optimizer, wrapped or not, or several of them (a list, or the values of a dict).
        every: sample every so many steps; "auto" keeps the cost below a per cent of the time.
        select: names, patterns such as ``"layer1.*"``, or a function of name and tensor that says what to watch;
            None for all tensors with at least two axes.
        granularity: "tensor", or "row" for one sample per row (output channel).
        steps_per_epoch: to say times in epochs too.
        symmetries: what `equilibria.symmetries` found: which weights are scale-invariant, so that predictions are made
            for these alone. Without it the cosine of weight and gradient decides.
        sinks: where samples go as they come.
    """

    _closed = True  # until there is something to close

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        *,
        every: int | str = "auto",
        select: Select | None = None,
        granularity: str = "tensor",
        steps_per_epoch: int | None = None,
        symmetries: Told | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise EquilibriaError(f"got model of type {type(model).__name__}; expected a torch.nn.Module")
        one_of("granularity", granularity, ["tensor", "row"])
        self._granularity = granularity
        self._steps_per_epoch = None if steps_per_epoch is None else whole("steps_per_epoch", steps_per_epoch, low=1)
        self._asked_every = every
        self._cadence = Cadence(every)
        found = _unwrapped(optimizers)
        self._model = weakref.ref(model)
        self._select = select if select is None or callable(select) or isinstance(select, str) else list(select)
        watched = find_watched(model, found, select=self._select, by_row=granularity == "row")
        watched = watched if symmetries is None else with_symmetries(watched, symmetries)
        self._sinks: list[Sink] = []
        if not isinstance(sinks, Iterable):
            raise EquilibriaError(f"got sinks of type {type(sinks).__name__}; expected a list of sinks")
        for sink in sinks:
            self.add_sink(sink)
        self._history = History()
        self._pending: list[tuple[Tap, Reading, torch.Tensor]] = []
        self._flushed = time.monotonic()
        self._failure: str | None = None
        self._told = False  # whether the other processes know that this one has failed
        self._awaited = False  # whether they wait for this one's sums
        self._owed: set[Tap] = set()  # optimizers whose next step completes the present round of samples
        self._planner: Tap | None = None  # the one whose step began it
        self.latest = 0
        self._taps, self._reckonings = [], []
        for at, optimizer in enumerate(found):
            own = [each for each in watched if each.optimizer == at]
            self._taps.append(Tap(optimizer, own, listener=self))
            self._reckonings.append(Reckoning(own, steps_per_epoch=self._steps_per_epoch))
        self._together = any_sharded(watched)
        self._planners = [tap for tap in self._taps if any_sharded(tap.watched) or not self._together]
        self._closed = False

    # ---- what people ask

    @property
    def step(self) -> int:
        """How many optimizer steps were taken while watching; steps that several optimizers take in turn count once."""
        return max(tap.last for tap in self._taps) + 1

    @property
    def every(self) -> int:
        """The present number of steps from one sample to the next."""
        return self._cadence.every

    @property
    def failure(self) -> str | None:
        """Why watching has stopped, or None."""
        return self._failure

    @property
    def metadata(self) -> dict[str, Any]:
        """What is being watched, as JSON can hold it."""
        return describe(
            self._taps,
            every=self._asked_every,
            granularity=self._granularity,
            steps_per_epoch=self._steps_per_epoch,
            version=__version__,
        )

    def samples(self) -> pa.Table:
        """The sample table so far; see `equilibria.records.tables` for its columns."""
        self.flush()
        return self._history.table()

    def findings(self) -> tuple[Finding, ...]:
        """What the samples mean, most serious first."""
        bypassed = [tap for tap in self._taps if tap.changes_since_last_step > _MOST_CHANGES]
        found = diagnose(self.samples(), metadata=self.metadata)
        unwatched = self._unwatched()
        return (*(_bypassed(tap) for tap in bypassed), *([_added_later(unwatched)] if unwatched else []), *found)

    def flush(self) -> None:
        """Work off the readings that wait."""
        try:
            self._work_off()
        except Exception as error:
            self._fail(error)

    def add_sink(self, sink: Sink) -> None:
        """Send samples there from now on.

        Raises:
            EquilibriaError: if it lacks ``append(columns)`` or ``close()``.
        """
        lacking = [name for name in ("append", "close") if not callable(getattr(sink, name, None))]
        if lacking:
            raise EquilibriaError(
                f"got a sink of type {type(sink).__name__} without {' and '.join(f'{name}()' for name in lacking)}; "
                "expected an object with append(columns) and close(), not a class"
            )
        self._sinks.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Send it no more samples."""
        self._sinks = [each for each in self._sinks if each is not sink]

    def reattach(self, optimizer: Any) -> None:
        """Go on with another optimizer in place of the first, such as a copy: copying drops hooks.

        Raises:
            EquilibriaError: if it does not train the watched tensors.
        """
        if self._closed:
            raise EquilibriaError("got a monitor that is closed; expected an open one: call equilibria.watch again")
        inner = unwrap_optimizer(optimizer)
        trained = {id(param) for group in inner.param_groups for param in group["params"]}
        fitting = [tap for tap in self._taps if tap.watched and all(id(each.param) in trained for each in tap.watched)]
        if not fitting:
            raise EquilibriaError(
                "got an optimizer that does not train the watched tensors; expected one that does. A copy of the model "
                "has other tensors: call equilibria.watch on it"
            )
        fitting[0].attach(inner)
        fitting[0].begin_anew()

    def close(self) -> None:
        """Take the hooks off, work off what waits and close the sinks; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for tap in self._taps:
            tap.detach()
        self.flush()
        for sink in self._sinks:
            self._try_sink(sink, sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped: numbers, words and tensors."""
        self.flush()
        return {
            "taps": [tap.state_dict() for tap in self._taps],
            "reckonings": [reckoning.state_dict() for reckoning in self._reckonings],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; call it after the model and the optimizer were loaded.

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
                f"got a damaged state ({error!r}); expected what monitor.state_dict() gave"
            ) from error

    def mark_weights(self) -> None:
        """Say that a checkpoint is loaded completely: a change of the weights before the next step is then noticed."""
        for tap in self._taps:
            tap.mark_weights()

    def _load(self, state: Mapping[str, Any]) -> None:
        for tap, held in zip(self._taps, state["taps"], strict=True):
            tap.load_state_dict(held)
        for reckoning, held in zip(self._reckonings, state["reckonings"], strict=True):
            reckoning.load_state_dict(held)
        self.latest = max(0, *(tap.last for tap in self._taps))
        self._owed.clear()
        self._cadence.resume(self.step)

    def _check_state(self, state: object) -> None:
        if not isinstance(state, Mapping) or {"taps", "reckonings"} - set(state):
            raise EquilibriaError(f"got {_shown(state)}; expected what monitor.state_dict() gave")
        held, own = ([each["names"] for each in state["reckonings"]], [each.names for each in self._reckonings])
        if held != own:
            raise EquilibriaError(
                f"got the state of a monitor that watches {_listed(held)}; expected this one's {_listed(own)}: same "
                "model, optimizers, select and granularity"
            )
        groups = [len(tap.logs) for tap in self._taps]
        if [len(tap["logs"]) for tap in state["taps"]] != groups:
            raise EquilibriaError(f"got the state of other parameter groups; expected {groups} groups per optimizer")

    # ---- what the taps ask and tell

    def is_due(self, tap: Tap) -> bool:
        """Whether the step that begins now is to be sampled.

        At a pace of its own choice, samples come in rounds: one step of every optimizer. A jump of lr or weight decay
        gets a sample at once, so that it is seen where it happens.
        """
        if not self._cadence.automatic:
            self._planner, due = tap, self._cadence.is_due(tap.count)
        else:
            if (self._cadence.is_due(tap.label) or tap.jumps) and tap in self._planners:
                self._owed, self._planner = set(self._taps), tap
            due = tap in self._owed
        self._awaited = due and self._together and tap in self._planners
        return due

    def next_is_due(self) -> bool:
        """Whether the step after this one is sampled too, as far as is known."""
        return self._cadence.every == 1

    def take(self, tap: Tap, reading: Reading) -> None:
        """Keep a reading until there are a few, or the last one was long ago."""
        if tap.has_grown() and (unwatched := self._unwatched()):
            warn_caller(f"{_added_later(unwatched).subject}: call equilibria.watch again", WatchWarning)
        products = reading.products
        self._owed.discard(tap)
        wish = self._cadence.wish(reading.label) if tap is self._planner else float(self._cadence.every)
        if self._together:
            products, wish = self._sum(tap, products, wish)
        if tap is self._planner:
            self._cadence.plan_next(reading.label, wish)
        self._pending.append((tap, reading, products))
        waited = time.monotonic() - self._flushed > _LONGEST_WAIT
        if _is_at_hand(products) or len(self._pending) >= _MOST_PENDING or waited:
            self._work_off()

    def guarded(self, work: Callable[[], None]) -> None:
        """Do it; an error ends the watching and is told once, and training goes on."""
        if self._failure is not None:
            return
        begun = time.perf_counter()
        try:
            work()
        except Exception as error:
            self._fail(error)
        self._cadence.spent(time.perf_counter() - begun)

    def missed(self, tap: Tap) -> None:
        """Tell the other processes, which wait for this one's sums, once this one has failed."""
        if self._failure is None or self._told or not self._awaited:
            return
        device = local(tap.watched[0].param).device
        nothing = torch.zeros(sum(each.units for each in tap.watched), PRODUCTS, dtype=torch.float64, device=device)
        with contextlib.suppress(Exception):
            self._sum(tap, nothing, 1.0)

    def _sum(self, tap: Tap, products: torch.Tensor, wish: float) -> tuple[torch.Tensor, float]:
        """Over all processes; if one of them has failed, all of them stop here."""
        self._told, self._awaited = self._failure is not None, False
        pieces = torch.split(products, [each.units for each in tap.watched])
        extra = torch.tensor([wish, float(self._told)], dtype=torch.float64, device="cpu")
        summed, extra = sum_over_pieces(tap.watched, pieces, extra)
        if extra[1] > 0 and not self._told:
            self._told = True
            raise RuntimeError("watching has stopped in another process")
        return torch.cat(summed), float(extra[0])

    def _unwatched(self) -> list[str]:
        """Tensors that would have been watched, had they been trained when watching began."""
        model, known = self._model(), {id(each.param) for tap in self._taps for each in tap.watched}
        if model is None:
            return []
        try:
            now = find_watched(model, [tap.optimizer for tap in self._taps], select=self._select, by_row=False)
        except Exception:  # a selection of the user's own may fail on what it was not made for
            return []
        return [each.name for each in now if id(each.param) not in known]

    def _fail(self, error: Exception) -> None:
        """Stop, and say so once. The hooks stay on: torch is walking through them."""
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"
            warn_caller(f"watching has stopped: {self._failure}; training goes on", WatchWarning)

    def _work_off(self) -> None:
        self._flushed = time.monotonic()
        pending, self._pending = self._pending, []
        for tap, reading, products in pending:
            self._reckon(tap, reading, products)

    def _reckon(self, tap: Tap, reading: Reading, products: torch.Tensor) -> None:
        numbers = products.cpu().numpy()
        if reading.grad_scale is not None:
            _unscale(numbers, float(reading.grad_scale), tap, reading)
        columns = self._reckonings[self._taps.index(tap)].columns(tap, reading, numbers)
        self._history.append(columns)
        for sink in self._sinks:
            self._try_sink(sink, lambda sink=sink: sink.append(columns))  # type: ignore[misc]

    def _try_sink(self, sink: Sink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.remove_sink(sink)
            warn_caller(
                f"{type(sink).__name__} takes no more samples: {type(error).__name__}: {error}; watching goes on",
                WatchWarning,
            )


def _unscale(products: NDArray[np.float64], scale: float, tap: Tap, reading: Reading) -> None:
    """Divide the gradient in ``products`` by the scale that a loss scaler left in it."""
    combined = np.repeat(reading.combined, [each.units for each in tap.watched])
    products[:, 1] /= scale
    products[:, 2] /= scale * scale
    products[combined, 4] /= scale


def _unwrapped(optimizers: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers among what people pass, each once."""
    several = isinstance(optimizers, Mapping | list | tuple)
    given = (
        list(optimizers.values()) if isinstance(optimizers, Mapping) else list(optimizers if several else [optimizers])
    )
    if not given:
        raise EquilibriaError(f"got an empty {type(optimizers).__name__} of optimizers; expected at least one")
    found = {id(each): each for each in map(unwrap_optimizer, given)}
    for each in found.values():
        _refuse_inner(each)
    return list(found.values())


def _refuse_inner(optimizer: torch.optim.Optimizer) -> None:
    """Refuse one that another one steps, with part of its parameters only: the others would seem to stand still."""
    outer = getattr(optimizer, "equilibria_stepped_by", None)
    if outer is not None:
        raise EquilibriaError(
            f"got the {type(optimizer).__name__} inside of a {outer}; expected the {outer} itself: it is what steps, "
            "and what is to be watched, saved and loaded"
        )


def _shown(state: object) -> str:
    if isinstance(state, Mapping):
        return f"a dict with {', '.join(map(repr, list(state)[:5])) or 'nothing in it'}"
    return f"state of type {type(state).__name__}"


def _listed(names: Sequence[Sequence[str]]) -> str:
    flat = [name for each in names for name in each]
    return f"{len(flat)} weights ({', '.join(flat[:3])}{', ...' if len(flat) > 3 else ''})"


def _bypassed(tap: Tap) -> Finding:
    return Finding(
        "warning",
        "the weights change, but the watched optimizer does not step",
        f"the last step seen was number {tap.count}, and the weights have been changed since",
        "the optimizer may have been copied, which drops hooks: call monitor.reattach(optimizer)",
        "",
    )


def _added_later(names: Sequence[str]) -> Finding:
    several = len(names) > 1
    return Finding(
        "warning",
        f"{_listed([names]) if several else names[0]} {'are' if several else 'is'} trained but not watched",
        f"{'they were' if several else 'it was'} added to the optimizer, or unfrozen, after equilibria.watch",
        "close this monitor and call equilibria.watch again, after the last add_param_group and unfreezing",
        "",
    )


def _is_at_hand(products: torch.Tensor) -> bool:
    """Whether nothing is gained by waiting: in main memory. Training may pause, or be killed, at any moment."""
    return products.device.type == "cpu"
