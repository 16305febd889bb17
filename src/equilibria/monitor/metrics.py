"""The numbers that a training logs itself, such as its loss: kept in memory, and handed to a record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from equilibria.errors import EquilibriaError, WatchWarning, described, warn_in_training, whole
from equilibria.records._metrics import KeptMetrics

MOST_NAMES, LONGEST_NAME = 100, 100
_MOST_WAITING = 512  # numbers
_LONGEST_WAIT = 1.0  # seconds: then numbers on a device are read, and the host waits for it

WriteRows: TypeAlias = Callable[[Mapping[str, Any]], None]


class MetricLog:
    """Takes numbers from the training loop at a few microseconds each.

    A name that is first logged before the first step is logged before every step: its number belongs to the step that
    follows. Every other name is logged after a step, and its number belongs to that step. Either way the loss of a step
    gets the number of that step in the samples.

    Numbers on a device are copied there and read later, many at once, so that the host does not wait for each. A number
    that is not finite is a number.
    """

    def __init__(self) -> None:
        self._kept = KeptMetrics()
        self._precedes_step: dict[str, bool] = {}  # by name: whether it is logged before a step or after it
        self._waiting: list[tuple[int, str, float | Tensor]] = []
        self._settled = time.monotonic()
        self._unwritten: list[tuple[int, str, float]] = []
        self._write: WriteRows | None = None
        self._can_write: Callable[[], bool] = lambda: False
        # A writer's thread settles too; re-entrant, because a signal handler may close the run inside of `log`.
        self._lock = threading.RLock()

    def log(self, numbers: Mapping[str, Any], *, taken: int, step: int | None = None) -> None:
        """Take one number for each name.

        Args:
            numbers: Python or numpy numbers, or tensors with one element.
            taken: steps taken so far.
            step: the step that they belong to, if it is not the present one.

        Raises:
            EquilibriaError: for what is not a number, a name that is too long or not printable, or too many names.
        """
        step = None if step is None else _step(step)
        rows: list[tuple[int, str, float | Tensor]] = []
        for name, value in numbers.items():
            precedes = self._precedes_step.get(name)
            if precedes is None:
                precedes = self._precedes_step[name] = self._admitted(name) and taken == 0
            number = value if type(value) is float else _number(name, value)
            rows.append(((taken if precedes else max(taken - 1, 0)) if step is None else step, name, number))
        with self._lock:
            self._waiting += rows
        if len(self._waiting) >= _MOST_WAITING or time.monotonic() - self._settled > _LONGEST_WAIT:
            self.settle()

    def record(self, write: WriteRows, *, can_write: Callable[[], bool]) -> None:
        """Hand all numbers to a record.

        Args:
            write: takes the columns of a metrics table.
            can_write: whether it may be opened already; until then the numbers wait.
        """
        self._write, self._can_write = write, can_write

    def settle(self, *, on_devices: bool = True, final: bool = False) -> bool:
        """Read the numbers that wait, and hand them to the record; whether it got any.

        Args:
            on_devices: whether to read those on devices, and all that follow them. Only the training's own thread may.
            final: hand them to the record even if that opens it; nothing is recorded after it.
        """
        with self._lock:
            self._keep_waiting(on_devices=on_devices)
            if self._write is None:
                return False
            has_written = bool(self._unwritten) and (final or self._can_write())
            if has_written:
                self._write_all(self._write)
            if final:
                self._write = None
            return has_written

    def table(self) -> pa.Table:
        """The metrics table so far, sorted by step."""
        with self._lock:
            self.settle()
            return self._kept.table()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: which names are logged before a step."""
        return {"precedes_step": dict(self._precedes_step)}

    def load_state_dict(self, state: Mapping[str, Any], *, taken: int) -> None:
        """Go on from a checkpoint that was saved after ``taken`` steps."""
        self._precedes_step = dict(state.get("precedes_step", {}))
        with self._lock:
            self._keep_waiting(on_devices=True)  # without writing: which record to append to is not known yet
            self._kept.drop_from(taken)

    def _admitted(self, name: str) -> bool:
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            shown = repr(name if len(name) <= LONGEST_NAME else name[:40] + "...")
            raise EquilibriaError(f"got the name {shown}; expected 1 to {LONGEST_NAME} printable characters")
        if len(self._precedes_step) >= MOST_NAMES:
            raise EquilibriaError(
                f"got the name {name!r} after {MOST_NAMES} others; expected at most {MOST_NAMES} names: log one number "
                "at every step under the same name"
            )
        return True

    def _keep_waiting(self, *, on_devices: bool) -> None:
        """Read the numbers that wait and keep them, for the record too."""
        self._settled = time.monotonic()
        rows = self._read_waiting(on_devices=on_devices)
        by_name: dict[str, tuple[list[int], list[float]]] = {}
        for step, name, value in rows:
            steps, values = by_name.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
        for name, (steps, values) in by_name.items():
            self._kept.add(name, steps, values)
        if self._write is not None:
            self._unwritten += rows

    def _read_waiting(self, *, on_devices: bool) -> list[tuple[int, str, float]]:
        """Take the rows that wait, all of them or those before the first number on a device."""
        places = [place for place, row in enumerate(self._waiting) if isinstance(row[2], Tensor)]
        end = len(self._waiting) if on_devices or not places else places[0]
        rows: list[Any] = self._waiting[:end]
        del self._waiting[:end]
        if places and on_devices:
            tensors = [rows[place][2] for place in places]
            for place, value in zip(places, _read(tensors), strict=True):
                rows[place] = (*rows[place][:2], value)
        return rows

    def _write_all(self, write: WriteRows) -> None:
        columns = dict(zip(("step", "name", "value"), map(list, zip(*self._unwritten, strict=True)), strict=True))
        self._unwritten = []
        try:
            write(columns)
        except Exception as error:  # a defect of the record must not end the training
            self._write = None
            warn_in_training(f"logged numbers are no longer recorded: {described(error)}", WatchWarning)


def _step(step: object) -> int:
    number = whole("step", step)
    if number >= 1 << 63:
        raise EquilibriaError(f"got step={step}; expected a step below 2^63", argument="step")
    return number


def _number(name: str, value: Any) -> float | Tensor:
    """A float, or a copy of a number on a device: the training may overwrite its own."""
    if isinstance(value, Tensor | np.ndarray):
        if value.size != 1 if isinstance(value, np.ndarray) else value.numel() != 1:
            raise _no_number(name, f"of shape {tuple(value.shape)}", ": take its mean, for instance")
        if isinstance(value, Tensor) and value.device.type != "cpu" and not value.is_complex():
            return value.detach().clone().reshape(())
        value = value.item()
    try:
        if isinstance(value, str | bytes):  # float() would read "0.1"
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        shown = repr(value)
        raise _no_number(name, shown if len(shown) <= 80 else f"{shown[:77]}...") from None


def _no_number(name: str, what: str, advice: str = "") -> EquilibriaError:
    between = " " if what.startswith("of ") else "="
    return EquilibriaError(f"got {name}{between}{what}; expected one number{advice}", argument=name)


def _read(tensors: list[Tensor]) -> list[float]:
    """Numbers on devices, with one wait for each device and type."""
    groups: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    values = [0.0] * len(tensors)
    for places in groups.values():
        read = torch.stack([tensors[place] for place in places]).tolist()
        for place, value in zip(places, read, strict=True):
            values[place] = float(value)
    return values
