"""Whether a weight looks scale-invariant: decided once, by the mean cosine and the decay in force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.sample_worlds import edited, together, world

from equilibria.diagnosis.invariance import InvarianceTest, decay_in_force, looks_invariant
from equilibria.diagnosis.summary import summarise
from equilibria.theory import SGD

ENTRIES = 10_000.0


def verdicts(cosine: np.ndarray, decay: float) -> np.ndarray:
    return looks_invariant(cosine, np.full(cosine.shape, decay), entries=np.full(len(cosine), ENTRIES))


@pytest.mark.parametrize(("strength", "invariant"), [(0.0, 1.0), (0.07, 1.0), (0.13, 0.0), (1.0, 0.0)])
@pytest.mark.parametrize("decay", [1e-3, 1e-5])
def test_the_limit_is_a_tenth_in_units_of_the_decay(strength, invariant, decay):
    """The mean cosine counts, not the rms: it scatters by 0.6 in these units, and 2048 samples average that away."""
    rng, unit = np.random.default_rng(0), math.sqrt(decay / 2)
    waves = np.resize([1.0, -1.0], 2048) * np.exp(0.1 * rng.standard_normal((20, 2048)))
    waves -= waves.mean(axis=1, keepdims=True)
    assert (verdicts(unit * (strength + 0.6 * waves), decay) == invariant).mean() >= 0.9


def test_rounding_errors_look_invariant_after_eight_samples_at_any_decay():
    noise = 1e-7 * np.random.default_rng(0).standard_normal((30, 100))
    for decay in (0.0, 1e-12, 1e-4):
        assert np.isnan(verdicts(noise[:, :7], decay)).all()
        assert (verdicts(noise[:, :8], decay) == 1).all()


def test_without_decay_small_cosines_are_no_invariance():
    """An embedding: its cosines are small because it has many entries."""
    cosines = np.random.default_rng(0).standard_normal((50, 4096)) / math.sqrt(ENTRIES)
    assert (verdicts(cosines, 0.0) == 0).all()
    assert (verdicts(0.1 * cosines, 0.0) == 0).all()


def test_scatter_leaves_it_undecided_until_the_error_is_small():
    """Independent cosines that scatter by 1 in units of the limit's: 0.1 is reached at 100 samples, due at 128."""
    unit, rng = math.sqrt(1e-4 / 2), np.random.default_rng(0)
    cosines = unit * rng.standard_normal((200, 512))
    assert np.isnan(verdicts(cosines[:, :32], 1e-4)).mean() > 0.9
    assert np.isfinite(verdicts(cosines[:, :128], 1e-4)).mean() > 0.5
    assert np.isfinite(verdicts(cosines, 1e-4)).mean() > 0.98
    assert (verdicts(cosines, 1e-4) == 0).mean() < 0.4  # its standard error is that of the limit: both verdicts occur


def test_correlated_cosines_are_not_taken_for_many():
    """AR(1) of 0.8 has the error of 9 times fewer samples: decided later than its scatter alone would say."""
    rng, unit = np.random.default_rng(0), math.sqrt(1e-4 / 2)
    steps = rng.standard_normal((50, 1024))
    slow = np.zeros_like(steps)
    for column in range(1, steps.shape[1]):
        slow[:, column] = 0.8 * slow[:, column - 1] + 0.6 * steps[:, column]
    assert np.isfinite(verdicts(0.5 * unit * steps[:, :64], 1e-4)).mean() > 0.9
    assert np.isnan(verdicts(0.5 * unit * slow[:, :64], 1e-4)).mean() > 0.6


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([1e-9, 1e-4, 1e-2]),
)
def test_samples_one_by_one_decide_as_all_at_once_and_never_again(seed, decay, mean, scatter):
    rng = np.random.default_rng(seed)
    cosines = mean * rng.standard_normal((3, 1)) + scatter * rng.standard_normal((3, 150))
    test, history = InvarianceTest(np.full(3, ENTRIES)), []
    for count in range(1, 151):
        if count % 10 == 5:  # a sample without a gradient does not count
            test.add(np.full(3, np.nan), np.full(3, decay))
        test.add(cosines[:, count - 1], np.full(3, decay))
        np.testing.assert_array_equal(test.verdict, verdicts(cosines[:, :count], decay))
        history.append(test.verdict.copy())
    for row in np.transpose(history):
        decided = row[np.isfinite(row)]
        assert len(set(decided.tolist())) <= 1
    resumed = InvarianceTest(np.full(3, ENTRIES))
    resumed.load_state_dict(test.state_dict())
    np.testing.assert_array_equal(resumed.verdict, test.verdict)


def test_the_decay_in_force_follows_the_optimizer():
    options = {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "grad_norm": 3.0, "norm": 400.0, "entries": 100.0}
    assert decay_in_force({"kind": "SGD"}, **options) == pytest.approx(0.01)
    assert decay_in_force({"kind": "SGD", "dampening": 0.5}, **options) == pytest.approx(0.005)
    assert decay_in_force({"kind": "SGD", "dampening": 0.5}, **{**options, "momentum": 0.0}) == pytest.approx(1e-3)
    for kind in ("SGDW", "AdamW", "Lion", "Muon", None):
        assert decay_in_force({"kind": kind}, **options) == pytest.approx(1e-3)
    # Adam divides by the root mean square of gradient and decay together: 5 / 10 here.
    assert decay_in_force({"kind": "AdamL2"}, **options) == pytest.approx(1e-3 / 0.5)


def verdicts_of(*worlds):
    run = together(*worlds)
    return {layer.name: layer.invariant for layer in summarise(run.samples, metadata=run.metadata)}


def test_siblings_in_different_blocks_are_decided_together():
    """Twins would otherwise be shown as "2 not invariant, 2 undecided" for hundreds of samples."""
    rule = SGD(0.1, 2e-3, momentum=0.9)

    def tensors(*names, steps=200):
        return world(rule, steps, layers=names, radial=1.0)

    decided = tensors("h.0.q.weight", "h.1.q.weight", "head.weight")
    alone = verdicts_of(decided)
    assert alone == dict.fromkeys(alone, False)
    waiting = verdicts_of(decided, tensors("h.2.q.weight", steps=20))
    assert waiting == {"h.0.q.weight": None, "h.1.q.weight": None, "head.weight": False, "h.2.q.weight": None}
    together_at_last = verdicts_of(decided, tensors("h.2.q.weight"))
    assert set(together_at_last.values()) == {False}


def test_siblings_that_are_all_decided_may_differ():
    rule = SGD(0.1, 2e-3, momentum=0.9)
    other = world(rule, 200, layers=("h.0.q.weight",), radial=1.0)
    assert verdicts_of(other, world(rule, 200, layers=("h.1.q.weight",))) == {
        "h.0.q.weight": False,
        "h.1.q.weight": True,
    }


def test_layers_of_a_plain_sequence_do_not_wait_for_each_other():
    rule = SGD(0.1, 2e-3, momentum=0.9)
    run = verdicts_of(world(rule, 200, layers=("net.0.weight",)), world(rule, 20, layers=("net.3.weight",), radial=1.0))
    assert run == {"net.0.weight": True, "net.3.weight": None}


def test_a_layer_that_does_not_look_invariant_after_all_is_measured_to_its_last_sample():
    """Predictions from before that was decided do not hold its window back."""
    run = world(SGD(0.1, 2e-3, momentum=0.9), 200, layers=("head.weight",), radial=1.0)
    step = run.samples["step"].to_numpy()
    predicted = np.where(step < 190, run.samples["angle_predicted"].to_numpy(), np.nan)
    (layer,) = summarise(edited(run.samples, angle_predicted=predicted), metadata=run.metadata)
    assert layer.invariant is False and layer.angle_predicted is None
    assert layer.last_step == 199
