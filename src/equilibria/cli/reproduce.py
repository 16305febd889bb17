"""`equilibria reproduce`: re-runs the papers' experiments, with a verdict on every claim."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import WHOLE, example, json_option
from equilibria.cli._output import INTERRUPTED, print_json
from equilibria.errors import EquilibriaError
from equilibria.views.terminal import paint, table, wrap

if TYPE_CHECKING:
    from equilibria.lab.harness import Claim, ExperimentReport
    from equilibria.lab.harness.runner import Progress as TaskProgress
    from equilibria.lab.harness.runner import RunningShare, Started
    from equilibria.lab.harness.workers import Workers

_MARKS = {
    "shown": ("✓", "32;1"),
    "within tolerance, law excluded": ("≈", "33;1"),
    "not shown": ("?", "33;1"),
    "contradicted": ("✗", "31;1"),
}


@click.command("reproduce", epilog=example("reproduce --list", "reproduce nrq-escape --scale smoke"))
@click.argument("ids", nargs=-1, metavar="[ID... | synthetic | networks | all]")
@click.option("--list", "listing", is_flag=True, help="Only list the experiments.")
@click.option(
    "--scale",
    default="desk",
    show_default=True,
    help="smoke (seconds), desk (minutes; networks: up to an hour) or paper (days, on a GPU).",
)
@click.option("--results", default="results", show_default=True, help="Folder for results, figures and the gallery.")
@click.option("--force", is_flag=True, help="Recompute results that exist.")
@click.option("--workers", type=WHOLE, help="Processes on this machine (default: one per core).")
@click.option("--cluster", help="Run on this Dask cluster instead, such as tcp://host:8786.")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Device to train networks on: cpu, cuda or cuda:1 (not yet tested on a GPU).",
)
@json_option
def command(
    *,
    ids: tuple[str, ...],
    listing: bool,
    scale: str,
    results: str,
    force: bool,
    workers: int | None,
    cluster: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Re-run the papers' experiments: figures, numbers, and a verdict on every claim."""
    from equilibria.lab.harness import find, reproduce

    if listing:
        _list(ids or ("all",), as_json=as_json)
        return
    if not ids:
        raise click.UsageError("Missing argument: an ID, or all; --list shows them", click.get_current_context())
    chosen = find(ids, scale=scale)
    _check_device(device, cluster)
    if scale == "paper" and device == "cpu" and any(experiment.kind == "networks" for experiment in chosen):
        print("equilibria: networks at the papers' scale take weeks on a CPU; see --device", file=sys.stderr)
    with ExitStack() as stack:
        hands = stack.enter_context(_workers(workers, cluster))
        progress, running, started, finished = stack.enter_context(_progress(quiet=as_json))
        try:
            reports = reproduce(
                chosen,
                scale=scale,
                results=results,
                force=force,
                workers=hands,
                device=device,
                progress=progress,
                running=running,
                started=started,
                finished=finished,
            )
        except KeyboardInterrupt:
            stack.close()  # the bar goes first
            kept = f"finished tasks and checkpoints are kept in {results}"
            print(f"equilibria: interrupted; {kept}: {_resume()}", file=sys.stderr)
            raise click.exceptions.Exit(INTERRUPTED) from None
    if as_json:
        print_json([_contract(report) for report in reports])
    else:
        _show(reports, scale, results)
    if not all(report.good and not (report.lacks and report.experiment in ids) for report in reports):
        raise click.exceptions.Exit(1)


def _check_device(device: str, cluster: str | None) -> None:
    """Raise before hours of work if the device is missing; that of a cluster's machines cannot be checked here."""
    if device != "cpu":  # torch takes a second to import
        from equilibria.lab.training.recipe import named_device, present_device

        present_device(device) if cluster is None else named_device(device)


def _resume() -> str:
    return "the same command resumes from there" + (" (without --force)" if "--force" in sys.argv else "")


def _list(ids: tuple[str, ...], *, as_json: bool) -> None:
    from equilibria.lab.harness import find

    experiments = find(ids)
    rows = [experiment.describe() for experiment in experiments]
    if as_json:
        print_json(rows)
        return
    head = ["id", "kind", "source", "scales", "title"]
    marks = {experiment.id: "*" if experiment.needs else "" for experiment in experiments}
    body = [
        [row["id"], row["kind"] + marks[row["id"]], row["source"], " ".join(row["scales"]), row["title"]]
        for row in rows
    ]
    print(table([head, *body], left=5))
    print(f"\n{_legend(rows)}")


def _legend(rows: list[dict[str, Any]]) -> str:
    """The kinds of experiments, what they need, and the papers behind the short names."""
    from equilibria.theory.citations import PAPERS

    used = {word for row in rows for word in row["source"].split()}
    papers = [f"{key}: {paper.title}" for key, paper in PAPERS.items() if key in used]
    kinds = (
        "synthetic: exact small problems, minutes each.",
        "networks: trained networks, minutes to an hour each.",
        "*: needs images: CIFAR-10 at scale desk, the paper's data set at scale paper, none at smoke; set "
        "EQUILIBRIA_DATA=FOLDER to where they are.",
    )
    return "\n".join(wrap(line, hang="    ") for line in (*kinds, *papers))


@contextmanager
def _workers(count: int | None, cluster: str | None) -> Iterator[Workers]:
    from equilibria.lab.harness.workers import DaskCluster, InProcess, Processes
    from equilibria.lab.processes import usable_cores

    if cluster is not None:
        if count is not None:
            raise EquilibriaError(f"got --workers {count} with --cluster {cluster}; expected one of the two")
        connected = DaskCluster(cluster)
        try:
            yield connected
        finally:
            connected.close()
        return
    count = usable_cores() if count is None else count
    yield InProcess() if count == 1 else Processes(count)


@contextmanager
def _progress(
    *, quiet: bool
) -> Iterator[tuple[TaskProgress, RunningShare | None, Started, Callable[[ExperimentReport], None]]]:
    """Progress on stderr: a bar over all tasks on a terminal, a line when experiments begin, one when each ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, markup=False)
    columns = (TextColumn("  tasks"), BarColumn(), MofNCompleteColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("tasks", total=None)

        def started(ids: Sequence[str], left: int) -> None:
            if not quiet:
                begin = f"{ids[0]} begins" if len(ids) == 1 else f"{len(ids)} experiments begin: {', '.join(ids)}"
                console.print(f"  {begin} ({left} {'task' if left == 1 else 'tasks'} to do)")

        def finished(report: ExperimentReport) -> None:
            if not quiet:
                console.print(f"  {report.experiment}: {_state(report)}")

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done > counted[0] and not quiet and not console.is_terminal:
                console.print(f"  {done} of {total} tasks done")
            counted[0] = done

        def running(share: float) -> None:
            bar.update(task, completed=counted[0] + share)

        counted = [0]
        yield progress, running if console.is_terminal else None, started, finished


def _state(report: ExperimentReport) -> str:
    from equilibria.lab.harness import claim_text

    if report.lacks:
        return "left out"
    if report.result is None:
        return "failed"
    spent = "reused" if report.reused else claim_text.duration_text(report.result.seconds)
    return f"{claim_text.claims_headline(report.result.claims)} ({spent})"


def _contract(report: ExperimentReport) -> dict[str, Any]:
    result = {} if report.result is None else report.result.as_dict()
    about = {"id": report.experiment, "good": report.good, "reused": report.reused}
    return {**about, "failure": report.failure, "lacks": report.lacks, **result}


def _show(reports: list[ExperimentReport], scale: str, results: str) -> None:
    from equilibria.lab.harness.claim_text import claims_headline
    from equilibria.lab.harness.pages import GALLERY_PAGE, RESULTS_PAGE

    for lacks in dict.fromkeys(report.lacks for report in reports if report.lacks):
        names = ", ".join(report.experiment for report in reports if report.lacks == lacks)
        print(f"\n  {paint(names, '1')}")
        print(wrap(f"left out: {lacks}", indent="    - ", hang="      "))
    for report in (report for report in reports if not report.lacks):
        print(f"\n  {paint(report.experiment, '1')}")
        if report.result is None:
            print(wrap(f"failed: {report.failure.strip()}", indent=f"    {paint('✗', '31;1')} ", hang="      "))
            continue
        for claim in report.result.claims:
            _show_claim(claim)
    claims = [claim for report in reports if report.result for claim in report.result.claims]
    failed, left = sum(bool(report.failure) for report in reports), sum(bool(report.lacks) for report in reports)
    also = f"; {failed} of {len(reports)} experiments failed" if failed else ""
    also += f"; {left} of {len(reports)} experiments left out" if left else ""
    kept = [report for report in reports if report.reused and report.result]
    if kept:
        days = sorted({report.result.finished[:10] for report in kept if report.result})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        which = "This result was" if len(reports) == 1 else f"{len(kept)} of these results were"
        again = f"computed earlier ({when}) and reused: --force recomputes, --results FOLDER writes elsewhere."
        print(wrap(f"{which} {again}", indent="\n  ", hang="  "))
    if left:
        print(wrap("Set EQUILIBRIA_DATA=FOLDER to where the data sets are.", indent="\n  "))
    print(f"\n  {claims_headline(claims) if claims else 'nothing was judged'}{also} (scale: {scale}).")
    print(f"  Gallery: {results}/{GALLERY_PAGE} (all scales)")
    print(f"  Table:   {results}/{RESULTS_PAGE} (of each experiment the largest scale computed)\n")


def _show_claim(claim: Claim) -> None:
    from equilibria.lab.harness import claim_text

    open_ = claim.role in ("comparison", "diagnostic") and claim.verdict == "contradicted"
    sign, colour = _MARKS["not shown" if open_ else claim.verdict]
    print(wrap(claim.text, indent=f"    {paint(sign, colour)} ", hang="      "))
    prints = f"; as printed: {claim_text.printed_text(claim)}" if claim.printed is not None else ""
    measured, expected = claim_text.measured_text(claim), claim_text.expected_text(claim)
    numbers = f"measured {measured}, expected {expected} ({claim.source}{prints})"
    verdict = claim_text.verdict_text(claim)
    suffix = "" if verdict == "shown" else f" -> {verdict}"
    print(wrap(numbers + suffix, indent="      ", hang="      "))
