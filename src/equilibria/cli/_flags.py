"""Errors in the words of the command line: the library names its arguments, users type flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from equilibria.errors import EquilibriaError

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
        message = re.sub(rf"(?<![\w-])(?:rule\.)?{name}\b{in_formula}", typed, message)
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
