"""A small training that was watched, and logged and saved at every step as other tools do."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import equilibria as eq

STEPS, EVERY = 400, 50
WEIGHT_DECAY = 0.1


@dataclass
class Training:
    """The training, and what was logged of it.

    Attributes:
        folder: of the watched run ("watched") and of the checkpoints ("checkpoints").
        rows: a dictionary per step with ``_step``, ``lr``, ``train/loss`` and levanter's names of norms.
        states: the weights before every 50th step.
    """

    folder: Path
    rows: list[dict[str, float]] = field(default_factory=list)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def watched(self):
        return eq.read_run(self.folder / "watched")

    def write_csv(self, path: Path, *, every: int = 1, form: str = "") -> Path:
        """The log as a table, its numbers in a format."""
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            for row in self.rows[::every]:
                writer.writerow(
                    {name: value if name == "_step" else format(value, form) for name, value in row.items()}
                )
        return path


@pytest.fixture(scope="session")
def training(tmp_path_factory) -> Training:
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48, bias=False), nn.ReLU(), nn.Linear(48, 6))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [300], 0.3)
    teacher, done = nn.Linear(24, 6), Training(tmp_path_factory.mktemp("training"))
    monitor = eq.watch(net, optimizer, every=1, log_dir=done.folder / "watched")
    for step in range(STEPS):
        if step % EVERY == 0:
            done.states[step] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        inputs = torch.randn(32, 24)
        labels = torch.where(torch.rand(32) < 0.3, torch.randint(6, (32,)), teacher(inputs).argmax(1))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        before = {name: param.detach().clone() for name, param in net.named_parameters()}
        row = {"_step": step, "lr": optimizer.param_groups[0]["lr"], "train/loss": loss.item()}
        optimizer.step()
        schedule.step()
        for name, param in net.named_parameters():
            row[f"params/norm/{name}"] = before[name].norm().item()
            row[f"updates/norm/{name}"] = (param.detach() - before[name]).norm().item()
            row[f"grad/norm/{name}"] = param.grad.norm().item()
        done.rows.append(row)
    monitor.close()
    return done
