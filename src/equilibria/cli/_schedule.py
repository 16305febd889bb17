"""The schedule options, and the schedule they describe."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    click.option("--end-lr", type=NUMBER, default=0.0, help="linear, cosine, polynomial, wsd: the lr at the end."),
    click.option("--cycles", type=WHOLE, default=1, help="cosine: number of warm restarts plus one."),
    click.option("--power", type=NUMBER, default=1.0, help="polynomial: the power."),
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
    kind = one_of("--schedule", options["schedule"], SCHEDULES)
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
    marks = [_position("--milestones", mark, unit, steps) for mark in numbers("--milestones", milestones)]
    return MultiStep(options["lr"], milestones=marks, factor=factor)


def _linear(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Linear

    return Linear(options["lr"], options["end_lr"], steps=steps)


def _cosine(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Cosine

    cycles = whole("--cycles", options["cycles"], low=1)
    return Cosine(options["lr"], steps=max(1, steps // cycles), end=options["end_lr"], cycles=cycles)


def _polynomial(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import Polynomial

    return Polynomial(options["lr"], options["end_lr"], steps=steps, power=options["power"])


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
    return WarmupStableDecay(options["lr"], warmup=0, stable=steps - falling, decay=falling, end=options["end_lr"])


def _hold_epochs(schedule: Schedule, steps_per_epoch: int | None) -> Schedule:
    from equilibria.theory.schedules import FromCallable

    if steps_per_epoch is None:
        raise EquilibriaError("got --per-epoch without --steps-per-epoch; expected both")
    return FromCallable(lambda step: schedule(step - step % steps_per_epoch))


def _from_file(options: dict[str, Any], unit: int, steps: int) -> Schedule:
    from equilibria.theory.schedules import FromValues

    path: Path | None = options["lr_file"]
    if path is None:
        raise EquilibriaError("--schedule file needs --lr-file PATH, with one lr per step")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise EquilibriaError(f"got --lr-file {path}; expected a readable text file: {reason}") from None
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        return FromValues([float(value) for value in values])
    except (ValueError, TypeError) as error:
        if isinstance(error, EquilibriaError):
            raise
        raise EquilibriaError(f"got --lr-file {path}; expected a JSON list or one number per line: {error}") from None


_BUILDERS = {
    "constant": _constant,
    "step": _step,
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "exponential": _exponential,
    "wsd": _wsd,
    "file": _from_file,
}
