"""The norm budget: its parts sum to the change, agree with a slow sum, and its sentence says the largest cause."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.report_helpers import transformer_run

from equilibria.diagnosis.budget import LayerBudget, budgets_over_time, layer_budgets, missing_gain
from equilibria.diagnosis.run import sampled_run
from equilibria.theory.gain import growth_gain


@pytest.fixture(scope="module")
def run():
    samples, metadata = transformer_run(4)
    return sampled_run(samples, metadata=metadata)


def test_the_parts_agree_with_a_sum_over_every_step(run):
    budgets = layer_budgets(run, run.taken)
    for position, budget in enumerate(budgets):
        rows, rule = run.taken.of(position), run.rules[position]
        assert budget is not None and rule is not None
        steps = np.arange(rows["step"][0], rows["step"][-1])
        at = (np.interp(steps + 0.5, rows["step"], values) for values in (rows["lr"], rows["angle"] ** 2))
        lr, angle_sq = at
        decay, diffusion = -2 * lr * 0.1 / (1 - 0.9), growth_gain(rule) * angle_sq  # SGD, wd 0.1, momentum 0.9
        change = 2 * math.log(rows["norm"][-1] / rows["norm"][0])
        assert budget.growth == pytest.approx(100 * change / len(steps), rel=1e-9)
        assert budget.decay == pytest.approx(100 * decay.mean(), rel=1e-9)
        assert budget.diffusion == pytest.approx(100 * diffusion.mean(), rel=1e-6)
        assert budget.pull == pytest.approx(budget.growth - budget.decay - budget.diffusion, rel=1e-9)
        assert budget.settling == pytest.approx((1 - 0.9) / (4 * 1e-3 * 0.1), rel=1e-9)


def test_stretches_of_a_run_add_up_to_it(run):
    whole, stretches = layer_budgets(run, run.taken)[2], budgets_over_time(run)[2]
    assert whole is not None and 1 < len(stretches) <= 40
    steps = np.array([stretch.last_step - stretch.first_step for stretch in stretches])
    for part in ("growth", "decay", "pull", "diffusion"):
        parts = np.array([getattr(stretch, part) for stretch in stretches])
        assert (parts * steps).sum() / steps.sum() == pytest.approx(getattr(whole, part), rel=1e-9)


def test_one_sample_or_an_unknown_optimizer_has_no_budget(run):
    first = run.taken.where(np.isin(np.arange(run.taken.first[-1]), run.taken.first))
    assert layer_budgets(run, first) == [None] * len(run.taken.names)


causes = st.floats(-0.5, 0.5).map(lambda value: round(value, 4))


@given(causes, causes, st.floats(-0.5, -1e-4))
def test_the_sentence_names_the_largest_cause_first_and_blames_decay_only_where_it_holds(pull, diffusion, decay):
    growth = pull + diffusion + decay
    budget = LayerBudget(0, 100, growth, decay, pull, abs(diffusion), 1000.0, "1/(2 lr wd)", "gradient")
    sentence = budget.sentence
    assert sentence.startswith("grows" if growth > 0 else "falls")
    largest = max((abs(pull), "gradient"), (abs(diffusion), "random steps"), (abs(decay), "decay"))
    if largest[0] > 5e-4 and sorted((abs(pull), abs(diffusion), abs(decay)))[1] < largest[0]:
        causes = sentence.split(": ")[1].removeprefix(f"{growth:+.3f} in its logarithm, ")
        assert causes.startswith(largest[1])
    assert ("by a factor of" in sentence) == (abs(growth) > 0.1)
    assert ("The gradient holds it more than decay does" in sentence) == (0.26 * abs(diffusion) + pull < 2 * decay)


@pytest.mark.parametrize(
    ("shape", "samples", "steps", "words"),
    [
        ((64, 64), 24, 500, "it needs 1 more sample for a growth gain"),
        ((64, 64), 60, 60, "it needs 20 more steps for a growth gain"),
        ((64,), 500, 500, "it is a vector, whose growth gain is not steady"),
        (None, 500, 500, "it has no growth gain in these samples"),
    ],
)
def test_a_missing_gain_has_a_reason_with_a_number(shape, samples, steps, words):
    assert missing_gain(shape, samples=samples, steps=steps)[0].format("it") == words
