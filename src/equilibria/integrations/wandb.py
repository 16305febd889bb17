"""Samples as metrics of a Weights & Biases run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from equilibria.errors import EquilibriaError, WatchWarning, warn_caller
from equilibria.integrations.scalars import METRICS, MOST_LAYERS, PREFIX, ScalarSink, require

__all__ = ["WandbSink"]

_STEP = f"{PREFIX}/step"


class WandbSink(ScalarSink):
    """Shows a watched run in Weights & Biases, over an axis of its own: ``equilibria/step``, the optimizer steps.

    Your own steps are left alone: each sample goes into the row that is open. That is the row of your next ``run.log``,
    or, if you log with ``step=``, the row of your call before: W&B keeps it open until a later step comes. Beside your
    numbers stands then the sample of the optimizer steps that followed them; ``equilibria/step`` is right either way.
    Of the samples for one row the last is kept, and sample 0, which is sent together with the next, is mostly lost; a
    run directory keeps all of them.

    Args:
        run: the run, which is not finished for you; None for the one that is active when the first sample comes.
        metrics: columns of the sample table, or "angle_vs_predicted".
        layers: how many layers have tags of their own, at most.
        commit: give every sample a row of its own. That moves W&B's step on, and W&B drops what you log for a step that
            has passed, which cannot be seen from here: only where nothing is logged with ``step=``, as in Lightning
            and transformers.

    Raises:
        EquilibriaError: if W&B is not installed, or ``run`` is no run.
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
            raise EquilibriaError(f"got run of type {type(run).__name__}; expected what wandb.init() returned")
        self._given, self._commit = run, commit
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
        """Say so where most samples were overwritten by later ones."""
        run, first, sent = self._run, self._first_row, self._sent
        self._run, self._first_row, self._sent = None, None, 0
        last = None if first is None else _row(run)
        if first is None or last is None or self._commit:
            return
        kept = last - first + 1  # the last one is still open
        if kept < sent / 2:
            warn_caller(
                f"W&B keeps at most {kept:,} of {sent:,} samples: the last one before each of your own run.log calls. "
                "If you never log with step=, WandbSink(commit=True) keeps all",
                WatchWarning,
            )

    def _begin(self) -> None:
        run = self._given if self._wandb is None else self._wandb.run
        if run is None:
            raise EquilibriaError("got no active W&B run; expected one: call wandb.init() before training")
        run.define_metric(_STEP, hidden=True)
        run.define_metric(f"{PREFIX}/*", step_metric=_STEP)
        self._run, self._first_row = run, _row(run)


def _row(run: Any) -> int | None:
    """The row that the next ``run.log`` goes into; None where W&B does not say, as for a run of several writers."""
    try:
        return int(run.step)
    except Exception:  # of W&B's many kinds; it is asked for a warning only
        return None
