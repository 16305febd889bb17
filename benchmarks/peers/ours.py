"""equilibria, as its documentation shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

import equilibria as eq
from peers.bench import Bench, Step, Watcher
from peers.eigenvalue import Answer, Batch


def watched(every: int | str) -> Watcher:
    @contextmanager
    def attach(bench: Bench) -> Iterator[Step]:
        with eq.watch(bench.model, bench.optimizer, every=every):
            yield bench.step

    return attach


def sharpness(net: nn.Module, batch: Batch, start: int) -> Answer:
    found = eq.sharpness(eq.objective(net, functional.cross_entropy), batch, seed=start)
    return Answer(found.value, found.hvps)


def scale_invariant(net: nn.Module, batch: Batch) -> tuple[set[str], int]:
    """Tensors that are invariant alone, and the backward passes it took."""
    found = eq.symmetries(eq.objective(net, functional.cross_entropy), [batch])
    return set(found.alone), found.probes


class LastStep:
    """Update norm and angle of the last step, by name."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._run = eq.watch(model, optimizer, every=1)

    def read(self) -> dict[str, tuple[float, float]]:
        table = self._run.samples().to_pylist()
        newest = max(row["step"] for row in table)
        return {row["param"]: (row["update_norm"], row["angle"]) for row in table if row["step"] == newest}

    def close(self) -> None:
        self._run.close()
