"""The page: what every tool answered, what it cost, and where a peer is better than we are."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.eigenvalue import STARTS, Answers
from peers.environment import Outcome
from peers.invariance import Verdict
from peers.overhead import SEGMENTS, STEPS, Watched
from peers.updates import JUDGED, Errors

BUSY = 0.5  # load before we began, above which the page says so
RIGHT = 1e-2  # relative error up to which an answer counts as right
ALIKE = 0.1  # relative difference of two errors that makes neither better


@dataclass(frozen=True)
class Results:
    """Everything that was measured."""

    installed: list[Outcome]
    watching: dict[str, list[Watched]]
    presets: dict[str, tuple[str, str]]
    eigenvalue: list[Answers]
    truth: float
    invariance: list[Verdict]
    updates: dict[str, list[Errors]]
    load: float


def text(results: Results) -> str:
    """The whole page in Markdown."""
    sections = (_head, _installed, _watching, _eigenvalue, _invariance, _updates, _better)
    return "\n".join(line for section in sections for line in section(results)) + "\n"


def goals(results: Results) -> dict[str, bool]:
    """What we promise of ourselves here."""
    ours = results.eigenvalue[0]
    mine = [row for row in results.invariance if row.tool.startswith("equilibria")]
    updates = [row for rows in results.updates.values() for row in rows if row.tool.startswith("equilibria")]
    default = [statistics.median(rows[1].factors(rows[0])) for rows in results.watching.values()]
    return {
        "watching with default settings costs at most 1 %, at the median": max(default) <= 1.01,
        "the top eigenvalue is right to a per cent, from every start": ours.error(results.truth) < RIGHT,
        "the model is left as it was": not ours.left,
        "no scale-invariant tensor missed, none named wrongly": not sum(row.missed + row.wrong for row in mine)
        and not any(row.failure for row in mine),
        "update norms and angles are right to a thousandth, float32's rounding apart": max(
            row.excess() for row in updates
        )
        < 1e-3,
    }


def _head(results: Results) -> Iterator[str]:
    yield "# Beside its peers"
    yield ""
    yield (
        f"Measured by `make bench-peers` in one process and one thread, everything in turns; CPU time. "
        f"Python {platform.python_version()}, torch {torch.__version__}, {_processor()}, {os.cpu_count()} cores. "
        f"Load of the machine at the beginning: {results.load:.1f}"
        + (
            " (**other work was running: small ratios are less certain than their ranges say**)."
            if _busy(results)
            else "."
        )
    )
    yield ""
    yield "What a tool raises is shown as it raises it. Peers are used as documented, unless a row says otherwise."
    yield ""


def _busy(results: Results) -> bool:
    return results.load > BUSY


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _installed(results: Results) -> Iterator[str]:
    yield "## Do they install?"
    yield ""
    yield "Into an environment of their own, beside this version of torch."
    yield ""
    yield "| tool | command | |"
    yield "|---|---|---|"
    for each in results.installed:
        yield f"| {each.peer} | `{each.command}` | {each.version or f'**fails**: {_cell(each.failure or str())}'} |"
    yield ""


def _watching(results: Results) -> Iterator[str]:
    yield "## What watching costs"
    yield ""
    yield (
        "ResNet-18 of width 16 with BatchNorm, 64 images of 32x32. The second column is CPU time of a step over "
        "that of a "
        f"plain step beside it: median and range of {SEGMENTS} segments of {STEPS} steps. The third exists for what "
        "works in hooks of the optimizer: step over the same step without the hooks, which depends less on what else "
        "the machine does, but on it too. The naive loop takes norms of weight, gradient and update, and the angle. "
        "No step that was measured is one at which wandb.watch writes by default."
    )
    yield ""
    for optimizer, rows in results.watching.items():
        yield f"| {optimizer} | step / plain step | by its hooks |"
        yield "|---|---|---|"
        for row in rows:
            yield f"| {row.name} | {_ratio(row, rows[0])} |"
        yield ""
    yield "| cockpit's presets | with BatchNorm | without |"
    yield "|---|---|---|"
    for preset, outcomes in results.presets.items():
        yield f"| {preset} | {' | '.join(map(_cell, outcomes))} |"
    yield ""


def _ratio(row: Watched, plain: Watched) -> str:
    if row.failure:
        return f"**fails**: {_cell(row.failure)} |"
    return f"{_ranged(row.ratios(plain), '.3f')} | {_ranged(row.by_hooks, '.4f') if row.by_hooks else ''}"


def _ranged(values: list[float], form: str) -> str:
    low, high = (format(pick(values), form) for pick in (min, max))
    return f"{statistics.median(values):{form}} [{low}, {high}]"


def _eigenvalue(results: Results) -> Iterator[str]:
    yield "## The largest Hessian eigenvalue of a BatchNorm network"
    yield ""
    yield (
        "Six convolutions with BatchNorm after 40 steps on handwritten digits, 128 images; the Hessian of the "
        "loss that is "
        f"trained, so in training mode: **{results.truth:.5g}** (eigsh in float64, products by hand). {STARTS} random "
        "starts: values and products from least to most, median CPU seconds, largest error. By hand, as in ours, "
        "the graph of the gradient is kept from product to product."
    )
    yield ""
    yield "| tool | reports | relative error | products | CPU s | what it changes of the model |"
    yield "|---|---|---|---|---|---|"
    for row in results.eigenvalue:
        yield f"| {row.name} | {_answers(row, results.truth)} |"
    yield ""
    yield (
        "What is reported in evaluation mode (PyHessian puts the model there itself) is an eigenvalue too, but of "
        "another loss: one whose normalisation does not depend on the weights."
    )
    yield ""


def _answers(row: Answers, truth: float) -> str:
    if row.failure:
        return f"**fails**: {_cell(row.failure)} | | | |"
    error = row.error(truth)
    remarks = [each.remark for each in row.found if each.remark]
    remark = f" ({remarks[0]}, from {len(remarks)} of {STARTS} starts)" if remarks else ""
    shown = f"{error:.0e}" if error < RIGHT else f"**{error:.2g}**"
    left = ", ".join(sorted(row.left)) or "nothing"
    return (
        f"{_span([each.value for each in row.found], '.4g')}{remark} | {shown} "
        f"| {_span(row.products, 'd')} | {statistics.median(row.seconds):.2f} | {left}"
    )


def _span(values: Iterable[float], form: str) -> str:
    low, high = (format(pick(values), form) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _invariance(results: Results) -> Iterator[str]:
    yield "## Which tensors are scale-invariant?"
    yield ""
    yield (
        "The answer is known: every weight was scaled by itself, in float64, on a copy with ten times the weights (as "
        "they start, attention is so even that queries and keys hardly matter). AdamP asks at every step, so its "
        "mistakes are counted over tensors and steps."
    )
    yield ""
    yield "| network | tool | invariant ones missed | others named | others named at some step | cost |"
    yield "|---|---|---|---|---|---|"
    for row in results.invariance:
        if row.failure:
            yield f"| {row.case} | {row.tool} | **fails**: {_cell(row.failure)} | | | |"
            continue
        yield (
            f"| {row.case} | {row.tool} | {_share(row.missed, row.invariant * row.times)} "
            f"| {_share(row.wrong, row.others * row.times)} | {row.ever_wrong} of {row.others} "
            f"| {row.cost} |"
        )
    yield ""


def _share(count: int, total: int) -> str:
    if not total:
        return "none there"
    return f"0 of {total}" if not count else f"**{count} of {total}** ({100 * count / total:.1f} %)"


def _updates(results: Results) -> Iterator[str]:
    yield "## Is the update that is reported the one that was made?"
    yield ""
    yield (
        f"Relative error against w_new - w_old in float64, over all layers and {JUDGED} steps of the same network. "
        "An error "
        "of 1 means that nothing is reported, or twice the truth. With SGD `watch` takes the update from the "
        "momentum buffer, "
        "without a copy of the weights: at tiny learning rates that is what was asked for, of which float32 "
        "weights then "
        "round a part away."
    )
    yield ""
    yield "| optimizer | tool | quantity | median error | largest |"
    yield "|---|---|---|---|---|"
    for setting, rows in results.updates.items():
        for row in rows:
            yield f"| {setting} | {row.tool} | {row.quantity} | {row.median:.1e} | {row.largest:.1e} |"
    yield ""


def _better(results: Results) -> Iterator[str]:
    yield "## Where a peer is better"
    yield ""
    yield "In one respect at least, or as good as ours, by the numbers above."
    yield ""
    yield from _cheaper_watchers(results)
    yield from _better_eigenvalues(results)
    yield from _better_updates(results)
    yield (
        "- cockpit plots what it tracks while a network trains, and knows quantities of gradient noise that we do not "
        "measure; curvlinops has many more matrices than the Hessian; hessian-eigenthings the density of the "
        "spectrum and the "
        "trace; wandb keeps histograms, and a server for many people."
    )
    yield (
        "- AdamP's test costs next to nothing and needs no extra pass: an optimizer that asks at every step "
        "cannot afford "
        "ours."
    )
    yield ""


def _cheaper_watchers(results: Results) -> Iterator[str]:
    """Cheaper where the ranges are apart; as cheap where they overlap."""
    for optimizer, (plain, default, every_step, *peers) in results.watching.items():
        for row in peers:
            ours = every_step if "every step" in row.name else default
            if row.failure or min(row.factors(plain)) > max(ours.factors(plain)):
                continue
            apart = max(row.factors(plain)) < min(ours.factors(plain))
            yield (
                f"- {row.name}, with {optimizer} costs {_percent(row.factors(plain))} of a step, "
                f"{ours.name} {_percent(ours.factors(plain))}" + ("." if apart else ": no difference beyond the noise.")
            )


def _percent(factors: list[float]) -> str:
    return f"{_ranged([100 * (factor - 1) for factor in factors], '.2f')} %"


def _better_eigenvalues(results: Results) -> Iterator[str]:
    """Peers that are better in seconds, in products or in the error, with all three numbers."""
    ours, *peers = results.eigenvalue
    mine = _cost(ours, results.truth)
    for row in peers:
        if row.failure or row.error(results.truth) > RIGHT:
            continue
        if any(theirs < own for theirs, own in zip(_cost(row, results.truth), mine, strict=True)):
            yield f"- {row.name}: {_costs(row, results.truth)}; {ours.name}: {_costs(ours, results.truth)}."


def _cost(row: Answers, truth: float) -> tuple[float, int, float]:
    return statistics.median(row.seconds), min(row.products), row.error(truth)


def _costs(row: Answers, truth: float) -> str:
    return f"{_span(row.products, 'd')} products, {statistics.median(row.seconds):.2f} s, error {row.error(truth):.0e}"


def _better_updates(results: Results) -> Iterator[str]:
    for setting, rows in results.updates.items():
        ours = {row.quantity: row for row in rows if row.tool.startswith("equilibria")}
        ours["relative update"] = ours["update norm"]  # over the norm of the weight, which both have right
        for row in rows:
            verdict = "" if row in ours.values() else _verdict(row, ours[row.quantity])
            if verdict:
                own = ours[row.quantity]
                yield (
                    f"- {row.tool}, {row.quantity}, with {setting}: {verdict}, median error {row.median:.1e} and "
                    f"largest {row.largest:.1e}, ours {own.median:.1e} and {own.largest:.1e}."
                )


def _verdict(theirs: Errors, ours: Errors) -> str:
    ratios = theirs.median / ours.median, theirs.largest / ours.largest
    if min(ratios) < 1 - ALIKE:
        return "better"
    return "as good" if max(ratios) < 1 + ALIKE else ""


def _cell(message: str) -> str:
    return message.replace("|", "\\|").replace("\n", " ")
