"""A small network learns handwritten digits, watched into TensorBoard: `python examples/tensorboard_digits.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits_network import batches, loss_of, make_network, make_optimizer
from torch.utils.tensorboard import SummaryWriter

import equilibria as eq
from equilibria.integrations.tensorboard import TensorBoardSink


def main(folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    network = make_network()
    optimizer = make_optimizer(network)
    writer = SummaryWriter(str(folder / "tensorboard"))
    with eq.watch(network, optimizer, log_dir=folder / "run", every=4, sinks=[TensorBoardSink(writer)]) as monitor:
        for epoch in range(epochs):
            for images, labels in batches():
                loss = loss_of(network, images, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            writer.add_scalar("loss", loss.item(), epoch)  # your own steps stay yours
    writer.close()
    print(monitor.table())
    print(f"tensorboard --logdir {folder / 'tensorboard'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/tensorboard_digits"))
    parser.add_argument("--epochs", type=int, default=60)
    given = parser.parse_args()
    main(given.folder, given.epochs)
