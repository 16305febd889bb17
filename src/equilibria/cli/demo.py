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
    from equilibria.lab.demo import DemoResult, DemoSettings, Turn


@click.command("demo", epilog=example("demo --out equilibria-demo"))
@click.option("--out", default="equilibria-demo", show_default=True, help="Folder for the runs and the reports.")
@click.option(
    "--seed", type=WHOLE, default=0, show_default=True, help="Random seed of initial weights, images and noise."
)
@json_option
def command(*, out: str, seed: int, as_json: bool) -> None:
    """Train a small network on real digits, watched, and compare every layer with the theory (about a minute)."""
    from equilibria.lab.demo import DemoError, DemoSettings, run_demo

    settings = DemoSettings(seed=seed)
    try:
        with _bars(settings) as progress:
            result = run_demo(out, settings=settings, progress=progress)
    except DemoError as error:
        print(f"equilibria: {error}", file=sys.stderr)
        raise click.exceptions.Exit(1) from None
    if as_json:
        print_json(result.as_dict())
    else:
        _show(result)


@contextmanager
def _bars(settings: DemoSettings) -> Iterator[Callable[[str, int], None]]:
    """A progress bar per training on stderr; nothing if that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from equilibria.lab.demo.training import ARMS

    console = Console(stderr=True)
    columns = (TextColumn("  {task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks = {arm: bars.add_task(arm.replace("_", " "), total=settings.steps) for arm in ARMS}
        yield lambda arm, steps: bars.update(tasks[arm], completed=steps)


def _show(result: DemoResult) -> None:
    settings = result.settings
    print(
        f"\n  A small BatchNorm ResNet on handwritten digits, {settings.label_noise:.0%} of the labels random.\n"
        f"  SGD, lr {settings.lr:g}, weight decay {settings.weight_decay:g}, momentum {settings.momentum:g}; "
        f"lr / {settings.drop:g} at step {settings.steps_before:,} of {settings.steps:,}\n"
    )
    print(_table(result))
    print()
    for good, sentence in _sentences(result):
        mark = paint("✓", "32;1") if good else paint("!", "33;1")
        print(wrap(sentence, indent=f"  {mark} ", hang="    "))
    arms = {"plain": result.plain, "rescaled": result.rescaled, "less decay": result.less_decay}
    accuracies = ", ".join(f"{name} {arm.test_accuracy:.1%}" for name, arm in arms.items())
    print(wrap(f"Test accuracy at the end, of one seed: {accuracies}.", indent="    ", hang="    "))
    print()
    for path in (*(arm.report for arm in arms.values()), result.out / "demo.json"):
        print(f"  {path}")
    print()


def _table(result: DemoResult) -> str:
    head = ["layer", "angle*", "before", "plain: after", "end", "rescaled: after", "end"]
    rows = [head]
    for plain, rescaled in zip(result.plain.layers, result.rescaled.layers, strict=True):
        turns = (plain.before, plain.after, plain.end, rescaled.after, rescaled.end)
        rows.append([_short(plain.layer), f"{plain.before.equilibrium:.4f}", *map(_cell, turns)])
    settings = result.settings
    legend = (
        "angle per step over equilibrium, measured (predicted by the recursion); angle*: equilibrium before the drop, "
        f"in rad; before, end: {settings.steady_window} steps; after: the first {settings.drop_window}"
    )
    return table(rows) + "\n" + wrap(legend)


def _short(layer: str) -> str:
    return layer.removesuffix(".conv.weight")


def _cell(turn: Turn) -> str:
    predicted = turn.predicted_ratio
    return f"{turn.ratio:.2f}" + (" (  - )" if predicted is None else f" ({predicted:.2f})")


def _sentences(result: DemoResult) -> Iterator[tuple[bool, str]]:
    """A sentence per comparison with the theory, and whether it agrees."""
    from equilibria.lab.demo.results import TOLERANCE
    from equilibria.lab.demo.training import RESCALED
    from equilibria.theory.states import rescale_factors

    settings = result.settings
    within = "Every layer turns" if result.as_predicted else "Not every layer turns"
    yield (
        result.as_predicted,
        f"{within} within {TOLERANCE:.0%} of its equilibrium before the drop (the worst is off by "
        f"{result.off_before:.1%}).",
    )
    plain, end = result.plain.ratios("after"), result.plain.ratios("end")
    yield (
        max(plain) < min(end),
        f"Plain: the drop leaves the layers at {_span(plain)} of their new equilibrium (theory: "
        f"1/sqrt({settings.drop:g}) = {settings.drop**-0.5:.2f} at once, then slowly back); after "
        f"{settings.steps_after:,} steps they are at {_span(end)}.",
    )
    factors = rescale_factors(settings.rule_before, settings.rule_after(RESCALED))
    after = result.rescaled.ratios("after")
    yield (
        min(after) > max(plain),
        f"Rescaled: weights x {factors.weight:.3f} and momentum x {factors.first_moment:.3f} at the drop put them at "
        f"{_span(after)} at once.",
    )
    after = result.less_decay.ratios("after")
    yield (
        min(after) > max(plain),
        f"Less decay: with weight decay / {settings.drop:g} at the drop the equilibrium angle falls by "
        f"{settings.drop:g} and the equilibrium norm stays: the layers are at {_span(after)} of it at once.",
    )


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}"
