"""Summaries against a slow computation, row by row, and what must not change them."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.sample_worlds import World, edited, rescaled_units, together, world

from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.series import sample_weights
from equilibria.diagnosis.summary import summarise, summarise_run
from equilibria.errors import EquilibriaError
from equilibria.records.tables import GAIN_LAW, NO_GRADIENT, NOT_FINITE, SKIPPED
from equilibria.theory import SGD, AdamW
from equilibria.theory.fluctuation import fluctuation, random_walk_variance

HEAVY_BALL = SGD(0.1, 2e-3, momentum=0.9)
RATIOS = ("angle_vs_predicted", "angle_vs_equilibrium", "norm_vs_predicted", "norm_vs_equilibrium")


@cache
def clean() -> World:
    return world(HEAVY_BALL, 1600)


@cache
def dropped() -> World:
    return world(HEAVY_BALL, 1600, lr=lambda step: 0.1 if step < 1200 else 0.01)


def summaries(run: World, **options) -> dict[str, LayerSummary]:
    return {layer.name: layer for layer in summarise(run.samples, metadata=run.metadata, **options)}


def slow_weights(steps: list[int]) -> list[float]:
    """Steps nearer to a sample than to any other, one by one; beyond both ends as far as `sample_weights` says."""
    if len(steps) == 1:
        return [1.0]
    mean = (steps[-1] - steps[0]) / (len(steps) - 1)
    before = [min(steps[1] - steps[0], mean), *np.diff(steps).tolist()]
    after = [*np.diff(steps).tolist(), min(steps[-1] - steps[-2], mean)]
    return [(low + high) / 2 for low, high in zip(before, after, strict=True)]


def slow_summary(run: World, name: str, samples: int) -> dict[str, float]:
    """Root mean squares over the last so many samples that count, one row at a time."""
    not_taken = (SKIPPED, NOT_FINITE, NO_GRADIENT)
    rows = [row for row in run.samples.to_pylist() if row["param"] == name]
    rows = sorted((row for row in rows if row["note"] not in not_taken), key=lambda row: row["step"])[-samples:]

    weights = slow_weights([row["step"] for row in rows])

    def rms(column: str) -> float:
        squares = (weight * row[column] ** 2 for weight, row in zip(weights, rows, strict=True))
        return math.sqrt(math.fsum(squares) / math.fsum(weights))

    last = rows[-1]
    return {
        "samples": len(rows),
        "angle": rms("angle"),
        "angle_predicted": rms("angle_predicted"),
        "angle_vs_predicted": rms("angle") / rms("angle_predicted"),
        "angle_vs_equilibrium": rms("angle") / rms("angle_equilibrium"),
        "cosine": rms("cosine"),
        "norm": last["norm"],
        "norm_vs_predicted": last["norm"] / last["norm_predicted"],
        "norm_vs_equilibrium": last["norm"] / last["norm_equilibrium"],
        "how_wrong": abs(math.log(rms("angle") / rms("angle_predicted"))),
    }


@pytest.mark.parametrize("window", [1, 37, 500])
def test_the_numbers_are_those_of_a_slow_computation(window):
    run = world(HEAVY_BALL, 600, not_finite=[200, 590, 599], skipped=[595])
    for name, layer in summaries(run, window=window).items():
        slow = slow_summary(run, name, window)
        assert {key: getattr(layer, key) for key in slow} == pytest.approx(slow, rel=1e-12)
        assert layer.last_step == 598  # the last step that was taken


def test_the_default_window_is_the_last_quarter_since_the_last_change():
    assert {layer.samples for layer in summaries(clean()).values()} == {400}
    for name, layer in summaries(dropped()).items():
        assert layer.samples == 100  # a quarter of the 400 since the drop
        assert layer.angle == pytest.approx(slow_summary(dropped(), name, 100)["angle"], rel=1e-12)


def test_a_window_has_twenty_samples_where_there_are_as_many():
    soon_after = world(HEAVY_BALL, 340, lr=lambda step: 0.1 if step < 300 else 0.01)
    assert {layer.samples for layer in summaries(soon_after).values()} == {20}
    at_once = world(HEAVY_BALL, 307, lr=lambda step: 0.1 if step < 300 else 0.01)
    assert {layer.samples for layer in summaries(at_once).values()} == {7}, "a window goes across no jump"
    assert {layer.samples for layer in summaries(world(HEAVY_BALL, 12)).values()} == {12}


@pytest.mark.parametrize(
    "lr",
    [
        lambda step: 0.05 * (1 + math.cos(math.pi * step / 300)),
        lambda step: 0.1 * (1 - step / 299),
        lambda step: 0.1 * min(1, (300 - step) / 60),
        lambda step: 0.1 * (step + 1) / 300,
    ],
    ids=["cosine", "linear to zero", "zero after a plateau", "warm-up"],
)
def test_a_window_under_a_schedule_holds_samples_at_about_the_present_settings(lr):
    table = clean().samples.slice(0, 900)
    steps = table["step"].to_numpy()
    table = edited(table, lr=[lr(step) for step in steps])
    rows = [step for step in range(300) if lr(step) > 0]  # with an lr of 0 nothing moves

    def alike() -> list[int]:
        """Counted back from the last row, to a quarter of the rows."""
        count = 0
        while count < max(-(-len(rows) // 4), 20) and lr(rows[-1]) / 2 <= lr(rows[-1 - count]) <= 2 * lr(rows[-1]):
            count += 1
        return rows[-count:]

    everything = list(rows)
    for eighth in range(1, 9):  # the tail of a schedule that falls, a fifth at most
        if len(alike()) < 10:
            rows = everything[: len(everything) - int(eighth / 8 * 0.2 * len(everything))]
    window = alike()
    assert len(window) >= 10
    for layer in summarise(table, metadata=clean().metadata):
        assert (layer.samples, layer.first_step, layer.last_step) == (len(window), window[0], window[-1])
        assert layer.lr_range == (min(map(lr, window)), max(map(lr, window)))
        assert (layer.lr, layer.last_lr) == (lr(window[-1]), lr(max(step for step in range(300) if lr(step) > 0)))
        moving = World(table.slice(0, 3 * (window[-1] + 1)), {})
        wanted = {"angle", "angle_predicted", "angle_vs_predicted", "angle_vs_equilibrium"}
        slow = {name: value for name, value in slow_summary(moving, layer.name, len(window)).items() if name in wanted}
        assert {name: getattr(layer, name) for name in slow} == pytest.approx(slow, rel=1e-12)
        assert layer.angle_vs_predicted == pytest.approx(layer.angle / layer.angle_predicted, rel=1e-12)


@pytest.mark.parametrize(
    ("lr", "runs_out"),
    [
        (lambda step: 0.05 * (1 + math.cos(math.pi * step / 1000)), True),
        (lambda step: 0.1 * (1 - step / 1000), True),
        (lambda step: 0.1 * (1 - step / 20_000), False),
        (lambda step: 0.1 if step < 900 else 0.001, False),
    ],
    ids=["cosine", "linear to zero", "slowly", "drop"],
)
def test_there_is_no_time_to_settle_if_lr_falls_to_zero_before(lr, runs_out):
    for layer in summaries(world(HEAVY_BALL, 990, lr=lr)).values():
        assert layer.lr_runs_out is runs_out
        assert (layer.steps_to_settle is None) == (layer.epochs_to_settle is None) == runs_out
        assert ("too fast for a time to settle at one lr" in layer.sentence) == runs_out
        assert "falls to 0" not in layer.sentence
        assert layer.angle_vs_predicted == pytest.approx(1, abs=0.15)


def test_a_falling_lr_is_described_by_its_samples_only():
    def lr(step: int) -> float:
        """A cosine that ends at a twentieth: nothing in the samples says that it falls to 0."""
        return 0.1 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / 1000)) / 2)

    run = world(HEAVY_BALL, 900, lr=lr)
    layer = summaries(run)["conv1.weight"]
    assert layer.lr_runs_out
    first, last = (f"{lr(step):.3g}" for step in (layer.first_step, 899))
    assert f"lr fell from {first} to {last} since step {layer.first_step}, too fast" in layer.sentence


def test_the_first_lr_is_that_of_the_first_step_even_if_its_angle_is_unknown():
    """B of LoRA is 0 before its first step, and an angle from 0 does not exist."""
    run = world(HEAVY_BALL, 60, lr=lambda step: 0.1 * (1 - step / 100))
    names = np.array(run.samples["param"].to_pylist())
    unknown = (names == "conv1.weight") & (run.samples["step"].to_numpy() == 0)
    angle = np.where(unknown, np.nan, run.samples["angle"].to_numpy())
    layers = summarise(edited(run.samples, angle=angle), metadata=run.metadata)
    assert len({layer.settings_over_run for layer in layers}) == 1
    assert all(layer.first_lr == 0.1 for layer in layers)


def test_no_window_goes_across_a_jump_however_few_samples_are_behind_it():
    table = clean().samples.slice(0, 900)
    table = edited(table, lr=np.where(table["step"].to_numpy() < 297, 0.1, 0.01))
    assert {layer.samples for layer in summarise(table, metadata=clean().metadata)} == {3}


def test_the_error_of_a_ratio_is_its_scatter_over_many_layers():
    """Layers whose angles scatter by a known amount around a prediction that moves with its schedule."""
    run = world(SGD(0.1, 2e-3), 60, layers=[f"layer{number}" for number in range(200)])
    steps, rng = run.samples["step"].to_numpy(), np.random.default_rng(0)
    predicted = 0.1 * (1 - steps / 100)
    angle = predicted * np.exp(rng.normal(0, 0.2, len(steps)))
    table = edited(run.samples, angle=angle, angle_predicted=predicted)
    layers = summarise(table, metadata=run.metadata, window=60)
    scatter = np.std(np.log([layer.angle_vs_predicted for layer in layers]))
    # A standard deviation of 200 is good to 5 %, the mean of the errors to 1 %.
    assert np.sqrt(np.mean([layer.angle_error**2 for layer in layers])) == pytest.approx(scatter, rel=0.16)


def test_the_course_of_lr_is_told_from_first_to_last():
    table = clean().samples.slice(0, 900)
    falling = edited(table, lr=np.where(table["step"].to_numpy() < 200, 0.1, 0.01))
    assert (
        summarise(falling, metadata=clean().metadata)[0].settings_over_run
        == "SGD(lr=0.1 -> 0.01, wd=2e-3, momentum=0.9)"
    )
    (same, *_) = summarise(table, metadata=clean().metadata)
    assert same.settings_over_run == same.settings
    steps = table["step"].to_numpy()
    peaked = edited(table, lr=np.where(steps < 100, 0.01, np.where(steps < 200, 0.2, 0.004)))
    assert (
        summarise(peaked, metadata=clean().metadata)[0].settings_over_run
        == "SGD(lr=0.01 -> 0.2 -> 4e-3, wd=2e-3, momentum=0.9)"
    )


def test_the_numbers_of_a_window_are_those_of_the_samples_with_a_prediction():
    table = clean().samples.slice(0, 900)
    early = table["step"].to_numpy() < 290
    predicted = np.where(early, np.nan, table["angle_predicted"].to_numpy())
    for layer in summarise(edited(table, angle_predicted=predicted), metadata=clean().metadata):
        assert (layer.samples, layer.first_step, layer.last_step) == (10, 290, 299)
        assert layer.angle == pytest.approx(slow_summary(clean_of(table), layer.name, 10)["angle"], rel=1e-12)


def clean_of(table: pa.Table) -> World:
    return World(table, clean().metadata)


def test_momentum_counts_through_what_it_leaves():
    table = clean().samples.slice(0, 900)
    steps = table["step"].to_numpy()
    slowly = edited(table, momentum=0.9 + 0.09 * steps / 299)  # 1 - momentum falls tenfold, to 0.01
    assert {layer.samples for layer in summarise(slowly, metadata=clean().metadata)} == {34}  # 0.02 is 33.2 steps back


@pytest.mark.parametrize("without", ["invariance", "law"])
def test_no_prediction_is_left_over_where_none_applies(without):
    table, metadata = clean().samples, clean().metadata
    if without == "invariance":
        table = edited(table, cosine=np.full(len(table), 0.1))
    else:
        metadata = {**metadata, "params": [{**p, "rule": None, "no_law": "none"} for p in metadata["params"]]}
    layer = summarise(table, metadata=metadata)[0]
    told = {name: getattr(layer, name) for name in (*RATIOS, "angle_predicted", "angle_equilibrium", "norm_predicted",
            "norm_equilibrium", "how_wrong", "steps_to_settle", "epochs_to_settle")}  # fmt: skip
    assert told == dict.fromkeys(told)
    assert layer.state == "none" and layer.angle and layer.norm


def test_the_tail_is_a_share_of_the_steps_however_few_of_them_were_sampled():
    """Samples that become rarer: the last fifth of a run has one, and without it many are at about one lr."""
    table = clean().samples.slice(0, 1800)
    table = edited(table, lr=[0.1 * min(1, (600 - step) / 120) for step in table["step"].to_numpy()])
    sampled = [*range(0, 300, 10), 370, 430, 490, 564]
    rare = table.filter(pc.is_in(table["step"], pa.array(sampled)))
    for layer in summarise(rare, metadata=clean().metadata):
        assert (layer.last_step, layer.samples, layer.last_lr) == (490, 20, pytest.approx(0.03))
        assert layer.lr_runs_out and layer.steps_to_settle is None
        assert layer.sentence.endswith("; it was settled there.")


def test_a_tail_with_all_predictions_of_a_layer_is_not_left_out():
    """A growth gain is measured late in a short run."""
    table = clean().samples.slice(0, 900)
    step = table["step"].to_numpy()
    predicted = np.where(step < 260, np.nan, table["angle_predicted"].to_numpy())
    table = edited(table, lr=0.1 * (1 - step / 299), angle_predicted=predicted)
    rare = table.filter(pc.equal(pc.bit_wise_and(table["step"], 7), 0))
    for layer in summarise(rare, metadata=clean().metadata):
        assert layer.first_step >= 264 and layer.angle_vs_predicted == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(
    ("lr", "jumps"),
    [
        (lambda epoch: 0.9**epoch, False),
        (lambda epoch: 1 + math.cos(math.pi * epoch / 30), False),
        (lambda epoch: 1 - epoch / 30, False),
        (lambda epoch: 0.1 ** (epoch // 10), True),
        (lambda epoch: 0.2 ** (epoch // 5), True),
        (lambda epoch: 0.5 ** (epoch // 7), True),
        (lambda epoch: 0.9**epoch * (0.1 if epoch > 20 else 1), True),
    ],
    ids=["exponential", "cosine", "linear", "tenth", "fifth", "half", "a drop within"],
)
def test_a_staircase_has_no_jumps_and_disturbs_nothing(lr, jumps):
    table = clean().samples.slice(0, 900)
    values = [0.1 * lr(step // 10) for step in table["step"].to_numpy()]
    table = edited(table, lr=values, state=["settled"] * 300 + ["disturbed"] * (len(values) - 300))
    run = sampled_run(table, metadata=clean().metadata)
    assert (run.taken.last_jump > run.taken.first[:-1]).all() == jumps
    assert {layer.state for layer in summarise_run(run)} == {"disturbed" if jumps else "settling"}


def test_a_restart_of_a_cosine_is_a_jump():
    table = clean().samples.slice(0, 930)
    steps = table["step"].to_numpy()
    table = edited(table, lr=[0.05 * (1 + math.cos(math.pi * (step % 300) / 300)) for step in steps])
    assert {layer.samples for layer in summarise(table, metadata=clean().metadata)} == {10}


def test_a_settled_layer_is_as_predicted_within_its_scatter():
    scatter = fluctuation(HEAVY_BALL, random_walk_variance(256, momentum=0.9))
    alike = 0.9**2
    error = math.sqrt(scatter.angle_variance * (1 + alike) / (1 - alike) / 400)
    for layer in summaries(clean()).values():
        assert abs(layer.angle_vs_predicted - 1) < 4 * error
        assert abs(layer.norm_vs_equilibrium - 1) < 4 * math.sqrt(scatter.norm_variance) + 0.02  # L over 100 steps
        assert layer.invariant and layer.state == "settled" and layer.no_law is None


def test_order_chunks_and_plain_words_make_no_difference():
    expected = summarise(dropped().samples, metadata=dropped().metadata)
    table = dropped().samples
    shuffled = table.take(np.random.default_rng(0).permutation(len(table)))
    plain = pa.table({name: column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
                      for name, column in zip(table.column_names, table.columns, strict=True)})  # fmt: skip
    # Chunks whose dictionaries number the words differently.
    halves = [table.slice(0, 2401), table.slice(2401).take(np.arange(len(table) - 2401)[::-1])]
    chunked = pa.concat_tables(
        [pa.Table.from_pylist(half.to_pylist(), schema=table.schema) for half in halves],
    )
    for variant in (shuffled, plain, chunked):
        assert summarise(variant, metadata=dropped().metadata) == expected


def test_layers_come_in_the_order_of_the_metadata():
    backwards = {**clean().metadata, "params": clean().metadata["params"][::-1]}
    names = [layer.name for layer in summarise(clean().samples, metadata=backwards)]
    assert names == ["conv3.weight", "conv2.weight", "conv1.weight"]


@given(st.floats(1e-3, 1e3))
def test_the_scale_of_the_weights_changes_no_ratio(factor):
    before = summaries(dropped())
    after = {x.name: x for x in summarise(rescaled_units(dropped().samples, factor), metadata=dropped().metadata)}
    for name, layer in before.items():
        for ratio in (*RATIOS, "how_wrong", "angle", "steps_to_settle", "cosine"):
            assert getattr(after[name], ratio) == pytest.approx(getattr(layer, ratio), rel=1e-9)
        assert after[name].norm == pytest.approx(layer.norm * factor)


def test_a_run_at_another_scale_has_the_same_ratios():
    before, after = summaries(world(HEAVY_BALL, 500)), summaries(world(HEAVY_BALL, 500, scale=4.0))
    for name, layer in before.items():
        assert [getattr(after[name], ratio) for ratio in RATIOS] == [getattr(layer, ratio) for ratio in RATIOS]


@pytest.mark.parametrize(("factor", "state"), [(1.2, "settled"), (1.9, "settling"), (0.6, "settling")])
def test_a_layer_with_a_measured_gain_is_settled_only_if_it_turns_about_as_in_equilibrium(factor, state):
    """Its norm may pass its equilibrium on the way."""
    table, count = clean().samples, len(clean().samples)
    columns = {"angle": factor * table["angle_equilibrium"].to_numpy(), "steps_to_settle": np.zeros(count)}
    columns |= {"state": ["settled"] * count, "law": [GAIN_LAW] * count}
    layer = summarise(edited(table, **columns), metadata=clean().metadata)[0]
    assert layer.by_gain and layer.state == state
    assert ("it is settled" in layer.sentence) == (state == "settled")
    assert (f"still turns at {factor}x its equilibrium" in layer.sentence) == (state == "settling")


def test_sentences_of_settled_and_approaching_layers():
    layer = summaries(clean())["conv1.weight"]
    assert layer.sentence == (
        f"conv1.weight turns {layer.angle:.3g} rad per step over steps 1,200-1,599; "
        f"SGD(lr=0.1, wd=2e-3, momentum=0.9) predicts {layer.angle_predicted:.3g}; it is settled."
    )
    far = summaries(world(HEAVY_BALL, 200, start=0.6, layers=["layer3.conv2"]))["layer3.conv2"]
    assert far.state == "settling"
    assert far.sentence == (
        f"layer3.conv2 turns {far.angle:.3g} rad per step over steps 150-199; "
        f"SGD(lr=0.1, wd=2e-3, momentum=0.9) predicts {far.angle_predicted:.3g} now and "
        f"{far.angle_equilibrium:.3g} in equilibrium; its norm is "
        f"{1 / far.norm_vs_equilibrium:.3g}x too small and needs {math.ceil(far.steps_to_settle):,} more steps "
        f"({far.epochs_to_settle:.1f} epochs) to settle at this lr and weight decay."
    )


def test_a_time_to_settle_far_beyond_the_run_is_no_number():
    layer = summaries(world(SGD(1e-3, 2e-3, momentum=0.9), 200, start=3.0, layers=["layer3.conv2"]))["layer3.conv2"]
    assert layer.steps_to_settle > 2000
    assert "would take more than 10 times the steps so far to settle at this lr and weight decay" in layer.sentence
    assert "more step" not in layer.sentence


def test_sentences_of_the_other_states():
    after = summaries(dropped())["conv2.weight"].sentence
    assert "SGD(lr=0.01, wd=2e-3, momentum=0.9) predicts" in after and "since the last change its norm is 1." in after
    assert after.count("too large and needs") == 1
    bare = summaries(world(SGD(0.1, 0.0, momentum=0.9), 300))["conv1.weight"]
    assert bare.sentence.endswith("momentum=0.9) predicts 0.00922; without weight decay there is no equilibrium.")
    assert bare.angle_vs_equilibrium is None and bare.how_wrong is not None
    adam = summaries(world(AdamW(1e-2, 0.1, betas=(0.9, 0.99)), 300))["conv1.weight"]
    assert "AdamW(lr=0.01, wd=0.1, betas=(0.9, 0.99)) predicts" in adam.sentence


def without_prediction(samples: pa.Table) -> pa.Table:
    nothing = [None] * len(samples)
    names = ("angle_predicted", "norm_predicted", "angle_equilibrium", "norm_equilibrium", "steps_to_settle")
    return edited(samples, **dict.fromkeys((*names, "epochs_to_settle"), nothing), state=["none"] * len(samples))


def test_a_layer_without_a_law_says_why():
    metadata = {
        **clean().metadata,
        "optimizers": [{"class": "RMSprop", "settings": "RMSprop(lr=0.1)"}],
        "params": [
            {**p, "rule": None, "law": None, "no_law": "no law for RMSprop"} for p in clean().metadata["params"]
        ],
    }
    layer = summarise(without_prediction(clean().samples), metadata=metadata)[0]
    assert (
        layer.sentence
        == f"conv1.weight turns {layer.angle:.3g} rad per step over steps 1,200-1,599; no law for RMSprop."
    )
    assert layer.settings == "RMSprop(lr=0.1, wd=2e-3, momentum=0.9)"
    assert layer.how_wrong is None and layer.norm_vs_equilibrium is None and layer.steps_to_settle is None


def test_a_layer_that_does_not_look_scale_invariant_says_its_mean_cosine():
    table = without_prediction(clean().samples)
    table = edited(table, cosine=np.full(len(table), -0.05))
    layer = summarise(table, metadata=clean().metadata)[0]
    assert layer.invariant is False
    assert layer.sentence.endswith(
        "it does not look scale-invariant (mean cosine with its gradient -0.05), and it is a vector, whose growth gain "
        "is not steady."
    )
    # lr wd / (1 - momentum) = 2e-3: a mean cosine of 0.003 has a strength of 0.095, and one of 0.0035 of 0.11.
    for cosine, invariant in ((0.003, True), (0.0035, False)):
        wave = cosine + 0.01 * np.resize([1, 1, 1, -1, -1, -1], len(table))  # three layers
        assert summarise(edited(table, cosine=wave), metadata=clean().metadata)[0].invariant is invariant
    labelled = {
        **clean().metadata,
        "params": [{**p, "invariant": False, "how": "no"} for p in clean().metadata["params"]],
    }
    assert "it is not scale-invariant (mean" in summarise(table, metadata=labelled)[0].sentence


def test_layers_that_never_moved_are_kept():
    table = clean().samples
    third = np.array(table["param"].to_pylist()) == "conv3.weight"
    notes = np.where(third, NO_GRADIENT, None)
    angles = np.where(third, np.nan, table["angle"].to_numpy())
    norms = np.where(third, 1.0, table["norm"].to_numpy())
    still = summarise(edited(table, angle=angles, note=notes, norm=norms), metadata=clean().metadata)
    assert [layer.samples for layer in still] == [400, 400, 0]
    assert still[2].sentence == "conv3.weight has no angle in any sampled step: no gradient."
    assert still[:2] == summarise(table, metadata=clean().metadata)[:2]
    weightless = summarise(edited(table, angle=np.zeros(len(table))), metadata=clean().metadata)[0]
    assert math.isfinite(weightless.how_wrong) and weightless.how_wrong > 10


def test_unknown_parameters_and_missing_metadata_are_no_obstacle():
    layer = summarise(clean().samples, metadata={})[0]
    assert layer.invariant is None and layer.no_law is not None and layer.angle is not None
    assert layer.sentence.endswith("no law is known for its optimizer.")


def test_layers_with_different_lengths():
    run = together(clean(), world(HEAVY_BALL, 100, layers=["fresh"], start=1.2))
    assert [layer.samples for layer in summaries(run).values()] == [400, 400, 400, 25]
    assert summaries(run)["conv2.weight"] == summaries(clean())["conv2.weight"]


def test_no_samples_no_summaries_and_bad_input_is_refused():
    assert summarise(clean().samples.slice(0, 0), metadata=clean().metadata) == ()
    with pytest.raises(EquilibriaError, match="without angle, state"):
        summarise(clean().samples.drop_columns(["angle", "state"]), metadata=clean().metadata)
    with pytest.raises(EquilibriaError, match="window"):
        summarise(clean().samples, metadata=clean().metadata, window=0)


def test_nothing_here_needs_torch():
    code = (
        "import sys, equilibria.diagnosis.summary, equilibria.diagnosis.identities, equilibria.diagnosis\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- unevenly sampled runs


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(0, 10**6), st.integers(1, 9))
def test_a_sample_weighs_the_steps_it_stands_for(gaps, start, unit):
    steps = np.cumsum([start, *gaps])
    weights = sample_weights(steps, np.array([0, len(steps)]))
    assert weights.tolist() == slow_weights(steps.tolist())
    # Inside the run they share out every step; beyond each end at most half the mean distance is added.
    assert steps[-1] - steps[0] <= weights.sum() <= (steps[-1] - steps[0]) * (1 + 1 / len(gaps)) * (1 + 1e-12)
    assert sample_weights(unit * steps, np.array([0, len(steps)])) == pytest.approx(unit * weights, rel=1e-12)
    twice = sample_weights(np.tile(steps, 2), np.array([0, len(steps), len(steps), 2 * len(steps)]))
    assert twice.tolist() == [*weights, *weights]


def sampled_at(run: World, steps: list[int]) -> World:
    return World(run.samples.filter(pc.is_in(run.samples["step"], pa.array(steps))), run.metadata)


def test_uneven_samples_give_the_angle_of_all_steps():
    """A speed that falls linearly, sampled ten times as often in the first half of the window."""
    run = world(HEAVY_BALL, 2000)
    steps = run.samples["step"].to_numpy()
    run = World(edited(run.samples, angle=0.01 * (3 - steps / 1000)), run.metadata)
    (layer, *_) = summarise(
        sampled_at(run, [*range(0, 1000, 10), *range(1000, 2000, 100)]).samples, metadata=run.metadata
    )
    inside = np.arange(layer.first_step, layer.last_step + 1)
    true = math.sqrt(np.mean((0.01 * (3 - inside / 1000)) ** 2))
    # Sums over intervals of at most 100 of 1000 steps: the ends count for half an interval more, 5 % of the window, at
    # most 25 % off; samples weighted alike are 15 % off.
    assert layer.angle == pytest.approx(true, rel=0.02)


def test_the_first_steps_are_no_part_of_now_where_later_ones_are_sampled_more_thinly():
    steps = [0, 1, *range(50, 500, 50)]
    run = world(HEAVY_BALL, 500)
    at = run.samples["step"].to_numpy()
    fast_start = World(edited(run.samples, angle=np.where(at <= 1, 0.5, 0.01)), run.metadata)
    for layer in summarise(sampled_at(fast_start, steps).samples, metadata=run.metadata):
        assert (layer.first_step, layer.samples) == (50, 9)
        assert layer.angle == pytest.approx(0.01, rel=1e-12)
        # the whole run still counts them: steps 0 and 1 stand for 1 and 25 of its 475 steps
        weights = slow_weights(steps)
        rms = math.sqrt((0.25 * sum(weights[:2]) + 1e-4 * sum(weights[2:])) / sum(weights))
        assert layer.angle_over_run == pytest.approx(rms, rel=1e-6)
