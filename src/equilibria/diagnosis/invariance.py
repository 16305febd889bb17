"""Weights that are scale-invariant only nearly, only partly, or only for a part of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equilibria.diagnosis.layers import Layer, are, many, percent
from equilibria.diagnosis.summary import INVARIANT, LEAST_WINDOW
from equilibria.findings import Finding

_PARTLY = 0.5  # of a random direction's cosine: without normalisation it is about 1, but a head may well have 0.9
_CLEARLY = math.sqrt(2)  # factor beyond the limit on either side that makes a flip: at the limit itself noise flips
_MOST_BLOCKS = 10


def radial_gradient(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients with a part along the weight that acts like weight decay, or against it."""
    able = [layer for layer in layers if layer.predictable]
    hit = [layer for layer in able if layer.radial is not None]
    if not hit:
        return
    worst = max(hit, key=lambda layer: abs(layer.radial or 0.0))
    share = worst.radial or 0.0
    effect = "adds to weight decay" if share > 0 else "works against weight decay"
    yield Finding(
        "warning",
        f"{many(hit, able, worst)} {are(hit)} not quite scale-invariant",
        f"the gradient of {worst.name} has a part along the weight (cosine {worst.summary.cosine:.2g}) that {effect}: "
        f"{percent(abs(share))} of it; it turns at {percent(worst.summary.angle_vs_predicted or 1)} of the prediction",
        "the eps of its normalisation layer is not small beside the variance it divides by (norms that shrink make it "
        "worse), or a bias or skip connection bypasses the normalisation: lower eps, or raise the norm (lr / wd)",
        "norms.norm_residual",
    )


def partly_invariant(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients less along the weight than a random direction would be, but too much for the laws to hold."""
    hit = [layer for layer in layers if _is_partly(layer) and flip(layer) is None]
    if not hit:
        return
    worst = max(hit, key=_share)
    yield Finding(
        "note",
        f"{many(hit, layers, worst)} {are(hit)} only partly scale-invariant, and not predicted",
        f"the cosine of {worst.name} with its gradient is {worst.summary.cosine:.2g}, {percent(_share(worst))} of a "
        f"random direction's; the laws hold below {percent(INVARIANT)}, and a weight with no normalisation behind it "
        "has about 100 % or more",
        _likely_cause(worst),
        "norms.norm_residual",
    )


def flipped(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights that became or ceased to be scale-invariant during the run."""
    flips = {layer.name: flip(layer) for layer in layers}
    for lost in (True, False):
        hit = [layer for layer in layers if (one := flips[layer.name]) is not None and one.lost is lost]
        if not hit:
            continue
        worst = max(hit, key=lambda layer: abs(math.log(_ratio(flips[layer.name]))))
        one = flips[worst.name]
        assert one is not None
        yield Finding(
            "warning" if lost else "note",
            f"{many(hit, layers, worst)} {are(hit, 'has', 'have')} {'ceased to be' if lost else 'become'} "
            "scale-invariant",
            f"the cosine of {worst.name} with its gradient went from {percent(one.before)} to {percent(one.after)} of "
            f"a random direction's between steps {one.first:,} and {one.last:,}; the laws hold below "
            f"{percent(INVARIANT)}",
            _likely_cause(worst) if lost else "nothing to do: predictions are made from then on",
            "norms.norm_residual",
        )


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of the invariance.

    Attributes:
        lost: whether it was scale-invariant before and is not now.
        before: rms cosine with the gradient over a random direction's, in the last block on the other side.
        after: the same now.
        first: middle step of that block.
        last: middle step of the first block on this side.
    """

    lost: bool
    before: float
    after: float
    first: int
    last: int


def flip(layer: Layer) -> Flip | None:
    """The last change of the invariance, None if there was none."""
    cosine, step = layer.rows["cosine"], layer.rows["step"]
    known = np.isfinite(cosine)
    count = min(_MOST_BLOCKS, int(np.count_nonzero(known)) // LEAST_WINDOW)
    if count < 2 or not layer.entries or layer.entry.get("invariant") is not None:
        return None
    squares, steps = np.array_split(cosine[known] ** 2, count), np.array_split(step[known], count)
    shares = np.sqrt([float(np.mean(block)) * layer.entries for block in squares])
    low, high = shares < INVARIANT / _CLEARLY, shares > INVARIANT * _CLEARLY
    other = low if high[-1] else high if low[-1] else np.zeros_like(low)
    if not other.any():
        return None
    at, here = int(np.flatnonzero(other)[-1]), high if high[-1] else low
    first_here = at + 1 + int(np.argmax(here[at + 1 :]))
    middles = [int(np.median(steps[block])) for block in (at, first_here)]
    return Flip(bool(high[-1]), float(shares[at]), float(shares[-1]), *middles)


def _ratio(one: Flip | None) -> float:
    return 1.0 if one is None else max(one.after, 1e-12) / max(one.before, 1e-12)


def _share(layer: Layer) -> float:
    """rms cosine with the gradient over a random direction's; NaN where unknown."""
    cosine = layer.summary.cosine
    return math.nan if cosine is None else cosine * math.sqrt(layer.entries)


def _is_partly(layer: Layer) -> bool:
    is_told = layer.entry.get("invariant") is not None  # then a cosine that is not 0 has a known reason
    return layer.rule is not None and not is_told and not layer.few and INVARIANT <= _share(layer) < _PARTLY


def _likely_cause(layer: Layer) -> str:
    causes = (
        "the eps of the normalisation layer is not small beside the variance it divides by (norms that shrink make it "
        "worse), a skip connection bypasses it, or there is none behind this weight: lower eps, or raise the norm "
        "(lr / wd)"
    )
    if not layer.entry.get("bias"):
        return causes
    return (
        "most likely its bias: before a LayerNorm or GroupNorm weight and bias are scale-invariant only together, so "
        f"that neither is by itself; leave the bias out (bias=False) where a normalisation follows. Otherwise {causes}"
    )
