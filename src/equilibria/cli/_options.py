"""Options that several commands share, their types, the rule they describe, and errors that name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from equilibria.errors import EquilibriaError, number, one_of, whole

if TYPE_CHECKING:
    from equilibria.theory import Rule
    from equilibria.theory.settling import Timescale

OPTIMIZERS = ("sgd", "sgdw", "adamw", "adam", "lion", "muon")
_NEEDS = {
    "momentum": ("sgd", "sgdw", "muon"),
    "nesterov": ("sgd", "muon"),
    "dampening": ("sgd",),
    "betas": ("adamw", "adam", "lion"),
    "adjust_lr_fn": ("muon",),
}
Command = TypeVar("Command", bound=Callable[..., Any])


class Number(click.ParamType):  # type: ignore[type-arg]  # not subscriptable before click 8.4
    """A finite number; NaN, infinity and words raise an error that shows them."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the typed text."""
        try:
            return number("value", float(value))
        except ValueError:
            self.fail(f"got {value!r}; expected a finite number, such as 0.1, 5e-4 or 100000", param, ctx)


class Whole(click.ParamType):  # type: ignore[type-arg]
    """A whole number; 1e5 is one, 1.5 is not."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the typed text."""
        parsed = NUMBER.convert(value, param, ctx)
        if not parsed.is_integer():
            self.fail(f"got {value!r}; expected a whole number", param, ctx)
        return int(parsed)


NUMBER, WHOLE = Number(), Whole()
PATH = click.Path(path_type=Path)


def completes(words: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Shell completion of a value: the words that begin with the typed text."""
    return lambda _context, _parameter, typed: [word for word in words if word.startswith(typed.lower())]


def apply(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combine option decorators into one, in the order of the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def example(*lines: str) -> str:
    """The epilog of a command's help: lines to paste, which click must not wrap."""
    title = "Example" if len(lines) == 1 else "Examples"
    return "\b\n" + "\n".join([f"{title}:", *(f"  equilibria {line}" for line in lines)])


def _rule_options(*, required: bool) -> tuple[Callable[[Command], Command], Callable[[Command], Command]]:
    """The optimizer's option, and those of its settings."""
    optimizer = click.option(
        "--optimizer",
        required=required,
        shell_complete=completes(OPTIMIZERS),
        help=f"One of: {', '.join(OPTIMIZERS)} (adam: coupled L2).",
    )
    settings = apply(
        click.option("--lr", type=NUMBER, help="Learning rate."),
        click.option("--wd", "--weight-decay", type=NUMBER, required=required, help="Weight decay, as torch takes it."),
        click.option("--momentum", type=NUMBER, help="Momentum (sgd, sgdw: 0 if not given; muon: 0.95)."),
        click.option("--nesterov", is_flag=True, help="Nesterov momentum (sgd; muon has it on by itself)."),
        click.option("--dampening", type=NUMBER, help="Dampening (sgd)."),
        click.option("--betas", help="beta1,beta2 (adamw, adam: 0.9,0.999 if not given; lion: 0.9,0.99)."),
        click.option("--adjust-lr-fn", help="muon: original (if not given), match_rms_adamw, spectral_norm or none."),
    )
    return optimizer, settings


_optimizer_option, setting_options = _rule_options(required=True)
rule_options = apply(_optimizer_option, setting_options)
rule_or_run_options = apply(*_rule_options(required=False))
scale_options = apply(
    click.option("--unit-grad-sq", type=NUMBER, help="L = E||g||^2 ||w||^2 of a layer; fixes the norm of sgd, sgdw."),
    click.option("--dim", type=WHOLE, help="Number of entries of the weight; fixes the norm of adamw, lion."),
)
shape_option = click.option("--shape", help="muon: rows,columns of the matrix, such as 1024,4096; fixes its norm.")
data_options = apply(
    click.option("--batch-size", type=NUMBER, help="Examples or tokens per step; shows times in them too."),
    click.option("--data-size", type=NUMBER, help="Examples or tokens in the data; shows times in epochs too."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")


def numbers(option: str, text: str, *, example: str) -> list[float]:
    """Parse comma-separated numbers; ``example`` is the suggestion in the error."""
    try:
        return [number(option, float(part)) for part in text.split(",")]
    except ValueError:
        raise EquilibriaError(
            f"got {option} {text!r}; expected numbers separated by commas, such as {example}", argument=option
        ) from None


def optimizer_of(options: dict[str, Any]) -> str:
    """The optimizer in lower case: SGD is sgd."""
    optimizer: str = options["optimizer"]
    return one_of("--optimizer", optimizer.lower(), OPTIMIZERS)


def shape_of(options: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the matrix; None without --shape."""
    return None if options["shape"] is None else parsed_shape(options["shape"])


def parsed_shape(text: str) -> tuple[int, int]:
    """Rows and columns from the text of --shape; they are printed as 1024x4096."""
    sides = numbers("--shape", text.replace("x", ","), example="1024,4096")
    if len(sides) != 2:
        raise EquilibriaError(f"got --shape {text}; expected two numbers, rows,columns, such as 1024,4096")
    return whole("--shape", sides[0], low=1), whole("--shape", sides[1], low=1)


def timescale_of(rule: Rule, options: dict[str, Any]) -> Timescale | None:
    """How long the weights remember, in steps and data; None without --batch-size."""
    from equilibria.theory.settling import decay_timescale

    if options["batch_size"] is None:
        if options["data_size"] is not None:
            raise EquilibriaError("got --data-size without --batch-size; expected both", argument="--batch-size")
        return None
    given = {name: options[name] for name in ("batch_size", "data_size", "unit_grad_sq", "dim")}
    return decay_timescale(rule, **given)


def in_data(steps: float, options: dict[str, Any]) -> str:
    """Steps as text, with the examples or tokens and the epochs that they see where those are known."""
    parts = [f"{steps:,.1f} steps".replace(".0 ", " ")]
    if options["batch_size"] is not None:
        seen = steps * options["batch_size"]
        parts.append(f"{seen:,.4g} examples or tokens")
        if options["data_size"] is not None:
            parts.append(f"{seen / options['data_size']:.3g} epochs")
    return " = ".join(parts)


def build_rule(options: dict[str, Any]) -> Rule:
    """The rule that the options describe; raises for an option that the optimizer does not have."""
    from equilibria.theory import RULES

    optimizer = optimizer_of(options)
    for name, meaning in (("lr", "the learning rate, such as --lr 0.1"), ("wd", "the weight decay, such as --wd 5e-4")):
        if options[name] is None:
            raise EquilibriaError(f"--{name} is missing; expected {meaning}")
    settings = {name: options[name] for name in _NEEDS if options[name] not in (None, False)}
    for name in settings:
        if optimizer not in _NEEDS[name]:
            raise EquilibriaError(
                f"got {flag(name)} with --optimizer {optimizer}; expected it only with: {', '.join(_NEEDS[name])}"
            )
    if "betas" in settings:
        settings["betas"] = tuple(numbers("--betas", settings["betas"], example="0.9,0.999"))
    return RULES[optimizer](options["lr"], options["wd"], **settings)


_SCALES = {
    "unit_grad_sq": ("sgd", "sgdw", "adam"),
    "dim": ("adamw", "adam", "lion"),
    "shape": ("muon",),
}


def refuse_unused_scale(options: dict[str, Any]) -> None:
    """Raise for a scale that the optimizer's norm does not depend on: it would be ignored silently."""
    optimizer = optimizer_of(options)
    for name, optimizers in _SCALES.items():
        if options[name] is not None and optimizer not in optimizers:
            instead = " or ".join(flag(scale) for scale, users in _SCALES.items() if optimizer in users)
            raise EquilibriaError(
                f"got {flag(name)} with --optimizer {optimizer}; expected it only with: {', '.join(optimizers)} "
                f"({optimizer} takes {instead})"
            )


# ---- errors in the words of the command line: the library names its arguments, users type flags


_NEVER_PROSE = ("dim", "shape")  # names without an underscore that messages use for the argument only


def flag(name: str) -> str:
    """The flag of an option: to_momentum -> --to-momentum."""
    return f"--{name.replace('_', '-')}"


def in_flags(message: str, flags: Mapping[str, str], *, argument: str | None = None) -> str:
    """Replace arguments in a message by their flags, and ``=None`` by words.

    The argument that the error is about is replaced wherever it stands. Of the others, a name that is also an English
    word is replaced only inside a formula.

    Example:
        >>> flags = {"init_norm": "--init-norm", "weight_decay": "--wd", "steps": "--steps"}
        >>> in_flags("got steps=0, init_norm=None; expected weight_decay > 0 for some steps", flags)
        'got --steps=0, no --init-norm; expected --wd > 0 for some steps'
        >>> in_flags("got steps without an end", flags, argument="steps")
        'got --steps without an end'
    """
    for name, typed in flags.items():
        is_word = "_" not in name and name not in _NEVER_PROSE and name != argument
        in_formula = rf"(?= ?[=*<>])|(?<=[<>=] ){name}\b|(?<=\*){name}\b" if is_word else ""
        message = re.sub(rf"(?<![\w'-])(?:rule\.)?{name}\b{in_formula}", typed, message)
    message = message.replace("--shape=(rows, columns)", "--shape rows,columns")
    message = re.sub(r"columns=\{'(\w+)': '([^']*)'\}", r"--column \1=\2", message)
    return re.sub(r"(--[\w-]+)=None", r"no \1", message)


def error_in_flags(error: EquilibriaError, flags: Mapping[str, str]) -> EquilibriaError:
    """The same error about flags: its message, and the argument it is about."""
    argument = error.argument
    message = in_flags(str(error), flags, argument=argument)
    return EquilibriaError(message, argument=None if argument is None else flags.get(argument, argument))


@contextmanager
def named(flags: Mapping[str, str]) -> Iterator[None]:
    """Translate errors where a command calls the library with other names than those of its flags."""
    try:
        yield
    except EquilibriaError as error:
        raise error_in_flags(error, flags) from error


class FlagNames(click.Group):
    """Commands whose errors name the flags of the command that was typed."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except EquilibriaError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            raise error_in_flags(error, _flags_of(command)) from error


def _flags_of(command: click.Command | None) -> dict[str, str]:
    """Flags by the argument they stand for: weight_decay and wd are both --wd."""
    options = [option for option in (command.params if command else []) if isinstance(option, click.Option)]
    return {name[2:].replace("-", "_"): option.opts[0] for option in options for name in option.opts}
