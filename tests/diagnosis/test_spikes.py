"""A spike says what came first, at which steps, in which layers; healthy runs of six kinds have none."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import numpy as np
import pytest
from tests.helpers.sample_worlds import world
from tests.helpers.spiky_runs import ACCIDENT, HEALTHY, conv_bn, ln_mlp, plain_mlp, without_metrics

from equilibria.diagnosis import diagnose, equilibrium
from equilibria.diagnosis.gradient_jumps import total_gradients
from equilibria.diagnosis.layers import layers_of
from equilibria.diagnosis.loss_rises import loss_rises
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.spikes import spikes
from equilibria.diagnosis.summary import summarise_run
from equilibria.findings import Finding
from equilibria.theory import SGD

RULE = SGD(0.1, 2e-3, momentum=0.9)
LAYERS = ("conv1.weight", "conv2.weight", "conv3.weight")


accident = cache(lambda train, kind: train(0, accident=kind))  # trained once for all tests


def the_spike(run: SampledRun) -> Finding:
    (finding,) = spikes(run)
    return finding


def text(finding: Finding) -> str:
    return f"{finding.subject}. {finding.evidence}."


def logged(run: SampledRun, values: np.ndarray, *, every: int = 1, name: str = "loss") -> SampledRun:
    """The run with a loss of one value per step, logged every so many steps."""
    return dataclasses.replace(run, metrics={name: (np.arange(len(values))[::every], values[::every])})


def noisy(steps: int = 400, seed: int = 0) -> np.ndarray:
    return 1 + 0.05 * np.random.default_rng(seed).standard_normal(steps)


def spiky(steps: int = 400, *, at: int = 300, lasts: int = 1, height: float = 4.0) -> np.ndarray:
    values = noisy(steps)
    values[at : at + lasts] += height
    return values


def sampled(*, every: int = 1, steps: int = 400, burst: int | None = None, **options) -> SampledRun:
    """Three layers in equilibrium; at step ``burst`` their gradients are 30 times as large."""
    if burst is not None:
        options["unit_grad_sq"] = lambda step: 900.0 if step == burst else 1.0
    planted = world(RULE, steps, every=every, layers=LAYERS, dim=64, **options)
    return sampled_run(planted.samples, metadata=planted.metadata)


@pytest.fixture(scope="module")
def calm() -> SampledRun:
    return sampled()


@pytest.fixture(scope="module")
def burst() -> SampledRun:
    return sampled(burst=300)


def raised(begin: int, end: int, factor: float = 30.0):
    return lambda step: RULE.lr * (factor if begin <= step < end else 1.0)


# ---- trainings


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_has_no_spike(kind):
    run = HEALTHY[kind](seed=0)
    assert run.metrics and list(spikes(run)) == []
    assert list(spikes(without_metrics(run))) == []


def test_garbage_labels_are_one_bad_batch():
    run = accident(conv_bn, "garbage labels")
    finding = the_spike(run)
    assert finding.severity == "note"
    assert re.match(
        rf"loss rose from [\d.e-]+ to [\d.]+ at step {ACCIDENT} and was back at step 12\d$", finding.subject
    )
    assert "first loss, and in the same step the gradient of " in finding.evidence
    assert f"its recent median at step {ACCIDENT}" in finding.evidence
    assert "; lr was unchanged over the samples of steps 109-120, and the samples before show no quarter " in text(
        finding
    )
    assert "as one bad batch does" in finding.evidence
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), " in finding.remedy


def test_inputs_thirty_times_as_large_are_one_bad_batch():
    finding = the_spike(accident(plain_mlp, "inputs x 30"))
    assert f"at step {ACCIDENT}" in finding.subject
    assert re.search(
        r"first loss, and in the same step the gradient of 3 of 3 layers \(.*\) was up to \d\d", text(finding)
    )
    assert "as one bad batch does" in finding.evidence


def test_lr_thirty_times_as_high_comes_before_the_loss():
    run = accident(conv_bn, "lr x 30")
    finding = the_spike(run)
    assert re.match(rf"loss rose from .* at step {ACCIDENT + 1}", finding.subject)
    assert finding.evidence.split("; ")[1] == f"first lr was 30 times higher at steps {ACCIDENT} to {ACCIDENT + 2}"
    assert "bad batch" not in text(finding)
    assert 'group["lr"] = min(group["lr"], 0.05)' in finding.remedy
    assert finding.severity == "warning" and f"load a checkpoint from before step {ACCIDENT}" in finding.remedy


@pytest.mark.parametrize("kind", ["garbage labels", "lr x 30"])
def test_without_the_loss_nothing_is_said_about_it(kind):
    run = without_metrics(accident(conv_bn, kind))
    for finding in spikes(run):
        assert "loss rose" not in text(finding) and "no loss was logged" in finding.evidence
    if kind == "lr x 30":
        assert the_spike(run).subject == f"lr was 30 times higher at steps {ACCIDENT} to {ACCIDENT + 2}"


def test_an_lr_that_came_back_disturbed_nothing_by_being_divided():
    planted = world(RULE, 600, lr=raised(500, 503), dim=64)
    findings = diagnose(planted.samples, metadata=planted.metadata)
    assert not any("divided by 30" in finding.subject for finding in findings)
    assert [finding for finding in findings if "30 times higher at steps 500 to 502" in finding.subject]
    stays = world(RULE, 600, lr=lambda step: RULE.lr / (30 if step >= 500 else 1), dim=64)
    run = sampled_run(stays.samples, metadata=stays.metadata)
    assert any(
        "divided by 30" in finding.subject for finding in equilibrium.disturbed(layers_of(run, summarise_run(run)))
    )


# ---- the loss


def test_a_loss_that_comes_back_is_a_note_and_one_that_does_not_a_warning(calm):
    back, lost = (the_spike(logged(calm, spiky(lasts=lasts))) for lasts in (3, 100))
    assert back.severity == "note" and back.subject.endswith("at step 300 and was back at step 303")
    assert lost.severity == "warning" and "and has not come back: it is 5" in lost.subject
    assert "load a checkpoint from before step 300" in lost.remedy


def test_a_spike_at_the_end_is_not_judged(calm):
    finding = the_spike(logged(calm, spiky(at=397, lasts=3)))
    assert finding.severity == "note" and "too few to say whether it comes back" in finding.evidence


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.exp(2 * np.random.default_rng(0).standard_normal(3000)), id="lognormal"),
        pytest.param(np.random.default_rng(1).exponential(size=3000), id="exponential"),
        pytest.param(np.cumsum(np.random.default_rng(2).standard_normal(3000)), id="random walk"),
        pytest.param(1e-3 * np.arange(3000) + np.random.default_rng(3).standard_normal(3000), id="rising"),
        pytest.param(np.zeros(3000), id="zero"),
        pytest.param(np.full(3000, np.nan), id="NaN"),
        pytest.param(spiky(at=25), id="too early"),
        pytest.param(spiky(height=0.09), id="too small"),
    ],
)
def test_what_is_no_spike(calm, values):
    assert list(spikes(logged(calm, values))) == []


def test_a_negative_loss_can_spike(calm):
    subject = the_spike(logged(calm, spiky() - 10)).subject
    assert re.match(r"loss rose from -9\.0\d to -[45]\.\d* at step 300 and was back at step 301$", subject)


def test_only_training_losses_count_and_those_that_rise_together_once(calm):
    steps = np.arange(400)
    both = {"train/loss": (steps, spiky(height=6.0)), "loss_l2": (steps, spiky()), "val_loss": (steps, spiky(at=200))}
    assert the_spike(dataclasses.replace(calm, metrics=both)).subject.startswith("train/loss rose")
    assert (
        list(spikes(dataclasses.replace(calm, metrics={"val_loss": (steps, spiky()), "accuracy": (steps, spiky())})))
        == []
    )


def test_a_loss_that_is_lost_is_not_hidden_by_a_higher_spike_of_another(calm):
    steps = np.arange(400)
    both = {"loss_a": (steps, spiky(lasts=100)), "loss_b": (steps, spiky(at=320, height=9.0))}
    finding = the_spike(dataclasses.replace(calm, metrics=both))
    assert finding.severity == "warning" and finding.subject.startswith("loss_a rose")


def test_a_loss_logged_rarely_names_the_values_around(calm):
    finding = the_spike(logged(calm, spiky(), every=10))
    assert "between the values logged at steps 290 and 300 and was back at step 310" in finding.subject


def test_the_last_three_of_many_spikes_have_a_finding_each_and_the_others_one(calm):
    values = noisy(2000)
    values[200:2000:300] += [3, 9, 4, 8, 7, 2]
    together, *others = spikes(logged(calm, values))
    assert together.subject == "3 earlier spikes, at steps 200, 500, 800"
    assert re.match(r"the largest: loss rose from [\d.]+ to 1\d[.\d]* at step 500 and was back", together.evidence)
    assert [re.search(r"at step ([\d,]+) and", finding.subject)[1] for finding in others] == ["1,100", "1,400", "1,700"]


def test_more_spikes_than_once_could_be_looked_at_are_all_counted(calm):
    values = noisy(9000)
    values[100::100] += 8
    together, *_ = spikes(logged(calm, values))
    assert together.subject.startswith(f"{len(values[100::100]) - 3} earlier spikes, at steps 100, 200, ")


def test_bad_batches_close_to_each_other_are_all_reported(calm):
    """The first of them, in the window of the next ones, must not make these look usual."""
    values = noisy()
    values[[300, 330, 370]] += [9, 8, 7]
    findings = list(spikes(logged(calm, values)))
    assert [re.search(r"at step (\d+) and", finding.subject)[1] for finding in findings] == ["300", "330", "370"]


def test_a_level_of_hundreds_is_written_without_an_exponent(calm):
    assert re.match(
        r"loss rose from (9\d\d|1,0\d\d) to 5,\d\d\d at step 300", the_spike(logged(calm, 1000 * spiky())).subject
    )


def test_gradients_out_of_line_at_several_steps_are_not_one_bad_batch():
    planted = world(RULE, 400, layers=LAYERS, dim=64, unit_grad_sq=lambda step: 900.0 if 300 <= step < 303 else 1.0)
    values = spiky(lasts=3)
    values[302] += 1  # the peak
    finding = the_spike(logged(sampled_run(planted.samples, metadata=planted.metadata), values))
    assert "in the same step the gradient of 3 of 3 layers" in finding.evidence
    assert "one bad batch" not in finding.evidence


# ---- what came first


def test_a_gradient_before_the_loss(burst):
    finding = the_spike(logged(burst, spiky(at=302, lasts=5)))
    pattern = r"; first the gradient of 3 of 3 layers \(conv.*\) was up to 3\d times its recent median at step 300"
    assert re.search(pattern + "; then .*loss at step 302", finding.evidence)


def test_clipping_is_given_twice_the_median_norm_of_what_is_watched(burst):
    finding = the_spike(logged(burst, spiky()))
    step, grad = (burst.taken.columns[name].reshape(3, -1) for name in ("step", "grad_norm"))
    usual = np.sqrt((grad**2).sum(axis=0))[200:300]
    assert f"clip_grad_norm_(model.parameters(), {2 * np.median(usual):.2g})" in finding.remedy
    assert "of the watched parameters over the samples of steps 200 to 299" in finding.remedy
    assert step[0, 299] == 299


def test_gradients_that_are_clipped_already_are_not_clipped_again(calm):
    grad = calm.taken.columns["grad_norm"]
    clipped = np.where(calm.taken.columns["step"] == 300, 3.0, 1.0) * np.ones_like(grad)
    taken = dataclasses.replace(calm.taken, columns={**calm.taken.columns, "grad_norm": clipped})
    finding = the_spike(logged(dataclasses.replace(calm, taken=taken), spiky()))
    assert "clip_grad_norm_" not in finding.remedy and "if loss.item() > 3: continue" in finding.remedy


def test_a_few_layers_with_large_gradients_before_an_accident_did_not_come_first():
    """Among 12 layers and 12 samples, one or two have a gradient of three times its median by chance."""
    names = [f"layer{number}.weight" for number in range(12)]
    planted = world(RULE, 400, layers=names, dim=64, lr=raised(300, 303))
    run = sampled_run(planted.samples, metadata=planted.metadata)
    grad = run.taken.columns["grad_norm"].reshape(12, -1).copy()
    grad[:2, 296] *= 4
    few, many = (
        dataclasses.replace(run.taken, columns={**run.taken.columns, "grad_norm": values.ravel()})
        for values in (grad, np.where(np.arange(400) == 296, 4 * grad, grad))
    )
    values = spiky(at=301, lasts=5)
    first_of_few, first_of_many = (
        the_spike(logged(dataclasses.replace(run, taken=taken), values)).evidence.split("; ")[1]
        for taken in (few, many)
    )
    assert first_of_few == "first lr was 30 times higher at steps 300 to 302"
    assert first_of_many.startswith("first the gradient of 12 of 12 layers") and first_of_many.endswith("step 296")


def test_nothing_out_of_line_is_said_so(calm):
    finding = the_spike(logged(calm, spiky()))
    assert (
        "no sampled step before shows an lr, or a gradient or an angle of a quarter of the layers" in finding.evidence
    )
    assert "nothing was sampled" not in finding.evidence


def test_steps_that_were_not_sampled_are_named():
    finding = the_spike(logged(sampled(every=10, steps=600), spiky(600, at=304)))
    assert finding.evidence.endswith("nothing was sampled between steps 300 and 310")
    assert "eq.watch(model, optimizer, every=1)" in finding.remedy


def test_an_lr_that_may_have_come_first_is_not_said_to_have():
    run = sampled(every=10, steps=600, lr=raised(305, 600))
    text_of = the_spike(logged(run, spiky(600, at=304, lasts=20))).evidence
    assert (
        "; first or at the same time lr was multiplied by 30 between the samples at steps 300 and 310; then loss"
        in text_of
    )


def test_an_lr_that_rises_in_the_same_step_comes_after_the_loss():
    text_of = the_spike(logged(sampled(lr=raised(300, 303)), spiky())).evidence
    assert "no sampled step before" in text_of and "; then lr was 30 times higher at steps 300 to 302" in text_of


def test_an_excursion_of_lr_that_the_loss_does_not_show():
    finding = the_spike(logged(sampled(lr=raised(300, 303, 2.0)), noisy()))
    assert finding.subject == "lr was 2 times higher at steps 300 to 302"
    assert re.search(r"; loss was at most \d\.\d+ over steps 301-\d+, after \d\.\d+ \(median\) and", finding.evidence)


@pytest.mark.parametrize(
    "lr",
    [
        pytest.param(lambda step: RULE.lr * (2 if step % 20 < 5 else 1), id="cycles"),
        pytest.param(lambda step: RULE.lr * min(1.0, (step + 1) / 200), id="warm-up"),
        pytest.param(lambda step: RULE.lr / (10 if step > 200 else 1), id="drop"),
        pytest.param(lambda step: RULE.lr / (1 + abs(step - 200) / 10), id="one cycle"),
    ],
)
def test_schedules_are_no_accident(lr):
    assert list(spikes(sampled(lr=lr))) == []


# ---- "lr was unchanged", and "as one bad batch does"


def bad_batch(lr=None, **options) -> Finding:
    """A loss and gradients that are high at step 300 only, under some schedule."""
    return the_spike(logged(sampled(burst=300, lr=lr, **options), spiky()))


@pytest.mark.parametrize(
    ("lr", "course"),
    [
        (None, "lr was unchanged over the samples of steps 289-300"),
        (lambda step: RULE.lr * (1 + np.cos(np.pi * step / 400)) / 2, "lr went from 0.0178 to 0.0146 over the samples"),
        (lambda step: RULE.lr * 0.97**step, "lr went from 1.5e-5 to 1.08e-5 over the samples of steps 289-300"),
    ],
    ids=["constant", "cosine", "exponential"],
)
def test_one_bad_batch_names_the_course_of_lr(lr, course):
    text_of = bad_batch(lr).evidence
    assert f"; {course}" in text_of and text_of.endswith("as one bad batch does")
    assert ("unchanged" in text_of) == (lr is None)


@pytest.mark.parametrize(
    ("factor", "change"), [(0.1, "lr was divided by 10 at step 300"), (1.4, "lr was multiplied by 1.4 at step 300")]
)
def test_an_lr_that_jumps_in_the_same_step_is_named_and_is_not_one_bad_batch(factor, change):
    text_of = bad_batch(lambda step: RULE.lr * (factor if step == 300 else 1)).evidence
    assert change in text_of or "lr was 10 times lower at step 300" in text_of
    assert "unchanged" not in text_of and "one bad batch" not in text_of


def test_of_steps_that_were_not_sampled_nothing_is_said_about_lr_or_one_batch():
    text_of = bad_batch(raised(297, 300), every=10).evidence
    assert "nothing was sampled between steps 290 and 300" in text_of
    assert "unchanged" not in text_of and "one bad batch" not in text_of


def test_the_level_is_the_median_of_the_logged_values_that_it_names(calm):
    values = noisy()
    values[200:290] += 6  # a long spike fills most of the window before the next one
    values[295] += 3
    _, finding = spikes(logged(calm, values))
    level, count = re.match(r"([\d.]+) is the median of the (\d+) values before", finding.evidence).groups()
    assert float(level) == pytest.approx(np.median(values[295 - int(count) : 295]), abs=0.006)
    assert int(count) <= 5


@pytest.mark.parametrize(("before", "rises"), [(50, 0), (100, 1)])
def test_after_fewer_values_a_rise_must_be_higher(before, rises):
    """The highest of 50 values is lower than that of 100: thrice its rise is enough after 100 values only."""
    logs = 0.05 * np.random.default_rng(0).standard_normal(before + 20)
    level = np.median(logs[:before])
    logs[before] = level + 3 * (logs[:before].max() - level)
    assert len(list(loss_rises(np.arange(len(logs)), np.exp(logs)))) == rises


def test_a_bad_batch_among_noisy_ones_is_found(calm):
    """7 standard deviations, and thrice the highest rise before."""
    values = 2.4 * np.exp(0.1 * np.random.default_rng(1).standard_normal(400))
    values[300] = 4.6
    burst = sampled(burst=300)
    assert "loss rose from 2.35 to 4.6 at step 300" in the_spike(logged(burst, values)).subject


# ---- without a loss


def test_a_gradient_alone_is_reported_as_that(burst):
    finding = the_spike(burst)
    assert finding.severity == "note"
    assert re.match(r"the total gradient norm was 3\d times its recent median at step 300$", finding.subject)
    assert finding.evidence.endswith("no loss was logged") and "monitor.log(loss=loss)" in finding.remedy


def test_gradients_that_stay_large_are_a_lasting_change():
    options = {"unit_grad_sq": lambda step: 900.0 if step >= 300 else 1.0}
    planted = world(RULE, 400, layers=LAYERS, dim=64, **options)
    run = sampled_run(planted.samples, metadata=planted.metadata)
    for finding in (the_spike(run), the_spike(logged(run, noisy()))):
        assert finding.severity == "note"
        factor = re.match(
            r"the total gradient norm jumped to ([\d.]+) times its recent median at step 300 and stayed high$",
            finding.subject,
        )
        assert f"{factor[1]} is the median over steps 300-310" in finding.evidence
        total = np.sqrt((run.taken.columns["grad_norm"].reshape(3, -1) ** 2).sum(axis=0))
        assert float(factor[1]) == pytest.approx(np.median(total[300:311]) / np.median(total[200:300]), rel=0.05)


# ---- the remedy that is recommended, tried


def losses(run: SampledRun) -> np.ndarray:
    return run.metrics["loss"][1]


def rise_after_bad_labels(train, seed: int, *, clip: float | None) -> float:
    """The highest loss of the 20 steps after a bad batch above the same training without it."""
    bad, good = (losses(train(seed, accident=kind, clip=clip)) for kind in ("garbage labels", "none"))
    return float(np.max((bad - good)[ACCIDENT + 1 : ACCIDENT + 21]))


@pytest.mark.slow
@pytest.mark.parametrize(("train", "without", "clipped"), [(conv_bn, 0.451, 0.1), (ln_mlp, 0.015, 0.011)])
def test_clipping_at_twice_the_median_norm_does_what_the_remedy_says(train, without, clipped):
    rises = []
    for seed in range(1000, 1010):
        step, total = total_gradients(train(seed, accident="none"))
        clip = 2 * float(np.median(total[step < ACCIDENT][-100:]))
        rises.append([rise_after_bad_labels(train, seed, clip=value) for value in (None, clip)])
    assert all(with_clip < free for free, with_clip in rises)
    np.testing.assert_allclose(np.median(rises, axis=0), [without, clipped], rtol=0.1)
