"""What is said, and what is not, about small trainings of the kinds that people run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.sample_worlds import world
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.assumptions import vanishing_gradient
from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.layers import layers_of
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.summary import summarise, summarise_run
from equilibria.findings import Finding
from equilibria.monitor.monitor import Monitor
from equilibria.theory import SGD


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    every: int = 1,
    scheduler: Any = None,
    batch: Callable[[], tuple[Tensor, Tensor]] = lambda: (torch.randn(128, 32), torch.randint(0, 10, (128,))),
) -> tuple[Monitor, list[float]]:
    monitor, losses = Monitor(net, optimizer, every=every), []
    for _ in range(steps):
        inputs, labels = batch()
        loss = cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    monitor.close()
    return monitor, losses


def said(monitor: Monitor) -> tuple[Finding, ...]:
    return diagnose(monitor.samples(), metadata=monitor.metadata)


def words(findings: tuple[Finding, ...]) -> str:
    return " ".join(f"{finding.subject} {finding.evidence} {finding.remedy}" for finding in findings)


def summaries(monitor: Monitor) -> Mapping[str, LayerSummary]:
    return {layer.name: layer for layer in summarise(monitor.samples(), metadata=monitor.metadata)}


def batch_norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    first = (nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU())
    return nn.Sequential(*first, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def badly_scaled() -> tuple[Monitor, list[float]]:
    """Random data and labels: the loss begins far above chance, 2.30, and ends there."""
    net = batch_norm_net()
    with torch.no_grad():
        net[-1].weight.mul_(30)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return train(net, optimizer, 150, every=5)


def test_nothing_is_said_about_a_loss_that_was_not_seen():
    monitor, losses = badly_scaled()
    assert losses[-1] > 2.2, "nothing can be learned"
    told = words(said(monitor))
    assert not any(word in told for word in ("interpolation", "loss is", "fitted", "stop"))
    assert [finding.severity for finding in said(monitor)].count("warning") == 0


def test_a_time_to_settle_needs_a_gradient_that_has_come_to_rest():
    """The first gradients are huge, and the equilibrium norm of their average is no goal."""
    monitor, _ = badly_scaled()
    for layer in summaries(monitor).values():
        assert "more step" not in layer.sentence
    assert "more step" not in words(said(monitor))


@pytest.mark.parametrize(("last", "near"), [(0.02, True), (2.28, False)])
def test_near_interpolation_is_said_with_the_numbers_of_the_loss(last, near):
    fallen = world(SGD(0.1, 2e-3, momentum=0.9), 1000, unit_grad_sq=lambda step: math.exp(-2 * step / 125))
    run = sampled_run(fallen.samples, metadata=fallen.metadata)
    steps = np.arange(1000)
    falling = last + (2.3 - last) * (1 - steps / 999) ** 2
    loss = steps, np.where(steps < 3, 60.0, falling)  # its first values are no measure
    (finding,) = vanishing_gradient(layers_of(run, summarise_run(run)), loss)
    assert ("near interpolation" in finding.evidence) == near
    assert ("of its median 2.29 over steps 0-6" in finding.evidence) == near
    (without,) = vanishing_gradient(layers_of(run, summarise_run(run)), None)
    assert "loss" not in without.evidence and "interpolation" not in words((without,))


def layer_norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 10))


@pytest.mark.parametrize("kind", ["linear", "one cycle"])
def test_now_is_the_last_samples_and_all_numbers_are_theirs(kind):
    net = layer_norm_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    linear = kind == "linear"
    scheduler = (
        LambdaLR(optimizer, lambda step: 1 - step / 200) if linear else OneCycleLR(optimizer, 3e-3, total_steps=200)
    )
    monitor, _ = train(net, optimizer, 200, scheduler=scheduler)
    layer = summaries(monitor)["0.weight"]
    rows = [row for row in monitor.samples().to_pylist() if row["param"] == "0.weight"]
    window = [row for row in rows if layer.first_step <= row["step"] <= layer.last_step]
    assert len(window) == layer.samples and window[-1]["step"] >= 160
    assert max(row["lr"] for row in window) <= 2 * min(row["lr"] for row in window)
    for name in ("angle", "angle_predicted", "angle_equilibrium"):
        rms = math.sqrt(sum(row[name] ** 2 for row in window) / len(window))
        assert getattr(layer, name) == pytest.approx(rms, rel=1e-9)
    assert layer.angle_vs_predicted == pytest.approx(layer.angle / layer.angle_predicted, rel=1e-9)
    assert layer.angle_vs_predicted == pytest.approx(1, abs=0.1) and not layer.few
    assert f"over steps {layer.first_step}-{layer.last_step} (lr " in layer.sentence
    first, last = rows[0]["lr"], rows[-1]["lr"]
    course = "lr=1e-3 -> 5e-6" if linear else "lr=1.2e-4 -> 3e-3 -> 1.2e-8"
    assert layer.settings_over_run.startswith(f"AdamW({course}, wd=0.1"), (first, last)


class TokenModel(nn.Module):
    """An embedding and a post-norm encoder, as in an introduction to language models."""

    def __init__(self, tokens: int = 2000, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(tokens, width)
        block = nn.TransformerEncoderLayer(width, 2, 64, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(block, 2)
        self.out = nn.Linear(width, tokens)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim))
        return self.out(hidden).flatten(0, 1)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 2000, (8, 17))
    return drawn[:, :-1], drawn[:, 1:].flatten()


def test_an_embedding_without_decay_is_not_taken_for_scale_invariant():
    """Its cosines are small because it has many entries, and it is told nothing about weight decay."""
    net = TokenModel()
    monitor, _ = train(net, torch.optim.SGD(net.parameters(), lr=0.1), 36, batch=tokens)
    assert said(monitor) == ()
    assert summaries(monitor)["embedding.weight"].invariant is False


def test_a_decision_about_invariance_is_never_taken_back():
    """The prediction of a weight may begin or end once, and no two twins get opposite verdicts."""
    torch.manual_seed(0)
    blocks = [part for _ in range(3) for part in (nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU())]
    net = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), *blocks, nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, 3e-3, total_steps=130)
    monitor, _ = train(net, optimizer, 130, scheduler=scheduler)
    for name in summaries(monitor):
        rows = [row for row in monitor.samples().to_pylist() if row["param"] == name]
        predicted = [row["angle_predicted"] is not None for row in rows]
        changes = sum(before != after for before, after in itertools.pairwise(predicted))
        assert changes <= 2, name  # provisional at first, then none, then decided
    twins = {summaries(monitor)[f"{index}.weight"].invariant for index in (2, 5, 8)}
    assert True in twins and False not in twins


def test_a_batch_norm_network_has_predictions_from_the_first_sample_on():
    net = batch_norm_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    monitor, _ = train(net, optimizer, 8)
    assert all(row["angle_predicted"] for row in monitor.samples().to_pylist() if row["param"] == "0.weight")
    assert [layer.invariant for layer in summaries(monitor).values()] == [True, True, None]


def test_weights_that_begin_as_nan_are_no_matter_for_a_checkpoint():
    net = layer_norm_net()
    with torch.no_grad():
        net[0].weight[0, 0] = math.nan
    (finding,) = said(train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), 10)[0])
    assert finding.severity == "warning" and "checkpoint" not in finding.remedy
    assert finding.subject == "0.weight was not finite before the first sampled step, 0"
    assert "param.isfinite()" in finding.remedy


def test_a_first_gradient_that_is_nan_points_to_the_data():
    net = layer_norm_net()
    bad = iter([math.nan] + [1.0] * 20)
    monitor, _ = train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.0),
        10,
        batch=lambda: (torch.randn(16, 32) * next(bad), torch.randint(0, 10, (16,))),
    )
    finding = said(monitor)[0]
    assert (
        finding.subject
        == "the gradient of 2 of 2 parameters (0.weight, ...) was not finite at the first sampled step, 0"
    )
    assert "checkpoint" not in finding.remedy and "data" in finding.remedy
    assert finding.evidence.startswith("the watched weights were finite there")
    assert "parameters that are not watched" in finding.remedy and "param.isfinite()" in finding.remedy


def test_weights_lost_later_go_back_to_a_checkpoint_from_before_that_step():
    net = layer_norm_net()
    scale = iter([1.0] * 5 + [math.nan] + [1.0] * 20)
    monitor, _ = train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        10,
        batch=lambda: (torch.randn(16, 32) * next(scale), torch.randint(0, 10, (16,))),
    )
    finding = said(monitor)[0]
    assert finding.severity == "warning" and "no longer finite" in finding.subject
    assert finding.remedy.startswith("go back to a checkpoint from before step 5;")


def test_a_healthy_run_that_is_out_of_equilibrium_gets_notes_only():
    """Settled, then lr / 10: a state, not a fault, and nothing is to be done."""
    net = batch_norm_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 if step < 150 else 0.1)
    findings = said(train(net, optimizer, 200, scheduler=scheduler)[0])
    assert findings and {finding.severity for finding in findings} == {"note"}
    assert all(finding.remedy.startswith("nothing needs doing") for finding in findings), findings
