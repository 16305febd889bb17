"""Tasks that are a seed each, of a training on images."""

from __future__ import annotations

from typing import Protocol

from equilibria.lab.papers.smd.image_training import Images, load


class Seeded(Protocol):
    """Settings of such an experiment."""

    @property
    def images(self) -> Images:
        """What is trained on."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """One training each."""


def key(seed: int) -> str:
    """Name of a task."""
    return f"seed-{seed}"


def tasks(config: Seeded) -> dict[str, int]:
    """Seeds."""
    return {key(seed): seed for seed in config.seeds}


def needs(config: Seeded) -> object:
    """Loads the images."""
    return load(config.images)
