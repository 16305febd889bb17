"""A status line on the terminal that shows the latest sample while training runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.records.tables import SETTLED, STATES
from equilibria.views._rich import Console, Live, Text

if TYPE_CHECKING:
    from equilibria.watching._watch import WatchedRun

_PAUSE = 0.25  # seconds between two updates


class StatusLine:
    """Shows the latest sample as one line on standard error, if that is a terminal.

    Args:
        run: the run whose samples are shown.
        console: where to show them; standard error by default.
    """

    def __init__(self, run: WatchedRun, *, console: Console | None = None) -> None:
        self._run = run
        self._console = Console(stderr=True) if console is None else console
        self._live: Live | None = None
        self._updated = 0.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line inside a ``with``."""
        if not self._console.is_terminal:
            yield
            return
        # Printed lines appear above the status line. If standard output is a file or a pipe it is left alone: rich
        # would send it to the terminal instead.
        with Live(
            _line("watching ..."),
            console=self._console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        ) as self._live:
            self._run.add_sink(self)
            try:
                yield
            finally:
                self._run.remove_sink(self)

    def append(self, columns: Mapping[str, Any]) -> None:
        """Show a sample."""
        if self._live is not None and time.monotonic() - self._updated > _PAUSE:
            self._updated = time.monotonic()
            self._live.update(_line(status_text(columns)), refresh=True)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


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
        error = np.abs(np.log(ratio))
    if np.isfinite(error).any():
        worst = int(np.argmax(np.where(np.isfinite(error), error, -1.0)))
        parts.append(f"{columns['param'][worst]} turns {ratio[worst]:.2f}x its prediction")
    return "; ".join(parts)
