"""The trainings of the `paper` scales of the noisy Rayleigh quotient's networks, with the source of each setting."""

from __future__ import annotations

from equilibria.lab.papers.nrq import fig3_networks as networks
from equilibria.lab.papers.nrq import fig4_imagenet as imagenet
from equilibria.lab.papers.nrq.fig3_networks import ADJUSTED, BASE, Config, LineSettings
from equilibria.lab.papers.presets import BIAS, CONTROL, LINEAR, NORMS, SCHEDULE, Preset, Settings
from equilibria.lab.papers.smd.presets import CIFAR, GOYAL, IMAGENET, SILENT, cifar_schedule, rates, sgd

_LINES = "the text does not state the numbers of its lines"

_CONVOLUTIONS_ALONE = (
    "The lines differ in learning rate, weight decay and first weights of the convolutions alone; the other parameters "
    "have one learning rate. The paper names the convolutions for the first weights, but not for the rates."
)
DIFFERENCES = {
    "nrq-networks": (
        f"Fig. 3: {_LINES} but those of (e)-(h). Ours have one lr wd, lr over a factor of 25, and corollary 3's rates.",
        _CONVOLUTIONS_ALONE,
        "In (e)-(h) all weights are divided by 5^(1/4) at epoch 60. Those panels are `smd-pseudo-overfitting`, which "
        "divides the scale-invariant weights, and at epochs 120 and 160 too.",
    ),
    "nrq-imagenet": (f"Fig. 4: {_LINES}.", _CONVOLUTIONS_ALONE),
}
"""What differs from the paper, by experiment."""


def presets() -> tuple[Preset, ...]:
    """All of them."""
    small, large = networks.EXPERIMENT.config("paper"), imagenet.EXPERIMENT.config("paper")
    return (
        *(_preset("nrq-networks", small, line, _cifar(line)) for line in small.lines),
        *(_preset("nrq-imagenet", large, line, _imagenet(line)) for line in large.lines),
    )


def _preset(experiment: str, config: Config, line: LineSettings, settings: Settings) -> Preset:
    return Preset(
        experiment,
        line.name,
        lambda images: networks.recipe(config, line, seed=config.seeds[0], images=images),
        settings,
    )


def _first_weights(line: LineSettings) -> Settings:
    return {
        "first weights": (
            "He, by inputs" if line.scale == 1 else "He, by inputs, times 10",
            "fig. 3 (i)-(l): deviation (2 / p)^(1/2), and times 10",
        )
    }


def _cifar(line: LineSettings) -> Settings:
    source = "fig. 3 (e)-(h)" if line.name == BASE else "corollary 3: (k, k^2, 1 / k^2), k = 10; or the same product"
    return {
        **CIFAR,
        **cifar_schedule("§4"),
        **rates(line.lr, source, line.weight_decay, source, others=0.5),
        **sgd(0.0, "§4: no momentum"),
        **_first_weights(line),
        "network": ("BasicBlockResNet", "§4: ResNet-18"),
        CONTROL: (False, "fig. 3 (a)-(d), (i)-(l)"),
    }


def _imagenet(line: LineSettings) -> Settings:
    by_line = "corollary 3: k = 10" if line.name == ADJUSTED else "as in figure 3"
    source = "§4: LR is initialised as 1" if line.name == BASE else f"fig. 4: {_LINES}; {by_line}"
    decay = f"{GOYAL}, which §4 follows" if line.name == BASE else f"fig. 4: {_LINES}; {by_line}"
    epochs = {epoch * 5004: factor for epoch, factor in ((0, 1.0), (30, 0.1), (60, 0.01), (80, 0.001))}
    return {
        **IMAGENET,
        **sgd(0.0, "§4: momentum is 0"),
        **_first_weights(line),
        **rates(line.lr, source, line.weight_decay, decay, others=1.0),
        **dict.fromkeys((f"weight decay {LINEAR}", f"weight decay {BIAS}"), (1e-4, f"{GOYAL}; the same for all lines")),
        f"weight decay {NORMS}": (0.0, f"{GOYAL}: none for the BN coefficients"),
        SCHEDULE: (epochs, f"{GOYAL}: divided by 10 at epochs 30, 60, 80"),
        "network": ("BottleneckResNet", "fig. 4: ResNet-50"),
        CONTROL: (False, f"{SILENT} for fig. 4"),
    }
