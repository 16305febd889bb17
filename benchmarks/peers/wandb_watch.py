"""wandb.watch: histograms of gradients and weights. Offline, into a folder that is removed afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peers.bench import Bench, Step, Watcher


def watching(**settings: Any) -> Watcher:
    """With these settings of ``watch``; none: its default, gradients alone every 1000 steps.

    Two at a time share one run, for the hooks of ``watch`` write to the one of the process.
    """

    @contextmanager
    def attach(bench: Bench) -> Iterator[Step]:
        import wandb

        with tempfile.TemporaryDirectory() as folder:
            run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
            run.watch(bench.model, **settings)

            def step() -> None:
                bench.step()
                run.log({"step": 1})

            yield step
            run.finish()

    return attach
