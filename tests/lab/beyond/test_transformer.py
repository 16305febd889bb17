"""The text of eq-transformer, and its judgement on planted gains."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from equilibria.errors import EquilibriaError
from equilibria.lab.beyond.transformer import QK_NORM, Config, collect, tasks
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


def planted(config: Config, *, gains=None, drift=1.0):
    """Weights that obey the law with gains of their own; ``drift`` multiplies the gains after the change."""
    found = {}
    own = np.array(gains or [30.0, 19.0, 19.0, 8.0, 25.0, 70.0])
    for name, (model, seed) in tasks(config).items():
        how = [each if model == QK_NORM else each.replace("groups of 16 rows", "against q") for each in NAMES.values()]
        rng = np.random.default_rng(seed)
        size = 8.0 * np.ones(len(how)) * (1 + 0.01 * rng.standard_normal(len(how)))
        log_norm_sq, rows = np.full(len(how), np.log(9.0)), {"sampled_step": [], "angle": [], "norm": []}
        for step in range(config.steps):
            lr = config.lr * (config.factor if step >= config.drop else 1.0)
            angle = lr * size / np.exp(log_norm_sq / 2)
            if step % config.watch_every == 0:
                for key, value in (("sampled_step", step), ("angle", angle), ("norm", np.exp(log_norm_sq / 2))):
                    rows[key].append(value)
            gain = own * (drift if step >= config.drop else 1.0)
            log_norm_sq = log_norm_sq + gain * angle**2 - 2 * lr * config.weight_decay
        arrays = {key: np.array(values) for key, values in rows.items()}
        found[name] = {"names": np.array(list(NAMES)), "how": np.array(how), "test_loss": np.ones(2), **arrays}
    return found


def test_planted_gains_are_measured_and_predict_what_follows():
    config = Config(layers=1)
    outcome = collect(config, planted(config))
    rows = {row["name"]: row for row in outcome.numbers[QK_NORM]["tensors"]}
    assert rows["head.weight"]["gain"] == pytest.approx([70.0] * len(config.seeds), rel=0.01)
    assert rows["head.weight"]["angle"] == pytest.approx([1.0] * len(config.seeds), rel=0.01)
    assert abs(np.log(rows["head.weight"]["angle_as_invariant"])).min() > 0.1
    assert {claim.verdict for claim in outcome.claims} <= {SHOWN, EXCLUDED}  # planted without noise


def test_gains_that_change_contradict():
    config = Config(layers=1)
    claims = collect(config, planted(config, drift=4.0)).claims
    contradicted = [claim.text for claim in claims if claim.verdict == CONTRADICTED]
    assert any("predict the norm after it" in text for text in contradicted)


def test_invariant_tensors_that_turn_otherwise_contradict():
    config = Config(layers=1)
    claims = collect(config, planted(config, gains=[30.0, 8.0, 8.0, 8.0, 25.0, 70.0])).claims
    verdicts = {claim.text.split(":")[0]: claim.verdict for claim in claims}
    assert verdicts["normalised queries and keys"] == CONTRADICTED
