"""`watch`, and the run that it gives back."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.distributed as dist
from torch import nn

from equilibria.curvature._tracker import SharpnessMonitor
from equilibria.diagnosis.summary import summarise
from equilibria.findings import Finding, counted
from equilibria.monitor.monitor import Monitor, Sink
from equilibria.records.tables import SETTLED, STATES
from equilibria.tensors.invariance import Told
from equilibria.tensors.parameters import Select
from equilibria.views._rich import Console, Live, Text
from equilibria.views.run.page import write_report
from equilibria.views.run.terminal import run_table
from equilibria.watching._recording import Recording, record_at

_PAUSE = 0.25  # seconds between two renewals of the line


class StatusLine:
    """Shows the latest sample as one line on standard error, if that is a terminal.

    Args:
        monitor: whose samples to show.
        console: where to show them; standard error without it.
    """

    def __init__(self, monitor: Monitor, *, console: Console | None = None) -> None:
        self._monitor = monitor
        self._console = Console(stderr=True) if console is None else console
        self._live: Live | None = None
        self._renewed = 0.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line inside a ``with``."""
        if not self._console.is_terminal:
            yield
            return
        # What is printed goes above the line. A standard output that is a file or a pipe stays what it is: rich would
        # send it to the terminal instead.
        with Live(
            _line("watching ..."),
            console=self._console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=_is_terminal(),
        ) as self._live:
            self._monitor.add_sink(self)
            try:
                yield
            finally:
                self._monitor.remove_sink(self)

    def append(self, columns: Mapping[str, Any]) -> None:
        """Show a sample."""
        if self._live is not None and time.monotonic() - self._renewed > _PAUSE:
            self._renewed = time.monotonic()
            self._live.update(_line(status_text(columns)), refresh=True)

    def close(self) -> None:
        """Nothing is kept."""


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def status_text(columns: Mapping[str, Any]) -> str:
    """One sampled step in one line.

    Example:
        >>> status_text({"step": [7], "param": ["conv"], "state": ["settled"], "angle": [0.02],
        ...              "angle_predicted": [0.01]})
        'step 7: 1 of 1 layers settled; conv turns 2.00x its prediction'
    """
    states = [state for state in columns["state"] if state in STATES[:3]]
    parts = [f"step {int(columns['step'][0]):,}: {states.count(SETTLED)} of {len(states)} layers settled"]
    predicted = np.array([np.nan if value is None else value for value in columns["angle_predicted"]], dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.asarray(columns["angle"], dtype=float) / predicted
        wrong = np.abs(np.log(ratio))
    if np.isfinite(wrong).any():
        at = int(np.argmax(np.where(np.isfinite(wrong), wrong, -1.0)))
        parts.append(f"{columns['param'][at]} turns {ratio[at]:.2f}x its prediction")
    return "; ".join(parts)


_RECORD = "record"  # in the state, beside the monitor's own

# Not for people.
_FOR_HOOKS = {
    "guarded",
    "is_due",
    "latest",
    "mark_weights",
    "missed",
    "next_is_due",
    "record_into",
    "take",
    "tracked_by",
}


class WatchedRun(Monitor):
    """A training run that is being watched: look at it at any time, from any cell or callback."""

    _recording: Recording | None = None
    _tracker: SharpnessMonitor | None = None

    def __repr__(self) -> str:
        layers = len(self.metadata["params"])
        parts = [f"{counted(layers, 'layer')}, {counted(self.step, 'step')}", _states(self.samples(), layers)]
        parts += [f"stopped: {self.failure}"] if self.failure else ["closed"] if self._closed else []
        parts += [f"recorded in {self.log_dir}"] if self.log_dir else []
        return f"<{type(self).__name__}: {'; '.join(filter(None, parts))}>"

    def _repr_html_(self) -> str:
        from equilibria.views.run.card import run_card

        samples = self.samples()
        return run_card(samples, summarise(samples, metadata=self.metadata), findings=self.findings())

    def __dir__(self) -> list[str]:
        """What people use: what the hooks call is left out of completions."""
        return [name for name in super().__dir__() if name not in _FOR_HOOKS]

    def record_into(self, recording: Recording) -> None:
        """Send the samples there from now on."""
        self._recording = recording
        self.add_sink(recording)

    def tracked_by(self, tracker: SharpnessMonitor) -> Recording | None:
        """Show what a sharpness tracker finds too; returns where it may record."""
        self._tracker = tracker
        return self._recording

    def findings(self) -> tuple[Finding, ...]:
        """What the samples mean, most serious first; then what a sharpness tracker beside it found."""
        return (*super().findings(), *(self._tracker.findings() if self._tracker else ()))

    @property
    def log_dir(self) -> Path | None:
        """Where the samples are recorded, None if they are not."""
        return None if self._recording is None else self._recording.directory

    def table(self) -> None:
        """Print one line per layer, the most surprising first: measured, predicted, and how long until it settles."""
        print(run_table(summarise(self.samples(), metadata=self.metadata), findings=self.findings()))  # noqa: T201

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write everything as one HTML page that needs no network.

        Args:
            path: the file to write; an existing one is replaced.
            title: shown above the headline.
        """
        samples, metadata, found = self.samples(), {**self.metadata, "steps": self.step}, self.findings()
        queries = self._tracker.samples() if self._tracker else None
        if self._tracker:
            metadata["sharpness"] = self._tracker.metadata["sharpness"]
        return write_report(samples, path, metadata=metadata, title=title, findings=found, sharpness=queries)

    def live(self) -> AbstractContextManager[None]:
        """Show one line on the terminal while training runs inside ``with monitor.live():``; nothing elsewhere."""
        return StatusLine(self).shown()

    def __del__(self) -> None:
        self.close()  # a run that nobody holds any more, nor its optimizer: what waits is written, the directory freed

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped, and which record to append to."""
        return {**super().state_dict(), _RECORD: record_at(self.log_dir)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, appending to its own record; call it after model and optimizer were loaded.

        If ``log_dir`` holds the record of another run, this one is recorded beside it, with a warning.
        """
        super().load_state_dict(state)
        if self._recording is not None:
            self._recording.go_on_from(state.get(_RECORD, {}))


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    log_dir: str | Path | None = None,
    every: int | str = "auto",
    select: Select | None = None,
    granularity: str = "tensor",
    steps_per_epoch: int | None = None,
    symmetries: Told | None = None,
    sinks: Iterable[Sink] = (),
) -> WatchedRun:
    """Watch how fast every layer turns, beside how fast it should.

    Works with any torch optimizer, through its step hooks; training is not changed by a single bit.

    Args:
        model: the network, wrapped or compiled or not.
        optimizer: a torch optimizer, or several of them.
        log_dir: a directory to record into, for `equilibria report` and `equilibria.read_run`.
        every: sample every so many steps; "auto" keeps the cost below a per cent of the training time.
        select: names, patterns such as ``"layer1.*"``, or a function of name and tensor; by default all tensors with
            at least two axes.
        granularity: "tensor", or "row" for every row (output channel) by itself.
        steps_per_epoch: to say times in epochs too.
        symmetries: what `equilibria.symmetries` found for this model: each layer is labelled with how it is invariant,
            and predictions are made for those alone that are. Without it the cosine of weight and gradient decides.
        sinks: objects with ``append(columns)`` and ``close()`` that take the samples as they come.

    Returns:
        The run: ``table()``, ``findings()``, ``samples()``, ``report(path)``, ``close()``.

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
    run = WatchedRun(
        model,
        optimizer,
        every=every,
        select=select,
        granularity=granularity,
        steps_per_epoch=steps_per_epoch,
        symmetries=symmetries,
        sinks=sinks,
    )
    if log_dir is not None and _writes_here():
        try:
            run.record_into(Recording(log_dir, describe=lambda: run.metadata, count_steps=lambda: run.step))
        except BaseException:
            run.close()
            raise
    atexit.register(_close, weakref.ref(run))
    return run


def _states(samples: pa.Table, layers: int) -> str:
    """How many layers are in which state at their latest sample: it is among the last rows, two optimizers or one."""
    last = samples.select(["param", "state"]).slice(max(0, samples.num_rows - 2 * layers))
    now = Counter(dict(zip(*(last[name].to_pylist() for name in ("param", "state")), strict=True)).values())
    return ", ".join(f"{now[state]:,} {state}" for state in STATES if now[state])


def _writes_here() -> bool:
    """All processes measure, one writes."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _close(run: weakref.ref[WatchedRun]) -> None:
    held = run()
    if held is not None:
        held.close()
