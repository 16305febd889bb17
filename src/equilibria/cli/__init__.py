"""The command line: one file per command.

Commands are imported when they are typed, and import the library inside their functions, so that ``equilibria plan``
starts fast and never imports torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from difflib import get_close_matches
from keyword import iskeyword
from typing import TextIO

import click

from equilibria._version import __version__
from equilibria.cli._options import FlagNames, example
from equilibria.cli._output import INTERRUPTED, OutputError, discard, guard_streams, print_error
from equilibria.errors import EquilibriaError

_COMMANDS = (
    *("bench", "demo", "doctor", "equilibrium", "plan", "fold", "translate"),
    *("explain", "forecast", "history", "import", "report", "reproduce", "serve", "verify"),
)

_WHOLE = 1000  # characters: longer than the first sentence of any command


class _Commands(FlagNames):
    """The commands by the names of their files."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import only the command that was typed."""
        if cmd_name not in _COMMANDS:
            return None
        module = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command: click.Command = importlib.import_module(f"equilibria.cli.{module}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands with their whole first sentences, which click would cut off at the width of the terminal."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(_WHOLE)) for name, command in commands if command])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was typed; the error for an unknown one suggests the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], _COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}; did you mean {near[0]!r}?", ctx) from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=example("plan --optimizer adamw --lr 3e-4 --wd 0.1 --steps 20000", "report runs/a --html report.html"),
)
@click.version_option(__version__, prog_name="equilibria")
def app() -> None:
    """Predict how fast every layer of a normalised network really turns."""


def main() -> None:
    """Entry point: one line on stderr and exit code 2 after bad input, 1 after failed work, 130 after Ctrl-C."""
    guard_streams()
    code = 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _run()
        sys.stdout.flush()
    except OutputError as error:
        discard(sys.stdout)
        if not error.reader_left:
            print_error(f"equilibria: standard output cannot be written: {error}")
            code = code or 1
    raise SystemExit(code)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning; without file and line if it points into click, which is no line of the user's."""
    if filename == click.core.__file__:
        print_error(f"equilibria: warning: {message}")
    else:
        print_error(warnings.formatwarning(message, category, filename, lineno, line).rstrip())


def _run() -> int:
    """Run the command that was typed and return its exit code."""
    try:
        return app.main(prog_name="equilibria", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        print_error(error.format_message())
        return 2
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "equilibria"
        print_error(f"equilibria: {error.format_message()} (see {where} --help)")
        return 2
    except EquilibriaError as error:
        print_error(f"equilibria: {error}")
        return 2
    except OSError as error:
        print_error(f"equilibria: {error}")
        return 1
    except click.Abort:  # Ctrl-C that the command did not handle
        print_error("equilibria: interrupted")
        return INTERRUPTED
