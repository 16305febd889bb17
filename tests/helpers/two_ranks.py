"""One of two processes that train together, watched; what it has to say is written to a file by the test's loggers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import equilibria as eq
from equilibria.integrations.tensorboard import TensorBoardSink
from tests.helpers.logged import sgd
from tests.helpers.watched_worlds import make_net, train

STEPS = 5


def plain(folder: Path) -> int:
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(make_net())
    optimizer = sgd(net)
    sinks = [TensorBoardSink(folder / "tensorboard")]
    with eq.watch(net, optimizer, every=1, log_dir=folder / "run", sinks=sinks) as monitor:
        train(net, optimizer, STEPS, seed=dist.get_rank())
    return monitor.step


def with_lightning(folder: Path) -> int:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import TensorBoardLogger

    from equilibria.integrations.lightning import EquilibriaCallback
    from tests.integrations.test_lightning import Classifier, data

    callback = EquilibriaCallback(folder / "run", every=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        callbacks=[callback],
        logger=TensorBoardLogger(folder, name="", version="tensorboard"),
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), data(2 * STEPS))
    assert callback.monitor is not None
    return callback.monitor.step


def with_transformers(folder: Path) -> int:
    from equilibria.integrations.transformers import EquilibriaCallback
    from tests.integrations.test_transformers import make_trainer

    sinks = [TensorBoardSink(folder / "tensorboard")]
    callback = EquilibriaCallback(folder / "run", every=1, sinks=sinks)
    make_trainer(folder / "out", callback, max_steps=STEPS, save_strategy="steps", save_steps=STEPS).train()
    assert callback.monitor is not None
    return callback.monitor.step


KINDS: dict[str, Callable[[Path], int]] = {
    "plain": plain,
    "lightning": with_lightning,
    "transformers": with_transformers,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[2]), os.environ["RANK"]
    steps = KINDS[sys.argv[1]](folder)
    (folder / f"{rank}.json").write_text(json.dumps({"steps": steps, "world": dist.get_world_size()}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
