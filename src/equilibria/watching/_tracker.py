"""`SharpnessTracker`: the largest curvature of a loss, beside the optimizer's threshold, all along a run."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from equilibria.curvature._tracker import SharpnessMonitor, SharpnessSink
from equilibria.errors import EquilibriaError
from equilibria.findings import counted
from equilibria.objectives._objective import Objective
from equilibria.records.tables import SAMPLE_FIELDS, SHARPNESS, SHARPNESS_FIELDS
from equilibria.tensors.parameters import Select
from equilibria.views.run.page import write_report
from equilibria.views.run.sharpness import sharpness_table
from equilibria.watching._recording import Recording
from equilibria.watching._watch import WatchedRun


class SharpnessTracker(SharpnessMonitor):
    """Follows the sharpness of a training run: how far it is from the edge of stability, and when it gets there.

    Works through a hook of the optimizer; training is not changed by a single bit. Every so many steps the top
    eigenvalue of the Hessian is measured, by two to ten Hessian-vector products as fast as its eigenvectors turn, and
    compared with the threshold of the optimizer: R = sharpness / threshold. Between them the steps themselves are
    looked at, which costs next to nothing: where they begin to swing, a query comes at once. Beyond R = 1 two
    consecutive steps are queried each time, because at the edge everything alternates from step to step.

    Args:
        objective: of `equilibria.objective` or `equilibria.Objective`, around the tensors that are trained.
        optimizer: torch.optim.SGD (with or without momentum), Adam (without weight decay) or AdamW.
        batch: what the loss is evaluated on: the full batch, or one fixed batch; see `equilibria.sharpness`. A
            DataLoader is read once, here, and its batches are kept.
        every: a query every so many steps; "auto" spends less than a tenth of the training time in the long run, which
            leaves few queries in the first thousand steps: the first search costs as much as fifty steps or more.
        select: the parameters: names, patterns or a function of name and tensor; default: all of the objective's that
            the optimizer trains. Take ``symmetries(...).largest_uniform()`` for the spherical sharpness of a network.
        spherical: whether to measure on the unit sphere, as is right where the loss is scale-invariant in the selected
            parameters together; None to find out.
        tol: of the relative error of each value, estimated where a query began at the one before it.
        recheck: after so many queries that began at the result before, one begins at random.
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        beside: what `equilibria.watch` gave for the same run: record into its directory and appear in its report.
        sinks: objects with ``append(columns)`` and ``close()`` that take the rows as they come.

    Raises:
        EquilibriaError: for an optimizer without a known threshold, parameters that it does not train, a loss that
            cannot be evaluated or is not scale-invariant where it must be, or a directory that cannot be written.

    Example:
        >>> import torch
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> objective = Objective(lambda params, batch: (batch * params["w"] ** 2).sum() / 2, {"w": weights})
        >>> optimizer, batch = torch.optim.SGD([weights], lr=0.25), torch.tensor([1.0, 2.0, 4.0])
        >>> with SharpnessTracker(objective, optimizer, batch, every=5) as tracker:
        ...     for _ in range(7):
        ...         optimizer.zero_grad()
        ...         objective({"w": weights}, batch).backward()
        ...         optimizer.step()
        >>> tracker.samples().select(["step", "sharpness", "threshold", "ratio"]).to_pylist()[-1]
        {'step': 5, 'sharpness': 4.0, 'threshold': 8.0, 'ratio': 0.5}
    """

    _recording: Recording | None = None

    def __init__(
        self,
        objective: Objective,
        optimizer: Any,
        batch: Any,
        *,
        every: int | str = "auto",
        select: Select | None = None,
        spherical: bool | None = None,
        tol: float = 1e-2,
        recheck: int = 100,
        log_dir: str | Path | None = None,
        beside: WatchedRun | None = None,
        sinks: Iterable[SharpnessSink] = (),
    ) -> None:
        if log_dir is not None and beside is not None:
            raise EquilibriaError("got log_dir and beside; expected one of them: beside= records where that run does")
        if beside is not None and not isinstance(beside, WatchedRun):
            raise EquilibriaError(
                f"got beside of type {type(beside).__name__}; expected what equilibria.watch gave for this run"
            )
        super().__init__(
            objective,
            optimizer,
            batch,
            every=every,
            select=select,
            spherical=spherical,
            tol=tol,
            recheck=recheck,
            sinks=sinks,
        )
        try:
            self._record(log_dir, beside)
        except BaseException:
            self.close()
            raise
        atexit.register(_close, weakref.ref(self))

    def __repr__(self) -> str:
        parts = [f"{counted(self.step, 'step')}, {counted(len(self._rows), 'query', 'queries')}", self.state]
        parts += [f"stopped: {self.failure}"] if self.failure else ["closed"] if self._closed else []
        parts += [f"recorded in {self.log_dir}"] if self.log_dir else []
        return f"<{type(self).__name__}: {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        from equilibria.views.run.card import tracker_card

        return tracker_card(self.samples(), title=repr(self), findings=self.findings())

    @property
    def log_dir(self) -> Path | None:
        """Where the queries are recorded, None if they are not."""
        return None if self._recording is None else self._recording.directory

    def table(self) -> None:
        """Print some of the queries, and what they mean."""
        print(sharpness_table(self.samples(), metadata={**self.metadata, "steps": self.step}))  # noqa: T201

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write everything as one HTML page that needs no network.

        Args:
            path: the file to write; an existing one is replaced.
            title: shown above the headline.
        """
        nothing, metadata = SAMPLE_FIELDS.empty_table(), {**self.metadata, "steps": self.step}
        return write_report(nothing, path, metadata=metadata, title=title, sharpness=self.samples())

    def __del__(self) -> None:
        self.close()  # a tracker that nobody holds any more, nor its optimizer

    def _record(self, log_dir: str | Path | None, beside: WatchedRun | None) -> None:
        if beside is not None:
            self._recording = beside.tracked_by(self)
        elif log_dir is not None and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            self._recording = Recording(
                log_dir, describe=lambda: self.metadata, count_steps=lambda: self.step, advice=""
            )
        if self._recording is not None:
            self._recording.tell_at_end(lambda: {"sharpness": self.metadata["sharpness"]})
            self._sinks.append(_IntoTable(self._recording, owned=beside is None))


class _IntoTable:
    """The sharpness table of a recording."""

    def __init__(self, recording: Recording, *, owned: bool) -> None:
        self._recording, self._owned = recording, owned

    def append(self, columns: Mapping[str, Any]) -> None:
        self._recording.append({name: columns[name] for name in SHARPNESS_FIELDS.names}, table=SHARPNESS)

    def close(self) -> None:
        if self._owned:
            self._recording.close()


def _close(tracker: weakref.ref[SharpnessTracker]) -> None:
    held = tracker()
    if held is not None:
        held.close()
