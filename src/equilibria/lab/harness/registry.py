"""Every experiment by its id. Looking one up imports its module alone."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.experiment import KINDS, Experiment
from equilibria.lab.harness.results import Result

# id -> module below `equilibria.lab`, whose EXPERIMENT it is; the order of `equilibria reproduce --list`.
MODULES = {
    "smd-architectures": "papers.smd.fig9_architectures",
    "smd-correlation": "papers.smd.fig2d_correlation",
    "smd-detection": "papers.smd.fig3_detection",
    "smd-fixed-lr": "papers.smd.fig2_fixed_lr",
    "smd-linear-scaling": "papers.smd.fig7_linear_scaling",
    "smd-momentum": "papers.smd.plus_app_e_momentum",
    "smd-multistage": "papers.smd.fig3_multistage",
    "smd-noise": "papers.smd.plus_fig1_noise",
    "smd-pseudo-overfitting": "papers.smd.plus_app_f_pseudo_overfitting",
    "smd-rescale-law": "papers.smd.sec5_rescale_law",
    "smd-synthetic": "papers.smd.fig4_synthetic",
    "smd-transient": "papers.smd.cor3_transient",
    "nrq-bounds": "papers.nrq.thm1_bounds",
    "nrq-equilibrium": "papers.nrq.fig2_equilibrium",
    "nrq-escape": "papers.nrq.fig2_escape",
    "nrq-imagenet": "papers.nrq.fig4_imagenet",
    "nrq-initialization": "papers.nrq.fig2_initialization",
    "nrq-landscape": "papers.nrq.fig1_landscape",
    "nrq-networks": "papers.nrq.fig3_networks",
    "nrq-stationary": "papers.nrq.thm2_stationary",
    "explr-angle": "papers.explr.fig5_angle",
    "explr-constant": "papers.explr.fig1_constant",
    "explr-cosine": "papers.explr.fig4_cosine",
    "explr-equivalence": "papers.explr.thm2_equivalence",
    "explr-joint": "papers.explr.thm2_joint",
    "explr-norms": "papers.explr.thm_b_norms",
    "explr-stepdecay": "papers.explr.fig2_stepdecay",
    "explr-toy": "papers.explr.sec3_toy",
    "explr-v2": "papers.explr.fig3_v2",
    "sharp-3d": "papers.sharp.fig3_three_dimensions",
    "sharp-ablations": "papers.sharp.fig13_ablations",
    "sharp-completion": "papers.sharp.fig1_completion",
    "sharp-coverage": "papers.sharp.thm_c2_coverage",
    "sharp-gradient-flow": "papers.sharp.sec5_gradient_flow",
    "sharp-hamiltonian": "papers.sharp.fig5_hamiltonian",
    "sharp-pacbayes": "papers.sharp.app_c_pacbayes",
    "sharp-random-starts": "papers.sharp.thm4_6_random_starts",
    "sharp-regression": "papers.sharp.fig4_regression",
    "sharp-regression-rates": "papers.sharp.fig14_regression",
    "sharp-resnet": "papers.sharp.fig8_resnet",
    "sharp-rmsprop": "papers.sharp.cor_b14_rmsprop",
    "sharp-schedulers": "papers.sharp.thm_b7_schedulers",
    "sharp-vgg": "papers.sharp.fig2_vgg",
    "eq-diffusion": "beyond.diffusion",
    "eq-forecast": "beyond.forecast",
    "eq-optimizers": "beyond.optimizers",
    "eq-transformer": "beyond.transformer",
}
PRESETS = frozenset({"nrq-imagenet"})
"""Experiments without a desk scale."""
ALL = "all"
GROUPS = (ALL, *KINDS)
"""Words that stand for several experiments."""


def load(name: str) -> Experiment[Any]:
    """The experiment with this id; imports its module."""
    experiment: Experiment[Any] = importlib.import_module(f"equilibria.lab.{MODULES[name]}").EXPERIMENT
    return experiment


def experiments() -> dict[str, Experiment[Any]]:
    """All experiments by id; imports all of them."""
    return {name: load(name) for name in MODULES}


def find(ids: Sequence[str], *, scale: str = "") -> list[Experiment[Any]]:
    """The experiments with these ids, each once and in the order of the list.

    "all" stands for all experiments, "synthetic" for those of small problems, "networks" for those that train networks;
    with a scale, for those of them that have it.

    Raises:
        EquilibriaError: an id is unknown; the message suggests the nearest.
    """
    for name in ids:
        if name not in GROUPS and name not in MODULES:
            near = get_close_matches(name, [*MODULES, *GROUPS], n=1)
            advice = f"did you mean {near[0]}?" if near else "`equilibria reproduce --list` shows them"
            raise EquilibriaError(f"got the experiment {name!r}, which is unknown; {advice}")
    if set(ids) & set(GROUPS):
        chosen = [known for known in experiments().values() if {ALL, known.kind, known.id} & set(ids)]
        return [known for known in chosen if known.id in ids or not scale or scale in known.scales]
    return [load(name) for name in MODULES if name in ids]


def is_stale(result: Result) -> bool:
    """Whether the experiment has another version or other settings now; an unknown experiment is never stale."""
    if result.id not in MODULES:
        return False
    experiment = load(result.id)
    if result.scale not in experiment.scales:
        return False
    return result.fingerprint != experiment.fingerprint(experiment.scales[result.scale])
