"""Trainings of explr-stepdecay: those of figure 2, and some that drop the learning rate before rounding matters."""

from __future__ import annotations

from dataclasses import replace

from equilibria.experiments.experiment import Arrays
from equilibria.experiments.explr import networks
from equilibria.experiments.explr.networks import DECAY, FOLDED, ROUNDED, TEXP, Setting, Variant

_ACROSS = "across"
DROP = 3
"""The step of the early drop: two more are taken before rounding parts two runs."""
_STEPS = 6


def variants(*drops_at: int) -> tuple[Variant, ...]:
    """The four runs for drops at these steps."""
    return tuple(Variant(way, way, drops_at=drops_at) for way in (DECAY, FOLDED, TEXP, ROUNDED))


def across(config: Setting) -> Setting:
    """The first steps alone, with a drop among them, every one of them watched."""
    return replace(config, variants=variants(DROP)[:3], steps=_STEPS, epoch=_STEPS, watch_every=1)


def across_key(variant: Variant, seed: int) -> str:
    """Name of a task across the drop."""
    return f"{_ACROSS}-{networks.key(variant, seed)}"


Task = tuple[str, tuple[int, int]]


def tasks(config: Setting) -> dict[str, Task]:
    """Which of the two settings, and the task in it."""
    few = across(config)
    return {
        **{key: ("", task) for key, task in networks.tasks(config).items()},
        **{
            across_key(variant, seed): (_ACROSS, (at, seed))
            for at, variant in enumerate(few.variants)
            for seed in few.seeds
        },
    }


def run_task(config: Setting, task: Task) -> Arrays:
    """One training."""
    which, within = task
    return networks.run_task(across(config) if which == _ACROSS else config, within)
