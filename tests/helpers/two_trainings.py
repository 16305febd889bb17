"""A training in two processes, for `tests.helpers.ranks`; the test trains the same in one."""

from __future__ import annotations

import contextlib
import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from equilibria.errors import EquilibriaError
from equilibria.lab.data import load_digits
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd
from equilibria.lab.training import Recipe, Trained, train
from tests.helpers.training_cases import StoppedError, stop_at

STEPS = 6


def recipe() -> Recipe:
    """Ghost batches of 8 images, a warm-up and a drop with rescaled weights, as the presets have."""
    training = ImageTraining(
        images=Images("digits", flip=False, resized=False, label_noise=0.1),
        network=Network(width=4, blocks=(1,)),
        sgd=Sgd("SGDM", lr=0.1, weight_decay=5e-3, other_lr=0.1, momentum=0.9, other_decay=1e-3),
        batch_size=32,
        steps=STEPS,
        drops=(4,),
        rescale=True,
        ghost=8,
        warm_up=2,
        warm_up_from=0.25,
        watch_every=1,
        measure_every=3,
    )
    digits = load_digits()
    return trainings.recipe(training, digits, seed=3)


def numbers(trained: Trained) -> dict[str, object]:
    """Weights (not running statistics, which are one process's), curves and angles."""
    weights = {name: param.detach().clone() for name, param in trained.model.named_parameters()}
    angles = [] if trained.samples is None else trained.samples["angle"].to_pylist()
    return {"weights": weights, "loss": trained.curves["loss"][1:].tolist(), "angles": angles}


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    whole = train(recipe(), folder=folder / "whole")
    with contextlib.suppress(StoppedError):
        train(recipe(), folder=folder / "resumed", checkpoint_steps=1, progress=stop_at(3))
    resumed = train(recipe(), folder=folder / "resumed")
    try:
        train(trainings_without_share())
        refused = ""
    except EquilibriaError as error:
        refused = str(error)
    found = {"whole": numbers(whole), "resumed": numbers(resumed), "refused": refused, "covers": whole.covers}
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def trainings_without_share() -> Recipe:
    from dataclasses import replace

    digits = load_digits()
    data = trainings.batches(Images("digits", flip=False), digits, batch_size=32, seed=3)
    return replace(recipe(), data=data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
