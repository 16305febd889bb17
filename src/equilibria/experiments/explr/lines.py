"""What the experiments on networks of this paper share: scales, and whether the curves of two runs coincide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equilibria.experiments.claim import Claim, Source, not_demanded
from equilibria.experiments.curves import POINTS, Window, mean_in
from equilibria.experiments.experiment import Arrays, Findings
from equilibria.experiments.explr.networks import Setting, Variant, key
from equilibria.experiments.seeds import mean_at_most, mean_near

# Twice the standard error of an accuracy of one half on 10,000 test images.
SAME_ACCURACY = 1.0
# The loss of a minibatch of 128 scatters by about a tenth, the mean over a hundred by one per cent; twice that.
SAME_LOSS = 0.02
# Of the root mean square differences of two pairs of chaotic runs; each is of some ten measurements, so a factor of
# two is beyond chance, and a schedule that were wrong would miss it by far: the curves differ by ten times as much
# between schedules.
AS_ROUNDING = 2.0

SMOKE: Mapping[str, Any] = {
    "seeds": (0, 1, 2),
    "data": "digits",
    "width": 4,
    "batch_size": 16,
    "flip": False,
    "steps": 10,
    "epoch": 5,
    "watch_every": 1,
    "statistics": (1, 64),
    "train_images": 64,
}
"""Settings of the smallest scale that all have in common."""
EPOCH = 390  # batches of 128 among 50,000 images, the last one left out
PAPER: Mapping[str, Any] = {
    "network": "preresnet",
    "size": 32,
    "depth": 32,
    "crop": 4,
    "weight_decay": 5e-4,
    "epoch": EPOCH,
}
"""The paper's: PreResNet-32, lr 0.1, weight decay 5e-4, momentum 0.9, batches of 128."""


def runs(config: Setting, found: Findings, variant: Variant) -> list[Arrays]:
    """Of all seeds."""
    return [found[key(variant, seed)] for seed in config.seeds]


def named(config: Setting) -> dict[str, Variant]:
    """The variants by name."""
    return {variant.name: variant for variant in config.variants}


def difference(one: Arrays, other: Arrays, name: str) -> float:
    """Root mean square difference of two curves, from the first step on."""
    return float(np.sqrt(np.mean((one[name] - other[name])[1:] ** 2)))


def demanded(config: Setting, claims: Sequence[Claim]) -> list[Claim]:
    """A few steps on digits are to show nothing that is not exact."""
    return [not_demanded(claim) for claim in claims] if config.data == "digits" else list(claims)


def judge_coincidence(
    label: str, source: Source, *, decay: Sequence[Arrays], other: Sequence[Arrays], late: Window
) -> list[Claim]:
    """Claims that two runs end with the same accuracy and loss, seed by seed."""
    pairs = list(zip(decay, other, strict=True))
    return [
        mean_near(
            f"{label}: test accuracy less that with weight decay, steps {late[0]} to {late[1]}",
            source,
            expected=0.0,
            values=[mean_in(b, "test_accuracy", late) - mean_in(a, "test_accuracy", late) for a, b in pairs],
            absolute=SAME_ACCURACY,
            unit=POINTS,
        ),
        mean_near(
            f"{label}: training loss over that with weight decay, the same steps",
            source,
            expected=1.0,
            values=[mean_in(b, "loss", late) / mean_in(a, "loss", late) for a, b in pairs],
            absolute=SAME_LOSS,
        ),
    ]


def judge_rounding(
    label: str, source: Source, *, decay: Sequence[Arrays], other: Sequence[Arrays], rounded: Sequence[Arrays]
) -> Claim:
    """The claim that two runs are together all along, as well as float32 lets any two runs be."""
    apart = [
        difference(a, b, "loss") / difference(a, twin, "loss") for a, b, twin in zip(decay, other, rounded, strict=True)
    ]
    return mean_at_most(
        f"{label}: root mean square difference of the training loss from that with weight decay, over what one "
        "rounding of the first weights makes of it",
        source,
        bound=AS_ROUNDING,
        values=apart,
    )
