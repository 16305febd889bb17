"""Steps that a GradScaler skipped are counted, although no hook sees them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from equilibria.watching import read_run, watch

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # the first steps are skipped


def train(bad: set[int], *, steps: int = 60, every: int = 1, interval: int = 2000, log_dir=None, optimizers=1, begin=0):
    """A training with a scaler whose gradients overflow at the steps ``bad``, counted with the skipped ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4))
    parts = [model] if optimizers == 1 else [model[0], model[2]]
    several = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for part in parts]
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    scheduler = LambdaLR(several[0], lambda step: 1.0)
    monitor = None
    for step in range(steps):
        if step == begin:
            monitor = watch(model, several, every=every, log_dir=log_dir)
        loss = model(torch.randn(16, 8)).square().mean()
        scaler.scale(loss).backward()
        if step in bad:
            model[0].weight.grad[0, 0] = torch.inf
        for optimizer in several:
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        for optimizer in several:
            optimizer.zero_grad()
    return monitor


def subjects(findings) -> list[str]:
    return [finding.subject for finding in findings if "GradScaler" in finding.subject]


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("interval", [2000, 5])
def test_every_skipped_step_is_counted(every, interval):
    """The first ones too, two in a row, and with a scale that grows in between."""
    bad = {0, 1, 20, 33, 34}
    monitor = train(bad, every=every, interval=interval)
    assert subjects(monitor.findings()) == ["the GradScaler skipped 5 of 60 steps: no update"]
    (entry,) = monitor.metadata["skipped"]
    assert entry == {"optimizer": 0, "steps": 5, "before": 35 - 5, "taken": 55}
    assert monitor.step == 55


def test_the_record_has_them(tmp_path):
    train({3, 4}, log_dir=tmp_path / "a").close()
    assert subjects(read_run(tmp_path / "a").findings()) == ["the GradScaler skipped 2 of 60 steps: no update"]


def test_nothing_is_said_of_a_scaler_that_skips_nothing():
    monitor = train(set(), interval=5)
    assert monitor.metadata["skipped"] == [] and subjects(monitor.findings()) == []


def test_steps_skipped_before_watching_began_are_not_counted():
    assert train({0, 1, 2}, begin=10).metadata["skipped"] == []


def test_a_scaler_with_two_optimizers_is_not_counted():
    """Its scale falls when either of them is skipped."""
    assert train({20}, optimizers=2).metadata["skipped"] == []


def test_a_checkpoint_keeps_the_count():
    monitor = train({3, 4})
    again = train(set(), steps=2)
    again.load_state_dict(monitor.state_dict())
    assert again.metadata["skipped"][0]["steps"] == 2
