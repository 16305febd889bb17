"""What the callbacks of two trainers share: watching begins, ends and is resumed, and training never breaks over it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from equilibria.diagnosis.summary import summarise
from equilibria.errors import EquilibriaError, WatchWarning, one_of, warn_caller
from equilibria.findings import Finding, counted
from equilibria.integrations.scalars import is_first_process
from equilibria.monitor.monitor import Sink
from equilibria.optimizers.budget import Cadence
from equilibria.tensors.invariance import Told
from equilibria.tensors.parameters import Select
from equilibria.views._rich import Console, Table, Text
from equilibria.views.run.headline import run_headline, worst_layer
from equilibria.watching import WatchedRun, watch

_MOST_TOLD = 3  # findings at the end of a training; the report has all


class Session:
    """One watched training at a time.

    Args:
        log_dir: a directory to record into.
        every: as for `equilibria.watch`, like the next four.
        select: which tensors.
        granularity: "tensor" or "row".
        symmetries: what `equilibria.symmetries` found.
        sinks: where samples go as they come.
        tell: print what was found when the training ends.

    Raises:
        EquilibriaError: for what can be refused before there is a model.

    Attributes:
        monitor: the watched run, during training and after it; None before, or if it could not be watched.
        options: those for `equilibria.watch`.
    """

    _open: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()

    def __init__(
        self,
        log_dir: str | Path | None,
        *,
        every: int | str,
        select: Select | None,
        granularity: str,
        symmetries: Told | None,
        sinks: Iterable[Sink],
        tell: bool,
    ) -> None:
        Cadence(every)  # refuses what is no pace
        one_of("granularity", granularity, ["tensor", "row"])
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.monitor: WatchedRun | None = None
        self.options: dict[str, Any] = {
            "every": every,
            "select": select,
            "granularity": granularity,
            "symmetries": symmetries,
        }
        self._sinks, self._tells = list(sinks), tell
        self._listens_to: set[int] = set()
        self._held: Mapping[str, Any] | None = None  # a checkpoint's, until the weights it belongs to are there

    def begin(
        self,
        model: nn.Module,
        optimizers: Any,
        *,
        steps_per_epoch: int | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        """Watch from now on, from where a loaded checkpoint stopped; call it when model and optimizer are loaded."""
        held = self._held
        self.close()
        with training_goes_on("this training is not watched"):
            self._close_others(optimizers)
            self.monitor = None
            self.monitor = watch(
                model,
                optimizers,
                log_dir=self.log_dir,
                steps_per_epoch=steps_per_epoch,
                sinks=[*self._sinks, *sinks],
                **self.options,
            )
            Session._open.add(self)
            if held is not None:
                with training_goes_on("the record of this run begins anew"):
                    self.monitor.load_state_dict(held)

    def end(self) -> None:
        """Close, and tell what was found."""
        self.close()
        if self._tells and self.monitor is not None and is_first_process():
            with training_goes_on("what was found is not told"):
                tell(self.monitor)

    def close(self) -> None:
        """Take the hooks off and close the run directory; what was measured can still be looked at.

        A checkpoint that was loaded for something else than training, such as validation, is forgotten.
        """
        self._held = None
        Session._open.discard(self)
        with training_goes_on("the run directory may lack its last samples"):
            if self.monitor is not None:
                self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; empty if nothing is watched."""
        with training_goes_on("this checkpoint is without the state of the monitor"):
            if self.monitor is not None:
                return self.monitor.state_dict()
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint when the next training begins."""
        self._held = state or None

    def _close_others(self, optimizers: Any) -> None:
        """Close what a training that broke off left open in this directory: not every trainer tells when it does.

        One that listens to the same optimizers belongs to the training that begins now, and is left alone.
        """
        self._listens_to = {id(each) for each in (optimizers if isinstance(optimizers, Iterable) else [optimizers])}
        for other in [each for each in Session._open if self.log_dir is not None and each.log_dir == self.log_dir]:
            if not other._listens_to & self._listens_to:
                other.close()


@contextlib.contextmanager
def training_goes_on(consequence: str) -> Iterator[None]:
    """Turn an error of ours into a warning."""
    try:
        yield
    except Exception as error:
        said = str(error) if isinstance(error, EquilibriaError) else f"{type(error).__name__}: {error}"
        warn_caller(f"{consequence}: {said}; training goes on", WatchWarning)


def tell(monitor: WatchedRun) -> None:
    """Print a headline, the most serious findings and where the rest is."""
    layers, found = summarise(monitor.samples(), metadata=monitor.metadata), monitor.findings()
    out = Console()
    out.print(Text(f"equilibria: {run_headline(layers)}. {worst_layer(layers)}"))
    for finding in found[:_MOST_TOLD]:
        out.print(_paragraph(finding))
    out.print(Text(_where(monitor, len(found) - _MOST_TOLD)))


def _paragraph(finding: Finding) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("!" if finding.severity == "warning" else "-"), Text(f"{finding.subject}: {finding.evidence}"))
    if finding.remedy:
        grid.add_row(Text(""), Text(finding.remedy))
    return grid


def _where(monitor: WatchedRun, more: int) -> str:
    rest = f"{counted(more, 'more finding')} and all layers" if more > 0 else "All layers"
    return f"  {rest}: {f'equilibria report {monitor.log_dir}' if monitor.log_dir else 'callback.monitor.table()'}"
