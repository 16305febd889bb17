"""One live line on the terminal while a run is watched."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from equilibria._rich import Console, Live, Text
from equilibria.measure.monitor import Monitor
from equilibria.measure.samples import SETTLED, STATES

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
