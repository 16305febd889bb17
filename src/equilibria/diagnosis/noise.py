"""Gradient noise, curvature along the step, and turning over many steps, from the tables of a run.

Where the loss neither falls nor rises, curvature takes back what the mean gradient gains: E<g, e> = 1/2 e'He for the
last move e (`equilibria.theory.correlation`). The left side is measured: by the column ``pull`` or, under heavy-ball
momentum, by h~. It gives the curvature along the step and the mean gradient's share m of E|g|^2; the batch size at
which mean and noise are equally large is (1 - m)/m times the present one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from equilibria._display import Printable, renderer
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.series import Array, Series
from equilibria.diagnosis.turning import Turning, independent_turning, measured_turning
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, percent, plain
from equilibria.theory.correlation import gradient_noise_scale
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule

_FEWEST = 30  # samples, or values of the loss
_BLOCKS = 10  # whose scatter gives the standard errors
_STATIONARY = 0.1  # change of the loss per step, and its standard error, over the pull of all layers
_SURE = 0.15  # standard error of the share over the share, and the most that dependent batches may add to it
_SURE_CURVATURE = 0.1
_LARGEST_SHARE = 0.08  # with plain SGD: above it the loss is no parabola over a step; noise scales were too large
_LARGEST_RATIO = 0.92  # h~/N: above it, the noise scale with momentum was off by more than 30 % on networks
_WARM = 2  # times 1/(1 - beta2) steps, after which Adam's second moment is complete to 13 %
_LEAST_OF_NETWORK = 0.6  # of the network's share: layers below it were off by up to 74 % under LayerNorm
_SURE_TURNING = 0.075  # standard error of D(n): two of them are 15 %
_SHORT = 16  # steps: where these vary too much, no longer turning is trusted
_SAMPLES_PER_BLOCK = 4  # of the angle, at least, in a stretch whose mean is compared with that of others
_MOSTLY = 0.5  # of E|g|^2, that scale-invariant layers have in a network whose noise scale is trusted
_FAR_BELOW, _ABOVE = 4.0, 0.5  # noise scale over batch, outside of which there is something to decide


@dataclass(frozen=True, slots=True)
class LayerNoise:
    """A layer, or the network, over the second half of its samples since lr, weight decay or momentum last jumped.

    Attributes:
        name: of the parameter (or its row); "network" for all layers together.
        first_step: of the window, None without samples.
        last_step: of the window.
        mean_share: m, the mean gradient's share of E|g|^2; of g/v^(1/4) under Adam. None where no law gives it.
        share_error: its standard error.
        noise_scale: gradient noise scale over the batch size, (1 - m)/m; None unless 0 < m < 1.
        curvature: |w|^2 e'(He)/|e|^2 in loss per rad^2, e the layer's part of the step and He that of all layers: its
            part of e'He, the other layers' steps included, not the curvature along its own step alone. None for the
            network.
        curvature_error: its standard error.
        lr_curvature: lr/|w|^2 times the curvature, for SGD and SGDW; None for others.
        doubt: why the noise scale is not reliable; "" if it is.
        curvature_doubt: the same for the curvature.
        turning: by distance n, D(n)/D(1) over that of independent gradients under the same rule, which is n for plain
            SGD and more with momentum; of the pairs in the window, none under a rule without a law, without the
            distances that too few of them cover.
        turning_error: by distance, the standard error of ``turning``, from the scatter between pairs; NaN without two.
        turning_doubt: why distances from 16 on are missing from it; "" if none is.
        update_gain: kappa, AdamW's squared update over that of independent gradients, (1+b1)/(1-b1) mean((m/sqrt v)^2):
            the equilibrium norm grows by its root. None for other rules.
    """

    name: str
    first_step: int | None = None
    last_step: int | None = None
    mean_share: float | None = None
    share_error: float | None = None
    noise_scale: float | None = None
    curvature: float | None = None
    curvature_error: float | None = None
    lr_curvature: float | None = None
    doubt: str = "no samples"
    curvature_doubt: str = "no samples"
    turning: Mapping[int, float] | None = None
    turning_error: Mapping[int, float] | None = None
    turning_doubt: str = ""
    update_gain: float | None = None

    @property
    def reliable(self) -> bool:
        """Whether the noise scale is expected to be within 30 %."""
        return not self.doubt


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """What `noise()` returns; ``print`` shows a table, a notebook a card.

    Attributes:
        layers: in the order of the model.
        network: all layers together, from sums over them; none where they follow different rules.
        batch_size: examples in a batch, None if `watch` was not told.
    """

    layers: tuple[LayerNoise, ...]
    network: LayerNoise
    batch_size: int | None

    def __str__(self) -> str:
        shown: Printable = renderer("run.noise.noise_table")(self)
        return shown.text

    def _repr_html_(self) -> str:
        shown: Printable = renderer("run.noise.noise_table")(self)
        return shown.html


def gradient_noise(
    samples: pa.Table,
    *,
    metadata: Mapping[str, Any],
    metrics: pa.Table | None = None,
    diffusion: pa.Table | None = None,
) -> GradientNoise:
    """Noise scale and curvature of every layer and of the network, and how far each turns over many steps.

    Args:
        samples: the sample table of a monitor or of a recorded run.
        metadata: the metadata of the run.
        metrics: the numbers that the training logged; nothing is reliable without its loss.
        diffusion: the diffusion table.
    """
    return noise_of_run(sampled_run(samples, metadata=metadata, metrics=metrics), diffusion)


def noise_of_run(run: SampledRun, diffusion: pa.Table | None = None) -> GradientNoise:
    """`gradient_noise` of a run whose samples are sorted already."""
    batch = run.metadata.get("batch_size")
    late = run.taken.where(run.taken.is_late)
    if not len(late.columns["step"]):
        return GradientNoise(tuple(LayerNoise(name) for name in run.series.names), LayerNoise("network"), batch)
    measured = _Measured(run, late)
    share, bend = measured.share, measured.bend
    lr = late.mean(late.columns["effective_lr"])
    turning, gain = _turning(run, diffusion, late), late.mean(late.columns["update_gain"])
    layers, of_network = [], measured.of_network.of(0)[0]
    for place, (name, rule) in enumerate(zip(late.names, run.rules, strict=True)):
        if not late.counts[place]:
            layers.append(LayerNoise(name))
            continue
        steps = late.of(place)["step"]
        m, h = share.of(place), bend.of(place)
        turned, scatter, left_out = turning[place]
        doubts = [*measured.doubts(steps), *_layer_doubts(run.invariant[place])]
        layers.append(
            LayerNoise(
                name,
                int(steps[0]),
                int(steps[-1]),
                *m,
                _noise_scale(m[0]),
                *h,
                h[0] * float(lr[place]) if h[0] is not None and isinstance(rule, SGD | SGDW) else None,
                _first(
                    doubts,
                    share.bursts(place),
                    _share_doubts(m, rule, steps, run.metadata),
                    _small_in_network(m[0], of_network, rule),
                ),
                _first(doubts, bend.bursts(place), _curvature_doubts(h), _faint(m[0], rule)),
                turned,
                scatter,
                left_out,
                float(gain[place]) if math.isfinite(gain[place]) else None,
            )
        )
    return GradientNoise(tuple(layers), _network(run, measured, layers), batch)


def _network(run: SampledRun, measured: _Measured, layers: Sequence[LayerNoise]) -> LayerNoise:
    """All layers together, from the sums over them of |g|^2 and of the mean gradient's part in it."""
    known = [layer for layer in layers if layer.mean_share is not None]
    rules = [rule for rule, layer in zip(run.rules, layers, strict=True) if layer.mean_share is not None]
    if not known or len({_is_adam(rule) for rule in rules}) > 1:
        reason = "the layers follow rules whose gradients cannot be added up" if known else "no layer has a noise scale"
        return LayerNoise("network", doubt=reason, curvature_doubt=reason)
    first, last = min(layer.first_step or 0 for layer in known), max(layer.last_step or 0 for layer in known)
    m, steps = measured.of_network.of(0), np.array([first, last])
    doubts = [
        *measured.doubts(measured.late.columns["step"]),
        *measured.of_network.bursts(0),
        *_share_doubts(m, rules[0], steps, run.metadata),
    ]
    if measured.part_of(run.invariant) < _MOSTLY:
        doubts.append("most of E|g|^2 is that of layers that are not known to be scale-invariant")
    return LayerNoise(
        "network", first, last, *m, _noise_scale(m[0]), doubt=_first(doubts), curvature_doubt="see layers"
    )


# ---- ratios of sums over samples


class _Ratio:
    """Ratios of two sums over the samples of each group, with standard errors from the scatter of ten blocks.

    Args:
        group: of every sample.
        block: of every sample, 0 to 9.
        above: summand of the numerator, weighted.
        below: summand of the denominator, weighted.
        count: groups.
    """

    def __init__(self, group: Array, block: Array, above: Array, below: Array, count: int) -> None:
        known = np.isfinite(above) & np.isfinite(below)
        group, block, above, below = (values[known] for values in (group, block, above, below))
        self.counts = np.bincount(group, minlength=count)
        tops, bottoms = (np.bincount(group, part, minlength=count) for part in (above, below))
        with np.errstate(all="ignore"):
            self.value = np.where(bottoms > 0, tops / bottoms, np.nan)
            left = above - self.value[group] * below
            blocks = np.bincount(group * _BLOCKS + block, left, minlength=count * _BLOCKS).reshape(count, _BLOCKS)
            self._effective = bottoms**2 / np.bincount(group, below**2, minlength=count)
            self.error = np.sqrt(_BLOCKS / (_BLOCKS - 1) * np.sum(blocks**2, axis=1)) / bottoms

    def bursts(self, place: int) -> Iterator[str]:
        """Why the ratio of one group rests on few of its samples."""
        if self.counts[place] >= _FEWEST > self._effective[place]:
            yield f"gradients come in bursts: {self._effective[place]:.0f} samples hold most of E|g|^2"

    def of(self, place: int) -> tuple[float | None, float | None]:
        """The ratio of one group and its standard error; None where it is unknown."""
        if self.counts[place] < _FEWEST or not math.isfinite(self.value[place]):
            return None, None
        return float(self.value[place]), float(self.error[place])


class _Measured:
    """The ratios of all layers in their windows.

    Attributes:
        late: the samples in the windows.
        share: the mean gradient's share of every layer.
        bend: the curvature along the step of every layer.
        of_network: the share of all layers together.
    """

    def __init__(self, run: SampledRun, late: Series) -> None:
        self.late, self._loss = late, run.loss
        self._doubts: dict[tuple[int, int, bool], list[str]] = {}
        columns, counts, weight = late.columns, late.counts, late.weights
        layer = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(layer)) - np.repeat(late.first[:-1], counts)
        block = place * _BLOCKS // np.maximum(counts, 1)[layer]
        is_adam, kept, has_law = (
            np.array([fact(rule) for rule in run.rules])[layer] for fact in (_is_adam, _kept, _has_law)
        )
        with np.errstate(all="ignore"):
            momentum = np.nan_to_num(columns["momentum"])
            above = columns["unit_grad_sq"] - columns["momentum_unit_grad_sq"]  # N - h~ = -2 gamma <g, v>
            heavy_ball = np.where(
                has_law & ~is_adam & (momentum > 0), columns["effective_lr"] * above * kept / (2 * momentum), np.nan
            )
            pull = np.where(np.isfinite(columns["pull"]), columns["pull"], heavy_ball)
            own = columns["lr"] * np.where(is_adam, 1 - momentum, kept)
            squares = np.where(is_adam, columns["scaled_grad_sq"], columns["grad_norm"] ** 2)
            mean = np.where(has_law, (1 + momentum) * pull / own, np.nan)
            unit = np.where(is_adam, columns["norm"], columns["norm"] ** 2)
            self.share = _Ratio(layer, block, mean * unit * weight, squares * unit * weight, len(counts))
            self.bend = _Ratio(layer, block, 2 * pull * weight, columns["relative_update"] ** 2 * weight, len(counts))
            self.of_network = _Ratio(np.zeros_like(layer), block, mean * weight, squares * weight, 1)
        self._pull = float(np.nansum(late.mean(pull)))
        self._squares = np.nan_to_num(late.mean(squares))

    def part_of(self, chosen: Sequence[bool | None]) -> float:
        """The part of E|g|^2 that some layers have."""
        total = float(np.sum(self._squares))
        return float(np.sum(self._squares[[bool(flag) for flag in chosen]])) / total if total else 0.0

    def doubts(self, steps: Array) -> list[str]:
        """Why nothing in a window can be trusted: too few samples, or a loss that is not known to be stationary."""
        key = int(steps.min()), int(steps.max()), len(steps) < _FEWEST
        if key not in self._doubts:
            few = [f"{len(steps)} samples; {_FEWEST} are needed"] if len(steps) < _FEWEST else []
            self._doubts[key] = [*few, *self._moving(*key[:2])]
        return self._doubts[key]

    def _moving(self, first: int, last: int) -> list[str]:
        """Why the loss is not known to be stationary over a stretch of steps, compared with the pull per step."""
        if self._loss is None:
            return ["the loss is not logged: monitor.log(loss=loss) shows whether it is stationary"]
        steps, values = self._loss
        inside = (steps >= first) & (steps <= last)
        if np.count_nonzero(inside) < _FEWEST:
            return [f"fewer than {_FEWEST} values of the loss over steps {first:,}-{last:,}"]
        t, y = (part[inside] - np.mean(part[inside]) for part in (steps.astype(np.float64), values))
        slope = float(np.sum(t * y) / np.sum(t * t))
        error = float(np.sqrt(np.sum((y - slope * t) ** 2) / (len(t) - 2) / np.sum(t * t)))
        if max(abs(slope), error) <= _STATIONARY * self._pull:
            return []
        if abs(slope) > 2 * error:
            way = "falls" if slope < 0 else "rises"
            return [f"the loss {way} by {abs(slope):.2g} per step over steps {first:,}-{last:,}"]
        return [f"the loss scatters too much over steps {first:,}-{last:,} to tell whether it is stationary"]


def _is_adam(rule: Rule | None) -> bool:
    return isinstance(rule, AdamW | AdamL2)


def _has_law(rule: Rule | None) -> bool:
    """Whether the mean gradient's share is known; the moves of Nesterov momentum are not its buffer."""
    return isinstance(rule, SGD | SGDW | AdamW | AdamL2) and not getattr(rule, "nesterov", False)


def _kept(rule: Rule | None) -> float:
    """The factor of a gradient in the momentum buffer that it enters."""
    return 1 - float(getattr(rule, "dampening", 0.0))


def _noise_scale(share: float | None) -> float | None:
    return gradient_noise_scale(1.0, share) if share is not None and 0 < share < 1 else None


# ---- what can be trusted


def _first(*doubts: Iterable[str]) -> str:
    return next((doubt for several in doubts for doubt in several), "")


def _layer_doubts(invariant: bool | None) -> list[str]:
    """Stationary is the loss, not what each layer adds to it: in our trials scale-invariant layers kept to it."""
    return (
        [] if invariant else ["it is not known to be scale-invariant; heads were off by up to a factor of 2 in trials"]
    )


def _faint(share: float | None, rule: Rule | None) -> Iterator[str]:
    """Why momentum hides a small mean gradient."""
    momentum = _momentum(rule)
    ratio = 1 - (share or 0.0) * 2 * momentum / (1 + momentum)
    if share is not None and momentum and ratio > _LARGEST_RATIO:
        yield f"h~/N = {ratio:.2f}; above {_LARGEST_RATIO} it is not reliable with momentum"


def _small_in_network(share: float | None, of_network: float | None, rule: Rule | None) -> Iterator[str]:
    """Why the share of a layer may be too small: the loss is stationary, not the part of it that each layer changes."""
    if share and of_network and _momentum(rule) and 0 < share < _LEAST_OF_NETWORK * of_network:
        yield (
            f"the mean gradient's share, {percent(share)}, is below {_LEAST_OF_NETWORK} of the network's, "
            f"{percent(of_network)}: such layers were off by up to 74 % in trials"
        )


def _momentum(rule: Rule | None) -> float:
    """Momentum, or beta1."""
    return float(rule.betas[0] if isinstance(rule, AdamW | AdamL2) else getattr(rule, "momentum", 0.0))


def _share_doubts(
    share: tuple[float | None, float | None], rule: Rule | None, steps: Array, metadata: Mapping[str, Any]
) -> Iterator[str]:
    """Why the noise scale of a stationary window may be off by more than 30 %."""
    value, error = share
    if not _has_law(rule):
        yield "no law gives the mean gradient's share under this optimizer"
    elif value is None or error is None:
        yield f"fewer than {_FEWEST} samples have the products that it needs"
    elif not 0 < value < 1:
        yield f"the mean gradient's share comes out at {percent(value)}: the loss is not stationary, or samples are few"
    else:
        momentum = _momentum(rule)
        epoch = metadata.get("steps_per_epoch")
        longest = (1 + momentum) / (1 - momentum) * (1 - value) / (_SURE * value)
        if error > _SURE * value:
            yield f"its standard error is {percent(error / value)} of the mean gradient's share"
        yield from _faint(value, rule)
        if not momentum and value > _LARGEST_SHARE:
            yield f"the mean gradient's share is {percent(value)}: above {percent(_LARGEST_SHARE)} steps are too long"
        if isinstance(rule, AdamW | AdamL2) and steps.min() < _WARM / (1 - rule.betas[1]):
            yield f"Adam's second moment is not complete before step {math.ceil(_WARM / (1 - rule.betas[1])):,}"
        if epoch is None:
            yield (
                f"it holds if an epoch has {math.ceil(longest):,} steps: tell eq.watch(..., steps_per_epoch=); of a "
                "stream that never repeats, the steps of the whole run"
            )
        elif epoch < longest:
            yield f"batches depend on each other: an epoch has {epoch:,} steps, and {math.ceil(longest):,} are needed"


def _curvature_doubts(curvature: tuple[float | None, float | None]) -> Iterator[str]:
    value, error = curvature
    if value is None or error is None:
        yield f"fewer than {_FEWEST} samples have the products that it needs"
    elif value <= 0:
        yield "it comes out negative: the loss is not stationary, or samples are few"
    elif error > _SURE_CURVATURE * value:
        yield f"its standard error is {percent(error / value)}"


# ---- turning over many steps

_SureTurning: TypeAlias = tuple[dict[int, float], dict[int, float], str]


def _turning(run: SampledRun, diffusion: pa.Table | None, late: Series) -> list[_SureTurning]:
    """For every layer D(n)/D(1) over that of independent gradients, by n, its errors, and why distances are left out.

    D(1) comes from all samples of the window.
    """
    never = np.iinfo(np.int64).max
    first = np.where(late.counts > 0, np.append(late.columns["step"], 0)[late.first[:-1]], never)
    last = np.full(len(first), never - 1)
    measured = measured_turning(diffusion, late.names, first=first, last=last, entries=run.entries)
    with np.errstate(all="ignore"):
        one_step = late.mean(-np.log(np.cos(late.columns["angle"])))
    return [
        _sure_turning(late.of(place), turning, one, rule) if late.counts[place] else ({}, {}, "")
        for place, (turning, one, rule) in enumerate(zip(measured, one_step.tolist(), run.rules, strict=True))
    ]


def _sure_turning(samples: Mapping[str, Array], turning: Turning, one_step: float, rule: Rule | None) -> _SureTurning:
    """The distances at which some pairs stand for the whole window, and the largest error of the others.

    Where steps pull back, D(n) holds the latest D(n)/D(1) of the n steps; the effect of the earlier ones is undone. If
    16 steps vary too much, so do more: where rare long steps make most of D(16), they make much of D(1024).
    """
    if rule is None or not one_step > 0 or not len(turning.distance):
        return {}, {}, ""
    distances, pairs = turning.distance.astype(np.int64), turning.pairs.astype(np.int64)
    try:
        independent = independent_turning(rule, int(distances[-1]))[distances - 1]
    except EquilibriaError:  # a measured law, or settings without an equilibrium
        return {}, {}, ""
    ratios = turning.turned / (distances * one_step)
    known = np.isfinite(ratios) & (ratios > 0)
    effective = np.clip(np.where(known, distances * ratios, 1), 1, distances)
    errors = np.array(
        [
            _turning_error(samples["step"], samples["angle"] ** 2, steps=steps, stretches=count)
            for steps, count in zip(effective.tolist(), pairs.tolist(), strict=True)
        ]
    )
    short = distances == _SHORT
    errors[distances > _SHORT] = np.maximum(errors[distances > _SHORT], errors[short].max(initial=0.0))
    sure = known & (errors <= _SURE_TURNING)
    over = ratios / independent
    values, scatter = (
        dict(zip(distances[sure].tolist(), numbers[sure].tolist(), strict=True))
        for numbers in (over, over * turning.error)
    )
    left_out = np.flatnonzero(known & ~sure & (distances >= _SHORT))
    if not len(left_out):
        return values, scatter, ""
    if not np.isfinite(errors[left_out]).all():
        return values, scatter, f"{len(samples['step'])} samples do not show how much the angle varies"
    worst = left_out[np.argmax(errors[left_out])]
    return (
        values,
        scatter,
        (
            f"the angle varies so much from step to step that {pairs[worst]} comparisons over {distances[worst]:,} "
            f"steps give D(n) with a standard error of {percent(errors[worst])}"
        ),
    )


def _turning_error(step: Array, angle_sq: Array, *, steps: float, stretches: int) -> float:
    """Relative standard error of a mean of angle^2 over some stretches of a window, from how much it varies in it.

    The variance between stretches of ``steps`` steps is that between blocks of samples, less what few samples in a
    block add to it, plus what single steps leave in a stretch.
    """
    known = np.isfinite(angle_sq)
    step, angle_sq = step[known], angle_sq[known]
    if not stretches or len(step) < 2 * _SAMPLES_PER_BLOCK or not angle_sq.mean() > 0:
        return math.inf
    span = int(step[-1] - step[0]) + 1
    block = (step - step[0]) // max(math.ceil(steps), math.ceil(_SAMPLES_PER_BLOCK * span / len(step)))
    size, sums = np.bincount(block), np.bincount(block, angle_sq)
    size, sums = size[size > 0], sums[size > 0]
    within = (np.sum(angle_sq**2) - np.sum(sums**2 / size)) / max(1, len(step) - len(size))
    between = max(0.0, float(np.var(sums / size, ddof=1) - within * np.mean(1 / size))) if len(size) > 1 else 0.0
    left_open = max(0.0, 1 - stretches * steps / span)
    return float(np.sqrt((between + within / steps) * left_open / stretches) / angle_sq.mean())


# ---- the finding


def batch_size(run: SampledRun) -> Iterator[Finding]:
    """A batch far below or above the gradient noise scale of the network, where that is reliable."""
    noise = noise_of_run(run)
    network, batch = noise.network, noise.batch_size
    if not network.reliable or network.noise_scale is None or network.mean_share is None:
        return
    factor, share = network.noise_scale, network.mean_share
    if _ABOVE < factor < _FAR_BELOW:
        return
    known = "" if batch is None else f": {plain(batch * factor)} examples for a batch of {batch:,}"
    yield Finding(
        "note",
        f"the gradient noise scale is {plain(factor)} times the batch{known}",
        f"of E|g|^2 over all layers {percent(share)} is the mean gradient and the rest noise, over steps "
        f"{network.first_step:,}-{network.last_step:,}, in which the loss is stationary",
        _advice(run, share, factor) if factor > 1 else _advice_above(share),
        "correlation.gradient_noise_scale",
    )


def _advice(run: SampledRun, share: float, factor: float) -> str:
    plain_sgd = all(isinstance(rule, SGD | SGDW) and not rule.momentum for rule in run.rules if _has_law(rule))
    if not plain_sgd:
        return f"to take fewer steps, raise the batch: up to {plain(factor)} times the present one, noise dominates"
    return (
        "to take half as many steps, double batch and lr: one such step turns a layer about "
        f"{1 / math.sqrt(1 - share):.2f} times as far as two present ones"
    )


def _advice_above(share: float) -> str:
    halved = share / (2 - share)
    return f"to spend less on a step, halve the batch: {percent(halved)} of E|g|^2 would still be the mean gradient"
