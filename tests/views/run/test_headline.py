"""The headline of a run: what was measured, of the steps it names, and no more."""

from __future__ import annotations

import dataclasses
import re

import pytest
from tests.helpers.report_helpers import KINDS, run, transformer_run

from equilibria.diagnosis.summary import summarise
from equilibria.findings import Finding
from equilibria.views.run.headline import (
    headline_and_details,
    in_short,
    most_telling_first,
    no_findings,
    run_details,
    run_headline,
)

(LAYER,) = summarise(run(1)[0], metadata=run(1)[1])


def transformer(blocks=24, **options):
    samples, metadata = transformer_run(blocks, **options)
    return summarise(samples, metadata=metadata)


def predicted(layers, *, ratio=1.0):
    """The same layers with predictions."""
    changes = {"angle_vs_predicted": ratio, "how_wrong": abs(ratio - 1), "angle_error": 1e-3, "invariant": True}
    return [dataclasses.replace(layer, angle_predicted=layer.angle / ratio, **changes) for layer in layers]


def test_blocks_that_turn_alike_are_one_sentence_with_its_steps():
    layers = transformer()
    first, last = layers[0].first_step, layers[0].last_step
    headline = run_headline(layers)
    assert headline.startswith("All 24 blocks turn alike, within 1.1x: 0.003 to 0.006 rad per step by kind of layer")
    assert f"(steps {first} to {last})" in headline and first > 0
    assert headline.endswith("norms grew by 20 % since step 0")


def test_the_blocks_that_are_unlike_the_others_are_named_with_their_factor():
    headline = run_headline(transformer(fast={0: 2.0, 23: 2.0}))
    assert headline.startswith("22 of 24 blocks turn alike, ")
    assert "; h.0, h.23 2x as fast; " in headline


def test_a_block_is_compared_kind_by_kind():
    """One kind of its layers three times, the others twice as fast as those of the same kind elsewhere."""
    layers = [
        dataclasses.replace(layer, angle=layer.angle * (1.5 if layer.name == "transformer.h.0.mlp.c_fc.weight" else 1))
        for layer in transformer(fast={0: 2.0})
    ]
    assert "; h.0 2 to 3x as fast; " in run_headline(layers)


def test_layers_outside_the_blocks_are_counted():
    headline = run_headline(transformer())
    assert "; the 2 other layers turn 0.001 to 0.002 rad per step; " in headline
    few = [layer for layer in transformer(3) if "c_fc" in layer.name]
    others = [dataclasses.replace(few[0], name=f"other{name}.weight", angle=0.01) for name in "abcdefghijklm"]
    assert run_headline([*few, *others]).startswith(
        "All 3 layers of a kind turn alike, within 1.1x: 0.003 rad per step (steps "
    )
    assert "; the 13 other layers turn 0.01 rad per step" in run_headline([*few, *others])


def test_nested_blocks_are_all_counted():
    layers = [
        dataclasses.replace(LAYER, name=f"stages.{stage}.{block}.{kind}.weight", shape=(8, 8))
        for stage in range(4)
        for block in range(6)
        for kind in ("attn", "mlp")
    ]
    assert run_headline(layers).startswith("All 24 blocks turn alike, ")


def test_places_in_a_block_are_no_blocks_but_blocks_in_a_stage_are():
    """lucidrains' ViT: attention in layers.*.0, the MLP in layers.*.1; a Swin has several blocks in a stage."""
    vit = [f"layers.{block}.{place}" for block in range(4) for place in ("0.to_qkv", "0.to_out", "1.up", "1.down")]
    swin = [f"features.{stage}.{block}.{kind}" for stage in (1, 3) for block in (0, 1) for kind in ("a", "b", "c", "d")]
    for names, count in ((vit, 4), (swin, 4)):
        layers = [dataclasses.replace(LAYER, name=f"{name}.weight", angle=0.01) for name in names]
        assert run_headline(layers).startswith(f"All {count} blocks turn alike, ")


def test_a_single_layer_that_is_unlike_its_siblings_is_named():
    layers = transformer()
    odd = "transformer.h.5.mlp.c_fc.weight"
    layers = [dataclasses.replace(layer, angle=layer.angle * (2 if layer.name == odd else 1)) for layer in layers]
    headline = run_headline(layers)
    assert headline.startswith("23 of 24 blocks turn alike, ") and f"; unlike its siblings: {odd} 2x; " in headline


def test_kinds_with_one_speed_share_a_number():
    layers = [dataclasses.replace(layer, angle=0.0042) for layer in transformer()]
    assert "turn alike, within 1.1x: 0.0042 rad per step (steps" in run_headline(layers)


def test_blocks_that_spread_are_not_called_alike():
    layers = transformer(8, fast={block: 1.35**block for block in range(8)})
    headline = run_headline(layers)
    assert headline.startswith("8 blocks turn ") and "alike" not in headline
    assert re.search(r"siblings differ by up to 8\.3x \(\S+\.h\.7\.\S+ against \S+\.h\.0\.\S+\)", headline)


def test_blocks_whose_kinds_differ_the_other_way_round_are_not_called_alike():
    """Attention three times as fast in half of the blocks, the MLP in the other half: the medians of blocks agree."""
    layers = [
        dataclasses.replace(layer, angle=layer.angle * (3 if (int(block[1]) < 4) == ("attn" in layer.name) else 1))
        for layer in transformer(8)
        if (block := re.search(r"\.h\.(\d)\.", layer.name))
    ]
    headline = run_headline(layers)
    assert "turn alike" not in headline and "; siblings differ by up to 3.1x (" in headline


def test_only_layers_of_the_same_steps_are_compared():
    late = {f"transformer.h.{block}.mlp.c_fc.weight" for block in range(3)}
    layers = [
        dataclasses.replace(layer, first_step=600, last_step=700, angle=layer.angle / 9)
        if layer.name in late
        else layer
        for layer in transformer()
    ]
    headline = run_headline(layers)
    assert headline.startswith("All 24 blocks turn alike, within 1.1x: ") and "the 2 other layers turn " in headline
    assert re.fullmatch(
        r"3 layers, sampled at other steps, turned \S+ to \S+ rad per step \(steps 600 to 700\)",
        headline.split("; ")[2],
    )


def test_layers_whose_samples_end_earlier_are_named_with_their_own_steps():
    layers = transformer()
    first, last = layers[0].first_step, layers[0].last_step
    early = {"first_step": first // 4, "last_step": first // 2, "angle": 0.5}
    own = f"transformer.wte.weight turned 0.5 rad per step (steps {first // 4} to {first // 2})"
    mixed = [dataclasses.replace(layer, **early) if ".wte." in layer.name else layer for layer in layers]
    for some, lead in (
        (mixed, "All 24 blocks"),
        ([layer for layer in mixed if ".h." not in layer.name], "The layer turns"),
    ):
        headline = run_headline(some)
        assert headline.startswith(lead) and f"(steps {first} to {last})" in headline and f"; {own}" in headline


def test_a_block_with_other_norms_is_named():
    layers = [
        dataclasses.replace(layer, norm=layer.norm * (2.5 if ".h.5." in layer.name else 1)) for layer in transformer()
    ]
    headline = run_headline(layers)
    assert (
        headline.startswith("All 24 blocks turn alike, ")
        and "norms unlike their siblings': 4 of 4 in h.5 2.5x" in headline
    )


@pytest.mark.parametrize("ratio", [None, 1.0])
def test_norms_of_most_layers_that_collapsed_come_first(ratio):
    layers = transformer() if ratio is None else predicted(transformer(), ratio=ratio)
    fallen = [dataclasses.replace(layer, norm=layer.first_norm * 0.02) for layer in layers[:60]]
    fallen[7] = dataclasses.replace(fallen[7], norm=fallen[7].first_norm * 0.011)
    start = f"60 of 98 norms fell to less than a tenth since the first sample, that of {fallen[7].name} to 0.011x; "
    assert run_headline([*fallen, *layers[60:]]).startswith(f"{start}All 24 blocks")
    assert "fell to less than a tenth" not in run_headline([*fallen[:40], *layers[40:]])


def test_with_predictions_the_verdict_comes_next():
    layers = predicted(transformer())
    assert run_headline(layers).startswith("All 24 blocks turn alike, ")
    assert run_details(layers).startswith("All 98 layers turn as predicted. Furthest off: ")
    assert "norms" not in run_headline(layers)


def test_without_predictions_the_measurement_comes_first_and_the_reason_is_short():
    layers = transformer()
    details = run_details(layers)
    first, *_ = details.split(". ")
    assert re.fullmatch(
        r"Over the whole run, from step 0 on, the angle was 0\.001 to 0\.006\d? rad per step \(.*\)", first
    )
    assert "No layer has a prediction: they have no growth gain in these samples." in details
    assert not re.search("could|alarm|wrong|warning", details)


def test_few_layers_without_predictions_are_measured_too():
    bare = [
        dataclasses.replace(
            LAYER, name=name, angle=angle, angle_vs_predicted=None, how_wrong=None, no_law="no law for Adadelta"
        )
        for name, angle in (("conv1.weight", 0.01), ("fc1.weight", 0.002), ("fc2.weight", 0.004))
    ]
    headline = run_headline(bare)
    assert headline.startswith("The 3 layers turn 0.002 to 0.01 rad per step (steps ")
    assert "No layer has a prediction: no law for Adadelta." in run_details(bare)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ((1.2, 1.4), "norms grew by 20 to 40 % since step 0"),
        ((0.9, 0.8), "norms shrank by 10 to 20 % since step 0"),
        ((7.48e16, 4.79), "norms are 4.8x to 7.5e16x as long as at step 0"),
        ((1e-4, 0.5), "norms are 0.0001x to 0.5x as long as at step 0"),
        ((0.67, 4.79), "norms are 0.67x to 4.8x as long as at step 0"),
        ((0.97, 1.41), "norms changed by -3 % to +41 % since step 0"),
        ((1.001, 0.999), "norms changed by less than 0.5 % since step 0"),
    ],
)
def test_how_the_norms_changed_is_of_the_recorded_steps(norms, words):
    bare = [
        dataclasses.replace(LAYER, norm=norm, first_norm=1.0, angle_vs_predicted=None, how_wrong=None) for norm in norms
    ]
    assert run_headline(bare).endswith(words)


def test_provisional_predictions_are_not_denied():
    """Undecided layers fill the predicted column of the table."""
    undecided = dataclasses.replace(LAYER, invariant=None)
    assert undecided.angle_predicted is not None
    details = run_details([undecided, undecided])
    assert "No layer has a prediction to judge it by: it is undecided whether they are scale-invariant." in details
    without = dataclasses.replace(undecided, angle_predicted=None, angle_vs_predicted=None)
    assert "No layer has a prediction: it is undecided" in run_details([without, without])


def test_a_layer_without_a_prediction_in_its_samples_is_named_in_plain_words():
    bare = dataclasses.replace(LAYER, angle_predicted=None, angle_vs_predicted=None, how_wrong=None)
    assert "No layer has a prediction: they have no prediction in these samples." in run_details([bare, bare])


def test_the_headline_of_a_run_that_diverged_says_so_first():
    layers = [LAYER, LAYER]
    warning = Finding("warning", "the training loss has diverged: it rose from 2 to 3e9", "", "", "", kind="diverged")
    headline, details = headline_and_details(layers, [warning])
    assert headline == "The training loss has diverged: it rose from 2 to 3e9"
    assert details == f"{run_headline(layers)}. {run_details(layers, short=True)}"
    assert headline_and_details(layers, []) == (run_headline(layers), run_details(layers, short=True))


def test_the_deck_of_a_page_leaves_numbers_of_single_layers_to_the_table():
    layers = [*predicted([LAYER], ratio=1.08), *predicted([LAYER])]
    assert run_details(layers, short=True).startswith(f"Furthest off: {LAYER.name}, 8 % fast.")
    assert len(run_details(layers, short=True)) < len(run_details(layers)) / 2


@pytest.mark.parametrize(
    ("severities", "ending"),
    [
        ([], ". No check found a fault."),
        (["note", "note"], ". No warnings, 2 notes below."),
        (["note", "warning"], ". Warning: warning 1."),
        (["warning", "note", "warning"], ". 2 warnings, the first: warning 0."),
    ],
)
def test_in_short_says_whether_a_check_found_something_wrong(severities, ending):
    findings = [Finding(severity, f"{severity} {place}", "", "", "") for place, severity in enumerate(severities)]
    assert in_short([LAYER, LAYER], findings) == run_headline([LAYER, LAYER]) + ending


def test_where_no_layer_can_be_judged_yet_the_headline_is_what_was_measured():
    few = dataclasses.replace(LAYER, angle_error=0.5, first_norm=LAYER.norm / 1.2, recorded_from=0)
    assert run_headline([few, few]).startswith("Both layers turn 0.03 rad per step (")
    assert run_headline([few, few]).endswith("; norms grew by 20 % since step 0")
    few = dataclasses.replace(few, samples=3, first_step=100, last_step=200)
    assert run_details([few, few]).startswith(
        "Both layers have too few samples to judge. A verdict takes 20 samples of a layer, or more where its angles "
        "scatter; these steps have 3. Train longer, or sample more often: eq.watch(..., every=5)."
    )
    for last_step, hint in ((110, "every=1"), (102, "Train longer.")):
        assert hint in run_details([dataclasses.replace(few, last_step=last_step)])
    assert "turns" not in run_details([few, few])


def test_layers_that_did_not_move_have_no_speed():
    still = dataclasses.replace(LAYER, angle=None, angle_vs_predicted=None, how_wrong=None)
    assert run_headline([still, still]) == "No angle was measured in any sampled step"


def test_no_findings_claims_only_what_was_compared():
    assert no_findings([LAYER])[1] == (
        "The layer that has a prediction turns within 5 % of it, and no check found a fault."
    )
    title, sentence = no_findings(transformer())
    assert title == "No findings" and sentence.startswith("There is no prediction to judge the angles by")


def test_the_most_telling_layers_are_the_unlike_ones_and_one_of_each_kind():
    names = [layer.name for layer in most_telling_first(transformer(fast={5: 3.0}))]
    assert {name.split(".")[2] for name in names[:4]} == {"5"}
    embeddings = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert set(names[4:10]) == {*embeddings, *(f"transformer.h.0.{kind}.weight" for kind in KINDS)}


def test_layers_with_too_few_samples_are_neither_counted_as_off_nor_furthest_off():
    near, off, few = (
        dataclasses.replace(layer, name=name, angle_error=error)
        for (layer,), name, error in (
            (predicted([LAYER]), "near", 1e-3),
            (predicted([LAYER], ratio=1.07), "off", 0.05),
            (predicted([LAYER], ratio=0.8), "few", 0.2),
        )
    )
    assert "Furthest off: off turns" in run_details([near, off, few])
    assert "Furthest off" not in run_details([few, few])
    assert no_findings([near, off, few])[1] == (
        "1 layer of 3 is more than 5 % off the prediction, which so few samples do not make certain; 1 has too few "
        "samples to judge."
    )
    assert no_findings([near, few])[1] == (
        "1 of 2 layers that have a prediction turns within 5 % of it; 1 has too few samples to judge; no check found a "
        "fault."
    )
