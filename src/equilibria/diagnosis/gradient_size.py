"""Whether gradients vary widely in size, and whether a run interpolates: decided once, for reports and forecasts.

Near interpolation few examples of a batch still have a gradient, and it comes in bursts; elsewhere noise or drift vary
it, too. The training loss can tell these apart, gradients alone cannot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibria.diagnosis.series import Array, Series
from equilibria.findings import percent

VARIES = "its gradient varies widely in size"
INTERPOLATES = ": near interpolation, where gradients vanish, if the same examples come again"
FEWEST = 20  # samples that show it
SKIPPED = 0.5  # share of the recorded steps left out: the start of training says little about the rest

# Mean of ||g||^4 over the square of the mean of ||g||^2. In 19 trainings with label noise 1.04 to 1.15 in the median
# layer of a network and up to 1.9 in its first layer; 1.3 to 3 and up to 9 on digits without label noise, which
# networks memorise.
_WIDE = 1.6
_MOSTLY = 1.25  # in the median layer
_FITTED = 0.05  # of the loss at its start: below it a training set is nearly fitted
_START = 7  # values of the loss, of which up to three may belong to a badly scaled network


def late_rows(series: Series) -> NDArray[np.bool_]:
    """Flag the rows in the second half of the steps that were recorded of their parameter."""
    step, counts = series.columns["step"], series.counts
    first = step[series.first[:-1][counts > 0]]
    last = step[series.first[1:][counts > 0] - 1]
    return np.asarray(step >= np.repeat(late_from(first, last), counts[counts > 0]))


def late_from(first: Array, last: Array) -> Array:
    """The step at which the second half begins, of the recorded steps from the first to the last."""
    return first + SKIPPED * (last - first)


def size_variation(unit_grad_sq: Array) -> Array:
    """Mean of ||g||^4 over the square of the mean of ||g||^2, along the first axis.

    Example:
        >>> size_variation(np.array([1.0, 1.0, 1.0, 1.0])).item(), size_variation(np.array([0.0, 0.0, 0.0, 1.0])).item()
        (1.0, 4.0)
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nanmean(unit_grad_sq**2, axis=0) / np.nanmean(unit_grad_sq, axis=0) ** 2)


def mostly_varies(values: Array) -> bool:
    """Whether the gradients of a network vary widely in size, from the `size_variation` of its layers."""
    return bool(np.median(values) > _MOSTLY)


def varies_widely(values: Array) -> NDArray[np.bool_]:
    """Whether the gradient of each layer varies widely in size: by itself, or with those of the network.

    Example:
        >>> varies_widely(np.array([1.1, 1.1, 1.9])).tolist(), varies_widely(np.array([1.1, 1.3, 1.9])).tolist()
        ([False, False, True], [True, True, True])
    """
    return (np.asarray(values) > _WIDE) | mostly_varies(values)


def near_interpolation(loss: tuple[Array, Array] | None) -> str:
    """That the logged training loss is small against its start, or was before a burst, in words; "" if not, or unknown.

    Of the tenths of the values the latest that is small counts: one that has fitted its training set does so again
    after a burst. The start is the median of the first seven values, or of the first tenth of a shorter record. The
    first values of a badly scaled network are no measure; a network may learn most within a tenth of a long record.

    Args:
        loss: steps and values of the training loss, None if it was not logged.

    Example:
        >>> steps = np.arange(5000)
        >>> near_interpolation((steps, 2.3 * np.exp(-steps / 300) + 0.004)).split(": ")[0]
        'the training loss is 0.004 over steps 4,500-4,999, 0.18 % of its median 2.28 over steps 0-6'
    """
    if loss is None or len(loss[0]) < 2:
        return ""
    steps, values = loss
    tenth = -(-len(values) // 10)
    first = min(_START, tenth)
    start = float(np.median(values[:first]))
    ends = range(len(values), tenth, -tenth)
    means = ((end, float(np.mean(values[end - tenth : end]))) for end in ends)
    end, low = next(((end, mean) for end, mean in means if 0 <= mean < _FITTED * start), (0, 0.0))
    if not end:
        return ""
    of = f"its {start:.3g} at step {int(steps[0]):,}"
    if first > 1:
        of = f"its median {start:.3g} over steps {int(steps[0]):,}-{int(steps[first - 1]):,}"
    return (
        f"the training loss {'is' if end == len(values) else 'was'} {low:.3g} over steps {int(steps[end - tenth]):,}-"
        f"{int(steps[end - 1]):,}, {percent(low / start)} of {of}{INTERPOLATES}"
    )
