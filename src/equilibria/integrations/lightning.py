"""Watch inside a Lightning `Trainer`, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equilibria.integrations._watched_training import LogLines, WatchedTraining, training_goes_on
from equilibria.integrations.scalars import METRICS, MOST_LAYERS, ScalarSink, Tags, require
from equilibria.monitor.monitor import Sink
from equilibria.optimizers.budget import Every
from equilibria.tensors.invariance import Invariant
from equilibria.tensors.parameters import Granularity, Select
from equilibria.watching import WatchedRun
from equilibria.watching._alerts import OnFinding

__all__ = ["EquilibriaCallback"]

_FIRST_STEP = "first_step"  # key in the state, next to the monitor's
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _packages() -> list[str]:
    """The imported ones of the two packages, because neither accepts the other's callbacks; else an installed one."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    installed = (name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]))
    return imported or [next(installed, _PACKAGES[0])]


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = type("_Callback", tuple(require(name, extra="lightning").Callback for name in _packages()), {})


class EquilibriaCallback(_Callback):
    """Watches every optimizer of the trainer during ``fit``, and logs to its loggers.

    It counts the optimizers' own steps: validation, accumulated batches and skipped steps do not count. The loss that
    ``training_step`` returns is recorded beside the angles, its mean over accumulated batches, as are the metrics with
    "val" in their names after each validation. Its state is in the trainer's checkpoints: a resumed run continues in
    its run directory. Several callbacks in one trainer must differ in ``every``, ``select`` or ``granularity``, and in
    ``log_dir``. An error in here becomes a warning.

    Args:
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        every: steps from one sample to the next; "auto" costs up to a second at the start of a run, then about one
            per cent of the training time.
        select: names, patterns or a function of name and tensor; by default all tensors with at least two axes.
        granularity: "tensor"; "row" for one sample per row (output channel, token); or one of them by name or pattern,
            such as ``{"embedding.weight": "row"}``. Matrices stacked in one parameter, such as experts, count as so
            many tensors, up to 64 of them.
        invariant: the scale-invariant weights: names, tensors, or the result of `equilibria.symmetries`.
        sinks: receive the samples in addition to the trainer's loggers.
        to_loggers: whether to log to the trainer's loggers.
        metrics: the logged columns of the sample table, or "angle_vs_predicted".
        layers: how many layers get separate tags there, at most; see `equilibria.integrations.scalars.Tags`.
        summary: whether to print a summary when the training ends.
        on_finding: called with each new finding; by default a line in the log of Lightning.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        *,
        every: Every = "auto",
        select: Select | None = None,
        granularity: Granularity = "tensor",
        invariant: Invariant | None = None,
        sinks: Iterable[Sink] = (),
        to_loggers: bool = True,
        metrics: Iterable[str] = METRICS,
        layers: int = MOST_LAYERS,
        summary: bool = True,
        on_finding: OnFinding | None = None,
    ) -> None:
        self._training = WatchedTraining(
            log_dir,
            every=every,
            select=select,
            granularity=granularity,
            invariant=invariant,
            sinks=sinks,
            summary=summary,
            on_finding=LogLines(f"{_packages()[0]}.equilibria") if on_finding is None else on_finding,
        )
        self._scalars: dict[str, Any] = {"metrics": tuple(metrics), "layers": layers}
        self._to_loggers = to_loggers
        self._first_step = 0  # of the loggers' axis, when watching began
        self._losses: list[Tensor] = []  # of the batches since the last step, each divided by their number
        self._logged = 0  # steps whose loss is recorded
        Tags(**self._scalars)  # raises for metrics that do not exist

    @property
    def monitor(self) -> WatchedRun | None:
        """The watched run, during training and after it; None before."""
        return self._training.monitor

    # Not at on_fit_start: the trainer loads the optimizers' state of a checkpoint only after that.
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start watching."""
        with training_goes_on("this training is not watched"):
            loggers = trainer.loggers if self._to_loggers else []
            sinks = [_LoggerSink(logger, **self._scalars) for logger in loggers]
            self._training.begin(
                pl_module,
                trainer.optimizers,
                steps_per_epoch=_steps_per_epoch(trainer, pl_module),
                batch_size=_batch_size(trainer),
                sinks=sinks,
            )
            if self.monitor is not None and self.monitor.step == 0:  # not resumed, whatever the trainer was
                self._first_step = _logged_step(trainer)
            self._losses, self._logged = [], 0 if self.monitor is None else self.monitor.step
            for sink in sinks:
                sink.first_step = self._first_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss of each step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.monitor is None or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        self._losses = [*self._losses, loss.detach()][-int(trainer.accumulate_grad_batches) :]
        if self.monitor.step > self._logged:
            self._logged = self.monitor.step
            self._training.log({"loss": sum(self._losses)}, step=self._logged - 1)
            self._losses = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what was measured."""
        if not trainer.sanity_checking:
            self._training.log({name: value for name, value in trainer.callback_metrics.items() if "val" in name})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close, and print the summary."""
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close."""
        self._training.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close, however the training ended."""
        self._training.close()

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint. Without ``log_dir``, which may differ when training is resumed."""
        options = {name: _plain(self._training.options[name]) for name in ("every", "select", "granularity")}
        return f"{type(self).__qualname__}{options}"

    def state_dict(self) -> dict[str, Any]:
        """The monitor's state, for the trainer's checkpoint."""
        state = self._training.state_dict()
        return {**state, _FIRST_STEP: self._first_step} if state else {}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Continue with other options too, if there was one such callback and there is one now."""
        callbacks = checkpoint.get("callbacks", {}).items()
        states = [state for key, state in callbacks if str(key).startswith(type(self).__qualname__)]
        if len(states) == sum(isinstance(callback, EquilibriaCallback) for callback in trainer.callbacks) == 1:
            self.load_state_dict(states[0])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._first_step = int(state_dict.get(_FIRST_STEP, 0))
        self._training.load_state_dict(state_dict)


class _LoggerSink(ScalarSink):
    """Sends scalars to a logger of the trainer. The trainer closes it."""

    first_step = 0  # on the logger's axis, when watching began

    def __init__(self, logger: Any, **options: Any) -> None:
        super().__init__(**options)
        self._logger = logger

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars by tag."""
        self._logger.log_metrics(dict(scalars), step=self.first_step + step)


def _steps_per_epoch(trainer: Any, pl_module: Any) -> int | None:
    """Optimizer steps per epoch, if the trainer takes them and knows the length of its data."""
    batches: float = trainer.num_training_batches
    if not pl_module.automatic_optimization or not math.isfinite(batches) or batches < 1:
        return None
    return math.ceil(batches / int(trainer.accumulate_grad_batches))


def _batch_size(trainer: Any) -> int | None:
    """Examples per optimizer step, all processes together, if the trainer has one loader with batches of one size."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int):
        return None
    return size * int(trainer.accumulate_grad_batches) * int(trainer.world_size)


def _logged_step(trainer: Any) -> int:
    """The step of the trainer's own curves. ``global_step`` counts the steps of all optimizers together."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def _plain(option: Any) -> Any:
    """An option as text that is the same in the next process: a function by its name, a set in order."""
    if callable(option):
        return getattr(option, "__qualname__", type(option).__qualname__)
    return sorted(map(str, option)) if isinstance(option, list | tuple | set | frozenset) else str(option)
