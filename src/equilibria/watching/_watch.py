"""`watch`, and the run that it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from torch import nn

from equilibria._display import Printable
from equilibria.findings import Finding, counted
from equilibria.monitor.monitor import Granularity, Monitor, Sink
from equilibria.optimizers.budget import Every
from equilibria.records._at_exit import close_at_exit, forget
from equilibria.records.tables import STATES
from equilibria.tensors.invariance import Invariant
from equilibria.tensors.parameters import Select
from equilibria.watching._recording import Recording, is_first_process

if TYPE_CHECKING:
    from equilibria.diagnosis.summary import LayerSummary
    from equilibria.watching._tracker import SharpnessTracker

_RECORD = "record"  # key in the state, next to the monitor's


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    log_dir: str | Path | None = None,
    every: Every = "auto",
    select: Select | None = None,
    granularity: Granularity = "tensor",
    steps_per_epoch: int | None = None,
    invariant: Invariant | None = None,
    sinks: Iterable[Sink] = (),
) -> WatchedRun:
    """Measure how fast every layer turns, and predict how fast it should.

    Works with any torch optimizer, through its step hooks; training is not changed by a single bit.

    Args:
        model: the network, wrapped or compiled or not.
        optimizer: a torch optimizer, or several of them.
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        every: steps from one sample to the next; "auto" keeps the cost below one per cent of the training time.
        select: names, patterns such as ``"layer1.*"``, or a function of name and tensor; by default all tensors with
            at least two axes.
        granularity: "tensor", or "row" for one sample per row (output channel).
        steps_per_epoch: converts steps to settle into epochs.
        invariant: the scale-invariant weights: names, tensors, or the result of `equilibria.symmetries`, which also
            labels every layer with how it is invariant. Only these weights get predictions. Without it the mean
            cosine of weight and gradient decides, once, which weights look scale-invariant.
        sinks: objects with ``append(columns)`` and ``close()`` that receive the samples as they are taken.

    Returns:
        The run: ``table()``, ``findings()``, ``samples()``, ``report(path)``, ``close()``. It need not be kept: the
        optimizer's hooks keep the measurement alive.

    Raises:
        EquilibriaError: if an argument is not what is described here, or ``log_dir`` cannot be written.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        >>> with watch(model, optimizer, every=1) as monitor:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(16, 8)).square().sum().backward()
        ...         optimizer.step()
        >>> monitor.samples().num_rows
        3
    """
    monitor = Monitor(
        model,
        optimizer,
        every=every,
        select=select,
        granularity=granularity,
        steps_per_epoch=steps_per_epoch,
        invariant=invariant,
        sinks=sinks,
    )
    recording = None
    if log_dir is not None and is_first_process():
        try:
            recording = Recording(log_dir, describe=lambda: monitor.metadata, count_steps=lambda: monitor.step)
        except BaseException:
            monitor.close()
            raise
        monitor.add_sink(recording)
    close_at_exit(monitor)
    return WatchedRun(monitor, recording)


class WatchedRun:
    """A training run that is being watched, made by `watch`: look at it at any time, from any cell or callback.

    The optimizer's hooks hold the monitor and the recording, not this object: dropping it does not end the watching.

    Args:
        monitor: samples the weights.
        recording: writes the samples to disk; None if they are not recorded.
    """

    def __init__(self, monitor: Monitor, recording: Recording | None) -> None:
        self._monitor, self._recording = monitor, recording
        self._tracker: SharpnessTracker | None = None

    # ---- the measurement

    @property
    def step(self) -> int:
        """Optimizer steps taken while watching; steps that several optimizers take in turn count once."""
        return self._monitor.step

    @property
    def every(self) -> int:
        """Steps from one sample to the next at present."""
        return self._monitor.every

    @property
    def failure(self) -> str | None:
        """The error that stopped the measurement, or None."""
        return self._monitor.failure

    @property
    def metadata(self) -> dict[str, Any]:
        """Versions, sampling, optimizers and every watched weight with its law, in values that JSON can hold."""
        return self._monitor.metadata

    @property
    def log_dir(self) -> Path | None:
        """The directory of the record; None if the run is not recorded."""
        return None if self._recording is None else self._recording.directory

    def samples(self) -> pa.Table:
        """The sample table so far; see `equilibria.records.tables` for its columns."""
        return self._monitor.samples()

    def findings(self) -> tuple[Finding, ...]:
        """What the samples mean, most serious first; then the findings of a sharpness tracker of the same run."""
        return (*self._monitor.findings(), *(self._tracker.findings() if self._tracker else ()))

    def flush(self) -> None:
        """Turn all queued readings into samples and write them to ``log_dir``."""
        self._monitor.flush()
        if self._recording is not None:
            self._recording.flush()

    def add_sink(self, sink: Sink) -> None:
        """Send all further samples to a sink.

        Raises:
            EquilibriaError: if it lacks ``append(columns)`` or ``close()``.
        """
        self._monitor.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Send no further samples to a sink."""
        self._monitor.remove_sink(sink)

    def reattach(self, optimizer: Any) -> None:
        """Continue with another optimizer of the same tensors, such as a copy: copying drops hooks.

        Raises:
            EquilibriaError: if the run is closed, or the optimizer does not train the watched tensors.
        """
        self._monitor.reattach(optimizer)

    def close(self) -> None:
        """Stop watching: remove the hooks, write the last samples and close all sinks. A second call does nothing."""
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
        """The state with which a resumed run continues as if it had not stopped, and which record to append to.

        Hands all samples so far to the operating system before it returns: a kill after a checkpoint loses none from
        before it. If the record cannot be written, the state says so (``state["record"]["failure"]``).
        """
        state = self._monitor.state_dict()
        return {**state, _RECORD: {} if self._recording is None else self._recording.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint and append to its record; call it after model and optimizer were loaded.

        If ``log_dir`` holds the record of another run, this one is recorded next to it, with a warning.

        Raises:
            EquilibriaError: if it is not the state of a monitor, or that of other weights.
        """
        self._monitor.load_state_dict(state)
        if self._recording is not None:
            self._recording.resume_from(state.get(_RECORD, {}))

    def mark_weights(self) -> None:
        """Count every change of the weights before the next step as a change from outside.

        Call it when a checkpoint is loaded completely: loading changes the weights too.
        """
        self._monitor.mark_weights()

    # ---- views

    def __repr__(self) -> str:
        layers = len(self.metadata["params"])
        parts = [f"{counted(layers, 'layer')}, {counted(self.step, 'step')}", _states(self.samples(), layers)]
        parts += [f"stopped: {self.failure}"] if self.failure else ["closed"] if self._monitor.closed else []
        parts += [f"recorded in {self.log_dir}"] if self.log_dir else []
        return f"<{type(self).__name__}: {'; '.join(filter(None, parts))}>"

    def _repr_html_(self) -> str:
        from equilibria.views.run.card import run_card

        samples = self.samples()
        summaries, findings = self._diagnosed(samples)
        return run_card(samples, summaries, findings=findings)

    def table(self) -> Printable:
        """One line per layer, the most surprising first: measured, predicted, and how long until it settles.

        Returns:
            A table that ``print`` shows in the terminal and a notebook shows as the value of a cell.
        """
        from equilibria.views.run.card import run_card
        from equilibria.views.run.terminal import run_table

        samples = self.samples()
        summaries, findings = self._diagnosed(samples)
        return Printable(run_table(summaries, findings=findings), run_card(samples, summaries, findings=findings))

    def _diagnosed(self, samples: pa.Table) -> tuple[tuple[LayerSummary, ...], tuple[Finding, ...]]:
        """The summaries, and the findings of `findings`: of thousands of layers neither is computed twice."""
        from equilibria.diagnosis import summarise_and_diagnose

        summaries, diagnosed = summarise_and_diagnose(samples, metadata=self.metadata)
        about_sharpness = self._tracker.findings() if self._tracker else ()
        return summaries, (*self._monitor.findings_about_watching(), *diagnosed, *about_sharpness)

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write everything as one HTML page that needs no network.

        Args:
            path: the file to write, outside the folder of a run; replaces an earlier page.
            title: shown above the headline.
        """
        from equilibria.views.run.page import write_report

        samples, metadata, findings = self.samples(), {**self.metadata, "steps": self.step}, self.findings()
        queries = self._tracker.samples() if self._tracker else None
        if self._tracker:
            metadata["sharpness"] = self._tracker.metadata["sharpness"]
        return write_report(samples, path, metadata=metadata, title=title, findings=findings, sharpness=queries)

    def live(self) -> AbstractContextManager[None]:
        """Show one line on the terminal while training runs inside ``with monitor.live():``; nothing elsewhere."""
        from equilibria.watching._status_line import StatusLine

        return StatusLine(self).shown()

    def _attach_tracker(self, tracker: SharpnessTracker) -> Recording | None:
        """Include a sharpness tracker in findings and report; returns the recording that it may write into."""
        self._tracker = tracker
        return self._recording


def _states(samples: pa.Table, layers: int) -> str:
    """How many layers are in which state at their latest sample: that is among the last rows of each optimizer."""
    last = samples.select(["param", "state"]).slice(max(0, samples.num_rows - 2 * layers))
    now = Counter(dict(zip(*(last[name].to_pylist() for name in ("param", "state")), strict=True)).values())
    return ", ".join(f"{now[state]:,} {state}" for state in STATES if now[state])
