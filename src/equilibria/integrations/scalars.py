"""Samples as scalars for loggers: few tags however many layers, each step once, from one process."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, one_of, whole
from equilibria.records.tables import NOTES, NUMBERS, STATES
from equilibria.watching._recording import is_first_process

PREFIX = "equilibria"
RATIO = "angle_vs_predicted"
METRICS = ("angle", "angle_predicted", "angle_equilibrium", RATIO, "norm", "relative_update", "effective_lr")
"""The default metrics."""

MOST_LAYERS = 8
"""The default number of layers with separate tags."""

_FEW_SAMPLES = 5  # of a layer before it is compared: the angle of a single step scatters
_FORGETS = 0.2  # weight of the newest sample
_WORTH_SHOWING = float(np.log(1.25))  # how far off a layer must be to get a separate tag, which it then keeps

Array = NDArray[np.float64]


def require(module: str, *, extra: str) -> Any:
    """Import an optional package.

    Raises:
        EquilibriaError: if it is not installed, with the command that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # it is installed, and lacks a dependency
        raise EquilibriaError(f"{package} is not installed; install it: pip install 'equilibria[{extra}]'") from None


class Tags:
    """Turns the rows of a step into a few scalars by tag.

    ``equilibria/<metric>/<median|min|max>`` over all layers, ``equilibria/<metric>/<layer>`` for some layers, and
    ``equilibria/layers/<state or note>``, the number of layers in a state or with a note. That is at most
    ``len(metrics) * (3 + layers) + 10`` tags.

    If there are more layers than ``layers``, those get a separate tag that are further than 25 % from the prediction
    (from the median angle, if there is none), the worst of a step first, and keep it: curves that have begun continue.

    Args:
        metrics: columns of the sample table, or "angle_vs_predicted".
        layers: how many layers get separate tags, at most.

    Example:
        >>> rows = {"param": ["a", "b"], "state": ["settled", "settled"], "note": [None, None], "norm": [1.0, 3.0]}
        >>> tags = Tags(metrics=["norm"], layers=1)
        >>> sorted(tags.of({**rows, "angle": [0.01, 0.01], "angle_predicted": [0.01, 0.01]}).items())[-3:]
        [('equilibria/norm/max', 3.0), ('equilibria/norm/median', 2.0), ('equilibria/norm/min', 1.0)]
    """

    def __init__(self, *, metrics: Iterable[str] = METRICS, layers: int = MOST_LAYERS) -> None:
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        self._metrics = [one_of("metric", name, [*NUMBERS, RATIO]) for name in names]
        self._most = whole("layers", layers)
        self._named: dict[str, None] = {}  # layers with separate tags; a dict keeps their order
        self._off: dict[str, tuple[int, float]] = {}  # samples, and mean log ratio of measured and expected angle

    def of(self, rows: Mapping[str, Any]) -> dict[str, float]:
        """The scalars of one step, without values that are missing or not finite."""
        names: Sequence[str] = rows["param"]
        self._choose(names, rows)
        named = [index for index, name in enumerate(names) if name in self._named]
        scalars: dict[str, float] = {}
        for metric in self._metrics:
            values = _column(rows, metric)
            scalars |= {f"{PREFIX}/{metric}/{names[index]}": float(values[index]) for index in named}
            scalars |= {f"{PREFIX}/{metric}/{word}": value for word, value in _over_layers(values).items()}
        return {tag: value for tag, value in scalars.items() if np.isfinite(value)} | _counts(rows)

    def _choose(self, names: Sequence[str], rows: Mapping[str, Any]) -> None:
        new = [name for name in names if name not in self._named]
        if len(self._named) + len(new) <= self._most and not self._off:
            self._named |= dict.fromkeys(new)
        elif len(self._named) < self._most:
            self._name_the_worst(names, _column(rows, "angle"), _column(rows, "angle_predicted"))

    def _name_the_worst(self, names: Sequence[str], angle: Array, predicted: Array) -> None:
        """Give the remaining tags to the layers that are furthest off."""
        expected = np.where(np.isfinite(predicted), predicted, _over_layers(angle).get("median", np.nan))
        with np.errstate(all="ignore"):
            off = np.log(angle / expected)
        for name, value in zip(names, off, strict=True):
            if np.isfinite(value):
                count, mean = self._off.get(name, (0, 0.0))
                self._off[name] = count + 1, mean + max(1 / (count + 1), _FORGETS) * (value - mean)
        far = {name: abs(mean) for name, (count, mean) in self._off.items() if count >= _FEW_SAMPLES}
        worst = sorted((name for name in far if far[name] > _WORTH_SHOWING), key=lambda name: -far[name])
        unnamed = [name for name in worst if name not in self._named]
        self._named |= dict.fromkeys(unnamed[: self._most - len(self._named)])


class ScalarSink:
    """Base class of sinks for `equilibria.watch` that send a few scalars per sampled step to a logger; see `Tags`.

    A subclass implements `write` and, if it has something to close, `finish`. Steps are the optimizer steps of the
    watched run, from 0. The samples of several optimizers at one step are sent together. Only the first process of a
    distributed training sends anything.
    """

    def __init__(self, *, metrics: Iterable[str] = METRICS, layers: int = MOST_LAYERS) -> None:
        self._tags = Tags(metrics=metrics, layers=layers)
        self._known: set[str] = set()  # layers of all optimizers that have sent samples
        self._waiting: list[Mapping[str, Any]] = []

    def append(self, columns: Mapping[str, Any]) -> None:
        """Take the rows of one sampled step of one optimizer."""
        if not is_first_process():
            return
        if self._waiting and _step(self._waiting[0]) != _step(columns):
            self._send()
        is_new = bool(set(columns["param"]) - self._known)  # then more optimizers may follow
        self._known |= set(columns["param"])
        self._waiting.append(columns)
        if not is_new and sum(len(part["param"]) for part in self._waiting) == len(self._known):
            self._send()

    def close(self) -> None:
        """Send the last samples."""
        try:
            self._send()
        finally:
            self.finish()

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars by tag."""
        raise NotImplementedError

    def finish(self) -> None:
        """Release resources; another training may follow."""

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            rows = {name: [value for part in waiting for value in part[name]] for name in waiting[0]}
            self.write(self._tags.of(rows), _step(waiting[0]))


def _step(columns: Mapping[str, Any]) -> int:
    return int(columns["step"][0])


def _column(rows: Mapping[str, Any], metric: str) -> Array:
    """One number per layer, NaN where it was not measured."""
    if metric == RATIO:
        with np.errstate(all="ignore"):
            ratio: Array = _column(rows, "angle") / _column(rows, "angle_predicted")
        return ratio
    return np.asarray(rows[metric], dtype=object).astype(np.float64)


def _over_layers(values: Array) -> dict[str, float]:
    known = values[np.isfinite(values)]
    if not known.size:
        return {}
    return {"median": float(np.median(known)), "min": float(known.min()), "max": float(known.max())}


def _counts(rows: Mapping[str, Any]) -> dict[str, float]:
    """The number of layers in each state, and with each note that occurs."""
    states, notes = Counter(rows["state"]), Counter(rows["note"])
    counts = {state: states[state] for state in STATES} | {note: notes[note] for note in NOTES if notes[note]}
    return {f"{PREFIX}/layers/{word.replace(' ', '_')}": float(count) for word, count in counts.items()}
