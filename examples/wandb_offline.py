"""The same training, watched into a Weights & Biases run on this machine: `python examples/wandb_offline.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import wandb
from digits_network import batches, loss_of, make_network, make_optimizer

import equilibria as eq
from equilibria.integrations.wandb import WandbSink


def main(folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    network = make_network()
    optimizer = make_optimizer(network)
    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project="equilibria-examples", mode="offline", dir=folder)
    with eq.watch(network, optimizer, log_dir=folder / "run", every=4, sinks=[WandbSink(run)]) as monitor:
        for _ in range(epochs):
            for images, labels in batches():
                loss = loss_of(network, images, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log({"loss": loss.item()})  # the samples go into the same rows, over an axis of their own
    run.finish()
    print(monitor.table())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/wandb_offline"))
    parser.add_argument("--epochs", type=int, default=60)
    given = parser.parse_args()
    main(given.folder, given.epochs)
