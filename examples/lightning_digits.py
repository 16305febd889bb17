"""A Lightning module and one more callback: `python examples/lightning_digits.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from digits_network import batches, loss_of, make_network, make_optimizer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, optim

from equilibria.integrations.lightning import EquilibriaCallback


class DigitsModule(pl.LightningModule):
    """As people write them: nothing in here knows that it is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = loss_of(self.network, images, labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        return make_optimizer(self.network)


def main(folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[EquilibriaCallback(folder / "run", every=4)],  # tells what it found when the training ends
        logger=CSVLogger(folder),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    trainer.fit(DigitsModule(), batches())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning_digits"))
    parser.add_argument("--epochs", type=int, default=60)
    given = parser.parse_args()
    main(given.folder, given.epochs)
