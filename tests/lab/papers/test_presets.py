"""Every training of a paper's scale: its hyper-parameters are those of the table with their sources, and it starts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from equilibria.lab.data import Batches, ImageSet
from equilibria.lab.harness.registry import MODULES, load
from equilibria.lab.papers.presets import Preset, facts, presets
from equilibria.lab.training import train
from equilibria.theory.stability import effective_lr

PRESETS = presets()
PIXELS = ("smd-fixed-lr", "smd-correlation", "smd-multistage", "smd-noise", "smd-linear-scaling", "smd-architectures")
ON_PIXELS = (*PIXELS, "nrq-imagenet")


def stand_in(preset: Preset, *, count: int = 4096) -> ImageSet:
    """As many images as a batch needs, shaped like the real ones, in the memory of one."""
    generator = torch.Generator().manual_seed(0)
    if preset.experiment in ON_PIXELS:
        image = torch.randint(256, (1, 3, 256, 256), generator=generator, dtype=torch.uint8)
        labels, names = torch.arange(count) % 1000, tuple(map(str, range(1000)))
        return ImageSet(image.expand(count, -1, -1, -1), labels, image, labels[:1], names, "random")
    if preset.experiment.startswith("sharp"):
        count = 40
    images, labels = torch.randn(1, 3, 32, 32, generator=generator).expand(count, -1, -1, -1), torch.arange(count) % 10
    return ImageSet(images, labels, images[:10], labels[:10], tuple("abcdefghij"), "random")


FIRST = {preset.experiment: preset.name for preset in reversed(PRESETS)}  # one training of each in `make test`
CASES = [
    pytest.param(
        preset,
        id=f"{preset.experiment} {preset.name}",
        marks=() if FIRST[preset.experiment] == preset.name else pytest.mark.slow,
    )
    for preset in PRESETS
]


@pytest.mark.parametrize("preset", CASES)
def test_the_recipe_is_the_table(preset, monkeypatch):
    monkeypatch.setattr("equilibria.lab.papers.sharp.full_batch.invariant_part", lambda *_: None)  # minutes
    found = facts(preset.recipe(stand_in(preset)), preset.steps)
    assert found == {name: value for name, (value, _) in preset.settings.items()}
    assert all(source for _, source in preset.settings.values())


def test_every_experiment_on_networks_with_a_papers_scale_has_presets():
    of_papers = [load(name) for name, module in MODULES.items() if module.startswith("papers")]
    wanted = {one.id for one in of_papers if one.kind == "networks" and "paper" in one.scales}
    assert {preset.experiment for preset in PRESETS} == wanted


NETWORKS = {(preset.experiment, preset.settings["network"]): preset for preset in reversed(PRESETS)}.values()


@pytest.mark.parametrize("preset", NETWORKS, ids=lambda preset: f"{preset.experiment} {preset.name}")
@pytest.mark.slow
def test_the_network_takes_its_first_steps_at_full_size(preset, monkeypatch):
    """From a loss of ln(classes), with images as large as the real ones; 8 of them make a batch."""
    monkeypatch.setattr("equilibria.lab.papers.sharp.full_batch.invariant_part", lambda *_: None)
    made = preset.recipe(stand_in(preset))
    data = made.data
    if isinstance(data, Batches):
        augmented = {"flip": data.flip, "crop": data.crop, "resized": data.resized}
        data = Batches(data.images[:8], data.labels[:8], batch_size=8, classes=data.classes, **augmented)
    chunk = 4 if made.chunk else None
    small = replace(
        made, data=data, chunk=chunk, steps=2, measures={}, measure_every=1, watch_every=1, watch_select=None
    )
    trained = train(small)
    classes = 1000 if preset.experiment in ON_PIXELS else 10
    assert 0.7 < trained.curves["loss"][1] / math.log(classes) < 1.6
    assert np.isfinite(trained.curves["loss"][1:]).all()
    assert all(bool(torch.isfinite(param).all()) for param in trained.model.parameters())


# ---- first weights of the sharpness paper's networks


@pytest.mark.parametrize(
    ("experiment", "name", "squares"),
    [
        # A convolution: kernel^2 in out * 2 / (kernel^2 out), twice its inputs; linear layers: 0.01^2, or 1 / (3 in).
        ("sharp-vgg", "decay", 2 * (3 + 64 + 128 + 256 + 256 + 512 + 512 + 512) + 512 * 10 * 1e-4),
        (
            "sharp-resnet",
            "scale-invariant",
            2 * (3 + 16 * 6 + 16 + 32 * 5 + 32 + 64 * 5 + 16 + 32) + 10 / 3 + 32 + 64,  # and scales of two shortcuts
        ),
    ],
)
def test_two_over_the_effective_lr_begins_where_the_cited_first_weights_put_it(experiment, name, squares):
    (preset,) = [each for each in PRESETS if (each.experiment, each.name) == (experiment, name)]
    torch.manual_seed(0)
    model = preset.recipe(stand_in(preset)).model()
    norm_sq = sum(float(param.detach().double().square().sum()) for param in model.parameters())
    assert norm_sq == pytest.approx(squares, rel=0.01)
    begins = 2 / effective_lr(0.1, 5e-4, norm_sq=norm_sq)
    if experiment == "sharp-vgg":  # with torch's first weights each convolution has out / 3
        torchs = (64 + 128 + 2 * 256 + 4 * 512 + 10) / 3
        assert begins == pytest.approx(8.97e4, rel=0.01)
        assert norm_sq / torchs == pytest.approx(4.9, abs=0.1)
