"""The schedule options, and the schedule they describe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import NUMBER, WHOLE, apply, numbers
from equilibria.errors import EquilibriaError, one_of, positive, whole, within

if TYPE_CHECKING:
    from equilibria.theory.schedules import Schedule

SCHEDULES = ("constant", "step", "linear", "cosine", "polynomial", "exponential", "wsd", "file")

schedule_options = apply(
    click.option("--schedule", default="constant", show_default=True, help=f"One of: {', '.join(SCHEDULES)}."),
    click.option("--steps", type=WHOLE, help="Length of the run in optimizer steps (positions are steps then)."),
    click.option("--epochs", type=NUMBER, help="Length of the run in epochs (positions are epochs then)."),
    click.option("--steps-per-epoch", type=WHOLE, help="Optimizer steps per epoch."),
    click.option("--milestones", help="step: where lr is multiplied by --factor, such as 60,120,160."),
    click.option("--every", type=NUMBER, help="step: multiply lr by --factor every so often."),
    click.option("--factor", type=NUMBER, help="step: the factor (0.1); exponential: the factor per step or epoch."),
    click.option("--warmup", type=NUMBER, help="Linear warm-up from 0 over this long, before the rest."),
    click.option("--end-lr", type=NUMBER, help="linear, cosine, polynomial, wsd: the lr at the end (0 if not given)."),
    click.option("--cycles", type=WHOLE, help="cosine: number of warm restarts plus one."),
    click.option("--power", type=NUMBER, help="polynomial: the power (1 if not given)."),
    click.option("--decay", type=NUMBER, help="wsd: length of the final decay."),
    click.option("--lr-file", type=Path, help="file: one lr per step, as a JSON list or one per line."),
    click.option("--per-epoch", is_flag=True, help="Hold lr during an epoch, as one scheduler.step() per epoch does."),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A schedule and the length of the run."""

    schedule: Schedule
    steps: int
    steps_per_epoch: int | None


def build_run(options: dict[str, Any]) -> Run:
    """The schedule that the options describe, with all positions in optimizer steps."""
    kind = one_of("--schedule", options["schedule"].lower(), SCHEDULES)
    _refuse_strangers(kind, options)
    if kind == "file":
        options = _with_file(options)
    elif options["lr"] is None:
        raise EquilibriaError("--lr is missing; expected the learning rate, such as --lr 0.1")
    else:
        within("--lr", options["lr"], low=0)
    total, unit = _length(options["steps"], options["epochs"], options["steps_per_epoch"])
    warmup = 0 if options["warmup"] is None else _position("--warmup", options["warmup"], unit, total)
    schedule = _BUILDERS[kind](options, unit, total - warmup)
    if warmup:
        from equilibria.theory.schedules import Warmup

        schedule = Warmup(schedule, steps=warmup)
    if options["per_epoch"]:
        schedule = _hold_epochs(schedule, options["steps_per_epoch"])
    return Run(schedule, total, options["steps_per_epoch"])


# The options that a schedule reads, beyond the length of the run, --warmup and --per-epoch.
_READS = {
    "constant": (),
    "step": ("milestones", "every", "factor"),
    "linear": ("end_lr",),
    "cosine": ("end_lr", "cycles"),
    "polynomial": ("end_lr", "power"),
    "exponential": ("factor",),
    "wsd": ("end_lr", "decay"),
    "file": ("lr_file",),
}


def _refuse_strangers(kind: str, options: dict[str, Any]) -> None:
    """An option of another schedule would be ignored without a word."""
    for name in {name for names in _READS.values() for name in names} - set(_READS[kind]):
        if options[name] is not None:
            owners = ", ".join(owner for owner, names in _READS.items() if name in names)
            raise EquilibriaError(
                f"got --{name.replace('_', '-')} with --schedule {kind}; expected it only with --schedule: {owners}"
            )


def _with_file(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the learning rates of the file, which also fix the length of the run if it is not given."""
    values = _read_file(options["lr_file"])
    if options["steps"] is None and options["epochs"] is None:
        options = {**options, "steps": len(values)}
    total, _ = _length(options["steps"], options["epochs"], options["steps_per_epoch"])
    if total > len(values):
        raise EquilibriaError(f"got a run of {total:,} steps; expected at most {len(values):,}, one per lr in the file")
    return {**options, "lr_values": values}


def _length(steps: int | None, epochs: float | None, steps_per_epoch: int | None) -> tuple[int, int]:
    """Total steps, and the steps per unit in which positions are given."""
    if (steps is None) == (epochs is None):
        raise EquilibriaError(
            f"got --steps {steps}, --epochs {epochs}; expected exactly one of them (--epochs with --steps-per-epoch)"
        )
    if steps_per_epoch is not None:
        whole("--steps-per-epoch", steps_per_epoch, low=1)
    if steps is not None:
        return whole("--steps", steps, low=1), 1
    if steps_per_epoch is None:
        raise EquilibriaError(
            f"got --epochs {epochs:g} without --steps-per-epoch; expected both, such as 391 for CIFAR-10"
        )
    return max(1, round(positive("--epochs", epochs) * steps_per_epoch)), steps_per_epoch


def _position(option: str, value: float, unit: int, total: int) -> int:
    at = round(within(option, value, above=0) * unit)
    if at >= total:
        what = "steps" if unit == 1 else "epochs"
        raise EquilibriaError(
            f"got {option} {value:g}; expected it before the end of the run at {total / unit:g} {what}"
        )
    return at


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _constant(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Constant

    return Constant(options["lr"])


def _step(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import MultiStep, Step

    milestones, every = options["milestones"], options["every"]
    if (milestones is None) == (every is None):
        raise EquilibriaError("--schedule step needs exactly one of --milestones (such as 60,120,160) and --every")
    factor = 0.1 if options["factor"] is None else positive("--factor", options["factor"])
    if every is not None:
        return Step(options["lr"], every=max(1, round(positive("--every", every) * unit)), factor=factor)
    given = numbers("--milestones", milestones)
    if any(later <= earlier for earlier, later in pairwise(given)):
        raise EquilibriaError(f"got --milestones {milestones}; expected them in ascending order, each once")
    marks = [_position("--milestones", mark, unit, steps) for mark in given]
    return MultiStep(options["lr"], milestones=marks, factor=factor)


def _linear(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Linear

    return Linear(options["lr"], options["end_lr"] or 0.0, steps=steps)


def _cosine(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Cosine

    cycles = 1 if options["cycles"] is None else whole("--cycles", options["cycles"], low=1)
    if cycles > steps:
        raise EquilibriaError(f"got --cycles {cycles}; expected at most one per step, {steps}")
    return Cosine(options["lr"], steps=steps // cycles, end=options["end_lr"] or 0.0, cycles=cycles)


def _polynomial(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Polynomial

    return Polynomial(options["lr"], options["end_lr"] or 0.0, steps=steps, power=_or(options["power"], 1.0))


def _exponential(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Exponential

    if options["factor"] is None:
        raise EquilibriaError("--schedule exponential needs --factor, what lr is multiplied by per step or epoch")
    return Exponential(options["lr"], gamma=positive("--factor", options["factor"]) ** (1 / unit))


def _wsd(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import WarmupStableDecay

    if options["decay"] is None:
        raise EquilibriaError("--schedule wsd needs --decay, the length of the final decay (and --warmup if wanted)")
    falling = _position("--decay", options["decay"], unit, steps)
    return WarmupStableDecay(
        options["lr"], warmup=0, stable=steps - falling, decay=falling, end=options["end_lr"] or 0.0
    )


def _hold_epochs(schedule: Schedule, steps_per_epoch: int | None) -> Schedule:
    from equilibria.theory.schedules import FromCallable

    if steps_per_epoch is None:
        raise EquilibriaError("got --per-epoch without --steps-per-epoch; expected both")
    return FromCallable(lambda step: schedule(step - step % steps_per_epoch))


def _from_values(options: dict[str, Any], unit: int, steps: int) -> Schedule:
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
        values = [
            float(x) for x in (json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split())
        ]
    except (ValueError, TypeError) as error:
        raise EquilibriaError(f"got --lr-file {path}; expected a JSON list or one number per line: {error}") from None
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
