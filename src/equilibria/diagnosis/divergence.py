"""Training that diverged: a logged loss far above its start, or weights and gradients that grow together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equilibria.diagnosis.gradient_jumps import total_gradients
from equilibria.diagnosis.loss_rises import LEAST
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import Array
from equilibria.findings import Finding, percent, plain

_TIMES, _TIMES_ALONE = 10, 1000  # its start: a loss with norms that grew as much, and one by itself
_NORMS, _NORMS_ALONE = 10, 100  # times as long as at the start, in the median layer: with the loss, and without one
_GRADIENTS = 10  # times as large as at the start: gradients of a healthy layer do not grow along with its norm
_NEARLY_ALL = 0.9  # share of the values since a step that are far above the start
_LAST = 10  # values that show where the loss is now


@dataclass(frozen=True, slots=True)
class Divergence:
    """Training that diverged, in words.

    Attributes:
        since: the first step from which on nine tenths of the values, of the loss or of the total gradient norm, are
            at 10 times the start or more.
        subject: what grew.
        growth: by how much norms and gradients grew.
        evidence: the numbers behind it.
        gradients_grew: whether the total gradient norm grew tenfold, too.
    """

    since: int
    subject: str
    growth: str
    evidence: str
    gradients_grew: bool

    @property
    def finding(self) -> Finding:
        """The warning about it."""
        remedy = (
            f"go back to a checkpoint from before step {self.since:,}, or start again, with a lower lr: for group in "
            "optimizer.param_groups: group['lr'] /= 10"
        )
        if self.gradients_grew:
            remedy += ". If gradients are not meant to add up over steps: optimizer.zero_grad() before loss.backward()"
        return Finding("warning", self.subject, self.evidence, remedy, "", kind="diverged")


def divergence(run: SampledRun) -> Divergence | None:
    """Whether a run diverged; None if it did not, or is too short to say."""
    steps, norms = _norm_growth(run)
    sampled, total = total_gradients(run)
    if norms is None or len(total) < LEAST:
        return None
    gradients = total / np.median(total[: -(-len(total) // 10)])
    low, middle, high = (plain(float(value)) for value in np.quantile(norms, [0, 0.5, 1]))
    growth = f"norms are {low} to {high} times as long as at step {steps[0]:,} (median layer: {middle})"
    factor = float(np.median(gradients[-max(len(gradients) // 10, 1) :]))
    growth += f"; the total gradient norm is {plain(factor)} times as large as at its start, up to step {sampled[-1]:,}"
    grew = float(np.median(norms))
    if not run.losses:
        if grew < _NORMS_ALONE or factor < _GRADIENTS:
            return None
        subject = f"weights and gradients grew together, to {middle} and {plain(factor)} times their size at the start"
        return Divergence(_stays(sampled, gradients), subject, growth, f"{growth}; no loss was logged", True)
    loss = run.loss
    if loss is None or len(loss[0]) < LEAST:
        return None
    step, values = loss
    tenth = -(-len(values) // 10)
    median, first = float(np.median(values[:tenth])), float(values[0])
    start = min(median, first)  # a run may be lost within its first tenth
    times = _growth(values, start)
    if times is None:
        return None
    now = float(np.median(times[-_LAST:]))
    if now < _TIMES or (grew < _NORMS and now < _TIMES_ALONE):
        return None
    since, highest = _stays(step, times), int(np.argmax(values))
    begin, end, peak = (
        plain(float(number), digits=3) for number in (start, np.median(values[-_LAST:]), values[highest])
    )
    of_start = f"the median of the first {tenth:,} values" if start == median else "the first value"
    evidence = (
        f"{begin} is {of_start}, {end} the median of the last {_LAST}, from step {int(step[-_LAST]):,} on; the highest "
        f"is {peak}, at step {int(step[highest]):,}; at least {percent(_NEARLY_ALL)} of the values since step "
        f"{since:,} are {_TIMES} times the start or more; {growth}"
    )
    subject = f"the training loss has diverged: it rose from {begin} to {end}"
    return Divergence(since, subject, growth, evidence, factor >= _GRADIENTS)


def _norm_growth(run: SampledRun) -> tuple[tuple[int, int], Array | None]:
    """First and last sampled step, and the last norm of each layer over its first."""
    taken = run.taken
    several = np.flatnonzero(taken.counts > 1)
    if not len(several):
        return (0, 0), None
    first, last = taken.first[:-1][several], taken.first[1:][several] - 1
    norm, step = taken.columns["norm"], taken.columns["step"]
    return (int(step[first].min()), int(step[last].max())), norm[last] / norm[first]


def _growth(values: Array, start: float) -> Array | None:
    """Values in units of their start; the unit of values around 0, as a loss may have, is their range in the beginning.

    None where there is no unit.
    """
    first = values[: -(-len(values) // 10)]
    unit = max(abs(start), float(np.ptp(first)) if np.min(first) <= 0 else 0.0)
    return None if unit == 0 else np.asarray((values - start) / unit + 1)


def _stays(step: Array, times: Array) -> int:
    """The first step from which on nine tenths of the values are at ten times the start or more."""
    above = times >= _TIMES
    share = np.cumsum(above[::-1])[::-1] / np.arange(len(above), 0, -1)
    stays = np.flatnonzero(above & (share >= _NEARLY_ALL))
    return int(step[stays[0] if len(stays) else -1])
