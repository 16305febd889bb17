"""Samples as metrics of an MLflow run."""

from __future__ import annotations

import hashlib
import posixpath
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.integrations.scalars import METRICS, MOST_LAYERS, ScalarSink, require

__all__ = ["MLflowSink"]

_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")  # in the name of a metric
_LONGEST = 250  # name of a metric
_MOST_AT_ONCE = 1000  # metrics in one request


class MLflowSink(ScalarSink):
    """Shows a watched run in MLflow, over the watched optimizer steps.

    Args:
        run: a run or its id; None for the run that is active at the first sample. It is not ended for you.
        metrics: columns of the sample table, or "angle_vs_predicted".
        layers: how many layers get separate tags, at most.
        tracking_uri: where the run is stored; None for MLflow's current setting.

    Raises:
        EquilibriaError: if MLflow is not installed, or ``run`` is not a run.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        metrics: Iterable[str] = METRICS,
        layers: int = MOST_LAYERS,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__(metrics=metrics, layers=layers)
        self._mlflow = require("mlflow", extra="mlflow")
        self._requested_run = run if isinstance(run, str) else getattr(getattr(run, "info", None), "run_id", None)
        if run is not None and self._requested_run is None:
            raise EquilibriaError(
                f"got run of type {type(run).__name__}; expected an MLflow run or its id", argument="run"
            )
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._run_id: str | None = None
        self._tag_of: dict[str, str] = {}  # by its name in MLflow

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars by tag."""
        if self._client is None:
            self._begin()
        metric, now = self._mlflow.entities.Metric, int(1000 * time.time())
        rows = [metric(self._name(tag), value, now, step) for tag, value in scalars.items()]
        for first in range(0, len(rows), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=rows[first : first + _MOST_AT_ONCE])

    def finish(self) -> None:
        """Forget the run: the next training may belong to another."""
        self._client = None

    def _name(self, tag: str) -> str:
        """A name that MLflow accepts and no other tag has."""
        name = _allowed(tag)
        return name if self._tag_of.setdefault(name, tag) == tag else _marked(name, tag)

    def _begin(self) -> None:
        self._run_id = self._requested_run
        if self._run_id is None:
            active = self._mlflow.active_run()
            if active is None:  # mlflow.log_metrics would start a run that nobody ends
                raise EquilibriaError("got no active MLflow run; expected one: call mlflow.start_run() before training")
            self._run_id = active.info.run_id
        self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)


def _allowed(tag: str) -> str:
    name = _NOT_ALLOWED.sub("_", tag)
    path = posixpath.normpath(name)  # MLflow treats a name as a path, and rejects one with detours
    return name if path == name and len(name) <= _LONGEST else _marked(path, tag)


def _marked(name: str, tag: str) -> str:
    """The name with a mark that is unique to the tag, not longer than allowed."""
    mark = hashlib.sha256(tag.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{name[: _LONGEST - len(mark) - 1]}-{mark}"
