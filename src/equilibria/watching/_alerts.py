"""Alerts: a function of the user's is called with each new finding while training runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from equilibria.errors import EquilibriaError, WatchWarning, described, warn_in_training
from equilibria.findings import Finding
from equilibria.optimizers.budget import TimeBudget

OnFinding: TypeAlias = Callable[[Finding], object]
"""Called with each new finding."""

_SHARE = 0.002  # of the training time that looking for findings may take


class FindingAlerts:
    """Sink that looks for new findings within a time budget, and once more at the end.

    A check says the same with other numbers, or of other layers, as training goes on. So a finding is new if there are
    more of its kind and severity than at any look before.

    Args:
        on_finding: called with each new finding. An error in it becomes one warning, and training goes on.
        find: returns the present findings.
    """

    def __init__(self, on_finding: OnFinding, find: Callable[[], Sequence[Finding]]) -> None:
        import equilibria.diagnosis  # noqa: F401  # now, rather than in a training step

        self._on_finding, self._find = on_finding, find
        self._announced: set[str] = set()
        self._budget = TimeBudget("auto", share=_SHARE)
        self._next = 0.0  # the step to look at
        self._last: tuple[int, float] | None = None  # step and time of the last look
        self._has_warned = self._is_looking = False

    def append(self, columns: Mapping[str, Any]) -> None:
        """Look for findings if the budget allows it."""
        step = int(columns["step"][0])
        if step < self._next or (self._last is not None and step <= self._last[0]):
            return
        begun = time.perf_counter()
        if self._last is not None:
            last_step, ended = self._last
            self._budget.add_step((begun - ended) / (step - last_step))
        self.look()
        ended = time.perf_counter()
        self._budget.add_cost(ended - begun)
        self._last = step, ended
        self._next = step + self._budget.interval()

    def close(self) -> None:
        """Look once more."""
        self.look()

    def look(self) -> None:
        """Announce the findings that are new."""
        if self._is_looking:  # the user's function may close the run
            return
        self._is_looking = True
        try:
            count: Counter[str] = Counter()
            for finding in self._find():
                kind = f"{finding.severity}: {finding.kind or finding.subject}"
                count[kind] += 1
                key = f"{kind} ({count[kind]})"
                if key not in self._announced:
                    self._announced.add(key)
                    self._announce(finding)
        finally:
            self._is_looking = False

    def _announce(self, finding: Finding) -> None:
        try:
            self._on_finding(finding)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warn_in_training(f"on_finding failed: {described(error)}; training goes on", WatchWarning)

    def state_dict(self) -> list[str]:
        """What was announced, for a checkpoint."""
        return sorted(self._announced)

    def load_state_dict(self, announced: Iterable[str]) -> None:
        """Go on from a checkpoint: what was announced before it is not new."""
        self._announced = set(announced)
        self._next, self._last = 0.0, None


def checked(on_finding: object) -> OnFinding:
    """The argument, if it can be called.

    Raises:
        EquilibriaError: if it cannot.
    """
    if not callable(on_finding):
        raise EquilibriaError(
            f"got on_finding of type {type(on_finding).__name__}; expected a function of one finding",
            argument="on_finding",
        )
    return on_finding
