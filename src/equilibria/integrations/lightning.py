"""Watching inside a Lightning `Trainer`, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibria.integrations.scalars import METRICS, MOST_LAYERS, ScalarSink, Tags, require
from equilibria.integrations.session import Session, training_goes_on
from equilibria.monitor.monitor import Sink
from equilibria.tensors.invariance import Told
from equilibria.tensors.parameters import Select
from equilibria.watching import WatchedRun

__all__ = ["EquilibriaCallback"]

_FIRST_STEP = "first_step"  # in the state, beside the session's own
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _packages() -> list[str]:
    """Those that the script has imported already, for a callback of one is none for the other; else one of them."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    installed = (name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]))
    return imported or [next(installed, _PACKAGES[0])]


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = type("_Callback", tuple(require(name, extra="lightning").Callback for name in _packages()), {})


class EquilibriaCallback(_Callback):
    """Watches every optimizer of the trainer during ``fit``, and logs to its loggers.

    It measures in the optimizers' own steps: validation, accumulated batches and steps that were skipped do not count.
    Its state is in the trainer's checkpoints: a resumed run goes on in its run directory. Several in one trainer must
    differ in ``every``, ``select`` or ``granularity``, and in ``log_dir``. An error in here becomes a warning.

    Args:
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        every: sample every so many steps; "auto" keeps the cost below a per cent of the training time.
        select: names, patterns or a function of name and tensor; by default all tensors with at least two axes.
        granularity: "tensor", or "row" for every row (output channel) by itself.
        symmetries: what `equilibria.symmetries` found for this model.
        sinks: more places for the samples, beside the trainer's loggers.
        to_loggers: log to the trainer's loggers.
        metrics: what is logged there: columns of the sample table, or "angle_vs_predicted".
        layers: how many layers have tags of their own there, at most; see `equilibria.integrations.scalars.Tags`.
        tell: print what was found when the training ends.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        *,
        every: int | str = "auto",
        select: Select | None = None,
        granularity: str = "tensor",
        symmetries: Told | None = None,
        sinks: Iterable[Sink] = (),
        to_loggers: bool = True,
        metrics: Iterable[str] = METRICS,
        layers: int = MOST_LAYERS,
        tell: bool = True,
    ) -> None:
        self._session = Session(
            log_dir, every=every, select=select, granularity=granularity, symmetries=symmetries, sinks=sinks, tell=tell
        )
        self._scalars: dict[str, Any] = {"metrics": tuple(metrics), "layers": layers}
        self._to_loggers = to_loggers
        self._first_step = 0  # of the loggers' axis, when watching began
        Tags(**self._scalars)  # refuses what cannot be logged

    @property
    def monitor(self) -> WatchedRun | None:
        """The watched run, also after the training; None before it."""
        return self._session.monitor

    # Not at on_fit_start: the optimizers' state of a checkpoint is loaded only after that.
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        with training_goes_on("this training is not watched"):
            loggers = trainer.loggers if self._to_loggers else []
            sinks = [_LoggerSink(logger, **self._scalars) for logger in loggers]
            epoch = _steps_per_epoch(trainer, pl_module)
            self._session.begin(pl_module, trainer.optimizers, steps_per_epoch=epoch, sinks=sinks)
            if self.monitor is not None and self.monitor.step == 0:  # not resumed, whatever the trainer was
                self._first_step = _logged_step(trainer)
            for sink in sinks:
                sink.first_step = self._first_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close, and tell what was found."""
        self._session.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close."""
        self._session.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close, however the training ended."""
        self._session.close()

    @property
    def state_key(self) -> str:
        """Where the state is in a checkpoint. Not by ``log_dir``, which a resumed training may choose anew."""
        options = {name: _plain(self._session.options[name]) for name in ("every", "select", "granularity")}
        return f"{type(self).__qualname__}{options}"

    def state_dict(self) -> dict[str, Any]:
        """The monitor's, for the trainer's checkpoint."""
        held = self._session.state_dict()
        return {**held, _FIRST_STEP: self._first_step} if held else {}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Go on with other options too, where there was one such callback and there is one now."""
        states = checkpoint.get("callbacks", {}).items()
        held = [state for key, state in states if str(key).startswith(type(self).__qualname__)]
        if len(held) == sum(isinstance(each, EquilibriaCallback) for each in trainer.callbacks) == 1:
            self.load_state_dict(held[0])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._first_step = int(state_dict.get(_FIRST_STEP, 0))
        self._session.load_state_dict(state_dict)


class _LoggerSink(ScalarSink):
    """A logger of the trainer, which closes it."""

    first_step = 0  # of its axis, when watching began

    def __init__(self, logger: Any, **options: Any) -> None:
        super().__init__(**options)
        self._logger = logger

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars by tag."""
        self._logger.log_metrics(dict(scalars), step=self.first_step + step)


def _steps_per_epoch(trainer: Any, pl_module: Any) -> int | None:
    """Optimizer steps, where the trainer decides about them and knows how long its data is."""
    batches: float = trainer.num_training_batches
    if not pl_module.automatic_optimization or not math.isfinite(batches) or batches < 1:
        return None
    return math.ceil(batches / int(trainer.accumulate_grad_batches))


def _logged_step(trainer: Any) -> int:
    """Where the trainer's own curves are. ``global_step`` counts the steps of all optimizers together."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def _plain(option: Any) -> Any:
    """An option in words that are the same in the next process: a function by its name, a set in order."""
    if callable(option):
        return getattr(option, "__qualname__", type(option).__qualname__)
    return sorted(map(str, option)) if isinstance(option, list | tuple | set | frozenset) else str(option)
