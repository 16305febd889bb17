"""`SharpnessTracker`: the largest curvature of a loss and the optimizer's threshold, all along a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from equilibria._display import Printable
from equilibria.curvature._tracker import SharpnessMonitor, SharpnessSink
from equilibria.errors import EquilibriaError
from equilibria.findings import Findings, counted
from equilibria.objectives._objective import Objective
from equilibria.optimizers.budget import Every
from equilibria.records._at_exit import close_at_exit, forget
from equilibria.records.tables import SAMPLE_FIELDS, SHARPNESS, SHARPNESS_FIELDS
from equilibria.tensors.parameters import Select
from equilibria.watching._recording import Recording, is_first_process
from equilibria.watching._watch import WatchedRun

_RECORD = "record"  # key in the state, next to those of the measurement
_LOAD_STATE = "To append to the first, load the tracker's state (tracker.load_state_dict) before training goes on"


class SharpnessTracker:
    """Follows the sharpness of a training run: how far it is from the edge of stability, and when it gets there.

    Works through a hook of the optimizer; training is not changed by a single bit. Every so many steps a query measures
    the top eigenvalue of the Hessian, with two to ten Hessian-vector products depending on how fast its eigenvectors
    turn, and compares it with the threshold of the optimizer: R = sharpness / threshold. Between queries the tracker
    compares consecutive steps, which costs next to nothing; if they begin to oscillate, a query follows at once. Beyond
    R = 1 every query covers two consecutive steps, because at the edge everything alternates from step to step.

    Args:
        objective: an `equilibria.objective` or `equilibria.Objective` of the tensors that are trained.
        optimizer: torch.optim.SGD (with or without momentum), Adam (without weight decay) or AdamW.
        batch: the data of the loss: the full batch, or one fixed batch; see `equilibria.sharpness`. A DataLoader is
            read once, here, and its batches are kept.
        every: steps from one query to the next; "auto" spends less than a tenth of the training time in the long run,
            which leaves few queries in the first thousand steps: the first search costs as much as fifty steps or more.
        select: the parameters: names, patterns or a function of name and tensor; default: all of the objective's that
            the optimizer trains. Take ``symmetries(...).largest_uniform()`` for the spherical sharpness of a network.
        spherical: whether to measure on the unit sphere, as is right where the loss is scale-invariant in the selected
            parameters together; None to test it.
        tol: relative error of each value, estimated if the query started from the previous result.
        recheck: after this many queries that started from the previous result, one starts at random.
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        monitor: the result of `equilibria.watch` for the same run: record into its directory and appear in its report.
        sinks: objects with ``append(columns)`` and ``close()`` that receive the rows as they are measured.

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

    def __init__(
        self,
        objective: Objective,
        optimizer: Any,
        batch: Any,
        *,
        every: Every = "auto",
        select: Select | None = None,
        spherical: bool | None = None,
        tol: float = 1e-2,
        recheck: int = 100,
        log_dir: str | Path | None = None,
        monitor: WatchedRun | None = None,
        sinks: Iterable[SharpnessSink] = (),
    ) -> None:
        if log_dir is not None and monitor is not None:
            raise EquilibriaError("got log_dir and monitor; expected one of them: monitor= records where that run does")
        if monitor is not None and not isinstance(monitor, WatchedRun):
            raise EquilibriaError(
                f"got monitor of type {type(monitor).__name__}; expected the result of equilibria.watch for this run",
                argument="monitor",
            )
        table = _SharpnessTable()
        self._monitor = tracker = SharpnessMonitor(
            objective,
            optimizer,
            batch,
            every=every,
            select=select,
            spherical=spherical,
            tol=tol,
            recheck=recheck,
            sinks=[*sinks, table],
        )
        self._table = table
        if monitor is not None:
            table.recording = monitor._attach_tracker(self)
        elif log_dir is not None and is_first_process():
            try:
                table.recording, table.is_owner = _recording(tracker, log_dir), True
            except BaseException:
                tracker.close()
                raise
        if table.recording is not None:
            table.recording.add_final_metadata(lambda: {"sharpness": tracker.metadata["sharpness"]})
        self._recording = table.recording
        close_at_exit(tracker)

    # ---- the measurement

    @property
    def step(self) -> int:
        """Optimizer steps taken while tracking."""
        return self._monitor.step

    @property
    def every(self) -> float:
        """Steps from one query to the next at present."""
        return self._monitor.every

    @property
    def spherical(self) -> bool:
        """Whether the sharpness is measured on the unit sphere."""
        return self._monitor.spherical

    @property
    def state(self) -> str:
        """As of the last query: one of `equilibria.records.tables.EDGE_STATES`."""
        return self._monitor.state

    @property
    def failure(self) -> str | None:
        """The error that stopped the tracking, or None."""
        return self._monitor.failure

    @property
    def metadata(self) -> dict[str, Any]:
        """Versions, optimizer and what is tracked, in values that JSON can hold."""
        return self._monitor.metadata

    @property
    def log_dir(self) -> Path | None:
        """The directory of the record; None if the queries are not recorded."""
        return None if self._recording is None else self._recording.directory

    def samples(self) -> pa.Table:
        """One row per query so far; see `equilibria.records.tables` for the columns."""
        return self._monitor.samples()

    def findings(self) -> Findings:
        """What the queries mean."""
        return self._monitor.findings()

    def flush(self) -> None:
        """Write all queries so far to ``log_dir``."""
        if self._recording is not None:
            self._recording.flush()

    def close(self) -> None:
        """Stop tracking: remove the hook and close all sinks. A second call does nothing."""
        self._monitor.close()
        forget(self._monitor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state with which a resumed run continues to count steps and queries, and which record to append to.

        Hands all queries so far to the operating system before it returns: a kill after a checkpoint loses none from
        before it. If the record cannot be written, the state says so (``state["record"]["failure"]``). Eigenvectors are
        not in it: the first query of the resumed run starts at random.
        """
        record = {} if self._recording is None else self._recording.state_dict()
        return {**self._monitor.state_dict(), _RECORD: record}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint and append to its record; call it after model and optimizer were loaded.

        A tracker with ``monitor=`` records where that run does: load the monitor's state as well. If ``log_dir`` holds
        the record of another run, this one is recorded next to it, with a warning.

        Raises:
            EquilibriaError: if it is not the state of a tracker, or that of other parameters.
        """
        self._monitor.load_state_dict(state)
        if self._recording is not None and self._table.is_owner:
            self._recording.resume_from(state.get(_RECORD, {}), step=self._monitor.step)

    # ---- views

    def __repr__(self) -> str:
        parts = [f"{counted(self.step, 'step')}, {counted(self.samples().num_rows, 'query', 'queries')}", self.state]
        parts += [f"stopped: {self.failure}"] if self.failure else ["closed"] if self._monitor.closed else []
        parts += [f"recorded in {self.log_dir}"] if self.log_dir else []
        return f"<{type(self).__name__}: {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        from equilibria.views.run.card import tracker_card

        return tracker_card(self.samples(), title=repr(self), findings=self.findings())

    def table(self) -> Printable:
        """Some of the queries, and what they mean.

        Returns:
            A table that ``print`` shows in the terminal and a notebook shows as the value of a cell.
        """
        from equilibria.views.run.sharpness import sharpness_table

        metadata = {**self.metadata, "steps": self.step}
        return Printable(sharpness_table(self.samples(), metadata=metadata), self._repr_html_())

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write everything as one HTML page that needs no network.

        Args:
            path: the file to write, outside the folder of a run; replaces an earlier page.
            title: shown above the headline.
        """
        from equilibria.views.run.page import write_report

        nothing, metadata = SAMPLE_FIELDS.empty_table(), {**self.metadata, "steps": self.step}
        return write_report(nothing, path, metadata=metadata, title=title, sharpness=self.samples())


class _SharpnessTable:
    """Sink that writes into the sharpness table of a recording, if there is one; closes it if it is the owner."""

    recording: Recording | None = None
    is_owner = False

    def append(self, columns: Mapping[str, Any]) -> None:
        if self.recording is not None:
            self.recording.append({name: columns[name] for name in SHARPNESS_FIELDS.names}, table=SHARPNESS)

    def close(self) -> None:
        if self.recording is not None and self.is_owner:
            self.recording.close()


def _recording(monitor: SharpnessMonitor, log_dir: str | Path) -> Recording:
    return Recording(log_dir, describe=lambda: monitor.metadata, count_steps=lambda: monitor.step, advice=_LOAD_STATE)
