"""Lightning's transformer example: a post-norm encoder-decoder as a language model, SGD by the trainer."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from equilibria.integrations.lightning import EquilibriaCallback
from equilibria.watching import WatchedRun
from tests.helpers.scripts import assert_nothing_alarming, text, words

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # Lightning's advice about speed
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),  # Lightning 2.6 on torch 2.13
]

LENGTH, BATCHES = 10, 60


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.Linear(16, 16)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.decoder(self.transformer(self.embedding(inputs), self.embedding(targets), tgt_mask=mask))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self(inputs, inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(*callbacks: pl.Callback) -> nn.Module:
    pl.seed_everything(0, verbose=False)
    tokens = text(8 * BATCHES * LENGTH + 1, 16)
    data = TensorDataset(tokens[:-1].view(-1, LENGTH), tokens[1:].view(-1, LENGTH))
    model = Model()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=8))
    return model


def trained_twice() -> WatchedRun:
    callback = EquilibriaCallback(every=1, summary=False)
    plain, watched = train(), train(callback)
    states = plain.state_dict(), watched.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert callback.monitor is not None and callback.monitor.failure is None
    return callback.monitor


def test_an_embedding_without_decay_is_not_called_invariant():
    run = trained_twice()
    assert_nothing_alarming(run)
    assert run.findings() == ()
    assert "give it weight decay" not in words(run.findings())
    assert run.metrics()["name"].to_pylist() == ["loss"] * BATCHES
