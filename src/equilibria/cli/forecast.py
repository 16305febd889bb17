"""`equilibria forecast`: the rest of a recorded run, alternatives to its schedule, and back-tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import PATH, WHOLE, example, flag, json_option, named
from equilibria.cli._output import jsonable, print_json
from equilibria.cli._scenarios import EXAMPLES, scenario_options, scenarios
from equilibria.cli._schedule import build_run
from equilibria.errors import EquilibriaError, number
from equilibria.views.terminal import chart, width

if TYPE_CHECKING:
    from equilibria.forecasting import BackTest, Forecast, Suggestion, WhatIf
    from equilibria.forecasting._suggest import AngleTarget

_BASE, _SUGGESTED = "as planned", "suggested"
_FLAGS = {"start": "--from", "schedule": "--schedule", "path": "--html", "target": "--suggest"}


@click.command(
    "forecast",
    epilog=example(
        "forecast runs/a --schedule cosine --steps 20000 --what-if 'rescaled=--rescale' --html forecast.html"
    ),
)
@click.argument("run", type=PATH)
@scenario_options
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    help=f"NAME=FLAGS: another scenario, with the flags that differ: {EXAMPLES}.",
)
@click.option(
    "--suggest",
    help="Search for the plan that keeps every layer's angle closest to: now, equilibrium, radians per step, or "
    "POSITION:RADIANS,... such as 0:0.03,1500:0.01.",
)
@click.option("--from", "start", type=WHOLE, help="Back-test: forecast a finished run from this step, and compare.")
@click.option(
    "--start",
    "begin",
    type=WHOLE,
    help="Forecast from this step, ignoring later records.",
)
@click.option("--html", type=PATH, help="Also write one offline page to this file.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, *, run: Path, start: int | None, html: Path | None, as_json: bool, **options: Any
) -> None:
    """Forecast every layer of the run recorded in RUN over the rest of a schedule, with 90 % bands.

    The schedule is that of the whole run, from its step 0. --what-if compares several scenarios, --suggest searches
    for a plan closer to a target, and --from checks a forecast against a finished run.
    """
    with named(_FLAGS):
        if start is not None:
            _require_alone(ctx)
            _backtest(run, start, rescale=options["rescale"] or None, html=html, as_json=as_json)
        else:
            _forecast(run, options, html=html, as_json=as_json)


def _require_alone(ctx: click.Context) -> None:
    """Raise for options besides --from: a back-test uses the recorded settings and would ignore them silently."""
    source = click.core.ParameterSource.COMMANDLINE
    typed_names = [name for name in ctx.params if ctx.get_parameter_source(name) is source]
    unused = [name for name in typed_names if name not in ("run", "start", "rescale", "html", "as_json")]
    if unused:
        typed = flag({"what_ifs": "what_if", "begin": "start"}.get(unused[0], unused[0]))
        raise EquilibriaError(
            f"got {typed} with --from; expected --from alone or with --rescale: a back-test uses the recorded lr and "
            "wd (--start N forecasts from an earlier step under another schedule)"
        )


def _backtest(run: Path, start: int, *, rescale: bool | None, html: Path | None, as_json: bool) -> None:
    from equilibria.forecasting import backtest

    with _busy("forecasting the past"):
        test = backtest(run, start=start, rescale=rescale)
    if html is not None:
        test.report(html, title=f"Back-test: {run.resolve().name}")
    if as_json:
        print_json(_backtest_contract(test))
        return
    print(test.table())
    _page(html)


def _forecast(run: Path, options: dict[str, Any], *, html: Path | None, as_json: bool) -> None:
    from equilibria.forecasting import suggest, what_if
    from equilibria.forecasting._layers import read_layers
    from equilibria.views.document import MOST_CHOICES
    from equilibria.views.forecast.page import forecast_page
    from equilibria.watching import read_run

    what_ifs, wanted, begin = options.pop("what_ifs"), options.pop("suggest"), options.pop("begin")
    with _busy("reading the record"):
        recorded = read_run(run)
        observed = read_layers(recorded, before=begin)
    if options["steps_per_epoch"] is None:
        options["steps_per_epoch"] = observed.steps_per_epoch
    by_name = scenarios(options, what_ifs, observed, base=_BASE)
    planned = build_run(
        {**options, "lr": float(observed.cohorts[0].lr.max()) if options["lr"] is None else options["lr"]}
    )
    if planned.steps <= observed.last_step + 1:
        raise EquilibriaError(
            f"got a run of {planned.steps:,} steps, of which {observed.last_step + 1:,} are recorded; expected the "
            "length of the whole run, with steps left to forecast (--start forecasts from an earlier step, --from also "
            "compares with the record)"
        )
    target = None if wanted is None else _target(wanted, planned.steps_per_epoch if options["epochs"] else None)
    with _busy(f"forecasting {planned.steps - observed.last_step - 1:,} steps"):
        comparison = what_if(recorded, by_name, steps=planned.steps, start=begin)
    suggestion = None
    if target is not None:
        with _busy("searching"):
            suggestion = suggest(recorded, schedule=by_name[_BASE], steps=planned.steps, target=target, start=begin)
    if html is not None:
        on_page = comparison
        if suggestion is not None and suggestion.best.changes and len(by_name) < MOST_CHOICES:
            with_suggestion = {**by_name, _SUGGESTED: suggestion.best.scenario}
            on_page = what_if(recorded, with_suggestion, steps=planned.steps, start=begin)
        forecast_page(on_page, title=f"Forecast: {run.resolve().name}", suggestion=suggestion).write(html)
    if as_json:
        print_json(_contract(comparison, suggestion))
        return
    _show(comparison)
    if suggestion is not None:
        print()
        print(suggestion.table(unit=1 if options["steps"] is not None else planned.steps_per_epoch or 1))
    _page(html)


def _show(comparison: WhatIf) -> None:
    first = comparison.forecasts[_BASE]
    print()
    for line in _curve(first, comparison.worst(_BASE).layer):
        print(line.rstrip())
    print()
    if len(comparison.forecasts) == 1:
        print(first.table())
    else:
        print(comparison.table())


def _curve(forecast: Forecast, name: str) -> list[str]:
    """One layer, measured and forecast."""
    per = forecast.steps_per_epoch or 1
    layer, samples, gap = forecast[name], forecast.measured(name), [float("nan")]
    x = [*(samples.step / per).tolist(), *(layer.step / per).tolist()]
    before, after = gap * len(samples.step), gap * len(layer.step)
    series = [
        ("·", [*samples.angle.tolist(), *after]),
        ("-", [*before, *layer.angle_equilibrium.tolist()]),
        ("█", [*before, *layer.angle.value.tolist()]),
    ]
    unit = "epochs" if per > 1 else "steps"
    legend = f"  {name}, angle per step (rad):  · measured   █ forecast   - equilibrium"
    return [legend, *chart(x, series, columns=width() - 26, unit=unit, end=forecast.steps / per)]


def _page(html: Path | None) -> None:
    if html is not None:
        print(f"\nPage: {html}")


def _target(text: str, per: int | None) -> AngleTarget:
    """Parse the value of --suggest; positions become steps."""
    from equilibria.theory.schedules import Piecewise

    if text.lower() in ("now", "as now"):
        return "as now"
    if text.lower() == "equilibrium":
        return "equilibrium"
    try:
        if ":" not in text:
            return number("--suggest", float(text))
        pairs = [part.split(":") for part in text.split(",")]
        unit = per or 1
        return Piecewise([(round(float(at) * unit), number("--suggest", float(angle))) for at, angle in pairs])
    except ValueError as error:
        reason = f" ({error})" if isinstance(error, EquilibriaError) and ":" in text else ""
        raise EquilibriaError(
            f"got --suggest {text}; expected now, equilibrium, radians per step such as 0.01, or POSITION:RADIANS,... "
            f"from 0 on, such as 0:0.03,1500:0.01{reason}"
        ) from None


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """Show on stderr what is being computed, if stderr is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


# ---- JSON


def _contract(comparison: WhatIf, suggestion: Suggestion | None) -> dict[str, Any]:
    first = comparison.forecasts[_BASE]
    return {
        "first": first.first,
        "steps": first.steps,
        "steps_per_epoch": first.steps_per_epoch,
        "scenarios": {name: _scenario_contract(comparison, name) for name in comparison.forecasts},
        "refused": first.refused,
        "suggestion": None if suggestion is None else _suggestion_contract(suggestion),
    }


def _scenario_contract(comparison: WhatIf, name: str) -> dict[str, Any]:
    forecast = comparison.forecasts[name]
    layers = []
    for layer, outcome in zip(forecast.layers, comparison.outcomes(name), strict=True):
        layers.append({**jsonable(layer), "optimizer": type(layer.rule).__name__, "outcome": jsonable(outcome)})
    return {
        "worst": jsonable(comparison.worst(name)),
        "layers": layers,
        "findings": jsonable(forecast.findings),
        "assumptions": forecast.assumptions,
    }


def _suggestion_contract(suggestion: Suggestion) -> dict[str, Any]:
    proposals = [
        {
            "changes": proposal.changes,
            "flags": proposal.flags(),
            "rescale": proposal.scenario.rescale,
            **{
                name: getattr(proposal, name)
                for name in ("off", "worst_layer", "median_off", "integrated_angle", "steps_out")
            },
        }
        for proposal in suggestion.proposals
    ]
    return {
        "target": suggestion.target,
        "proposals": proposals,
        "searched": suggestion.searched,
        "assumptions": suggestion.assumptions,
    }


def _backtest_contract(test: BackTest) -> dict[str, Any]:
    layers = [
        {
            "layer": layer.forecast.name,
            "step": layer.forecast.step,
            "angle_error": layer.angle_error,
            "norm_error": layer.norm_error,
            "angle_coverage": layer.angle_coverage,
            "norm_coverage": layer.norm_coverage,
        }
        for layer in test.layers
    ]
    return {
        "start": test.start,
        "steps": test.steps,
        "scores": jsonable(dict(test.scores)),
        "horizons": [{"first": first, **jsonable(score)} for first, score in test.horizons],
        "angle_coverage": test.angle_coverage,
        "norm_coverage": test.norm_coverage,
        "findings": jsonable(test.findings),
        "layers": layers,
        "refused": test.refused,
    }
