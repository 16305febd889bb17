"""A run that diverged has one warning; healthy runs whose norms or losses grow have none."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from tests.helpers.sample_worlds import edited, world

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.divergence import divergence
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.spikes import spikes
from equilibria.records._metrics import KeptMetrics
from equilibria.theory import SGD

RULE = SGD(0.1, 2e-3, momentum=0.9)
STEPS = 300


def grown(*, norms: float = 1.0, gradients: float = 1.0) -> SampledRun:
    """Three layers whose norms and gradients grow exponentially by these factors."""
    planted = world(RULE, STEPS, dim=64)
    share = planted.samples["step"].to_numpy() / (STEPS - 1)
    columns = {"norm": norms**share, "grad_norm": gradients**share}
    samples = edited(planted.samples, **{name: planted.samples[name].to_numpy() * by for name, by in columns.items()})
    return sampled_run(samples, metadata=planted.metadata)


def loss(to: float, *, start: float = 2.3, seed: int = 0) -> np.ndarray:
    """A loss with 5 % noise that stays at its start for 100 steps and then grows exponentially."""
    share = np.clip(np.arange(STEPS) - 100, 0, None) / (STEPS - 101)
    return start * (to / start) ** share * (1 + 0.05 * np.random.default_rng(seed).standard_normal(STEPS))


def logged(run: SampledRun, values: np.ndarray) -> SampledRun:
    return dataclasses.replace(run, metrics={"loss": (np.arange(len(values)), values)})


def warning(run: SampledRun):
    (finding,) = (finding for finding in spikes(run) if finding.severity == "warning")
    return finding


def test_a_loss_that_grows_with_the_norms_is_one_warning_and_no_spike():
    values = loss(1e20)
    values[[180, 220, 260]] *= 1e6
    run = grown(norms=1e10)
    (finding,) = spikes(logged(run, values))
    assert (finding.severity, finding.kind) == ("warning", "diverged")
    numbers = re.match(r"the training loss has diverged: it rose from ([\d.]+) to ([\d.e]+)$", finding.subject)
    start = min(values[0], np.median(values[:30]))
    assert float(numbers[1]) == pytest.approx(start, rel=0.01)
    assert f"; the highest is {values.max() / 1e22:.3g}e22, at step {values.argmax()};" in finding.evidence
    assert float(numbers[2]) == pytest.approx(np.median(values[-10:]), rel=0.01)
    since = int(re.search(r"at least 90 % of the values since step (\d+) are 10 times", finding.evidence)[1])
    high = values >= 10 * start
    assert since == next(step for step in range(STEPS) if high[step] and high[step:].mean() >= 0.9)
    norm = run.taken.columns["norm"].reshape(3, -1)
    assert f"(median layer: {np.median(norm[:, -1] / norm[:, 0]) / 1e9:.2g}e9)" in finding.evidence
    assert f"from before step {since}" in finding.remedy
    assert "zero_grad" not in finding.remedy


def test_a_run_that_is_lost_within_its_first_steps_is_compared_with_its_first_value():
    """Its loss jumps up and down by tens of orders of magnitude: as spikes, each would come back."""
    rng = np.random.default_rng(0)
    values = np.where(rng.random(STEPS) < 0.7, 60.0, 1e20) * np.exp(rng.standard_normal(STEPS))
    values[0] = 2.4
    (finding,) = spikes(logged(grown(norms=1e10), values))
    assert finding.kind == "diverged" and "2.4 is the first value" in finding.evidence


def test_gradients_that_grow_too_may_add_up_over_steps():
    run = grown(norms=300, gradients=50)
    finding = warning(logged(run, loss(226.0)))
    assert "optimizer.zero_grad() before loss.backward()" in finding.remedy
    total = np.sqrt((run.taken.columns["grad_norm"].reshape(3, -1) ** 2).sum(axis=0))
    grew = np.median(total[-30:]) / np.median(total[:30])
    assert f"the total gradient norm is {grew:.0f} times as large as at its start, up to step 299" in finding.evidence


def test_without_a_loss_norms_and_gradients_that_grow_together_are_reported():
    run = grown(norms=1e4, gradients=50)
    finding, norm = warning(run), run.taken.columns["norm"].reshape(3, -1)
    grew = np.median(norm[:, -1] / norm[:, 0])
    assert finding.subject.startswith(f"weights and gradients grew together, to {grew:,.0f} and ")
    assert "loss has" not in finding.subject and "no loss was logged" in finding.evidence


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(logged(grown(), loss(40.0)), id="a loss that grows 17 times with steady norms"),
        pytest.param(logged(grown(norms=1e4, gradients=50), loss(2.0)), id="norms that grow under a falling loss"),
        pytest.param(grown(norms=1e4), id="norms alone, as after a high first lr"),
        pytest.param(grown(gradients=1e4), id="gradients alone"),
        pytest.param(logged(grown(norms=30), 0.01 * loss(5.0) - 0.03), id="a loss around 0"),
        pytest.param(logged(grown(norms=30), loss(1e9)[:20]), id="a few values"),
    ],
)
def test_what_is_no_divergence(run):
    assert divergence(run) is None


def test_a_jump_of_lr_that_the_loss_did_not_survive_is_reported_as_that_jump():
    run = sampled_run(
        (planted := world(RULE, STEPS, dim=64, lr=lambda step: RULE.lr * (1e4 if step == 150 else 1))).samples,
        metadata=planted.metadata,
    )
    values = np.where(np.arange(STEPS) > 150, 1e5, 1.0) * loss(2.3)
    (finding,) = spikes(logged(run, values))
    assert (finding.severity, finding.kind) == ("warning", "diverged") and "has not come back" in finding.subject
    assert "first lr was 10,000 times higher at step 150" in finding.evidence


def test_a_diverged_run_is_not_told_that_it_settles_by_itself():
    planted = world(RULE, STEPS, dim=64, start=30.0)
    share = planted.samples["step"].to_numpy() / (STEPS - 1)
    samples = edited(planted.samples, norm=planted.samples["norm"].to_numpy() * 1e6**share)
    kept = KeptMetrics()
    for values, kinds in ((loss(2.0), {"out_of_equilibrium"}), (loss(1e20), set())):
        kept = KeptMetrics()
        kept.add("loss", list(range(STEPS)), values.tolist())
        findings = diagnose(samples, metadata=planted.metadata, metrics=kept.table())
        assert kinds <= {finding.kind for finding in findings}
    assert findings[0].kind == "diverged"
    assert not {finding.kind for finding in findings} & {"out_of_equilibrium", "drifting", "correlated", "angle_off"}
