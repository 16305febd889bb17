"""The command line: one file per command.

Commands import the library inside their functions, so that ``equilibria plan`` starts fast and never loads torch.
"""

from __future__ import annotations

import os
import sys

import click

from equilibria._version import __version__
from equilibria.cli import equilibrium, fold, plan, translate
from equilibria.errors import EquilibriaError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="equilibria")
def app() -> None:
    """Predict how fast every layer of a normalised network really turns."""


for command in (equilibrium.command, plan.command, fold.command, translate.command):
    app.add_command(command)


def main() -> None:
    """Entry point: bad input ends in one line on stderr and exit code 2, never in a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a console that cannot show █ shows ? instead of failing
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        raise SystemExit(app.main(prog_name="equilibria", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        raise SystemExit(2) from None
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "equilibria"
        print(f"equilibria: {error.format_message()} (see {where} --help)", file=sys.stderr)
        raise SystemExit(2) from None
    except click.Abort:
        raise SystemExit(1) from None
    except EquilibriaError as error:
        print(f"equilibria: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
