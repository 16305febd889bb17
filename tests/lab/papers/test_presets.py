"""Every training of a paper's scale: its hyper-parameters are those of the table with their sources, and it starts."""

from __future__ import annotations

import pytest
import torch

from equilibria.lab.data import ImageSet
from equilibria.lab.harness.registry import MODULES, load
from equilibria.lab.papers.presets import Preset, facts, presets

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
