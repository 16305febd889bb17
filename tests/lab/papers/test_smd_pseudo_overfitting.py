"""The judgement of smd-pseudo-overfitting on curves that are planted, and its tasks at every scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from equilibria.lab.data import ImageSet
from equilibria.lab.harness.claim import CONTRADICTED, EXCLUDED, NOT_SHOWN, SHOWN
from equilibria.lab.papers.smd.plus_app_f_pseudo_overfitting import EXPERIMENT, Config, collect, key, recipe, tasks
from equilibria.lab.training import train

LAYERS = 4


def course(config: Config, rule) -> np.ndarray:
    """Angle over its new equilibrium after the drop, by hand: the norm's fourth power relaxes from k; Adam's climbs."""
    step = np.arange(config.steps_after)
    if rule.optimizer == "adam":
        return np.where(step > 800, 1.0, config.divisor ** (-1 / 3))
    rate = 4 * rule.lr / config.divisor * rule.weight_decay / (1 - rule.momentum)
    return (1 + (config.divisor - 1) * np.exp(-rate * step)) ** -0.5


def planted(config: Config, *, fall: float, scatter: float = 0.0005):
    """Both branches at 80 %, the standard one ``fall`` above it at first; angles on their law."""
    found = {}
    for name, (place, seed) in tasks(config).items():
        rng = np.random.default_rng(seed)
        step = config.steps_before + np.arange(config.measure_every, config.steps_after + 1, config.measure_every)
        sampled = config.steps_before + np.arange(0, config.steps_after, config.watch_every)
        late = (step - config.steps_before) > 800
        rule = config.rules[place]
        apart = 1 + 0.02 * (seed - np.mean(rule.seeds))  # 1 in the mean over seeds
        climbing = apart * course(config, rule)[sampled - config.steps_before]
        arrays = {}
        risen = 0.002 * late
        for branch, gain, ratio in (
            ("standard", fall * ~late + risen, climbing),
            ("rescaled", risen, apart + 0 * climbing),
        ):
            noise = rng.normal(0, scatter, step.shape)
            angle = np.full((len(sampled), LAYERS), 0.03)
            arrays |= {
                f"{branch}_step": step,
                f"{branch}_test_accuracy": 0.8 + gain + noise,
                f"{branch}_test_loss": 0.5 - 2 * gain - noise,
                f"{branch}_sampled_step": sampled,
                f"{branch}_angle": angle * ratio[:, None],
                f"{branch}_angle_equilibrium": angle,
            }
        found[name] = arrays
    return found


def verdicts(fall: float, **more) -> dict[str, str]:
    return {claim.text: claim.verdict for claim in collect(Config(), planted(Config(), fall=fall, **more)).claims}


def test_a_planted_fall_is_shown_for_every_optimizer():
    found = verdicts(0.01)
    assert {text: verdict for text, verdict in found.items() if verdict not in (SHOWN, EXCLUDED)} == {
        "Adam: angle over its new equilibrium, 10 to 100 steps after lr / 5: at least that of the first step": NOT_SHOWN
    }  # it is that of the first step


def test_without_a_fall_it_is_not_shown():
    found = verdicts(0.0)
    falls = [verdict for text, verdict in found.items() if "test accuracy falls" in text]
    assert len(falls) == 3 and SHOWN not in falls


def test_the_law_of_the_window_after_a_drop_is_not_that_of_its_first_step():
    """5^(-1/2) is 0.447; over steps 10 to 100 of plain SGD's way back the law is 0.467."""
    claims = {claim.text: claim for claim in collect(Config(), planted(Config(), fall=0.01)).claims}
    claim = claims[
        "SGD: angle over its new equilibrium, 10 to 100 steps after lr / 5, by the law for a constant unit gradient"
    ]
    assert claim.expected == pytest.approx(0.467, abs=5e-4) and claim.verdict == SHOWN


def test_a_rise_contradicts():
    found = verdicts(-0.01)
    assert {verdict for text, verdict in found.items() if "test accuracy falls" in text} == {CONTRADICTED}


def test_a_fall_within_the_scatter_between_seeds_is_left_open():
    outcome = collect(Config(), planted(Config(), fall=0.0005, scatter=0.03))
    (claim,) = [each for each in outcome.claims if each.text.startswith("SGD: test accuracy falls")]
    assert claim.verdict == NOT_SHOWN and not claim.fails and claim.seeds == 4


def test_the_windows_hold_the_evaluations_of_the_trials():
    """10 evaluations at 150, 200, ..., 600 and 14 at 950, ..., 1600."""
    config, counted = Config(), []
    for low, high in (config.early, config.late):
        counted.append(len([t for t in range(50, config.steps_after + 1, config.measure_every) if low <= t <= high]))
    assert counted == [10, 14]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.slow
def test_the_papers_settings_start_and_run_on_a_stand_in(place):
    paper = EXPERIMENT.config("paper")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 32, 32, generator=generator)
    labels = torch.arange(8) % 10
    stand_in = ImageSet(images, labels, images, labels, tuple("abcdefghij"), "random")
    tiny = replace(paper, batch_size=4, width=2, statistics=(1, 4), train_images=4, measure_every=10)
    trained = train(recipe(tiny, paper.rules[place], seed=0, images=stand_in, steps=10))
    assert trained.curves["step"].tolist() == [0, 10] and np.isfinite(trained.curves["test_loss"]).all()


def test_tasks_are_named_by_rule_and_seed():
    assert list(tasks(Config()))[:5] == ["sgd-20", "sgd-21", "sgd-22", "sgd-23", "sgdm-20"]
    assert key(Config().rules[2], 12) == "adam-12"
