"""The text of eq-transformer, its angle of many tensors together, and its judgement on planted angles."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from equilibria.errors import EquilibriaError
from equilibria.lab.beyond.transformer import (
    QK_NORM,
    Config,
    WatchedTensor,
    collect,
    kind_of,
    predicted_angle,
    stream_ratio,
    tasks,
)
from equilibria.lab.data.batches import CHARACTERS, TextBatches, python_documentation
from equilibria.lab.harness.claim import CONTRADICTED, EXCLUDED, SHOWN

NAMES = {
    "embedding.weight": "jointly with blocks.0.down.weight and 2 more",
    "blocks.0.attention.query.weight": "groups of 16 rows",
    "blocks.0.attention.key.weight": "groups of 16 rows",
    "blocks.0.attention.out.weight": "jointly with embedding.weight",
    "blocks.0.up.weight": "against blocks.0.norm2.weight",
    "head.weight": "against norm.weight, norm.bias",
}


def test_the_text_is_words_in_few_characters():
    text = python_documentation()
    counted = torch.bincount(text, minlength=CHARACTERS)
    assert counted.argmax() == 1  # the blank, behind newline
    assert counted[-1] < 0.01 * len(text)  # hardly any character outside of ASCII


def test_batches_go_on_where_they_are_asked_to():
    windows = TextBatches(torch.arange(1000), length=8, batch_size=3, seed=5)
    later = list(islice(windows.starting_at(4), 2))
    for (inputs, targets), (again, _) in zip(islice(windows, 4, 6), later, strict=False):
        assert torch.equal(inputs, again) and torch.equal(targets, inputs + 1)
    assert not torch.equal(later[0][0], later[1][0])
    assert not torch.equal(
        windows.batch(0)[0], TextBatches(torch.arange(1000), length=8, batch_size=3, seed=6).batch(0)[0]
    )


def test_a_text_that_is_too_short_raises():
    with pytest.raises(EquilibriaError, match="8 characters; expected more than length=8"):
        TextBatches(torch.arange(8), length=8, batch_size=1)


def test_the_angle_of_several_tensors_together():
    """Against the angle of the joined vectors, whose parts of very different norms step at random; O(angle^2)."""
    rng = np.random.default_rng(0)
    sizes, scales = (400, 900), (1.0, 5.0)
    before = [scale * rng.standard_normal(size) for size, scale in zip(sizes, scales, strict=True)]
    after = [each + 0.01 * rng.standard_normal(each.shape) for each in before]
    config = Config(window=(0, 1))
    run = {
        "names": np.array(["embedding.weight", "blocks.0.down.weight", "head.weight"]),
        "sampled_step": np.array([0]),
        "norm": np.array([[*map(np.linalg.norm, before), 9.0]]),
        "angle": np.array([[*map(angle, before, after), 1.0]]),
    }
    joined = angle(np.concatenate(before), np.concatenate(after))
    assert stream_ratio(config, run) == pytest.approx(joined / predicted_angle(config), rel=0.01)


def angle(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one / np.linalg.norm(one), other / np.linalg.norm(other)
    return float(2 * np.arcsin(np.linalg.norm(one - other) / 2))


def planted(config: Config, *, invariant: float, others: float):
    """Every tensor at its multiple of the law's angle, but for a little scatter between seeds."""
    found = {}
    steps = np.arange(0, config.steps, config.watch_every)
    for name, (model, seed) in tasks(config).items():
        how = [each if model == QK_NORM else each.replace("groups of 16 rows", "against q") for each in NAMES.values()]
        rng = np.random.default_rng(seed)
        ratio = np.array([invariant if each.startswith("groups") else others for each in how])
        ratio *= [0.7, 1.0, 1.0, 1.3, 1.1, 1.2]  # two parts of the stream, on either side of the law
        ratio[1:3] = invariant
        found[name] = {
            "names": np.array(list(NAMES)),
            "how": np.array(how),
            "entries": np.full(len(how), 100),
            "sampled_step": steps,
            "angle": predicted_angle(config) * ratio * (1 + 0.01 * rng.standard_normal((len(steps), len(how)))),
            "norm": np.ones((len(steps), len(how))),
            "cosine": np.tile(np.log(ratio), (len(steps), 1)),
            "test_loss": np.ones(2),
        }
    return found


def test_planted_angles_are_shown():
    config = Config(layers=1)
    outcome = collect(config, planted(config, invariant=1.02, others=1.0))
    assert {claim.verdict for claim in outcome.claims} == {SHOWN, EXCLUDED}  # 2 % off is within the tolerance
    rows = {row["tensor"]: row for row in outcome.numbers[QK_NORM]["tensors"]}
    assert rows["blocks.0.attention.key.weight"]["as_predicted"] and not rows["head.weight"]["as_predicted"]


def test_invariant_tensors_that_turn_otherwise_contradict():
    config = Config(layers=1)
    claims = collect(config, planted(config, invariant=1.6, others=1.0)).claims
    verdicts = {claim.text.split(":")[0]: claim.verdict for claim in claims}
    assert verdicts["normalised queries and keys"] == CONTRADICTED
    assert verdicts["all other matrices are farther from it"] == CONTRADICTED


@pytest.mark.parametrize(
    ("ratio", "radial", "why"),
    [
        ((1.3, 1.3, 1.3), 0.5, "the loss makes it smaller, so it turns faster"),
        ((0.7, 0.7, 0.7), -0.5, "the loss makes it larger, so it turns slower"),
        ((1.3, 1.3, 1.3), -0.5, "not explained: the loss makes it larger, and yet it turns faster"),
        ((0.7, 0.7, 0.7), 0.5, "not explained: the loss makes it smaller, and yet it turns slower"),
        ((1.01, 1.0, 0.99), 0.5, "near the law although its norm matters"),
        ((1.0, 1.2, 1.4), 0.5, "seeds differ too much to tell"),
    ],
)
def test_a_reason_is_given_only_where_it_explains_the_angle(ratio, radial, why):
    tensor = WatchedTensor("head.weight", "against norm.weight", kind_of("against norm.weight"), ratio, (radial,) * 3)
    assert tensor.why == why
