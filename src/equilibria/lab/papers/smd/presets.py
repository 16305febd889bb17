"""The trainings of the `paper` scales of Spherical Motion Dynamics and its appendix, with their sources."""

from __future__ import annotations

from dataclasses import replace

from equilibria.lab.papers.presets import (
    BIAS,
    CONTROL,
    CONVOLUTIONS,
    LINEAR,
    NORMS,
    SCHEDULE,
    Preset,
    Settings,
    by_kind,
)
from equilibria.lab.papers.smd import fig2_fixed_lr as fixed_lr
from equilibria.lab.papers.smd import fig2d_correlation as correlation
from equilibria.lab.papers.smd import fig3_multistage as multistage
from equilibria.lab.papers.smd import fig7_linear_scaling as linear_scaling
from equilibria.lab.papers.smd import fig9_architectures as architectures
from equilibria.lab.papers.smd import plus_app_e_momentum as momentum
from equilibria.lab.papers.smd import plus_app_f_pseudo_overfitting as pseudo_overfitting
from equilibria.lab.papers.smd import plus_fig1_noise as noise
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.trainings import IMAGENET_DROPS, IMAGENET_STEPS, ImageTraining

GOYAL = "Goyal et al. 2017, §5.1"
MEGVII = "Megvii's ShuffleNet-Series, ShuffleNetV2+"
SILENT = "not stated"
_TORCH = f"{SILENT}; torch's default"
_WINDOWS = {"flip": True, "resized": 224}


def groups(lr: float, lr_source: str, decay: float, decay_source: str) -> Settings:
    """One learning rate and weight decay for all but normalisations, which do not decay."""
    decays = {f"weight decay {kind}": (decay, decay_source) for kind in (CONVOLUTIONS, LINEAR, BIAS)}
    return {"lr": (lr, lr_source), **decays, f"weight decay {NORMS}": (0.0, f"{GOYAL}: none for the BN coefficients")}


def sgd(factor: float, source: str) -> Settings:
    """SGD with momentum, which multiplies the buffer and not the gradient."""
    return {
        "optimizer": ("SGD", source),
        "momentum": (factor, source),
        "dampening": (0, "smd, eq. (18)"),
        "nesterov": (
            False,
            f"smd, eq. (18): heavy ball; {GOYAL}, has Nesterov's, 'standard momentum is equally effective'",
        ),
    }


IMAGENET: Settings = {
    "network": ("BottleneckResNet", "§5: ResNet-50"),
    "parameters": (25_557_032, f"torchvision's count; strides in the 3x3 convolutions: {GOYAL}"),
    "first weights": ("He, by outputs", f"{GOYAL}: He; by outputs: fb.resnet.torch, its reference [12]"),
    "BatchNorms that begin at 0": (16, f"{GOYAL}: the last of every block"),
    "BatchNorm's momentum": (0.1, f"{GOYAL}: running averages with 0.9"),
    "BatchNorm's eps": (1e-5, _TORCH),
    "dropout": (0.0, f"{GOYAL}: none"),
    "steps": (IMAGENET_STEPS, f"{GOYAL}: 90 epochs, of 5,004 batches"),
    "images in a batch": (256, f"{GOYAL}: 8 workers of 32"),
    "images that a BatchNorm sees": (32, f"{GOYAL}: n = 32 throughout"),
    "augmentation": (_WINDOWS, f"{GOYAL}: scale and aspect ratio, flips"),
    "loss": ("cross_entropy", SILENT),
    CONTROL: (False, "§5.2"),
}
"""What all trainings of ResNet-50 share: section 5.2 follows Goyal et al. 'rigorously'."""
_THREE_DROPS = {
    SCHEDULE: (
        {0: 1.0, **dict(zip(IMAGENET_DROPS, (0.1, 0.01, 0.001), strict=True))},
        "§5.2, §C.3: divided by 10 at epochs 30, 60, 80",
    )
}
_ALL_ALONG = {SCHEDULE: ({0: 1.0}, "§5.1: fixed")}
_REST = f"{SILENT} in §5.1; {GOYAL}"
_FIXED: Settings = {
    **{name: (value, source.replace(GOYAL, _REST)) for name, (value, source) in IMAGENET.items()},
    "network": IMAGENET["network"],
    **_ALL_ALONG,
    **groups(0.2, "§5.1", 1e-4, "§5.1"),
}
_STAGES: Settings = {
    **IMAGENET,
    **_THREE_DROPS,
    **groups(0.1, "§5.2", 1e-4, f"§5.2; the linear layer too: {GOYAL}"),
    **sgd(0.9, "§5.2"),
}


_DETECTRON2 = f"{SILENT}; detectron2, configs/Base-RCNN-FPN.yaml"
_DEFAULTS = f"{SILENT}; detectron2, config/defaults.py"
MASK_RCNN: Settings = {
    "network": ("Mask R-CNN with FPN, ResNet-50", "§5.2; He et al. 2017; Lin et al. 2017"),
    "normalisation": ("SyncBN", "§5.2; Peng et al. 2018"),
    "data": ("COCO train2017; AP on val2017", "§5.2 says MSCOCO; the splits: detectron2, configs/Base-RCNN-FPN.yaml"),
    "optimizer": ("SGD", "§5.2"),
    "momentum": (0.9, _DEFAULTS),
    "nesterov": (False, _DEFAULTS),
    "lr": (0.02, "§5.2"),
    "warm-up": ("1,000 steps from lr / 1000, linear", _DEFAULTS),
    SCHEDULE: ({0: 1.0, 300_000: 0.1, 340_000: 0.01}, "§5.2"),
    "steps": (360_000, "§5.2: the '4x setting' of He et al. 2019"),
    "weight decay": (1e-4, "§5.2"),
    "weight decay of normalisations": (0.0, _DEFAULTS),
    "images in a batch": (16, f"{_DETECTRON2}, with this lr"),
    "pixels": ("shorter side 640 to 800, by 32", _DETECTRON2),
    "first weights": (
        "not known",
        f"{SILENT}; ImageNet's in detectron2, configs/Misc/mask_rcnn_R_50_FPN_3x_syncbn.yaml",
    ),
    "weights rescaled at drops": ("no; yes", "§5.2: both; weights divided by 10^(1/4)"),
    "box AP, AP50, AP75": ("39.25, 58.88, 42.95; rescaled 38.38, 57.98, 42.31", "table 2"),
    "mask AP, AP50, AP75": ("35.16, 56.09, 37.48; rescaled 34.49, 55.27, 36.71", "table 2"),
}
"""The detector of section 5.2, of which no training is built here: `smd-detection` trains a small one."""


def presets() -> tuple[Preset, ...]:
    """All of them."""
    return (*_fixed(), *_multistage(), *_linear_scaling(), *_architectures(), *_cifar())


def _preset(experiment: str, name: str, training: ImageTraining, settings: Settings) -> Preset:
    return Preset(experiment, name, lambda images: trainings.recipe(training, images, seed=0), settings)


def _fixed() -> list[Preset]:
    config, other = fixed_lr.EXPERIMENT.config("paper"), correlation.EXPERIMENT.config("paper")
    sgdm = {**_FIXED, **sgd(0.9, "§5.1")}
    return [
        _preset("smd-fixed-lr", "SGD", config.training(0), {**_FIXED, **sgd(0.0, "§5.1")}),
        _preset("smd-fixed-lr", "SGDM", config.training(1), sgdm),
        _preset("smd-correlation", "SGDM", other.training(other.batch_sizes[0]), sgdm),
    ]


def _multistage() -> list[Preset]:
    training = multistage.EXPERIMENT.config("paper").training()
    rescaled = {
        **_STAGES,
        CONTROL: (True, "§5.2: weights divided by 10^(1/4); the buffer and BatchNorm's statistics too: ours"),
    }
    return [
        _preset("smd-multistage", "standard", training, _STAGES),
        _preset("smd-multistage", "rescaled", replace(training, rescale=True), rescaled),
        _preset("smd-noise", "SGDM", noise.EXPERIMENT.config("paper").training(), _STAGES),
    ]


def _linear_scaling() -> list[Preset]:
    config = linear_scaling.EXPERIMENT.config("paper")
    found = []
    for place, rule in enumerate(config.rules):
        source = "§C.3 prints 10^-4; §5.2 has 0.9" if rule.momentum else "§C.3: 'pure SGD', whose lr is not stated"
        for factor in config.factors:
            drops = {drop // factor: 0.1**power for power, drop in enumerate(IMAGENET_DROPS, 1)}
            growth = {0: 1 / factor, 5 * trainings.IMAGENET_EPOCH // factor: 1.0} if factor > 1 else {0: 1.0}
            settings: Settings = {
                **IMAGENET,
                **groups(0.1 * factor, "§C.3: 0.1 B / 256", 1e-4, "§C.3"),
                **sgd(rule.momentum, source),
                SCHEDULE: (
                    {**growth, **{step: float(f"{value:.4g}") for step, value in drops.items()}},
                    "§C.3: divided by 10 at epochs 30, 60, 80"
                    + ("; Goyal et al., §2.2, 5.2: from 0.1 on, linearly over 5 epochs" if factor > 1 else ""),
                ),
                "steps": (IMAGENET_STEPS // factor, "§C.3: 90 epochs"),
                "images in a batch": (256 * factor, "§C.3, fig. 7"),
            }
            name = f"{rule.name} {256 * factor}"
            found.append(_preset("smd-linear-scaling", name, config.training(place, factor), settings))
    return found


def _architectures() -> list[Preset]:
    config = architectures.EXPERIMENT.config("paper")
    shared: Settings = {
        **IMAGENET,
        **groups(0.5, "fig. 9", 4e-5, f"fig. 9; all but BatchNorm: {SILENT}; {GOYAL}"),
        **sgd(0.9, "fig. 9"),
        SCHEDULE: (
            {0: 1.0, **dict(zip((drop // 4 for drop in IMAGENET_DROPS), (0.1, 0.01, 0.001), strict=True))},
            "fig. 9: divided by 10 at epochs 30, 60, 80",
        ),
        "steps": (IMAGENET_STEPS // 4, f"90 epochs: {SILENT}; {GOYAL}"),
        "BatchNorms that begin at 0": (0, f"{SILENT}; {MEGVII}"),
        "BatchNorm's momentum": (0.1, f"{SILENT}; {MEGVII}, torch's default"),
        "images in a batch": (1024, f"{SILENT}; {MEGVII}, which has this lr and weight decay"),
        "images that a BatchNorm sees": (128, f"{SILENT}; eight workers"),
        "augmentation": (_WINDOWS, f"{SILENT}; {MEGVII}, which varies colours too"),
        "loss": ("cross_entropy", f"{SILENT}; {MEGVII}, smooths labels by 0.1"),
        "dropout": (0.2, f"{SILENT}; {MEGVII}, and torchvision's MobileNet-V2"),
    }
    plus = {name: value for name, value in shared.items() if BIAS not in name}
    return [
        _preset(
            "smd-architectures",
            "MobileNet-V2",
            config.training(0),
            {
                **shared,
                "network": ("PublishedMobileNetV2", "Sandler et al. 2018, table 2"),
                "parameters": (3_504_872, "torchvision's count; table 4 of Sandler et al.: 3.4 M"),
                "first weights": ("He, by outputs", f"{SILENT}; torchvision"),
            },
        ),
        _preset(
            "smd-architectures",
            "ShuffleNet-V2+",
            config.training(1),
            {
                **plus,
                "network": ("ShuffleNetV2Plus", f"{MEGVII}; its size, large: {SILENT}; the default there"),
                "parameters": (6_768_220, f"{MEGVII}: 6.7 M"),
                "first weights": ("its own", f"{MEGVII}: deviation 1 / inputs; 0.01 for stem, gates and linear layers"),
            },
        ),
    ]


CIFAR: Settings = {
    "network": ("BasicBlockResNet", "appendix F: ResNet-18"),
    "parameters": (11_173_962, "the usual form for 32x32 pixels: a 3x3 stem, no pooling"),
    "first weights": ("torch's", _TORCH),
    "BatchNorms that begin at 0": (0, _TORCH),
    "BatchNorm's momentum": (0.1, _TORCH),
    "BatchNorm's eps": (1e-5, _TORCH),
    "dropout": (0.0, SILENT),
    "augmentation": ({"flip": True, "crop": 4}, f"{SILENT}; the usual one"),
    "loss": ("cross_entropy", SILENT),
    CONTROL: (False, "figure 3 of nrq: with and without"),
    **{f"weight decay {kind}": (0.0, f"{SILENT}; here convolutions alone decay") for kind in (LINEAR, BIAS, NORMS)},
}
"""What all trainings of ResNet-18 on CIFAR-10 share."""


def rates(lr: float, lr_source: str, decay: float, decay_source: str, *, others: float) -> Settings:
    """Learning rates, and the weight decay of convolutions."""
    other_rates = dict.fromkeys((LINEAR, BIAS, NORMS), (others, f"{SILENT} apart"))
    return {
        **by_kind("lr", {CONVOLUTIONS: (lr, lr_source), **(other_rates if others != lr else {})}),
        f"weight decay {CONVOLUTIONS}": (decay, decay_source),
    }


CIFAR_EPOCH = 195  # batches of 256 among 50,000 images, the last one left out


def cifar_schedule(source: str) -> Settings:
    """Divided by 5 three times in 200 epochs."""
    steps = {epoch * CIFAR_EPOCH: factor for epoch, factor in ((0, 1.0), (60, 0.2), (120, 0.04), (160, 0.008))}
    return {
        SCHEDULE: (steps, f"{source}: divided by 5 at epochs 60, 120, 160"),
        "steps": (200 * CIFAR_EPOCH, f"{source}: 200 epochs"),
        "images in a batch": (256, "nrq, §4"),
        "images that a BatchNorm sees": (256, "nrq, §4"),
    }


def _cifar() -> list[Preset]:
    return [*_pseudo_overfitting(), *_momentum()]


def _pseudo_overfitting() -> list[Preset]:
    config = pseudo_overfitting.EXPERIMENT.config("paper")
    own = {
        "SGD": {**rates(0.5, "nrq, fig. 3 (e)-(h)", 1e-3, "nrq, fig. 3", others=0.5), **sgd(0.0, "nrq, §4")},
        "SGDM": {**rates(0.1, "appendix F", 5e-4, "appendix F", others=0.1), **sgd(0.9, "appendix F")},
        "Adam": {
            **rates(1e-3, "appendix F", 5e-4, "appendix F", others=1e-3),
            "optimizer": ("Adam", "appendix F"),
            "betas": ((0.9, 0.999), "appendix F"),
            "eps": (1e-8, _TORCH),
        },
    }
    found = []
    for rule in config.rules:
        source = "nrq, §4" if rule.name == "SGD" else "appendix F"
        settings = {**CIFAR, **cifar_schedule(source), **own[rule.name]}
        for rescale in (False, True):
            kind = {CONTROL: (rescale, "nrq, fig. 3 (e)-(h)")}
            found.append(
                Preset(
                    "smd-pseudo-overfitting",
                    f"{rule.name} rescaled" if rescale else rule.name,
                    lambda images, rule=rule, rescale=rescale: pseudo_overfitting.recipe(  # type: ignore[misc]
                        config, rule, seed=20, images=images, steps=config.steps, rescale=rescale
                    ),
                    {**settings, **kind},
                )
            )
    return found


def _momentum() -> list[Preset]:
    config, ours = momentum.EXPERIMENT.config("paper"), "ours: appendix E gives no settings"
    return [
        Preset(
            "smd-momentum",
            f"momentum {factor:g}",
            lambda images, factor=factor: trainings.recipe(config.training(factor), images, seed=70),  # type: ignore[misc]
            {
                **CIFAR,
                **rates(0.1, ours, 5e-4, ours, others=0.1 * (1 - factor)),
                **sgd(factor, ours),
                SCHEDULE: ({0: 1.0}, ours),
                "steps": (200 * 390, ours),
                "images in a batch": (128, ours),
                "images that a BatchNorm sees": (128, ours),
                CONTROL: (False, ours),
            },
        )
        for factor in config.momenta
    ]
