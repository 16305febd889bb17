"""`equilibria serve`: live pages of runs, plans and forecasts in a browser."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import WHOLE, example, json_option
from equilibria.cli._output import print_json
from equilibria.errors import EquilibriaError, one_of, within

if TYPE_CHECKING:
    from equilibria.forecasting._layers import RecordedLayers
    from equilibria.serve.app import App
    from equilibria.serve.queries import ForecastQuery, PlanQuery

_ANYWHERE = ("0.0.0.0", "::")
_NOT_ALLOWED = ("as_json", "html", "lr_file", "help")  # a server reads and writes no file that a request names
_ALTERNATIVES: dict[str, dict[str, Any]] = {
    "rescaled": {"rescale": True},
    "wd x2": {"wd": "x2"},
    "wd x0.5": {"wd": "x0.5"},
}
_BASE = "as planned"
_MOST_STEPS = 1_000_000  # of a plan: some seconds with alternatives, and other viewers wait meanwhile


@click.command("serve", epilog=example("serve runs --open"))
@click.argument("runs", nargs=-1, required=True, type=Path)
@click.option("--port", type=WHOLE, default=8000, show_default=True, help="Port; 0 for any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of this machine; 0.0.0.0 for all.")
@click.option(
    "--results", type=Path, default=Path("results"), show_default=True, help="Results folder of `equilibria reproduce`."
)
@click.option("--open/--no-browser", "browser", default=False, help="Open a browser, or not (the default).")
@json_option
def command(*, runs: tuple[Path, ...], port: int, host: str, results: Path, browser: bool, as_json: bool) -> None:
    """Show RUNS in a browser, live while they train: run folders, or folders of runs.

    The server is read-only, answers only this machine unless --host says otherwise, and needs no network. With --json
    it prints its address as soon as it answers, for scripts that use --port 0.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise EquilibriaError(f'equilibria serve needs {" and ".join(missing)}: pip install "equilibria[serve]"')
    from equilibria.serve.server import bind, run

    within("--port", port, low=0, high=65535)
    app = build_app(runs, host=host, results=results)
    listening = bind(host, port)
    missing_runs = missing_folders(runs)
    for folder in missing_runs:
        click.echo(f"There is no folder {folder} (misspelt?); runs that begin there later are shown.", err=True)
    if host in _ANYWHERE:
        click.echo("Anyone who can reach this machine can see these runs: there is no password.", err=as_json)

    def announce(address: str) -> None:
        if as_json:
            print_json({"address": address, "runs": list(map(str, runs)), "missing": list(map(str, missing_runs))})
            sys.stdout.flush()
        else:
            click.echo(f"Serving {address} (Ctrl-C stops it)")

    run(app, listening, on_start=announce, browser=browser)


def missing_folders(runs: tuple[Path, ...]) -> list[Path]:
    """Folders that do not exist: misspelt, or yet to be made by a training run."""
    return [folder for folder in runs if not folder.exists()]


def build_app(runs: tuple[Path, ...], *, host: str = "127.0.0.1", results: Path = Path("results")) -> App:
    """The application that answers requests."""
    from equilibria.serve.app import App
    from equilibria.serve.catalogue import Catalogue
    from equilibria.serve.guard import LOOPBACK
    from equilibria.serve.queries import QueryReaders

    hosts = {*LOOPBACK, host, *((socket.gethostname(),) if host in _ANYWHERE else ())}
    readers = QueryReaders(plan=read_plan, forecast=read_forecast)
    return App(Catalogue(runs), readers=readers, results=results, hosts=hosts, any_address=host in _ANYWHERE)


def read_plan(query: Mapping[str, str]) -> PlanQuery:
    """Parse and check the options of `equilibria plan` in a query."""
    from equilibria.cli._options import build_rule, refuse_unused_scale
    from equilibria.cli._schedule import build_run
    from equilibria.cli.plan import command as plan
    from equilibria.cli.plan import plan_settings
    from equilibria.serve.queries import PlanQuery

    words = _flags(plan, query)
    options = _parsed(plan, words)
    refuse_unused_scale(options)
    _refuse_what_a_page_cannot(options, command="equilibria plan")
    run = build_run(options)
    rule = build_rule({**options, "lr": run.lr})
    return PlanQuery(rule, run.schedule, plan_settings(options, run), f"equilibria plan {shlex.join(words)}")


def read_forecast(query: Mapping[str, str], observed: RecordedLayers) -> ForecastQuery:
    """Parse the options of `equilibria forecast` in a query, and add some alternatives."""
    from equilibria.cli._scenarios import scenario_options, scenarios
    from equilibria.cli._schedule import build_run
    from equilibria.serve.queries import ForecastQuery

    parser = click.command("forecast")(scenario_options(lambda **_: None))
    options = _parsed(parser, _flags(parser, query))
    if options["steps_per_epoch"] is None:
        options["steps_per_epoch"] = observed.steps_per_epoch
    _refuse_what_a_page_cannot(options, command="equilibria forecast")
    main = observed.cohorts[0]
    steps = build_run({**options, "lr": float(main.lr.max()) if options["lr"] is None else options["lr"]}).steps
    if steps <= observed.last_step + 1:
        raise EquilibriaError(
            f"got a run of {steps:,} steps, of which {observed.last_step + 1:,} are recorded; expected the length of "
            "the whole run, with steps left to forecast"
        )
    others = [f"{name}={_typed(changes)}" for name, changes in _ALTERNATIVES.items() if not _same(options, changes)]
    return ForecastQuery(scenarios(options, others, observed, base=_BASE), steps)


def _refuse_what_a_page_cannot(options: Mapping[str, Any], *, command: str) -> None:
    """Raise for files, and for plans that take long: all viewers share one server."""
    from equilibria.cli._schedule import SCHEDULES, run_steps

    one_of("--schedule", options["schedule"].lower(), [name for name in SCHEDULES if name != "file"])
    steps, _ = run_steps(options["steps"], options["epochs"], options["steps_per_epoch"])
    if steps > _MOST_STEPS:
        raise EquilibriaError(
            f"got a run of {steps:,} steps; expected at most {_MOST_STEPS:,} on this page ({command} in a terminal "
            "takes longer runs)"
        )


def _typed(changes: Mapping[str, Any]) -> str:
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items())


def _same(options: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether the plan already sets an option that an alternative would change."""
    return any(options[name] not in (None, False) for name in changes)


def _flags(command: click.Command, query: Mapping[str, str]) -> list[str]:
    """A query as it would be typed; switches are on if they are 1."""
    known = {option.name: option for option in command.params if isinstance(option, click.Option)}
    allowed = [name for name in known if name and name not in _NOT_ALLOWED]
    unknown = sorted(set(query) - set(allowed))
    if unknown:
        raise EquilibriaError(f"got {unknown[0]}; expected only: {', '.join(sorted(allowed))}")
    words = []
    for name in allowed:
        if name in query and known[name].is_flag:
            words += known[name].opts[:1] if query[name] == "1" else []
        elif name in query:
            words += [known[name].opts[0], query[name]]
    return words


def _parsed(command: click.Command, words: list[str]) -> dict[str, Any]:
    try:
        return dict(command.make_context(command.name, list(words)).params)
    except click.UsageError as error:
        raise EquilibriaError(error.format_message()) from None
