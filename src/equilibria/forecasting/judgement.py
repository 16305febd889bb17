"""What to make of a back-test: whether the forecast deserves belief, and what happened that it could not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from equilibria.findings import Finding, counted
from equilibria.forecasting.doubts import widened
from equilibria.forecasting.observed import Cohort

if TYPE_CHECKING:
    from equilibria.forecasting.backtest import Score
    from equilibria.forecasting.forecast import LayerForecast

_LEAST_COVERED = 0.75  # of what 90 % bands hold
_GOOD = 0.05  # median error of the angle that is good enough, whatever a guess does
_USELESS = 0.3  # one that is not, even if every guess is worse
_LAW = "transient.evolve"


def judge(
    scores: Mapping[str, Score],
    coverage: tuple[float, float],
    layers: Sequence[LayerForecast],
    remarks: Sequence[Finding],
) -> tuple[Finding, ...]:
    """What is worth knowing, warnings first.

    Args:
        scores: of the forecast, first, and of the guesses.
        coverage: shares of the angles and of the norms inside of their 90 % bands.
        layers: the forecasts.
        remarks: what was found already.
    """
    found = [*_unbelievable(scores, coverage), *remarks, *widened(layers)]
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))


def _unbelievable(scores: Mapping[str, Score], coverage: tuple[float, float]) -> Iterator[Finding]:
    (own, *_), (name, *_) = scores.values(), scores
    guess = min((each for each in scores if each != name), key=lambda each: scores[each].angle)
    if own.angle > _USELESS or (scores[guess].angle < own.angle and own.angle > _GOOD):
        yield Finding(
            "warning",
            "do not believe the angles forecast for this kind of run",
            f"the forecast was {own.angle:.0%} off in the median, and \u201c{guess}\u201d {scores[guess].angle:.0%}",
            "take the forecast for its direction, not for its numbers; near interpolation, or shortly after a change "
            "of lr, L does what the record does not show",
            _LAW,
        )
    for what, share in zip(("angles", "norms"), coverage, strict=True):
        if share < _LEAST_COVERED:
            yield Finding(
                "warning",
                f"do not believe the bands of the {what} for this kind of run",
                f"the 90 % bands hold {share:.0%} of the measured {what}",
                "watch longer or more often before the forecast; the layers are listed with their own shares",
                _LAW,
            )


def was_rescaled(cohort: Cohort, first: int) -> bool:
    """Whether weights were changed outside of the optimizer's step where lr or weight decay changed, from a step on."""
    moved = _settings_changed(cohort) & (cohort.step >= first)
    return bool(moved.any() and cohort.changed[moved].mean() > 0.5)


def changed_outside(cohort: Cohort, first: int, *, rescaled: bool) -> Iterator[Finding]:
    """Weights that were changed outside of the optimizer's step after the forecast began, at step ``first``."""
    changed = cohort.changed.any(axis=1) & (cohort.step >= first)
    when = cohort.step[changed]
    strange = cohort.step[changed & ~(_settings_changed(cohort) & rescaled)]
    if rescaled:
        evidence = f"at {counted(len(when), 'sample')}, first at step {when[0]:,}" if len(when) else "as was asked for"
        yield Finding(
            "note",
            "weights were rescaled when lr or weight decay changed, and the forecast does the same",
            evidence,
            "nothing to do if RescaleOnDecay was used",
            "states.rescaled",
        )
    if len(strange):
        yield Finding(
            "warning",
            "weights were changed outside of the optimizer's step, which the forecast does not know",
            f"{cohort.names[0]}, among {counted(len(cohort.names), 'layer')}: at {counted(len(strange), 'sample')}, "
            f"first at step {strange[0]:,}",
            "errors from there on are not the forecast's; if it was a rescaling: rescale=True",
            "states.rescaled",
        )


def _settings_changed(cohort: Cohort) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Samples before which lr or weight decay changed; the first one is not known."""
    moved = np.zeros(len(cohort.step), dtype=bool)
    for values in (cohort.lr, cohort.weight_decay):
        moved[1:] |= np.diff(values) != 0
    return moved
