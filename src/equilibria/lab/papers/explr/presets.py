"""The trainings of the `paper` scales of the exponential learning rates, with the source of each setting."""

from __future__ import annotations

from equilibria.lab.harness.registry import load
from equilibria.lab.papers.explr import trainings
from equilibria.lab.papers.explr.trainings import COSINE, DECAY, EPOCH, ROUNDED, Setting, Variant
from equilibria.lab.papers.presets import CONTROL, SCHEDULE, Preset, Settings

_SILENT = "not stated"
_TORCH = f"{_SILENT}; torch's default"
_EXPERIMENTS = {
    "explr-constant": "fig. 1",
    "explr-stepdecay": "fig. 2",
    "explr-v2": "fig. 3",
    "explr-cosine": "fig. 4",
    "explr-angle": "fig. 5",
}

DIFFERENCES = dict.fromkeys(
    _EXPERIMENTS,
    (
        "§4 fixes the scales and shifts of BatchNorm and the last linear layer. Here BatchNorms have no scales and "
        "shifts, except in two shortcuts, where they are trained; the linear layer is trained, with a BatchNorm of "
        "fixed scale behind it. All parameters are scale-invariant jointly, and all decay.",
        "The last 80 images of an epoch are left out: 390 steps, in which the learning rate grows by 1.480. The "
        "paper's 1.481 are 391 steps.",
    ),
)
"""What differs from the paper, by experiment."""


def presets() -> tuple[Preset, ...]:
    """All of them."""
    configs = {name: load(name).config("paper") for name in _EXPERIMENTS}
    return tuple(_preset(name, config, variant) for name, config in configs.items() for variant in config.variants)


def _preset(experiment: str, config: Setting, variant: Variant) -> Preset:
    return Preset(
        experiment,
        variant.name,
        lambda images: trainings.recipe(config, variant, seed=config.seeds[0], images=images),
        _settings(_EXPERIMENTS[experiment], config, variant),
    )


def _settings(figure: str, config: Setting, variant: Variant) -> Settings:
    changed = variant.raises_decay or variant.keeps_lr
    return {
        "network": ("PreActivationResNet", f"{figure}: PreResNet-32, of which §4 fixes what is not invariant"),
        "parameters": (464_624, "no scales and shifts but those of two shortcuts"),
        "first weights": ("torch's", _TORCH),
        "BatchNorms that begin at 0": (0, _TORCH),
        "BatchNorm's momentum": (0.1, _TORCH),
        "BatchNorm's eps": (1e-5, _TORCH),
        "dropout": (0.0, _SILENT),
        "optimizer": ("SGD", "§4"),
        "momentum": (0.9, "§4"),
        "dampening": (0, "eq. (1)"),
        "nesterov": (False, "eq. (1)"),
        "lr": (0.1, "§4"),
        "weight decay": (5e-4, "fig. 5; of the run that the exponential lr replaces"),
        SCHEDULE: _schedule(figure, config, variant),
        "steps": (config.steps, f"{figure}: {config.steps // EPOCH} epochs"),
        "images in a batch": (128, "growth by 1.481 in an epoch of 391 steps, fig. 1"),
        "images that a BatchNorm sees": (128, "growth by 1.481 in an epoch of 391 steps, fig. 1"),
        "augmentation": ({"flip": True, "crop": 4}, f"{_SILENT}; the usual one"),
        "loss": ("cross_entropy", _SILENT),
        CONTROL: (
            variant.way not in (DECAY, ROUNDED) or changed,
            "theorem 2.5: the exponential schedule in place of weight decay" if not changed else figure,
        ),
    }


def _schedule(figure: str, config: Setting, variant: Variant) -> tuple[dict[int, float], str]:
    if variant.schedule == COSINE:
        return {0: 1.0, config.steps // 2: 0.5}, "eq. (8), once per epoch"
    if variant.keeps_lr:
        return {0: 1.0}, f"{figure}: weight decay falls in its place"
    drops = {drop: variant.divisor**-power for power, drop in enumerate(variant.drops_at, 1)}
    epochs = ", ".join(str(drop // EPOCH) for drop in variant.drops_at)
    return {0: 1.0, **{step: float(f"{factor:.4g}") for step, factor in drops.items()}}, (
        f"{figure}: divided by 10 at epochs {epochs}" if epochs else f"{figure}: the first phase"
    )
