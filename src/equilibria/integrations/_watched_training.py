"""WatchedTraining: the common part of both trainers' callbacks. Training never breaks because of it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from equilibria.errors import EquilibriaError, WatchWarning, described, warn_in_training
from equilibria.findings import Finding, counted
from equilibria.monitor.monitor import Sink
from equilibria.optimizers.budget import Every, TimeBudget
from equilibria.tensors.invariance import Invariant
from equilibria.tensors.parameters import Granularity, Select, checked_granularity
from equilibria.watching import WatchedRun, watch
from equilibria.watching._alerts import OnFinding, checked
from equilibria.watching._recording import is_first_process

_MOST_FINDINGS = 3  # in the summary at the end of a training; the report has all


class WatchedTraining:
    """Watches one training at a time.

    Args:
        log_dir: a directory to record into.
        every: as for `equilibria.watch`, like the next four.
        select: which tensors.
        granularity: of the samples.
        invariant: the scale-invariant weights.
        sinks: receive the samples as they are taken.
        summary: whether to print a summary when the training ends.
        on_finding: called with each new finding.

    Raises:
        EquilibriaError: for arguments that are wrong whatever the model is.

    Attributes:
        monitor: the watched run, during training and after it; None before, or if it could not be watched.
        options: the options for `equilibria.watch`.
    """

    _open: ClassVar[weakref.WeakSet[WatchedTraining]] = weakref.WeakSet()

    def __init__(
        self,
        log_dir: str | Path | None,
        *,
        every: Every,
        select: Select | None,
        granularity: Granularity,
        invariant: Invariant | None,
        sinks: Iterable[Sink],
        summary: bool,
        on_finding: OnFinding,
    ) -> None:
        TimeBudget(every, share=1.0)  # raises if it is neither "auto" nor a number of steps
        checked_granularity(granularity)
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.monitor: WatchedRun | None = None
        self.options: dict[str, Any] = {
            "every": every,
            "select": select,
            "granularity": granularity,
            "invariant": invariant,
            "on_finding": checked(on_finding),
        }
        self._sinks, self._prints_summary = list(sinks), summary
        self._optimizers: set[int] = set()  # ids of those that are watched
        self._loaded: Mapping[str, Any] | None = None  # a checkpoint's state, until its weights are loaded too

    def begin(
        self,
        model: nn.Module,
        optimizers: Any,
        *,
        steps_per_epoch: int | None = None,
        batch_size: int | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        """Start watching, from a loaded checkpoint if there is one; call it when model and optimizer are loaded."""
        loaded = self._loaded
        self.close()
        with training_goes_on("this training is not watched"):
            self._close_others(optimizers)
            self.monitor = None
            self.monitor = watch(
                model,
                optimizers,
                log_dir=self.log_dir,
                steps_per_epoch=steps_per_epoch,
                batch_size=batch_size,
                sinks=[*self._sinks, *sinks],
                **self.options,
            )
            WatchedTraining._open.add(self)
            if loaded is not None:
                with training_goes_on("the record of this run starts again at step 0"):
                    self.monitor.load_state_dict(loaded)

    def log(self, numbers: Mapping[str, Any], *, step: int | None = None) -> None:
        """Record numbers of the training, such as its loss."""
        if self.monitor is not None and self in WatchedTraining._open and numbers:
            with training_goes_on(f"not recorded: {', '.join(numbers)}"):
                self.monitor.log(step=step, **numbers)

    def end(self) -> None:
        """Close, and print the summary."""
        self.close()
        if self._prints_summary and self.monitor is not None and is_first_process():
            with training_goes_on("no summary is printed"):
                print_summary(self.monitor)

    def close(self) -> None:
        """Stop watching and close the run directory; table, findings and report remain available.

        A checkpoint that was loaded for something other than training, such as validation, is dropped.
        """
        self._loaded = None
        WatchedTraining._open.discard(self)
        with training_goes_on("the run directory may lack its last samples"):
            if self.monitor is not None:
                self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """The monitor's state for a checkpoint; empty if nothing is watched."""
        with training_goes_on("this checkpoint is without the state of the monitor"):
            if self.monitor is not None:
                return self.monitor.state_dict()
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint when the next training begins."""
        self._loaded = state or None

    def _close_others(self, optimizers: Any) -> None:
        """Close runs that a broken training left open in this directory: not every trainer reports exceptions.

        A run of the same optimizers belongs to the training that begins now, and stays open.
        """
        several = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        self._optimizers = {id(optimizer) for optimizer in several}
        for other in list(WatchedTraining._open):
            same_directory = self.log_dir is not None and other.log_dir == self.log_dir
            if same_directory and not other._optimizers & self._optimizers:
                other.close()


@dataclass(frozen=True, slots=True)
class LogLines:
    """Logs each finding as one line: a warning, or information if it is a note.

    Attributes:
        logger: its name.
    """

    logger: str

    def __call__(self, finding: Finding) -> None:
        level = logging.WARNING if finding.severity == "warning" else logging.INFO
        logging.getLogger(self.logger).log(level, "equilibria: %s", finding)


@contextlib.contextmanager
def training_goes_on(consequence: str) -> Iterator[None]:
    """Turn an error of this package into a warning that names the consequence."""
    try:
        yield
    except Exception as error:
        cause = str(error) if isinstance(error, EquilibriaError) else described(error)
        warn_in_training(f"{consequence}: {cause}; training goes on", WatchWarning)


def print_summary(monitor: WatchedRun) -> None:
    """Print a headline, the most serious findings and where to find the rest."""
    from equilibria.diagnosis.summary import summarise
    from equilibria.views._rich import Console, Text
    from equilibria.views.findings import print_findings
    from equilibria.views.run.headline import in_short

    layers, findings = summarise(monitor.samples(), metadata=monitor.metadata), monitor.findings()
    out = Console()
    out.print(Text(f"equilibria: {in_short(layers, findings)}"))
    print_findings(findings[:_MOST_FINDINGS], out)
    more = len(findings) - _MOST_FINDINGS
    rest = f"{counted(more, 'more finding')} and all layers" if more > 0 else "All layers"
    command = f"equilibria report {monitor.log_dir}" if monitor.log_dir else "print(callback.monitor.table())"
    out.print(Text(f"  {rest}: {command}"))
