"""`watch`, and the run that it returns."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from torch import nn

from equilibria._display import Printable
from equilibria.errors import EquilibriaError, WatchWarning, warn_in_training
from equilibria.findings import Findings, counted, warnings_first
from equilibria.monitor.monitor import Monitor, Sink
from equilibria.optimizers.budget import Every
from equilibria.records import read_record
from equilibria.records._at_exit import close_at_exit, forget
from equilibria.records.tables import DIFFUSION, METRICS, STATES
from equilibria.tensors.invariance import Invariant
from equilibria.tensors.parameters import Granularity, Select
from equilibria.watching._alerts import FindingAlerts, OnFinding, checked
from equilibria.watching._recording import Recording, is_first_process

if TYPE_CHECKING:
    from equilibria.diagnosis.layer_summary import LayerSummary
    from equilibria.diagnosis.noise import GradientNoise
    from equilibria.watching._tracker import SharpnessTracker

_RECORD, _ALERTS = "record", "alerts"  # keys in the state, next to the monitor's


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    log_dir: str | Path | None = None,
    every: Every = "auto",
    select: Select | None = None,
    granularity: Granularity = "tensor",
    steps_per_epoch: int | None = None,
    batch_size: int | None = None,
    invariant: Invariant | None = None,
    sinks: Iterable[Sink] = (),
    on_finding: OnFinding | None = None,
) -> WatchedRun:
    """Measure how fast every layer turns, and predict how fast it should.

    Works with any torch optimizer, through its step hooks; training is not changed by a single bit.

    Args:
        model: the network, wrapped or compiled or not.
        optimizer: a torch optimizer, or several of them.
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        every: steps from one sample to the next; "auto" costs up to a second at the start of a run, then about one
            per cent of the training time.
        select: names, patterns such as ``"layer1.*"``, or a function of name and tensor; by default all tensors with
            at least two axes.
        granularity: "tensor"; "row" for one sample per row (output channel, token); or one of them by name or pattern,
            such as ``{"embedding.weight": "row"}``. Matrices stacked in one parameter, such as experts, count as so
            many tensors, up to 64 of them.
        steps_per_epoch: converts steps to settle into epochs, and shows whether successive batches are independent; of
            a stream that never repeats, the steps of the whole run.
        batch_size: examples in a batch, all processes together: converts gradient noise scales into examples.
        invariant: the scale-invariant weights: names, tensors, or the result of `equilibria.symmetries`, which also
            labels every layer with how it is invariant. Only these weights get predictions. Without it the mean
            cosine of weight and gradient decides, once, which weights look scale-invariant.
        sinks: objects with ``append(columns)`` and ``close()`` that receive the samples as they are taken.
        on_finding: a function that is called with each new finding while training runs, and at the end; the same kind
            of finding with other numbers is not new. An error in it becomes a warning.

    Returns:
        The run: ``log(loss=...)``, ``table()``, ``findings()``, ``noise()``, ``samples()``, ``diffusion()``,
        ``report(path)``, ``close()``. It need not be kept: the optimizer's hooks keep the measurement alive.

    Raises:
        EquilibriaError: if an argument is not what is described here, or ``log_dir`` cannot be written.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.BatchNorm1d(16))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
        >>> monitor = watch(model, optimizer, invariant=["0.weight"], every=1)
        >>> for _ in range(400):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(16, (32,))).backward()
        ...     optimizer.step()
        >>> print(monitor.table())
        The layer turns as predicted. No check found a fault.
        layer  rad/step  predicted  ratio  equilibrium  norm   norm*  state    invariant
        0      0.02...   0.02...    1.0... 0.0229       1.8... 1.8... settled  given
        ...
        >>> monitor.close()
    """
    call = None if on_finding is None else checked(on_finding)
    monitor = Monitor(
        model,
        optimizer,
        every=every,
        select=select,
        granularity=granularity,
        steps_per_epoch=steps_per_epoch,
        batch_size=batch_size,
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
        # Controllers that are made after this call, and skipped steps, are not yet in the metadata at the beginning.
        recording.add_final_metadata(lambda: {name: monitor.metadata[name] for name in ("controllers", "skipped")})
        monitor.add_sink(recording)
        monitor.diffusion_log.record(partial(recording.append, table=DIFFUSION))
        _record_metrics(monitor, recording)
    close_at_exit(monitor)
    return WatchedRun(monitor, recording, on_finding=call)


def _record_metrics(monitor: Monitor, recording: Recording) -> None:
    # Not before the first step: a checkpoint may still be loaded, and its record is the one to append to.
    log, may_open = monitor.metric_log, lambda: recording.is_open or monitor.step > 0
    log.record(partial(recording.append, table=METRICS), can_write=may_open)
    known = weakref.ref(log)  # the writer's thread must not keep a monitor alive that nobody holds any more

    def append_waiting() -> bool:
        held = known()
        return held is not None and held.settle(on_devices=False)

    recording.collect(append_waiting)


class WatchedRun:
    """A training run that is being watched, made by `watch`: look at it at any time, from any cell or callback.

    The optimizer's hooks hold the monitor and the recording, not this object: dropping it does not end the watching.

    Args:
        monitor: samples the weights.
        recording: writes the samples to disk; None if they are not recorded.
        on_finding: called with each new finding.
    """

    def __init__(self, monitor: Monitor, recording: Recording | None, *, on_finding: OnFinding | None = None) -> None:
        self._monitor, self._recording = monitor, recording
        self._tracker: SharpnessTracker | None = None
        self._resumed_at: int | None = None  # steps before the loaded checkpoint; None once they are read
        self._before: tuple[pa.Table | None, pa.Table | None, pa.Table | None] = (None, None, None)
        self._alerts: FindingAlerts | None = None
        if on_finding is not None and is_first_process():
            self._alerts = FindingAlerts(on_finding, self.findings)
            monitor.add_sink(self._alerts)

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
        """The sample table so far; see `equilibria.records.tables` for its columns.

        A run that was resumed from a checkpoint and appends to its record includes the samples from before.
        """
        return _joined(self._earlier()[0], self._monitor.samples())

    def log(self, *, step: int | None = None, **numbers: Any) -> None:
        """Record numbers of the training itself, such as its loss, to see them above the angles.

        Log the loss of a step before ``optimizer.step()`` or after it, always in the same place: it gets the number of
        that step in the samples. A name that is first logged before the first step belongs to the step that follows,
        also later; any other name belongs to the step just taken.

        Numbers on a device are read later, many at once, so that logging does not wait for it. NaN and infinity are
        recorded as they are. At most 100 names of at most 100 characters.

        Args:
            step: the step that they belong to, if it is not the present one.
            numbers: by name: Python or numpy numbers, or tensors with one element.

        Raises:
            EquilibriaError: for what is not a number, or a name that is too long, not printable or one too many.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with watch(model, optimizer) as monitor:
            ...     for batch in torch.ones(3, 8, 4):
            ...         optimizer.zero_grad()
            ...         loss = model(batch).square().mean()
            ...         loss.backward()
            ...         optimizer.step()
            ...         monitor.log(loss=loss)
            >>> monitor.metrics()["step"].to_pylist()
            [0, 1, 2]
        """
        self._monitor.log(numbers, step=step)

    def metrics(self) -> pa.Table:
        """The logged numbers so far: columns ``step``, ``name`` and ``value``, sorted by step.

        Beyond a million numbers the longest series loses every second one, again and again; the record has all. A run
        that was resumed from a checkpoint and appends to its record includes the numbers from before.
        """
        return _joined(self._earlier()[1], self._monitor.metrics())

    def diffusion(self) -> pa.Table:
        """How far every weight turned over 1, 2, 4, ..., 1,024 steps, from at most 1,024 of its coordinates.

        Sharded weights are left out. A run that was resumed from a checkpoint and appends to its record includes the
        rows from before.

        Returns:
            Columns ``step``, ``param``, ``distance`` and ``turned`` = -ln cos of the angle between the weight before
            ``step`` and the weight ``distance`` steps later, null from a right angle on.
        """
        return _joined(self._earlier()[2], self._monitor.diffusion())

    def noise(self) -> GradientNoise:
        """Gradient noise scale, curvature along the step and D(n), of every layer and of the network; prints itself."""
        from equilibria.diagnosis.noise import gradient_noise

        return gradient_noise(
            self.samples(), metadata=self.metadata, metrics=self.metrics(), diffusion=self.diffusion()
        )

    def _earlier(self) -> tuple[pa.Table | None, pa.Table | None, pa.Table | None]:
        """Samples, metrics and D(n) of the record from before the checkpoint that was loaded; read when needed."""
        if self._resumed_at is not None and self._recording is not None and self._recording.resumes:
            end, self._resumed_at = self._resumed_at, None
            try:
                record = read_record(self._recording.directory)
                before = pc.field("step") < end
                compared = pc.field("step") + pc.field("distance") < end
                tables = record.samples().filter(before), record.metrics().filter(before)
                self._before = *tables, record.diffusion().filter(compared)
            except EquilibriaError as error:  # a record that cannot be read: what this session measured is there
                warn_in_training(f"the samples from before step {end:,} are not shown: {error}", WatchWarning)
        return self._before

    def findings(self) -> Findings:
        """What the samples mean, and the queries of a sharpness tracker of the same run, warnings first."""
        return self._diagnosed(self.samples())[1]

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
        state[_RECORD] = {} if self._recording is None else self._recording.state_dict()
        return state if self._alerts is None else {**state, _ALERTS: self._alerts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint and append to its record; call it after model and optimizer were loaded.

        If ``log_dir`` holds the record of another run, this one is recorded next to it, with a warning.

        Raises:
            EquilibriaError: if it is not the state of a monitor, or that of other weights.
        """
        self._monitor.load_state_dict(state)
        self._resumed_at, self._before = self._monitor.step, (None, None, None)
        if self._recording is not None:
            self._recording.resume_from(state.get(_RECORD, {}), step=self._monitor.step)
        if self._alerts is not None:
            self._alerts.load_state_dict(state.get(_ALERTS, ()))

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
        return run_card(samples, summaries, findings=findings, metrics=self.metrics())

    def table(self) -> Printable:
        """One line per layer, in the order of the model: measured, predicted, and how long until it settles.

        Of many layers, those of one kind across blocks (``h.*.mlp.c_proj``) share a line.

        Returns:
            A table that ``print`` shows in the terminal and a notebook shows as the value of a cell.
        """
        from equilibria.views.run.card import run_card
        from equilibria.views.run.terminal import run_table

        samples = self.samples()
        summaries, findings = self._diagnosed(samples)
        metrics = self.metrics()
        return Printable(
            run_table(summaries, findings=findings, metrics=metrics),
            run_card(samples, summaries, findings=findings, metrics=metrics),
        )

    def _diagnosed(self, samples: pa.Table) -> tuple[tuple[LayerSummary, ...], Findings]:
        """The summaries, and the findings of `findings`: of thousands of layers neither is computed twice."""
        from equilibria.diagnosis import summarise_and_diagnose

        summaries, diagnosed = summarise_and_diagnose(samples, metadata=self.metadata, metrics=self.metrics())
        about_sharpness = self._tracker.findings() if self._tracker else ()
        kinds = {finding.kind for finding in diagnosed}
        # A trial before training and the samples of it may both show that rounding swallows the decay.
        before = [
            finding
            for finding in self._monitor.findings_about_watching()
            if finding.kind != "rounded_away" or finding.kind not in kinds
        ]
        return summaries, warnings_first((*before, *diagnosed, *about_sharpness))

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
        return write_report(
            samples,
            path,
            metadata=metadata,
            title=title,
            findings=findings,
            sharpness=queries,
            metrics=self.metrics(),
            diffusion=self.diffusion(),
        )

    def live(self) -> AbstractContextManager[None]:
        """Show one line on the terminal while training runs inside ``with monitor.live():``; nothing elsewhere."""
        from equilibria.watching._status_line import StatusLine

        return StatusLine(self).shown()

    def _attach_tracker(self, tracker: SharpnessTracker) -> Recording | None:
        """Include a sharpness tracker in findings and report; returns the recording that it may write into."""
        self._tracker = tracker
        return self._recording


def _joined(earlier: pa.Table | None, now: pa.Table) -> pa.Table:
    if earlier is None:
        return now
    return pa.concat_tables([earlier.select(now.column_names).cast(now.schema), now]).unify_dictionaries()


def _states(samples: pa.Table, layers: int) -> str:
    """How many layers are in which state at their latest sample: that is among the last rows of each optimizer."""
    last = samples.select(["param", "state"]).slice(max(0, samples.num_rows - 2 * layers))
    now = Counter(dict(zip(*(last[name].to_pylist() for name in ("param", "state")), strict=True)).values())
    return ", ".join(f"{now[state]:,} {state}" for state in STATES if now[state])
