"""The options of a forecast scenario, and `--what-if`, which takes the options that differ."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import NUMBER, apply
from equilibria.cli._schedule import USED_BY, build_run, schedule_options
from equilibria.errors import EquilibriaError, number, positive

if TYPE_CHECKING:
    from equilibria.forecasting import Scenario
    from equilibria.forecasting._layers import RecordedLayers
    from equilibria.theory.schedules import ScheduleLike

EXAMPLES = "'rescaled=--rescale' or 'late=--milestones 2000 --wd x2'"
_LENGTH = ("steps", "epochs", "steps_per_epoch")


@dataclass(frozen=True, slots=True)
class DecayPart:
    """A weight decay, or a factor of the recorded one, from a position of the run on; without position from now on."""

    position: float | None
    is_factor: bool
    value: float


class Decay(click.ParamType):  # type: ignore[type-arg]  # not subscriptable before click 8.4
    """A weight decay, a factor of the recorded one, or several of them, each with its position."""

    name = "number or xN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[DecayPart, ...]:
        """Parse the parts."""
        try:
            return tuple(_decay_part(part, alone="," not in value) for part in value.split(","))
        except ValueError:
            self.fail(
                f"got {value!r}; expected a weight decay such as 5e-4, a factor such as x2, or POSITION:VALUE,... "
                "such as 800:x10",
                param,
                ctx,
            )


def _decay_part(text: str, *, alone: bool) -> DecayPart:
    position, colon, decay = text.strip().rpartition(":")
    if not (colon or alone):
        raise ValueError(text)
    is_factor = decay[:1] in ("x", "×")
    return DecayPart(
        number("position", float(position)) if colon else None, is_factor, number("value", float(decay[is_factor:]))
    )


scenario_options = apply(
    click.option(
        "--lr",
        type=NUMBER,
        help="Learning rate of the first layer's group: the peak, or the one of a constant "
        "schedule; the largest recorded if not given, the last one with a constant schedule.",
    ),
    schedule_options,
    click.option(
        "--wd",
        "--weight-decay",
        type=Decay(),
        help="Weight decay from now on, or xN for N times the recorded one; POSITION:VALUE,... from positions on, such "
        "as 800:x10.",
    ),
    click.option("--batch-factor", type=NUMBER, default=1.0, help="Batch size from now on over that of the record."),
    click.option(
        "--rescale",
        is_flag=True,
        help="Rescale weights and optimizer state at every change of lr or wd, however small, as RescaleOnDecay does.",
    ),
)


@click.command("--what-if", add_help_option=False)
@scenario_options
def _parser(**options: Any) -> None:
    """A command whose parser alone is used."""


def scenarios(
    options: dict[str, Any], what_ifs: Sequence[str], observed: RecordedLayers, *, base: str
) -> dict[str, Scenario]:
    """The scenario of the options, named ``base``, and one for every --what-if, by name."""
    by_name = {base: _scenario(options, observed, base)}
    for text in what_ifs:
        name, changes = parse_what_if(text)
        if name in by_name:
            raise EquilibriaError(f"got two scenarios named {name!r}; expected a different name for each --what-if")
        try:
            by_name[name] = _scenario(_changed(options, changes), observed, name)
        except EquilibriaError as error:
            raise EquilibriaError(f"--what-if {name}: {error}", argument=error.argument) from error
    return by_name


def parse_what_if(text: str) -> tuple[str, dict[str, Any]]:
    """Parse NAME=FLAGS into the name and the typed options.

    Example:
        >>> parse_what_if("late=milestones 200 --rescale")
        ('late', {'milestones': '200', 'rescale': True})
    """
    name, equals, typed = (part.strip() for part in text.partition("="))
    if not (name and equals and typed):
        raise EquilibriaError(f"got --what-if {text!r}; expected NAME=FLAGS, such as {EXAMPLES}")
    known = {opt[2:] for option in _parser.params for opt in option.opts}
    try:
        words = [f"--{word}" if word in known else word for word in shlex.split(typed)]
        context = _parser.make_context("--what-if", words)
    except (click.UsageError, ValueError) as error:
        reason = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise EquilibriaError(f"got --what-if {text!r}: {reason} Expected NAME=FLAGS, such as {EXAMPLES}") from None
    source = click.core.ParameterSource.COMMANDLINE
    changes = {key: value for key, value in context.params.items() if context.get_parameter_source(key) is source}
    if any(key in changes for key in _LENGTH):
        raise EquilibriaError(f"got --what-if {text!r}; expected the length of the run outside, the same for all")
    return name, changes


def _changed(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The options with their changes; a changed schedule drops the options that it does not use."""
    merged = {**options, **changes}
    kind = merged["schedule"].lower()
    unused = {key for keys in USED_BY.values() for key in keys} - set(USED_BY.get(kind, ()))
    merged |= {key: None for key in unused if key not in changes and "schedule" in changes}
    for one, other in (("milestones", "every"), ("every", "milestones")):
        if one in changes and other not in changes:
            merged[other] = None
    return merged


def _scenario(options: dict[str, Any], observed: RecordedLayers, name: str) -> Scenario:
    from equilibria.forecasting import Scenario

    main = observed.cohorts[0]
    if options["lr"] is None and options["schedule"].lower() != "file":
        constant = options["schedule"].lower() == "constant"
        options = {**options, "lr": float(main.lr[-1] if constant else main.lr.max())}
    run = build_run(options)
    unit = 1 if options["steps"] is not None else run.steps_per_epoch or 1
    return Scenario(
        run.schedule,
        weight_decay=_decay(options["wd"], float(main.weight_decay[-1]), steps=run.steps, unit=unit),
        batch_factor=positive("--batch-factor", options["batch_factor"]),
        rescale=options["rescale"],
        name=name,
    )


def _decay(parts: Sequence[DecayPart] | None, recorded: float, *, steps: int, unit: int) -> ScheduleLike | None:
    """The weight decay of every step; None to keep the recorded one."""
    import numpy as np

    from equilibria.theory.schedules import FromValues

    if parts is None:
        return None
    values = [positive("--wd", part.value) * recorded if part.is_factor else part.value for part in parts]
    if parts[0].position is None:
        return values[0]
    decays = np.full(steps, recorded)
    for part, value in sorted(zip(parts, values, strict=True), key=lambda pair: pair[0].position or 0.0):
        position = part.position or 0.0
        first = round(position * unit)
        if not 0 <= first < steps:
            raise EquilibriaError(f"got --wd {position:g}:...; expected a position within the run of {steps:,} steps")
        decays[first:] = value
    return FromValues(decays)
