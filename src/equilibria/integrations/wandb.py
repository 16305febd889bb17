"""Samples as metrics of a Weights & Biases run, and findings as its alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from equilibria.errors import EquilibriaError, WatchWarning, warn_in_training
from equilibria.findings import Finding
from equilibria.integrations.scalars import METRICS, MOST_LAYERS, PREFIX, ScalarSink, require

__all__ = ["WandbAlerts", "WandbSink"]

_STEP = f"{PREFIX}/step"
_TITLE = 64  # characters that the title of an alert must stay below


class WandbSink(ScalarSink):
    """Shows a watched run in Weights & Biases, over a separate axis: ``equilibria/step``, the optimizer steps.

    W&B's own step is not changed: each sample goes into the row that is open. That is the row of your next ``run.log``;
    or, if you log with ``step=``, the row of your previous call, which W&B keeps open until a later step. In that case
    your numbers share a row with a sample of a later optimizer step; ``equilibria/step`` is right either way. Of the
    samples in one row W&B keeps the last, and sample 0, which is sent together with the next, is mostly lost; a run
    directory keeps all of them.

    Args:
        run: the run, which is not finished for you; None for the run that is active at the first sample.
        metrics: columns of the sample table, or "angle_vs_predicted".
        layers: how many layers get separate tags, at most.
        commit: give every sample a separate row. That advances W&B's step, and W&B drops values that you log for an
            earlier step, without an error: use it only if nothing is logged with ``step=``, as in Lightning and
            transformers.

    Raises:
        EquilibriaError: if W&B is not installed, or ``run`` is not a run.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        metrics: Iterable[str] = METRICS,
        layers: int = MOST_LAYERS,
        commit: bool = False,
    ) -> None:
        super().__init__(metrics=metrics, layers=layers)
        self._wandb = require("wandb", extra="wandb") if run is None else None
        if run is not None and not (hasattr(run, "log") and hasattr(run, "define_metric")):
            raise EquilibriaError(
                f"got run of type {type(run).__name__}; expected the result of wandb.init()", argument="run"
            )
        self._requested_run, self._commit = run, commit
        self._run: Any = None
        self._first_row: int | None = None
        self._sent = 0

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars by tag."""
        if self._run is None:
            self._begin()
        self._run.log({**scalars, _STEP: step}, commit=self._commit)
        self._sent += 1

    def finish(self) -> None:
        """Warn if most samples were overwritten by later ones."""
        run, first, sent = self._run, self._first_row, self._sent
        self._run, self._first_row, self._sent = None, None, 0
        last = None if first is None else _row(run)
        if first is None or last is None or self._commit:
            return
        kept = last - first + 1  # the last one is still open
        if kept < sent / 2:
            warn_in_training(
                f"W&B keeps at most {kept:,} of {sent:,} samples: the last one before each of your own run.log calls. "
                "If you never log with step=, WandbSink(commit=True) keeps all",
                WatchWarning,
            )

    def _begin(self) -> None:
        run = self._requested_run if self._wandb is None else self._wandb.run
        if run is None:
            raise EquilibriaError("got no active W&B run; expected one: call wandb.init() before training")
        run.define_metric(_STEP, hidden=True)
        run.define_metric(f"{PREFIX}/*", step_metric=_STEP)
        self._run, self._first_row = run, _row(run)


class WandbAlerts:
    """Sends each finding as an alert of a W&B run: ``equilibria.watch(..., on_finding=WandbAlerts())``.

    A warning has W&B's level WARN, a note INFO; W&B's own settings say who receives it, and how.

    Args:
        run: the run; None for the run that is active when a finding comes.
        notes: whether to send notes too, or only warnings.

    Raises:
        EquilibriaError: if W&B is not installed, or ``run`` is not a run.
    """

    def __init__(self, run: Any = None, *, notes: bool = False) -> None:
        self._wandb = require("wandb", extra="wandb")
        if run is not None and not hasattr(run, "alert"):
            raise EquilibriaError(f"got run of type {type(run).__name__}; expected the result of wandb.init()")
        self._run, self._notes = run, notes

    def __call__(self, finding: Finding) -> None:
        """Send one finding.

        Raises:
            EquilibriaError: if there is no active run.
        """
        is_warning = finding.severity == "warning"
        if not is_warning and not self._notes:
            return
        run = self._wandb.run if self._run is None else self._run
        if run is None:
            raise EquilibriaError("got no active W&B run; expected one: call wandb.init() before training")
        level = self._wandb.AlertLevel.WARN if is_warning else self._wandb.AlertLevel.INFO
        title = finding.subject if len(finding.subject) < _TITLE else f"{finding.subject[: _TITLE - 4]}..."
        run.alert(title=title, text=str(finding), level=level)


def _row(run: Any) -> int | None:
    """The row of the next ``run.log``; None if W&B does not tell, as for a run with several writers."""
    try:
        return int(run.step)
    except Exception:  # W&B raises many kinds, and this is only for a warning
        return None
