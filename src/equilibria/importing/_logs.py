"""Logs as series of numbers by name: CSV and Parquet tables, TensorBoard, MLflow and Weights & Biases runs."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, described
from equilibria.findings import counted
from equilibria.importing._names import NUMBERS, SETTINGS
from equilibria.importing._wandb_file import wandb_rows
from equilibria.integrations.scalars import PREFIX, require

Steps = NDArray[np.int64]
Array = NDArray[np.float64]

_STEPS = ("step", "_step", "global_step", "trainer/global_step", "train/global_step", "iteration", "iter")
_PARAMS = ("param", "parameter", "layer")
_METRIC_NAMES = ("metric", "key", "tag", "name")
_AXES = ("trainer/global_step", "train/global_step", "_step", f"{PREFIX}/step", "_runtime", "_timestamp")  # of W&B
_EVENTS = "*tfevents*"
_DECAYS = ("weight_decay", "wd")
_WHOLE = 2.0**53  # above it not every whole number is a float64 number


@dataclass(frozen=True, slots=True)
class Log:
    """What a log holds.

    Attributes:
        kind: of the source, in words.
        series: by name of the metric, steps (ascending) and values; values that are not finite are left out.
        weight_decay: that of the logged configuration; None if it has none.
        notes: sentences about what was left out.
    """

    kind: str
    series: Mapping[str, tuple[Steps, Array]]
    weight_decay: float | None = None
    notes: tuple[str, ...] = ()


def is_log(path: Path) -> bool:
    """Whether a path is one of the logs that `read_log` reads: its files lie in the folder itself."""
    return path.is_file() or bool(_wandb_files(path) or (path / "metrics").is_dir() or list(path.glob(_EVENTS)))


def has_events(path: Path) -> bool:
    """Whether a folder holds event files of TensorBoard, itself or further down."""
    return bool(_events(path))


def read_log(path: Path) -> Log:
    """Read a log.

    Args:
        path: a CSV or Parquet file, a ``.wandb`` file, or the folder of a TensorBoard, W&B or MLflow run.

    Raises:
        EquilibriaError: if it cannot be read, holds several runs or none, or its steps go back or come twice.
    """
    if path.is_dir():
        return _read_folder(path)
    ending = path.suffix.lower()
    if ending in (".csv", ".tsv", ".parquet"):
        return _from_table(_read_table(path, ending), path)
    if ending == ".wandb":
        return _from_wandb(path)
    if "tfevents" in path.name:
        return _from_events([path])
    raise EquilibriaError(f"got source={path}; expected {SOURCES}", argument="source")


SOURCES = (
    "a .csv, .tsv, .parquet or .wandb file, or a folder: of a W&B, TensorBoard or MLflow run, or of checkpoints "
    "(.safetensors, .pt, .pth, .bin, .ckpt, or folders of torch.distributed.checkpoint)"
)


def _read_folder(path: Path) -> Log:
    if files := _wandb_files(path):
        return _from_wandb(_the_only(files, path))
    if (path / "metrics").is_dir():
        return _from_mlflow(path)
    return _from_events(_events(path))


def _the_only(files: list[Path], path: Path) -> Path:
    if len(files) > 1:
        raise EquilibriaError(
            f"got source={path}, which holds {len(files)} runs ({_first_few(file.parent.name for file in files)}); "
            "expected the folder of one of them",
            argument="source",
        )
    return files[0]


def _first_few(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return f"{', '.join(listed[:most])}{', ...' if len(listed) > most else ''}"


def _wandb_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.wandb")) or sorted(path.glob("*run-*/*.wandb"))


def _events(path: Path) -> list[Path]:
    """The event files of a run, the oldest first; those of its only subfolder if it has none itself."""
    files = sorted(path.glob(_EVENTS))
    if files:
        return files
    folders = sorted({file.parent for file in path.rglob(_EVENTS)})
    if len(folders) > 1:
        raise EquilibriaError(
            f"got source={path}, which holds event files in {len(folders)} folders "
            f"({_first_few(str(folder.relative_to(path)) for folder in folders)}); expected the folder of one of them",
            argument="source",
        )
    return sorted(folders[0].glob(_EVENTS)) if folders else []


# ---- series


@dataclass
class _Collector:
    """Gathers numbers by name, and notes what is left out."""

    series: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, step: int, value: float) -> None:
        steps, values = self.series.setdefault(name, ([], []))
        steps.append(step)
        values.append(value)

    def go_back(self, step: int) -> None:
        """Leave out what was logged from a step on: a resumed run logged it again."""
        for name, (steps, values) in self.series.items():
            kept = [place for place, at in enumerate(steps) if at < step]
            self.series[name] = [steps[place] for place in kept], [values[place] for place in kept]

    def log(self, kind: str, *, weight_decay: float | None = None) -> Log:
        arrays = {name: (np.array(s, dtype=np.int64), np.array(v)) for name, (s, v) in self.series.items()}
        return _checked(kind, arrays, self.notes, weight_decay=weight_decay)


def _checked(
    kind: str,
    series: Mapping[str, tuple[Steps, Array]],
    notes: Iterable[str] = (),
    *,
    weight_decay: float | None = None,
) -> Log:
    """The log, after a check of every series."""
    kept, lost = {}, {}
    for name, (steps, values) in series.items():
        finite = np.isfinite(values)
        if not finite.all():
            lost[name] = int((~finite).sum())
        if finite.any():
            kept[name] = _in_order(name, steps[finite], values[finite])
    if not kept:
        raise EquilibriaError(f"got a source without a number ({kind}); expected logged norms", argument="source")
    notes = list(notes)
    if lost:
        first = next(iter(lost))
        more = f" and {len(lost) - 1:,} more metrics" if len(lost) > 1 else ""
        notes.append(f"{counted(sum(lost.values()), 'NaN or infinite value')} of {first}{more} left out")
    return Log(kind, kept, weight_decay, tuple(notes))


def _in_order(name: str, steps: Steps, values: Array) -> tuple[Steps, Array]:
    """The series without values that are logged twice alike; raises if it goes back, or has two values at a step."""
    if steps.min() < 0:
        raise EquilibriaError(f"got {name} at step {int(steps.min())}; expected steps from 0 on", argument="source")
    change = np.diff(steps)
    if np.any(change < 0):
        place = int(np.argmax(change < 0))
        raise EquilibriaError(
            f"got {name} at step {steps[place]:,} and after it at step {steps[place + 1]:,}; expected steps that only "
            "grow: keep one line of a run that was resumed from an earlier step",
            argument="source",
        )
    twice = np.flatnonzero(change == 0)
    differ = twice[values[twice] != values[twice + 1]]
    if len(differ):
        place = int(differ[0])
        raise EquilibriaError(
            f"got {name} twice at step {steps[place]:,}, {values[place]:g} and {values[place + 1]:g}; expected one "
            "value per step: keep one run, and one of the processes that logged",
            argument="source",
        )
    kept = np.append(True, change > 0)
    return steps[kept], values[kept]


# ---- tables


def _read_table(path: Path, ending: str) -> pa.Table:
    try:
        if ending == ".parquet":
            return importlib.import_module("pyarrow.parquet").read_table(path)
        csv = importlib.import_module("pyarrow.csv")
        options = csv.ReadOptions(block_size=max(path.stat().st_size, 1))  # one block: sparse columns begin with nulls
        parse = csv.ParseOptions(delimiter="\t" if ending == ".tsv" else ",")
        return csv.read_csv(path, read_options=options, parse_options=parse)
    except (pa.ArrowException, OSError) as error:
        raise EquilibriaError(f"cannot read {path}: {error}", argument="source") from error


def _from_table(table: pa.Table, path: Path) -> Log:
    if not table.num_rows:
        raise EquilibriaError(f"got source={path}, a table without rows; expected logged norms", argument="source")
    step = next((name for known in _STEPS for name in table.column_names if name.lower() == known), None)
    if step is None:
        raise EquilibriaError(
            f"got source={path} with the columns {', '.join(table.column_names[:12])}; expected one of steps: "
            f"{', '.join(_STEPS)}",
            argument="source",
        )
    table, notes = _with_steps(table, step)
    steps = _floats(table[step]).astype(np.int64)
    param = _text_column(table, _PARAMS)
    metric = _text_column(table, _METRIC_NAMES)
    if param is not None:
        return _checked("table", dict(_by_parameter(table, steps, param, step)), notes)
    if metric is not None and "value" in map(str.lower, table.column_names):
        value = next(name for name in table.column_names if name.lower() == "value")
        parts = _split(table[metric], steps, _floats(table[value]))
        return _checked("table", dict(parts), notes)
    return _checked("table", dict(_wide(table, steps, step)), notes)


def _with_steps(table: pa.Table, step: str) -> tuple[pa.Table, list[str]]:
    """The rows that have a step."""
    steps = table[step]
    numbers = pa.types.is_integer(steps.type) or pa.types.is_floating(steps.type)
    known = _floats(steps) if numbers else np.full(table.num_rows, np.nan)
    good = np.isfinite(known)
    if not good.any() or np.any(known[good] != np.floor(known[good])) or np.abs(known[good]).max() >= _WHOLE:
        raise EquilibriaError(
            f"got a column {step} of {steps.type} that does not hold whole steps; expected 0, 1, 2, ...",
            argument="source",
        )
    missing = int((~good).sum())
    return table.filter(pa.array(good)), [f"{counted(missing, 'row')} without a step left out"] if missing else []


def _text_column(table: pa.Table, names: Iterable[str]) -> str | None:
    """The column of texts with one of some names."""
    return next(
        (own for name in names for own in table.column_names if own.lower() == name and _is_text(table[own])), None
    )


def _is_text(column: pa.ChunkedArray) -> bool:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _floats(column: pa.ChunkedArray) -> Array:
    """The numbers of a column; NaN where null."""
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _is_numeric(column: pa.ChunkedArray) -> bool:
    return bool(pa.types.is_integer(column.type) or pa.types.is_floating(column.type))


def _split(names: pa.ChunkedArray, steps: Steps, values: Array) -> Iterator[tuple[str, tuple[Steps, Array]]]:
    """One series per name."""
    coded = names.combine_chunks()
    coded = coded if pa.types.is_dictionary(coded.type) else pc.dictionary_encode(coded)
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    for code, name in enumerate(coded.dictionary.to_pylist()):
        rows = (codes == code) & ~np.isnan(values)
        yield str(name), (steps[rows], values[rows])


def _by_parameter(table: pa.Table, steps: Steps, param: str, step: str) -> Iterator[tuple[str, tuple[Steps, Array]]]:
    """A row per step and parameter: each column of numbers gives one series per parameter, settings give one."""
    for name in table.column_names:
        if name in (param, step) or not _is_numeric(table[name]):
            continue
        values = _floats(table[name])
        if name in NUMBERS:
            yield from ((f"{name}/{own}", series) for own, series in _split(table[param], steps, values))
        elif name in SETTINGS:
            yield name, _common(name, steps, values)


def _common(name: str, steps: Steps, values: Array) -> tuple[Steps, Array]:
    """A setting that all parameters share at each step."""
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    first = np.append(True, np.diff(steps) != 0)[: len(steps)]
    groups = np.cumsum(first) - 1
    if np.any(values != values[first][groups]):
        raise EquilibriaError(
            f"got {name} that differs between parameters of one step; expected one: give {name}=, or select= the "
            "parameters of one group",
            argument=name,
        )
    return steps[first], values[first]


def _wide(table: pa.Table, steps: Steps, step: str) -> Iterator[tuple[str, tuple[Steps, Array]]]:
    """A column per metric; in charts exported by W&B the name of the run goes before it."""
    runs: set[str] = set()
    of_tags = next((_floats(table[name]) for name in table.column_names if name.endswith(f"{PREFIX}/step")), None)
    for name in table.column_names:
        if name == step or not _is_numeric(table[name]) or name.endswith(("__MIN", "__MAX")):
            continue
        run, separator, metric = name.rpartition(" - ")
        runs |= {run} if separator else set()
        if len(runs) > 1:
            raise EquilibriaError(
                f"got a table of several runs ({', '.join(sorted(runs))}); expected one: export them one by one",
                argument="source",
            )
        values = _floats(table[name])
        known, at = ~np.isnan(values), steps
        if of_tags is not None and metric.startswith(f"{PREFIX}/"):
            known &= ~np.isnan(of_tags)
            at = np.nan_to_num(of_tags).astype(np.int64)
        if metric not in _AXES:
            yield metric, (at[known], values[known])


# ---- TensorBoard, MLflow, W&B


def _from_events(files: list[Path]) -> Log:
    """The scalars of event files; of a resumed run the later file counts."""
    loader = require("tensorboard.backend.event_processing.event_file_loader", extra="tensorboard")
    arrays = importlib.import_module("tensorboard.util.tensor_util")
    collected = _Collector()
    for file in files:
        is_first = True
        try:
            for event in loader.EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    number = (
                        arrays.make_ndarray(value.tensor) if value.HasField("tensor") else np.array(value.simple_value)
                    )
                    if number.size != 1 or number.dtype.kind not in "fiu":
                        continue
                    if is_first:
                        collected.go_back(event.step)
                        is_first = False
                    collected.add(value.tag, event.step, float(number.reshape(())))
        except Exception as error:  # a library of its own, with errors of its own
            raise EquilibriaError(f"cannot read {file}: {described(error)}", argument="source") from error
    return collected.log("TensorBoard")


def _from_mlflow(path: Path) -> Log:
    """The metrics of an MLflow run: a file per metric, with lines "time value step"."""
    collected = _Collector()
    for file in sorted(path.glob("metrics/**/*")):
        if file.is_file():
            name = file.relative_to(path / "metrics").as_posix()
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                parts = line.split()
                try:
                    collected.add(name, int(parts[2]) if len(parts) > 2 else 0, float(parts[1]))
                except (IndexError, ValueError):
                    raise EquilibriaError(
                        f"got the line {line[:80]!r} in {file}; expected time, value and step", argument="source"
                    ) from None
    params = {name: path / "params" / name for name in _DECAYS}
    return collected.log(
        "MLflow", weight_decay=_decay({name: file.read_text() for name, file in params.items() if file.is_file()})
    )


def _from_wandb(path: Path) -> Log:
    """The history of a W&B run from its own file."""
    collected, config = _Collector(), dict[str, Any]()
    for row in wandb_rows(path):
        config |= row.config
        if "_step" in row.numbers:
            own, of_tags = _axes(row.numbers)
            for name, value in row.numbers.items():
                if name not in _AXES:
                    collected.add(name, of_tags if name.startswith(f"{PREFIX}/") else own, value)
    return collected.log("W&B", weight_decay=_decay(config))


def _axes(numbers: Mapping[str, float]) -> tuple[int, int]:
    """The steps that a row belongs to: those of training, and those of this package's tags."""
    own = next(int(numbers[name]) for name in _AXES if name in numbers)
    return own, int(numbers.get(f"{PREFIX}/step", own))


def _decay(config: Mapping[str, Any]) -> float | None:
    """The weight decay of a logged configuration."""
    for name in _DECAYS:
        value = config.get(name)
        try:
            number = float(json.loads(value) if isinstance(value, str) else value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        if math.isfinite(number) and number >= 0:
            return number
    return None
