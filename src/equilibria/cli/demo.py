"""`equilibria demo`: a minute of real training, measured and predicted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from equilibria.cli._options import WHOLE, example, json_option
from equilibria.cli._output import print_json
from equilibria.views.terminal import paint, table, wrap

if TYPE_CHECKING:
    from equilibria.lab.demo import DemoResult, Recipe, Turn


@click.command("demo", epilog=example("demo --out equilibria-demo"))
@click.option("--out", default="equilibria-demo", show_default=True, help="Folder for the runs and the reports.")
@click.option(
    "--seed", type=WHOLE, default=0, show_default=True, help="Random seed of initial weights, images and noise."
)
@json_option
def command(*, out: str, seed: int, as_json: bool) -> None:
    """Train a small network on real digits, watch it, and compare every layer with the theory (about a minute)."""
    from equilibria.lab.demo import DemoError, Recipe, run_demo

    recipe = Recipe(seed=seed)
    try:
        with _bars(recipe) as progress:
            result = run_demo(out, recipe=recipe, progress=progress)
    except DemoError as error:
        print(f"equilibria: {error}", file=sys.stderr)
        raise click.exceptions.Exit(1) from None
    if as_json:
        print_json(result.as_dict())
    else:
        _show(result)


@contextmanager
def _bars(recipe: Recipe) -> Iterator[Callable[[str, int], None]]:
    """A progress bar per training run on stderr, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from equilibria.lab.demo.runner import BRANCHES

    console = Console(stderr=True)
    columns = (TextColumn("  {task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks = {branch: bars.add_task(branch, total=recipe.steps) for branch in BRANCHES}
        yield lambda branch, steps: bars.update(tasks[branch], completed=steps)


def _show(result: DemoResult) -> None:
    recipe = result.recipe
    print(
        f"\n  A small BatchNorm ResNet on handwritten digits, {recipe.label_noise:.0%} of the labels random.\n"
        f"  SGD, lr {recipe.lr:g}, weight decay {recipe.weight_decay:g}, momentum {recipe.momentum:g}; "
        f"lr / {recipe.drop:g} at step {recipe.steps_before:,} of {recipe.steps:,}\n"
    )
    print(_table(result))
    print()
    for good, sentence in _sentences(result):
        mark = paint("✓", "32;1") if good else paint("!", "33;1")
        print(wrap(sentence, indent=f"  {mark} ", hang="    "))
    print(f"\n  {result.plain.report}\n  {result.rescaled.report}\n  {result.out / 'demo.json'}\n")


def _table(result: DemoResult) -> str:
    head = ["layer", "angle*", "before", "plain: after", "end", "rescaled: after", "end"]
    rows = [head]
    for plain, rescaled in zip(result.plain.layers, result.rescaled.layers, strict=True):
        turns = (plain.before, plain.after, plain.end, rescaled.after, rescaled.end)
        rows.append([_short(plain.layer), f"{plain.before.equilibrium:.4f}", *map(_cell, turns)])
    recipe = result.recipe
    legend = (
        "angle per step over equilibrium, measured (predicted by the recursion); angle*: equilibrium before the drop, "
        f"in rad; before, end: {recipe.steady_window} steps; after: the first {recipe.drop_window}"
    )
    return table(rows) + "\n" + wrap(legend)


def _short(layer: str) -> str:
    return layer.removesuffix(".conv.weight")


def _cell(turn: Turn) -> str:
    predicted = turn.predicted_ratio
    return f"{turn.ratio:.2f}" + (" (  - )" if predicted is None else f" ({predicted:.2f})")


def _sentences(result: DemoResult) -> Iterator[tuple[bool, str]]:
    """Sentences on the results, each with whether it agrees with the theory."""
    from equilibria.lab.demo.results import TOLERANCE
    from equilibria.theory.rescale import rescale_factors

    recipe = result.recipe
    within = "Every layer turns" if result.as_predicted else "Not every layer turns"
    yield (
        result.as_predicted,
        f"{within} within {TOLERANCE:.0%} of its equilibrium before the drop (the worst is off by "
        f"{result.off_before:.1%}).",
    )
    after, end = result.plain.ratios("after"), result.plain.ratios("end")
    yield (
        max(after) < min(end),
        f"Plain: the drop leaves the layers at {_span(after)} of their new equilibrium (theory: "
        f"1/sqrt({recipe.drop:g}) = {recipe.drop**-0.5:.2f} at once, then slowly back); after {recipe.steps_after:,} "
        f"steps they are at {_span(end)}.",
    )
    factors = rescale_factors(recipe.rule_before, recipe.rule_after)
    after = result.rescaled.ratios("after")
    yield (
        min(after) > max(result.plain.ratios("after")),
        f"Rescaled: weights x {factors.weight:.3f} and momentum x {factors.first_moment:.3f} at the drop put them at "
        f"{_span(after)} at once.",
    )


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}"
