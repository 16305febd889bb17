"""The options of a learning-rate schedule, and the schedule they describe."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import NUMBER, PATH, WHOLE, apply, completes, flag, named, numbers
from equilibria.errors import EquilibriaError, one_of, positive, whole, within

if TYPE_CHECKING:
    from equilibria.theory.schedules import Schedule

SCHEDULES = ("constant", "step", "linear", "cosine", "polynomial", "exponential", "wsd", "file")

schedule_options = apply(
    click.option(
        "--schedule",
        default="constant",
        show_default=True,
        shell_complete=completes(SCHEDULES),
        help=f"One of: {', '.join(SCHEDULES)}; --lr is its peak.",
    ),
    click.option("--steps", type=WHOLE, help="Length of the run in optimizer steps (positions are steps then)."),
    click.option("--epochs", type=NUMBER, help="Length of the run in epochs (positions are epochs then)."),
    click.option("--steps-per-epoch", type=WHOLE, help="Optimizer steps per epoch."),
    click.option("--milestones", help="step: where in the run lr is multiplied by --factor, as 60,120,160."),
    click.option("--every", type=NUMBER, help="step: lr is multiplied by --factor at every multiple of this."),
    click.option("--factor", type=NUMBER, help="step: the factor (0.1); exponential: the factor per step or epoch."),
    click.option("--warmup", type=NUMBER, help="Linear warm-up from 0 over this long, the first part of the run."),
    click.option("--end-lr", type=NUMBER, help="linear, cosine, polynomial, wsd: the lr at the end (0 if not given)."),
    click.option("--cycles", type=WHOLE, help="cosine: number of warm restarts plus one."),
    click.option("--power", type=NUMBER, help="polynomial: the power (1 if not given)."),
    click.option("--decay", type=NUMBER, help="wsd: length of the final decay."),
    click.option(
        "--lr-file", type=PATH, help="file: one lr per step, as a JSON list or one per line; --lr is not needed."
    ),
    click.option("--per-epoch", is_flag=True, help="Hold lr during an epoch, as one scheduler.step() per epoch does."),
)


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """A schedule, the length of the run, and the lr of its optimizer: --lr, or the largest lr of the file."""

    schedule: Schedule
    steps: int
    steps_per_epoch: int | None
    lr: float


@dataclass(frozen=True, slots=True)
class _Length:
    """Steps of the run, of its warm-up, and of the unit of positions: 1, or the steps of an epoch."""

    steps: int
    warmup: int
    unit: int

    @property
    def after_warmup(self) -> int:
        return self.steps - self.warmup

    def in_units(self, steps: int) -> str:
        """Steps in the unit of positions, with its name."""
        return f"{steps / self.unit:g} {'steps' if self.unit == 1 else 'epochs'}"


def build_run(options: dict[str, Any]) -> ScheduledRun:
    """The schedule that the options describe, with all positions in optimizer steps from the start of the run."""
    kind = one_of("--schedule", options["schedule"].lower(), SCHEDULES)
    _refuse_unused(kind, options)
    if kind == "file":
        options = _with_file(options)
    elif options["lr"] is None:
        raise EquilibriaError("--lr is missing; expected the learning rate, such as --lr 0.1")
    else:
        within("--lr", options["lr"], low=0)
    length = _length(options)
    with named({"end": "--end-lr"}):
        schedule = _BUILDERS[kind](options, length)
    if length.warmup:
        from equilibria.theory.schedules import Warmup

        schedule = Warmup(schedule, steps=length.warmup)
    if options["per_epoch"]:
        schedule = _hold_epochs(schedule, length.steps, options["steps_per_epoch"])
    return ScheduledRun(schedule, length.steps, options["steps_per_epoch"], options["lr"])


# The options that a schedule uses, besides the length of the run and --per-epoch.
USED_BY = {
    "constant": ("warmup",),
    "step": ("milestones", "every", "factor", "warmup"),
    "linear": ("end_lr", "warmup"),
    "cosine": ("end_lr", "cycles", "warmup"),
    "polynomial": ("end_lr", "power", "warmup"),
    "exponential": ("factor", "warmup"),
    "wsd": ("end_lr", "decay", "warmup"),
    "file": ("lr_file",),  # it has every lr, those of a warm-up too
}


def _refuse_unused(kind: str, options: dict[str, Any]) -> None:
    """Raise for an option of another schedule: it would be ignored silently."""
    for name in {name for names in USED_BY.values() for name in names} - set(USED_BY[kind]):
        if options[name] is not None:
            owners = ", ".join(owner for owner, names in USED_BY.items() if name in names)
            raise EquilibriaError(
                f"got {flag(name)} with --schedule {kind}; expected it only with --schedule: {owners}"
            )


def _with_file(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the learning rates of the file, which also give a missing --lr and length."""
    values = _read_file(options["lr_file"])
    options = {**options, "lr_values": values, "lr": max(values) if options["lr"] is None else options["lr"]}
    if options["steps"] is None and options["epochs"] is None:
        options["steps"] = len(values)
    total = _length(options).steps
    if total > len(values):
        raise EquilibriaError(f"got a run of {total:,} steps; expected at most {len(values):,}, one per lr in the file")
    return options


def _length(options: dict[str, Any]) -> _Length:
    steps, unit = run_steps(options["steps"], options["epochs"], options["steps_per_epoch"])
    length = _Length(steps, 0, unit)
    if options["warmup"] is None:
        return length
    warmup = _position("--warmup", options["warmup"], unit)
    if warmup >= steps:
        raise EquilibriaError(
            f"got --warmup {options['warmup']:g}; expected it to end before the run does, at {length.in_units(steps)}"
        )
    return _Length(steps, int(warmup), unit)


def run_steps(steps: int | None, epochs: float | None, steps_per_epoch: int | None) -> tuple[int, int]:
    """Total steps, and the steps per unit of positions."""
    from equilibria.planning._planner import MOST_STEPS

    if (steps is None) == (epochs is None):
        typed = "neither --steps nor --epochs" if steps is None else f"both --steps {steps} and --epochs {epochs:g}"
        raise EquilibriaError(f"got {typed}; expected exactly one of them (--epochs with --steps-per-epoch)")
    if steps_per_epoch is not None:
        within("--steps-per-epoch", steps_per_epoch, low=1, high=MOST_STEPS)
    if steps is not None:
        return int(within("--steps", steps, low=1, high=MOST_STEPS)), 1
    if steps_per_epoch is None:
        raise EquilibriaError(
            f"got --epochs {epochs:g} without --steps-per-epoch; expected both, such as 391 for CIFAR-10"
        )
    total = _position("--epochs", epochs or 0.0, steps_per_epoch)
    if total > MOST_STEPS:
        raise EquilibriaError(
            f"got --epochs {epochs:g} of --steps-per-epoch {steps_per_epoch:,}; "
            f"expected at most {MOST_STEPS:,} steps in all"
        )
    return int(total), steps_per_epoch


def _position(option: str, value: float, unit: int) -> float:
    """The whole number of steps nearest to a position in steps or epochs; infinite if it overflows a float."""
    steps = positive(option, value) * unit
    if unit == 1 and not steps.is_integer():
        raise EquilibriaError(
            f"got {option} {value:g}; expected a whole number of steps (fractions need --epochs and --steps-per-epoch)"
        )
    if steps < 0.5:
        raise EquilibriaError(f"got {option} {value:g}; expected at least one step, {1 / unit:.3g} epochs")
    return steps if math.isinf(steps) else max(1.0, float(round(steps)))


def _constant(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import Constant

    return Constant(options["lr"])


def _step(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import MultiStep, Step

    milestones, every = options["milestones"], options["every"]
    if (milestones is None) == (every is None):
        raise EquilibriaError("--schedule step needs exactly one of --milestones (such as 60,120,160) and --every")
    factor = 0.1 if options["factor"] is None else positive("--factor", options["factor"])
    if milestones is not None:
        marks = _marks(milestones, length)
    else:
        first = _mark("--every", every, length)
        if not length.warmup:
            return Step(options["lr"], every=first, factor=factor)
        marks = list(range(first, length.steps, first))
    return MultiStep(options["lr"], milestones=[mark - length.warmup for mark in marks], factor=factor)


def _marks(milestones: str, length: _Length) -> list[int]:
    positions = numbers("--milestones", milestones, example="60,120,160")
    marks = [_mark("--milestones", position, length) for position in positions]
    if any(later <= earlier for earlier, later in pairwise(marks)):
        raise EquilibriaError(f"got --milestones {milestones}; expected them in ascending order, each once")
    return marks


def _mark(option: str, position: float, length: _Length) -> int:
    """The step of a drop of lr: after the warm-up, before the end."""
    step = _position(option, position, length.unit)
    if not length.warmup < step < length.steps:
        after = f"after the warm-up of {length.in_units(length.warmup)} and " if length.warmup else ""
        end = length.in_units(length.steps)
        raise EquilibriaError(f"got {option} {position:g}; expected it {after}before the end of the run at {end}")
    return int(step)


def _linear(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import Linear

    return Linear(options["lr"], options["end_lr"] or 0.0, steps=length.after_warmup)


def _cosine(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import Cosine, Piecewise

    lr, end, steps = options["lr"], options["end_lr"] or 0.0, length.after_warmup
    cycles = 1 if options["cycles"] is None else whole("--cycles", options["cycles"], low=1)
    if cycles > steps:
        raise EquilibriaError(f"got --cycles {cycles}; expected at most one per step, {steps}")
    if steps % cycles == 0:
        return Cosine(lr, steps=steps // cycles, end=end, cycles=cycles)
    # Cycles may differ by a step: with equal ones, the remaining steps would stay at the end lr.
    marks = [cycle * steps // cycles for cycle in range(cycles + 1)]
    return Piecewise([(first, Cosine(lr, steps=after - first, end=end)) for first, after in pairwise(marks)])


def _polynomial(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import Polynomial

    power = 1.0 if options["power"] is None else positive("--power", options["power"])
    return Polynomial(options["lr"], options["end_lr"] or 0.0, steps=length.after_warmup, power=power)


def _exponential(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import Exponential

    if options["factor"] is None:
        raise EquilibriaError("--schedule exponential needs --factor, which multiplies lr per step or epoch")
    return Exponential(options["lr"], gamma=positive("--factor", options["factor"]) ** (1 / length.unit))


def _wsd(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import WarmupStableDecay

    if options["decay"] is None:
        raise EquilibriaError("--schedule wsd needs --decay, the length of the final decay (and --warmup if wanted)")
    falling, steps = _position("--decay", options["decay"], length.unit), length.after_warmup
    if falling > steps:
        rest = f"what the warm-up leaves of {length.in_units(length.steps)}" if length.warmup else "the whole run"
        raise EquilibriaError(f"got --decay {options['decay']:g}; expected at most {length.in_units(steps)}, {rest}")
    return WarmupStableDecay(
        options["lr"], warmup=0, stable=steps - int(falling), decay=int(falling), end=options["end_lr"] or 0.0
    )


def _hold_epochs(schedule: Schedule, steps: int, steps_per_epoch: int | None) -> Schedule:
    import numpy as np

    from equilibria.theory.schedules import FromValues

    if steps_per_epoch is None:
        raise EquilibriaError("got --per-epoch without --steps-per-epoch; expected both")
    step = np.arange(steps)
    return FromValues(schedule.values(steps)[step - step % steps_per_epoch])


def _from_values(options: dict[str, Any], length: _Length) -> Schedule:
    from equilibria.theory.schedules import FromValues

    return FromValues(options["lr_values"])


def _read_file(path: Path | None) -> list[float]:
    if path is None:
        raise EquilibriaError("--schedule file needs --lr-file PATH, with one lr per step")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise EquilibriaError(f"got --lr-file {path}; expected a readable text file: {reason}") from None
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        values = [float(entry) for entry in entries]
    except (ValueError, TypeError, OverflowError) as error:
        raise EquilibriaError(f"got --lr-file {path}; expected a JSON list or one number per line: {error}") from None
    except RecursionError:
        raise EquilibriaError(f"got --lr-file {path}, with nested lists; expected one JSON list of numbers") from None
    if not values:
        raise EquilibriaError(f"got --lr-file {path}, which is empty; expected a JSON list or one number per line")
    return values


_BUILDERS = {
    "constant": _constant,
    "step": _step,
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "exponential": _exponential,
    "wsd": _wsd,
    "file": _from_values,
}
