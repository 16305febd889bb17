"""Watch inside a transformers `Trainer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from equilibria.errors import WatchWarning, warn_in_training
from equilibria.integrations._watched_training import LogLines, WatchedTraining, training_goes_on
from equilibria.integrations.scalars import require
from equilibria.monitor.monitor import Sink
from equilibria.optimizers.budget import Every
from equilibria.tensors.invariance import Invariant
from equilibria.tensors.parameters import Granularity, Select
from equilibria.watching import WatchedRun
from equilibria.watching._alerts import OnFinding
from equilibria.watching._recording import is_first_process

__all__ = ["EquilibriaCallback"]

if TYPE_CHECKING:
    _TrainerCallback = object
else:
    _TrainerCallback = require("transformers", extra="transformers").TrainerCallback

_STATE = "equilibria.pt"  # in a checkpoint's folder


class EquilibriaCallback(_TrainerCallback):
    """Watches the optimizer of a trainer while it trains.

    It counts the steps of the torch optimizer inside accelerate's: accumulated batches and skipped steps do not count.
    The loss and the evaluation metrics that the trainer logs are recorded beside the angles; the loss is the mean since
    it logged last (``logging_steps``). Its state is in the trainer's checkpoints (``equilibria.pt``): a run that is
    resumed from one in its ``output_dir``, or from ``args.resume_from_checkpoint``, continues in its run directory. An
    error in here becomes a warning.

    The trainer does not report exceptions to its callbacks: after one, the run directory is closed at the next
    ``train()`` that records there, or at exit. ``with EquilibriaCallback(...) as callback:`` around ``trainer.train()``
    closes it at once.

    Args:
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        every: steps from one sample to the next; "auto" costs up to a second at the start of a run, then about one
            per cent of the training time.
        select: names, patterns or a function of name and tensor; by default all tensors with at least two axes.
        granularity: "tensor"; "row" for one sample per row (output channel, token); or one of them by name or pattern,
            such as ``{"embedding.weight": "row"}``. Matrices stacked in one parameter, such as experts, count as so
            many tensors, up to 64 of them.
        invariant: the scale-invariant weights: names, tensors, or the result of `equilibria.symmetries`.
        sinks: receive the samples as they are taken, such as `equilibria.integrations.wandb.WandbSink`.
        summary: whether to print a summary when the training ends.
        on_finding: called with each new finding; by default a line in the log of transformers.
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
            on_finding=LogLines("transformers.equilibria") if on_finding is None else on_finding,
        )

    @property
    def monitor(self) -> WatchedRun | None:
        """The watched run, during training and after it; None before."""
        return self._training.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start watching."""
        with training_goes_on("the record of this run starts again at step 0"):
            if state.global_step:
                self._training.load_state_dict(_load(args, state.global_step))
        with training_goes_on("this training is not watched"):
            self._training.begin(
                kwargs["model"],
                kwargs["optimizer"],
                steps_per_epoch=_steps_per_epoch(args, kwargs["train_dataloader"]),
                batch_size=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Record the loss and the evaluation metrics that the trainer logs."""
        self._training.log({name: value for name, value in (logs or {}).items() if _is_metric(name, value)})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the monitor's state to the trainer's checkpoint."""
        with training_goes_on("this checkpoint is without the state of the monitor"):
            folder = _checkpoint(args, state.global_step)
            monitor_state = self._training.state_dict()
            if monitor_state and is_first_process() and folder.is_dir():
                torch.save(monitor_state, folder / _STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close, and print the summary."""
        self._training.end()

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._training.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_metric(name: str, value: object) -> bool:
    """Whether the trainer measured it on data: neither a setting nor a speed."""
    is_measured = name == "loss" or (name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")))
    return is_measured and isinstance(value, int | float)


def _load(args: Any, step: int) -> dict[str, Any] | None:
    """The monitor's state in the checkpoint that is resumed. The trainer does not tell which one that is."""
    named = args.resume_from_checkpoint
    folders = [Path(named)] if isinstance(named, str) and named not in ("True", "true") else []
    folders = [folder for folder in (*folders, _checkpoint(args, step)) if (folder / _STATE).is_file()]
    if not folders:
        warn_in_training(
            f"training goes on from step {step:,}, but there is no {_checkpoint(args, step) / _STATE}: the record of "
            "this run starts again at step 0",
            WatchWarning,
        )
        return None
    state: dict[str, Any] = torch.load(folders[0] / _STATE, map_location="cpu", weights_only=True)
    return state


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _steps_per_epoch(args: Any, batches: Any) -> int | None:
    """Optimizer steps per epoch; None for data without a length."""
    try:
        return max(1, math.ceil(len(batches) / int(args.gradient_accumulation_steps)))
    except TypeError:
        return None
