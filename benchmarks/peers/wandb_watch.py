"""wandb.watch: histograms of gradients and weights. Offline, into a folder that is removed afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from peers.bench import Bench, Step


@contextmanager
def attach(bench: Bench) -> Iterator[Step]:
    """log="all" at every step; its default is gradients alone, every 1000 steps."""
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        run.watch(bench.model, log="all", log_freq=1)

        def step() -> None:
            bench.step()
            run.log({"step": 1})

        yield step
        run.finish()
