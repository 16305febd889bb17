"""The same training, watched into an MLflow run in a folder: `python examples/mlflow_local.py`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import mlflow
import torch
from digits_network import batches, loss_of, make_network, make_optimizer

import equilibria as eq
from equilibria.integrations.mlflow import MLflowSink


def main(folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    network = make_network()
    optimizer = make_optimizer(network)
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files need no server and no database
    mlflow.set_tracking_uri((folder / "mlflow").resolve().as_uri())
    monitor = eq.watch(network, optimizer, log_dir=folder / "run", every=4, sinks=[MLflowSink()])
    with mlflow.start_run() as run, monitor:
        for epoch in range(epochs):
            for images, labels in batches():
                loss = loss_of(network, images, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            mlflow.log_metric("loss", loss.item(), step=epoch)
    print(monitor.table())
    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    print(f"{sum(name.startswith('equilibria/') for name in metrics)} metrics of ours in run {run.info.run_id}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/mlflow_local"))
    parser.add_argument("--epochs", type=int, default=60)
    given = parser.parse_args()
    main(given.folder, given.epochs)
