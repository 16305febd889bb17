"""Watching inside a transformers `Trainer`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from equilibria.errors import WatchWarning, warn_caller
from equilibria.integrations.scalars import is_first_process, require
from equilibria.integrations.session import Session, training_goes_on
from equilibria.monitor.monitor import Sink
from equilibria.tensors.invariance import Told
from equilibria.tensors.parameters import Select
from equilibria.watching import WatchedRun

__all__ = ["EquilibriaCallback"]

if TYPE_CHECKING:
    _TrainerCallback = object
else:
    _TrainerCallback = require("transformers", extra="transformers").TrainerCallback

_STATE = "equilibria.pt"  # in a checkpoint's folder


class EquilibriaCallback(_TrainerCallback):
    """Watches the optimizer of a trainer while it trains.

    It measures in the steps of the torch optimizer inside of accelerate's: accumulated batches and skipped steps do not
    count. Its state is in the trainer's checkpoints (``equilibria.pt``): a run that is resumed from one in its
    ``output_dir``, or from ``args.resume_from_checkpoint``, goes on in its run directory. An error in here becomes
    a warning.

    The trainer does not tell when training raises: the run directory is then closed at the next ``train()`` that
    records there, or at exit; at once ``with EquilibriaCallback(...) as callback:`` around ``trainer.train()``.

    Args:
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        every: sample every so many steps; "auto" keeps the cost below a per cent of the training time.
        select: names, patterns or a function of name and tensor; by default all tensors with at least two axes.
        granularity: "tensor", or "row" for every row (output channel) by itself.
        symmetries: what `equilibria.symmetries` found for this model.
        sinks: more places for the samples, such as `equilibria.integrations.wandb.WandbSink`.
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
        tell: bool = True,
    ) -> None:
        self._session = Session(
            log_dir, every=every, select=select, granularity=granularity, symmetries=symmetries, sinks=sinks, tell=tell
        )

    @property
    def monitor(self) -> WatchedRun | None:
        """The watched run, also after the training; None before it."""
        return self._session.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        with training_goes_on("the record of this run begins anew"):
            if state.global_step:
                self._session.load_state_dict(_load(args, state.global_step))
        with training_goes_on("this training is not watched"):
            epoch = _steps_per_epoch(args, kwargs["train_dataloader"])
            self._session.begin(kwargs["model"], kwargs["optimizer"], steps_per_epoch=epoch)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add to the trainer's checkpoint."""
        with training_goes_on("this checkpoint is without the state of the monitor"):
            folder = _checkpoint(args, state.global_step)
            held = self._session.state_dict()
            if held and is_first_process() and folder.is_dir():
                torch.save(held, folder / _STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close, and tell what was found."""
        self._session.end()

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(args: Any, step: int) -> dict[str, Any] | None:
    """The monitor's state of the checkpoint that is resumed; the trainer does not say which one that is."""
    named = args.resume_from_checkpoint
    folders = [Path(named)] if isinstance(named, str) and named not in ("True", "true") else []
    folders = [each for each in (*folders, _checkpoint(args, step)) if (each / _STATE).is_file()]
    if not folders:
        warn_caller(
            f"training goes on from step {step:,}, but there is no {_checkpoint(args, step) / _STATE}: the record of "
            "this run begins anew, at step 0",
            WatchWarning,
        )
        return None
    held: dict[str, Any] = torch.load(folders[0] / _STATE, map_location="cpu", weights_only=True)
    return held


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _steps_per_epoch(args: Any, batches: Any) -> int | None:
    """Optimizer steps; None for data without a length."""
    try:
        return max(1, math.ceil(len(batches) / int(args.gradient_accumulation_steps)))
    except TypeError:
        return None
