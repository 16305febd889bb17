"""nrq-imagenet: ResNet-50 on ImageNet without momentum: equal lr * wd, and first weights of another scale (fig. 4).

The experiment of `fig3_networks` with the settings of figure 4; never run here at the paper's scale.
"""

from __future__ import annotations

from dataclasses import replace

from equilibria.lab.harness.experiment import NETWORKS, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.papers.nrq import fig3_networks as networks
from equilibria.lab.papers.nrq.fig3_networks import Config, lines


def collect(config: Config, results: TaskResults) -> Outcome:
    """The claims of figure 3, of figure 4."""
    outcome = networks.collect(config, results)
    return replace(
        outcome,
        claims=[
            replace(claim, source=replace(claim.source, where="fig. 4, section 4", corrected=""))
            for claim in outcome.claims
        ],
    )


def draw(config: Config, results: TaskResults) -> Figures:
    """The panels of figure 3."""
    return {"figure-4": networks.draw(config, results)["figure-3"]}


_EPOCH = 5004  # batches of 256 among 1,281,167 images, the last one left out
_PAPER = Config(
    lines=lines(1.0, 1e-4),
    seeds=(0, 1, 2),
    data="imagenet",
    size=224,
    width=64,
    blocks=(3, 4, 6, 3),
    batch_size=256,
    other_lr=1.0,
    other_decay=1e-4,
    resized=True,
    ghost=32,
    steps=90 * _EPOCH,
    drops_at=(30 * _EPOCH, 60 * _EPOCH, 80 * _EPOCH),
    divisor=10.0,
    early=(_EPOCH // 4, _EPOCH),
    settled=(20 * _EPOCH, 30 * _EPOCH),
    late=(85 * _EPOCH, 90 * _EPOCH),
    measure_every=_EPOCH // 4,
    watch_every=20,
    statistics=(0, 0),
    train_images=0,
)

EXPERIMENT = Experiment(
    id="nrq-imagenet",
    title="ResNet-50 on ImageNet at equal lr times weight decay, and with first weights times ten",
    source="nrq fig. 4",
    scales={"smoke": networks.EXPERIMENT.scales["smoke"], "paper": _PAPER},
    functions=(networks.tasks, networks.run_task, collect, draw),
    kind=NETWORKS,
    needs=networks.load,
)
