"""An experiment: settings per scale, tasks that can run anywhere, and the claims and figures made of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, one_of, whole, within
from equilibria.lab.harness.claim import Claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("smoke", "desk", "paper")
SYNTHETIC, NETWORKS = "synthetic", "networks"
KINDS = {SYNTHETIC: "Exact small worlds", NETWORKS: "Networks"}
"""The kinds of experiments, and their headings on the pages."""
_POSITIVE = {
    "steps",
    "trials",
    "replicas",
    "data_sets",
    "matrices",
    "dim",
    "samples",
    "every",
    "draws",
    "points",
    "grid",
}
Config = TypeVar("Config")
_LATER = "later"
Arrays = Mapping[str, NDArray[Any]]
"""Result of a task, by name."""
TaskResults = Mapping[str, Arrays]
"""Results of all tasks of an experiment, by the key of the task."""
Figures = Mapping[str, "Figure"]
"""Figures of an experiment, by the name of the file."""


@runtime_checkable
class Data(Protocol):
    """A data set that can describe itself."""

    @property
    def counts(self) -> str:
        """The number of images, in words."""

    @property
    def digest(self) -> str:
        """A hash of the contents."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Claims and numbers of an experiment.

    Attributes:
        claims: with their verdicts.
        numbers: further numbers worth keeping, such as a table of the paper; plain values for JSON.
        not_judged: name of a number that no claim uses -> why not.
    """

    claims: Sequence[Claim]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    not_judged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment(Generic[Config]):
    """One row of the list that `equilibria reproduce --list` prints.

    The four functions are module-level, so that a process on another machine can import them. Equal settings and tasks
    give equal numbers wherever and in whatever order the tasks run: a task seeds its own generator.

    Attributes:
        id: its name on the command line.
        title: one line.
        source: the figures, equations and theorems it reproduces, as "sharp fig. 5".
        scales: settings by scale, a frozen dataclass of plain values each.
        functions: the four that the properties `tasks`, `run_task`, `collect` and `draw` describe, in this order.
        kind: "synthetic" for exact small problems, which need no data; "networks" for experiments that train networks.
        needs: settings -> the data they need, or an EquilibriaError that says what this machine lacks. None if they
            need nothing.
        version: increase it when a change of the code changes a number; results of another version are recomputed.
    """

    id: str
    title: str
    source: str
    scales: Mapping[str, Config]
    functions: tuple[
        Callable[[Config], Mapping[str, Any]],
        Callable[[Config, Any], Arrays],
        Callable[[Config, TaskResults], Outcome],
        Callable[[Config, TaskResults], Figures],
    ]
    kind: str = SYNTHETIC
    needs: Callable[[Config], object] | None = None
    version: int = 1

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        for scale, config in self.scales.items():
            one_of("scale", scale, SCALES)
            if not is_dataclass(config) or isinstance(config, type):
                raise EquilibriaError(f"got {self.id} with settings {config!r}; expected a frozen dataclass")

    @property
    def tasks(self) -> Callable[[Config], Mapping[str, Any]]:
        """Settings -> tasks by key; a key names a file: letters, digits, dots, dashes and underscores."""
        return self.functions[0]

    @property
    def run_task(self) -> Callable[[Config, Any], Arrays]:
        """Settings, task -> arrays by name; does the work."""
        return self.functions[1]

    @property
    def collect(self) -> Callable[[Config, TaskResults], Outcome]:
        """Settings, arrays of all tasks by key -> claims and numbers; quick."""
        return self.functions[2]

    @property
    def draw(self) -> Callable[[Config, TaskResults], Figures]:
        """Settings, arrays of all tasks by key -> figures by the name of the file; quick."""
        return self.functions[3]

    def config(self, scale: str) -> Config:
        """The settings at a scale.

        Raises:
            EquilibriaError: if the experiment has no such scale, or its settings are impossible.
        """
        if scale not in self.scales:
            raise EquilibriaError(f"got {self.id} at scale={scale!r}; expected one of: {', '.join(self.scales)}")
        check_settings(self.scales[scale])
        return self.scales[scale]

    def data(self, config: Config) -> str:
        """The data that these settings use: number of images and digest; "" if none.

        Raises:
            EquilibriaError: if this machine lacks them.
        """
        data = None if self.needs is None else self.needs(config)
        return f"{data.counts} ({data.digest})" if isinstance(data, Data) else ""

    def fingerprint(self, config: Config, *, data: str = "") -> str:
        """A hash of the version, these settings and the data: equal fingerprints mean equal numbers.

        Returns:
            Sixteen hexadecimal digits.
        """
        content = json.dumps([self.id, self.version, settings(config), data], sort_keys=True, allow_nan=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Plain values for the list."""
        words = {"id": self.id, "title": self.title, "source": self.source, "kind": self.kind}
        return {**words, "scales": list(self.scales)}


def check_settings(config: Any) -> None:
    """Check settings against the defaults of their fields.

    A field whose default is a whole number must hold one; a field whose default is not negative must not be negative;
    the same holds for every number in a tuple. 0 is allowed, except for counts that must be positive, such as steps.

    Raises:
        EquilibriaError: a field breaks one of these rules; the message names the field and the allowed values.
    """
    for field_ in fields(config):
        default, value = field_.default, getattr(config, field_.name)
        if isinstance(default, tuple) and len({type(item) for item in default}) == 1 and isinstance(value, tuple):
            for item in value:
                _check_like(field_.name, item, default[0])
        else:
            _check_like(field_.name, value, default)


def _check_like(name: str, value: Any, default: Any) -> None:
    if isinstance(default, int) and not isinstance(default, bool):
        whole(name, value, low=1 if name in _POSITIVE and default > 0 else 0)
    elif isinstance(default, float):
        within(name, value, **({"above": 0} if name == "lr" else {"low": 0} if default >= 0 else {}))


def later(default: Any) -> Any:
    """A setting that an experiment got after results were committed: at its default no fingerprint contains it."""
    return field(default=default, metadata={_LATER: True})


def one_task(config: Any) -> dict[str, None]:
    """A single task: use as `Experiment.tasks` for an experiment that cannot be divided."""
    return {"all": None}


def settings(config: Any) -> dict[str, Any]:
    """The settings as JSON values, without those that came `later` and have their default.

    Example:
        >>> @dataclass(frozen=True)
        ... class Steps:
        ...     count: int = 10
        ...     warm_up: int = later(0)
        >>> settings(Steps()), settings(Steps(warm_up=2))
        ({'count': 10}, {'count': 10, 'warm_up': 2})
    """
    values = {item: getattr(config, item.name) for item in fields(config)}
    return {
        item.name: plain(value)
        for item, value in values.items()
        if _LATER not in item.metadata or value != item.default
    }


def plain(value: Any) -> Any:
    """Settings, tuples, arrays and numpy numbers as JSON values; numbers that are not finite become null."""
    if is_dataclass(value):
        return settings(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
