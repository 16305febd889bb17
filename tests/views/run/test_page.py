"""The page of a run: complete in itself, safe with any text, and true to the run."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pyarrow as pa
import pytest
from tests.helpers.page_reader import read_page, words
from tests.helpers.pages import EVIL, check_nothing_is_loaded, check_policy, data_of
from tests.helpers.report_helpers import KINDS, layer_names, metadata, run, table, transformer_run

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.budget import missing_gain
from equilibria.diagnosis.siblings import kind_of
from equilibria.diagnosis.summary import summarise, summarise_run
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding
from equilibria.records.tables import SAMPLE_FIELDS
from equilibria.views.run.curves import MOST_LAYERS
from equilibria.views.run.headline import as_predicted, no_findings, run_details, run_headline, worst_first
from equilibria.views.run.page import _optimizers, report_page, write_report

SAMPLES, METADATA = run(20, outlier=7, lawless=13)
OUTLIER = layer_names(20)[7]
NOTHING = SAMPLE_FIELDS.empty_table()


def no_law():
    names = layer_names(3)
    samples = table(np.arange(40), names, {"angle": np.full((40, 3), 0.01), "norm": np.full((40, 3), 2.0)})
    told = metadata(names)
    for entry in told["params"]:
        entry.update(rule=None, law=None, no_law="no law for Adagrad")
    return samples, told


def skipped_only():
    samples = table(np.arange(4), ["w"], {})
    note = pa.array(["step skipped"] * 4).dictionary_encode().cast(SAMPLE_FIELDS.field("note").type)
    return samples.set_column(samples.column_names.index("note"), SAMPLE_FIELDS.field("note"), note), metadata(["w"])


def page_of(samples, **options) -> str:
    return report_page(samples, **options).document()


EVIL_SAMPLES = table(np.arange(3), [EVIL], {"angle": np.full((3, 1), 0.1)})
PAGES = {
    "twenty": page_of(SAMPLES, metadata=METADATA, title="ResNet-20"),
    "one": page_of(run(1)[0], metadata=run(1)[1]),
    "nothing": page_of(NOTHING, metadata={}),
    "no law": page_of(no_law()[0], metadata=no_law()[1]),
    "skipped": page_of(skipped_only()[0], metadata=skipped_only()[1]),
    "evil": page_of(
        table(np.arange(3), [EVIL], {"angle": np.full((3, 1), 0.1)}),
        metadata=metadata([EVIL]),
        title=EVIL,
        notes=[EVIL],
    ),
}
each_page = pytest.mark.parametrize("name", PAGES)


def rows(page: str) -> list[list[str]]:
    found = re.findall(r"<tr data-layer[^>]*>(.*?)</tr>", page)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in found]


@each_page
def test_nothing_is_loaded_from_anywhere(name):
    check_nothing_is_loaded(PAGES[name], style="--c11")


@each_page
def test_the_policy_allows_exactly_the_scripts_of_the_page(name):
    check_policy(PAGES[name])


@each_page
def test_the_data_are_strict_json(name):
    assert set(data_of(PAGES[name])) == {"unit", "range", "layers", "middle", "metrics", "arrays", "sharpness"}


def test_the_headline_counts_and_names_the_worst():
    shown = words(PAGES["twenty"])
    ratios = [layer.angle_vs_predicted for layer in summarise(SAMPLES, metadata=METADATA)]
    good = sum(ratio is not None and 0.95 <= ratio <= 1.05 for ratio in ratios)
    off = [finding.subject for finding in diagnose(SAMPLES, metadata=METADATA) if "than predicted" in finding.subject]
    assert off == [f"{OUTLIER} turns faster than predicted"] and good == 17  # one is 5 % off, but by chance
    assert re.search(
        r"19 of 20 layers have a prediction; 17 agree, 1 is 6\d\s% fast, 1 is \d\s% fast "
        r"\(too few samples to be sure\)",
        shown,
    )
    assert re.search(rf"Furthest off: {OUTLIER}, 6\d\s% fast\.", shown)
    assert "The layer turns as predicted" in words(PAGES["one"])


def test_the_headline_says_when_there_is_nothing_to_compare():
    assert (
        "The 3 layers turn 0.01 rad per step (steps 20 to 39) Norms changed by less than 0.5 % since step 0"
        in words(PAGES["no law"])
    )
    assert "No layer has a prediction: no law for Adagrad." in words(PAGES["no law"])
    assert "Nothing was measured yet" in words(PAGES["nothing"])
    assert "train a few steps" in words(PAGES["nothing"])
    assert "No layer was measured." in words(PAGES["nothing"])


def test_all_layers_as_predicted():
    layers = summarise(run(5)[0], metadata=run(5)[1])
    assert run_headline(layers) == "All 5 layers turn as predicted"
    assert run_details(layers).startswith("Furthest off: ")


def test_both_layers_and_the_layer():
    assert run_headline(summarise(run(2)[0], metadata=run(2)[1])) == "Both layers turn as predicted"
    assert run_headline(summarise(run(1)[0], metadata=run(1)[1])) == "The layer turns as predicted"


def test_the_length_is_the_number_of_steps_that_were_taken_where_known():
    samples, told = run(1)
    told = {**told, "steps_per_epoch": None}
    last = max(samples["step"].to_pylist())
    assert f"{last + 1:,} steps" in words(page_of(samples, metadata=told))
    longer = words(page_of(samples, metadata={**told, "steps": last + 8}))
    assert f"{last + 8:,} steps" in longer and f"steps 0 to {last + 7:,}" in longer


def test_the_headline_agrees_with_the_findings():
    """A layer is off where a finding says so; too few samples, or too much scatter, make no verdict."""
    (layer,) = summarise(run(1)[0], metadata=run(1)[1])
    off = dataclasses.replace(layer, angle_vs_predicted=1.3, how_wrong=0.26, angle_error=0.01)
    scattered, few = (dataclasses.replace(off, angle_error=error) for error in (0.1, None))
    slow = dataclasses.replace(off, angle_vs_predicted=0.25, how_wrong=1.39)
    still = dataclasses.replace(off, angle_vs_predicted=0.0, how_wrong=20.7)
    bare = dataclasses.replace(layer, angle_vs_predicted=None, how_wrong=None)
    assert [as_predicted(judged) for judged in (layer, off, scattered, few)] == [True, False, None, None]
    headlines = {
        "The layer is 30 % fast (too few samples to be sure)": [scattered],
        "1 of 2 layers is 30 % fast (too few samples to be sure); 1 has too few samples to judge": [few, scattered],
        "The layer is 30 % fast": [off],
        "The layer is not turning": [still],
        "All 3 layers are off their prediction (worst: 4x slower)": [off, slow, off],
        "1 of 2 layers is 30 % fast; 1 has too few samples to judge": [off, few],
        "1 of 3 layers turns as predicted; 1 is 30 % fast; 1 has too few samples to judge": [layer, off, few],
        "2 of 4 layers turn as predicted; 2 are off their prediction (worst: 30 % fast)": [layer, layer, off, off],
        "1 of 3 layers has a prediction; it agrees": [layer, bare, bare],
        "2 of 3 layers have a prediction; both agree": [layer, layer, bare],
        "3 of 4 layers have a prediction; all are off their prediction (worst: 30 % fast)": [off, off, off, bare],
        "2 of 17 layers have a prediction; 1 agrees, 1 is 30 % fast (too few samples to be sure)": [
            layer,
            scattered,
            *[bare] * 15,
        ],
    }
    for headline, layers in headlines.items():
        assert headline in (run_headline(layers), run_details(layers).partition(". ")[0])
    assert no_findings([few])[0] == "Too early to judge"


def test_the_headline_says_why_nothing_is_predicted():
    (layer,) = summarise(run(1)[0], metadata=run(1)[1])
    bare = dataclasses.replace(layer, angle_vs_predicted=None, how_wrong=None, invariant=False)
    assert "No layer has a prediction: they have no prediction in these samples." in run_details([bare] * 3)
    labelled = dataclasses.replace(bare, how="no")
    assert "No layer has a prediction: they have no prediction in these samples." in run_details([labelled] * 3)
    undecided = dataclasses.replace(bare, invariant=None, mean_cosine=0.01)
    assert "it is undecided whether 2 are scale-invariant; 1 has no prediction in these samples." in run_details(
        [undecided, bare, undecided]
    )
    early = dataclasses.replace(bare, no_gain=missing_gain((64, 64), samples=20, steps=200))
    assert "No layer has a prediction: they need 5 more samples for a growth gain." in run_details([early] * 3)


def test_without_findings_only_what_was_compared_is_claimed():
    (layer,) = summarise(run(1)[0], metadata=run(1)[1])
    off = dataclasses.replace(layer, angle_vs_predicted=1.3)
    bare = dataclasses.replace(layer, angle_vs_predicted=None, invariant=False)
    lawless = dataclasses.replace(bare, no_law="no law for Adagrad")
    assert no_findings([layer, bare])[1].startswith("The layer that has a prediction turns within 5 % of it")
    assert no_findings([layer, off])[1].startswith("1 layer of 2 is more than 5 % off the prediction")
    assert no_findings([bare, lawless, bare]) == (
        "No findings",
        "There is no prediction to judge the angles by; no other check found a fault.",
    )
    assert "No layer has a prediction: 2 have no prediction in these samples; no law for Adagrad (1 layer)." in (
        run_details([bare, lawless, bare])
    )


def test_the_table_has_every_layer_in_the_order_of_the_model():
    shown = {row[0]: row[1:] for row in rows(PAGES["twenty"])}
    layers = {layer.name: layer for layer in summarise(SAMPLES, metadata=METADATA)}
    assert sorted(shown) == sorted(layers)
    kinds = [kind_of(name) for name in shown]
    assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(map(kind_of, layers)))  # a kind stands with its first layer
    first, cells = layers[OUTLIER], shown[OUTLIER]
    assert cells[0] == f"{first.angle_vs_predicted:.2f}▲ faster"
    assert cells[1:4] == [f"{first.angle:#.3g}", f"{first.angle_predicted:#.3g}", f"{first.angle_equilibrium:#.3g}"]
    assert cells[4] == f"{first.norm:#.3g}" and cells[5].startswith(f"{first.norm_vs_equilibrium:.2f}")
    lawless = layers[layer_names(20)[13]]
    expected = [
        "–",
        f"{lawless.angle:#.3g}",
        "–",
        "–",
        f"{lawless.norm:#.3g}",
        "–",
        "– no law",
    ]  # all others are settled
    assert shown[lawless.name] == expected


def test_a_row_is_numbered_by_its_curves_those_that_findings_name_first():
    """The script colours the first ones; it sorts by the rank, the furthest off first."""
    layers = {layer.name: layer for layer in summarise(SAMPLES, metadata=METADATA)}
    found = re.findall(r'<tr data-layer="(\d+)" data-rank="(\d+)".*?<button[^>]*>(.*?)</button>', PAGES["twenty"])
    names, ranked = ({int(row[by]): re.sub("<[^>]+>", "", row[2]) for row in found} for by in (0, 1))
    assert [names[number] for number in range(20)] == [layer["name"] for layer in data_of(PAGES["twenty"])["layers"]]
    wrong = [layers[ranked[number]].how_wrong for number in range(19)]
    assert wrong == sorted(wrong, reverse=True) and ranked[0] == OUTLIER
    said = " ".join(f"{each.subject} {each.evidence}" for each in diagnose(SAMPLES, metadata=METADATA))
    named = [names[number] in re.findall(r"[\w.]+\w", said) for number in range(20)]
    assert named == sorted(named, reverse=True) and 0 < sum(named) < 20
    ranks = {name: rank for rank, name in ranked.items()}
    others = [ranks[names[number]] for number in range(sum(named), 20)]
    assert others == sorted(others)


def kind_rows(page: str) -> dict[str, list[str]]:
    found = re.findall(r'<tr class="kind" data-kind="([^"]*)"[^>]*>(.*?)</tr>', page)
    cells = {kind: re.findall(r"<t[hd].*?</t[hd]>", row) for kind, row in found}
    return {kind: [re.sub(r"<[^>]+>", " ", cell).split() for cell in row] for kind, row in cells.items()}


def test_siblings_are_folded_into_one_row_with_median_range_and_the_unlike_ones():
    samples, metadata = transformer_run(12, fast={3: 2.0})
    page = page_of(samples, metadata=metadata)
    layers = summarise(samples, metadata=metadata)
    kinds = kind_rows(page)
    assert list(kinds) == [f"transformer.h.*.{kind}.weight" for kind in KINDS]
    angles = [layer.angle for layer in layers if layer.name.endswith("mlp.c_fc.weight")]
    name, angle, norm, growth = kinds["transformer.h.*.mlp.c_fc.weight"]
    assert re.search(r"12layers;h\.3[\d.]+×themedianangle$", "".join(name))
    assert [float(value) for value in angle if value != "–"] == pytest.approx(
        [np.median(angles), min(angles), max(angles)], rel=5e-3
    )
    assert (norm, growth) == (["12.0"], ["1.20"])
    members = re.findall(
        r'<tr data-layer="\d+" data-rank="\d+" data-place="\d+" class="member" data-kind="([^"]*)" hidden', page
    )
    assert members == [kind for kind in kinds for _ in range(12)]
    assert len(rows(page)) == 50


def test_columns_without_a_value_are_left_out():
    samples, metadata = transformer_run(12)
    head, budget = re.findall(r"<thead>(.*?)</thead>", page_of(samples, metadata=metadata), flags=re.DOTALL)
    assert "random steps" in budget
    titles = re.findall(r">([^<]+)</th>", head)
    assert titles == ["layer", "measured, rad per step", "norm", "norm ÷ that at step 0"]
    assert 'id="order"' not in page_of(samples, metadata=metadata)  # no layer is further off than another


def test_predictions_made_before_a_layer_was_known_to_have_no_law_are_not_drawn():
    samples, metadata = run(3)
    for entry in metadata["params"]:
        entry["invariant"] = entry["name"] != "conv1.weight"
    drawn = {layer["name"]: layer for layer in data_of(page_of(samples, metadata=metadata))["layers"]}
    kinds = ("predicted", "equilibrium", "norm_equilibrium", "ratio", "norm_ratio")
    assert all(drawn["conv1.weight"][kind] is None for kind in kinds)
    assert all(drawn["layer1.0.conv1.weight"][kind] is not None for kind in kinds)


def test_few_layers_are_not_folded():
    assert kind_rows(page_of(run(12)[0], metadata=run(12)[1])) == {}


def test_states_are_words_with_a_mark_and_a_time():
    samples, told = run(2, steps=4800)
    states = [(row[7], row[8]) for row in rows(page_of(samples, metadata=told))]
    waits = [layer.epochs_to_settle for layer in summarise(samples, metadata=told)]
    assert all(re.fullmatch(r"! disturbed[\d.]+ epochs", state) for _, state in states)  # narrow screens: in one cell
    assert sorted(wait for wait, _ in states) == sorted(f"{wait:.2g} epochs" for wait in waits)
    told["steps_per_epoch"] = None
    nulls = pa.nulls(samples.num_rows, pa.float64())
    samples = samples.set_column(
        samples.column_names.index("epochs_to_settle"), SAMPLE_FIELDS.field("epochs_to_settle"), nulls
    )
    assert all(re.fullmatch(r"[\d,]+ steps", row[7]) for row in rows(page_of(samples, metadata=told)))


def test_every_finding_is_shown():
    shown = words(PAGES["twenty"])
    findings = diagnose(SAMPLES, metadata=METADATA)
    assert PAGES["twenty"].count('<article class="finding') == len(findings) >= 2
    for finding in findings:
        for text in (finding.subject, finding.evidence, finding.remedy, finding.law):
            assert text.replace("lr x wd", "lr × wd")[1:] in shown  # the first letter may be a capital


@pytest.mark.parametrize(("count", "folded"), [(0, 0), (4, 0), (5, 0), (9, 5)])
def test_many_findings_are_folded(monkeypatch, count, folded):
    findings = tuple(Finding("note", f"subject {i}", f"evidence {i}", f"remedy {i}", "") for i in range(count))
    monkeypatch.setattr("equilibria.views.run.page.diagnose_run", lambda run: (summarise_run(run), findings))
    page = page_of(SAMPLES, metadata=METADATA)
    assert (f"<summary>{folded} more findings</summary>" in page) == (folded > 0)
    assert all(f"Evidence {i}." in words(page) for i in range(count))
    assert ("Nothing is clearly wrong" in words(page)) == (count == 0)  # two layers are off in these samples
    assert '<p class="law">' not in page


def test_text_from_outside_stays_text():
    reader = read_page(PAGES["evil"])
    assert len([tag for tag, _ in reader.elements if tag == "script"]) == 3
    assert "".join(text for tag, text in reader.text if tag == "title") == EVIL
    assert words(PAGES["evil"]).count(EVIL) >= 4  # title twice, a note, the table


def test_notes_about_the_record_are_shown():
    page = page_of(SAMPLES, metadata=METADATA, notes=["the last batch is torn"])
    assert '<p class="notice">The last batch is torn.</p>' in page


def test_more_layers_than_the_page_has_room_for():
    count = MOST_LAYERS + 7
    names = [f"w[{i}]" for i in range(count)]
    page = page_of(table(np.arange(3), names, {"angle": np.full((3, count), 0.1)}), metadata=metadata(names))
    assert len(rows(page)) == MOST_LAYERS
    assert "7 more layers" in words(page)


def test_layers_without_a_prediction_keep_their_order():
    samples, told = no_law()
    assert [layer.name for layer in worst_first(summarise(samples, metadata=told))] == layer_names(3)


def test_the_page_is_the_same_every_time():
    assert page_of(SAMPLES, metadata=METADATA, title="ResNet-20") == PAGES["twenty"]


def test_write_report_leaves_one_file(tmp_path):
    path = tmp_path / "run.html"
    assert write_report(SAMPLES, str(path), metadata=METADATA, title="ResNet-20") == path
    assert path.read_text(encoding="utf-8") == PAGES["twenty"]
    assert list(tmp_path.iterdir()) == [path]


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(EquilibriaError, match="is not a folder"):
        write_report(NOTHING, tmp_path / "missing" / "run.html", metadata={})
    with pytest.raises(EquilibriaError, match="without norm"):
        page_of(SAMPLES.drop_columns(["norm"]), metadata=METADATA)


def test_one_optimizer_is_listed_once_though_a_controller_has_fewer_settings_for_its_own_layers():
    settings = ("Rotational(lr=3e-3, wd=0.5)", "Rotational(lr=3e-3, wd=0.5, betas=(0.9, 0.999))", "SGD(lr=0.1, wd=0)")
    (layer,) = summarise(run(1)[0], metadata=run(1)[1])
    layers = [
        dataclasses.replace(layer, settings=text, first_lr=None, lr=None, peak_lr=None, last_lr=None)
        for text in settings
    ]
    assert _optimizers(layers, {}) == list(settings[1:])
