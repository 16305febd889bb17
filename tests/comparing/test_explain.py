"""`explain` on runs whose inputs are known: the planted cause is first, nothing is claimed without one."""

import dataclasses
import itertools
import json
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.evolved_runs import LAYERS, evolved_run

import equilibria as eq
from equilibria.cli import app
from equilibria.comparing._explanation import _logged, _parted
from equilibria.comparing._replay import coalitions, shapley
from equilibria.comparing._settings import clipped_at
from equilibria.control import AngularSchedule
from equilibria.diagnosis.run import sampled_run
from equilibria.errors import EquilibriaError
from equilibria.records import RecordWriter
from equilibria.theory import SGD, AdamW, Lion
from equilibria.theory.gain import advance_by_gain

SGDM, ADAM = SGD(0.1, 2e-3, momentum=0.9), AdamW(3e-3, 0.3, betas=(0.9, 0.95))


# ---- the pieces


@given(st.lists(st.floats(-5, 5), min_size=16, max_size=16))
def test_shapley_is_the_mean_effect_over_all_orders(values):
    table = {tuple(np.flatnonzero(row)): value for row, value in zip(coalitions(4), values, strict=True)}
    expected = np.zeros(4)
    for order in itertools.permutations(range(4)):
        for place, cause in enumerate(order):
            before, after = tuple(sorted(order[:place])), tuple(sorted(order[: place + 1]))
            expected[cause] += (table[after] - table[before]) / math.factorial(4)
    parts = shapley(np.array(values))
    np.testing.assert_allclose(parts, expected, atol=1e-12)
    assert parts.sum() == pytest.approx(values[-1] - values[0], abs=1e-12)


@pytest.mark.parametrize("power", [1, 2])
def test_the_gain_recursion_is_that_of_single_small_steps(power):
    norm_sq, gain, speed, lr, eps = 2.0, 3.0, 0.5, 1e-3, 2e-5
    state = advance_by_gain(
        np.array([norm_sq**power]),
        np.array([gain * speed**2]),
        decay=np.array([400 * eps]),
        lr_sq=400 * lr**2,
        power=power,
    )
    for _ in range(400):
        norm_sq *= math.exp(gain * (lr * speed) ** 2 / norm_sq**power - 2 * eps)
    assert state[0] == pytest.approx(norm_sq**power, rel=1e-5)


# ---- planted causes

PLANTED = {
    "lr": ({"lr": 2.0}, {}),
    "weight decay": ({"weight_decay": 4.0}, {}),
    "momentum": ({"momentum": 0.6}, {}),
    "start norm": ({}, {"start": 6.0}),
    "gradient size": ({}, {"unit_grad_sq": 9.0}),
}


def changed(rule, factors):
    values = {name: factor * getattr(rule, name) for name, factor in factors.items() if name != "momentum"}
    if "momentum" in factors:
        a = factors["momentum"]
        values |= {"betas": (a, 0.95)} if isinstance(rule, AdamW) else {"momentum": a}
    return dataclasses.replace(rule, **values)


@pytest.mark.parametrize("rule", [SGDM, ADAM], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("cause", PLANTED)
def test_the_planted_cause_is_first_and_explains_all(rule, cause):
    factors, options = PLANTED[cause]
    if isinstance(rule, AdamW) and cause == "gradient size":
        pytest.skip("Adam divides it out")
    result = eq.explain(evolved_run(rule), evolved_run(changed(rule, factors), seed=1, **options))
    assert result.causes[0].name == cause
    only, *others = result.causes
    # Under coupled decay the momentum of a cold optimizer builds up first; at another norm that shows as alignment.
    assert [each.name for each in others] in ([], ["alignment"])
    assert all(each.size < 0.2 * only.size for each in others)
    ratio = math.exp(np.mean([math.log(layer.travelled) for layer in result.layers]))
    # The scatter of 300 angles, twice; and a tenth for the momentum that builds up (alignment, claimed or not).
    cold = 0.1 * abs(math.log(ratio)) if cause == "start norm" else 0.0
    left = math.log(ratio) - sum(math.log(each.travelled) for each in result.causes)
    assert abs(left) < 0.03 + cold
    for layer in result.layers:
        assert abs(math.log(layer.unexplained)) < 0.02
        product = math.prod(layer.parts.values()) * layer.unexplained
        assert product == pytest.approx(layer.travelled)
    if cause != "gradient size":
        assert result.change.causes == (cause,)
        assert others or result.change.closes > 0.95


def test_two_causes_multiply():
    both = dataclasses.replace(SGDM, lr=0.2, weight_decay=8e-3)
    result = eq.explain(evolved_run(SGDM), evolved_run(both, seed=1))
    assert {each.name for each in result.causes} == {"lr", "weight decay"}
    assert result.change.causes in (("lr", "weight decay"), ("weight decay", "lr"))


@pytest.mark.parametrize("rule", [SGDM, ADAM], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_is_claimed_of_runs_that_differ_by_their_scatter(rule, seed):
    result = eq.explain(evolved_run(rule), evolved_run(rule, seed=seed))
    assert result.causes == ()
    assert result.change is None
    assert "no cause of a difference is larger than the scatter" in result.headline


def test_identical_runs_have_the_ratio_one():
    run = evolved_run(SGDM)
    result = eq.explain(run, run)
    assert result.causes == ()
    assert result.settings == ()
    assert [layer.travelled for layer in result.layers] == [1.0] * 3


def test_the_answer_inverts_with_the_runs():
    a, b = evolved_run(SGDM), evolved_run(dataclasses.replace(SGDM, lr=0.2), seed=1)
    forth, back = eq.explain(a, b), eq.explain(b, a)
    assert forth.causes[0].travelled * back.causes[0].travelled == pytest.approx(1.0)


def test_a_missing_warm_up_is_named_with_its_steps():
    warm = evolved_run(SGDM, lr=lambda step: 0.1 * min((step + 1) / 60, 1))
    result = eq.explain(warm, evolved_run(SGDM, seed=1))
    assert result.causes[0].name == "lr"
    assert "most of it at steps 0-" in result.causes[0].sentence
    assert "numpy.interp" in result.change.code


def test_layers_without_decay_are_named():
    a = evolved_run(SGDM)
    b = evolved_run(SGDM, layers=LAYERS[:2], seed=1)
    missing = evolved_run(dataclasses.replace(SGDM, weight_decay=0.0), layers=LAYERS[2:], seed=2, group=1)
    b.table = type(b.table).from_batches([*b.table.to_batches(), *missing.table.to_batches()])
    b.metadata["params"] += missing.metadata["params"]
    result = eq.explain(a, b)
    assert result.causes[0].name == "weight decay"
    assert result.causes[0].layers == LAYERS[2:]
    assert result.change.code == 'optimizer.param_groups[1]["weight_decay"] = 2e-3'


def test_a_frozen_layer_and_a_number_format_are_causes():
    a, b = evolved_run(SGDM), evolved_run(SGDM, layers=LAYERS[:2], seed=1)
    b.metadata["frozen"] = [{"name": LAYERS[2], "shape": [64, 64]}]
    result = eq.explain(a, b)
    assert result.causes[0].name == "frozen"
    assert f"{LAYERS[2]} turns in A and not in B" in result.causes[0].sentence
    rounded = eq.explain(a, evolved_run(SGDM, seed=1, dtype="bfloat16"))
    assert rounded.causes == ()  # no effect, no claim
    assert [each.name for each in rounded.settings] == ["number format"]


def test_a_run_records_a_frozen_layer_without_siblings():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 2))
    model[1].requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    monitor = eq.watch(model, torch.optim.SGD(trained, lr=0.1))
    assert monitor.metadata["frozen"] == [{"name": "1.weight", "shape": [6, 8]}]
    monitor.close()


def test_a_layer_that_dies_counts_as_a_hundredth_and_one_that_never_turns_as_frozen():
    a, b = evolved_run(SGDM), evolved_run(SGDM, seed=1)
    place, dead = b.table.column_names.index("angle"), [name == LAYERS[2] for name in b.table["param"].to_pylist()]
    angle, step = b.table["angle"].to_numpy(), b.table["step"].to_numpy()
    for since, names in ((300, ["alignment"]), (0, ["frozen"])):
        zeros = np.where(np.array(dead) & (step >= since), 0.0, angle)
        b.table = b.table.set_column(place, b.table.schema.field("angle"), [zeros])
        result = eq.explain(a, b)
        assert [each.name for each in result.causes] == names
        assert all(math.isfinite(math.log(layer.travelled)) for layer in result.layers)
        assert str(result)


def test_clipping_is_recognised_by_one_length():
    run = evolved_run(SGDM)
    assert clipped_at(sampled_run(run.table, metadata=run.metadata)) is None
    place = run.table.column_names.index("grad_norm")
    steps = np.unique(run.table["step"].to_numpy(), return_inverse=True)[1]
    total = np.sqrt(np.bincount(steps, run.table["grad_norm"].to_numpy() ** 2))
    limit = 0.9 * float(np.median(total))
    clipped = run.table["grad_norm"].to_numpy() * np.minimum(1, limit / total)[steps]
    table = run.table.set_column(place, "grad_norm", [clipped])
    assert clipped_at(sampled_run(table, metadata=run.metadata)) == pytest.approx(limit)


def test_other_optimizers_are_one_cause_with_their_lr():
    result = eq.explain(evolved_run(SGDM), evolved_run(ADAM, seed=1))
    assert "optimizer" in [each.name for each in result.causes]
    assert not {"lr", "momentum", "gradient size", "alignment"} & set(result.parts)
    assert (result.change.causes, result.change.code) == (("optimizer",), "")
    assert "the optimizer of A with its settings" in result.change.sentence


def test_nesterov_and_betas_of_lion_are_momentum():
    """Neither is seen in the column of the momentum, which is the same."""
    nesterov = dataclasses.replace(SGDM, nesterov=True)
    result = eq.explain(evolved_run(nesterov), evolved_run(SGDM, seed=1))
    assert result.causes[0].name == "momentum"
    assert "(nesterov: True in A, False in B)" in result.causes[0].sentence
    assert result.change.code == 'optimizer.param_groups[0]["nesterov"] = True'
    lion = Lion(1e-3, 0.1, betas=(0.9, 0.99))
    result = eq.explain(evolved_run(lion), evolved_run(dataclasses.replace(lion, betas=(0.9, 0.9)), seed=1))
    assert result.causes[0].name == "momentum"  # its memory of 100 steps fills, which shows as alignment
    assert "second beta: 0.99 in A, 0.9 in B" in result.causes[0].sentence
    assert result.change.code == 'optimizer.param_groups[0]["betas"] = (0.9, 0.99)'


def test_a_recorded_setting_is_part_of_the_change_however_little_it_closes():
    lion = Lion(1e-3, 0.1, betas=(0.9, 0.99))
    change = eq.explain(evolved_run(lion), evolved_run(dataclasses.replace(lion, lr=2e-3), seed=1)).change
    assert change.code == 'optimizer.param_groups[0]["lr"] = 1e-3'
    assert "what was measured may be a consequence of it" in change.sentence


def test_a_recorded_setting_that_no_law_has_is_named_beside_what_was_measured():
    a, b = evolved_run(SGDM), evolved_run(SGDM, seed=1, unit_grad_sq=9.0)
    for run, size in ((a, 32), (b, 8)):
        run.metadata["batch_size"] = size
    (cause,) = eq.explain(a, b).causes
    assert cause.name == "gradient size"
    assert "of the recorded settings this may be batch size: 32 in A, 8 in B; or other data" in cause.sentence


def test_settings_as_a_change_and_as_a_difference():
    a = evolved_run(SGDM)
    b = evolved_run(SGDM, lr=lambda step: 0.1 if step < 300 else 0.01, seed=1)
    (setting,) = eq.explain(a, b).settings
    assert (setting.first_step, setting.factor) == (300, 0.1)
    assert setting.sentence == "lr: 0.1 in A, 0.1 → 0.01 in B from step 300"
    assert str(setting) == "lr x 0.1 (0.1 before, 0.1 → 0.01 now from step 300)"
    assert str(eq.explain(evolved_run(ADAM), a).settings[-1]) == "law AdamW -> SGD"


# ---- what can be pasted runs


def network():
    torch.manual_seed(0)
    parts = [
        part for _ in range(3) for part in (torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*parts)


def test_the_printed_settings_and_the_printed_schedule_run():
    both = dataclasses.replace(SGDM, lr=0.2, weight_decay=8e-3, momentum=0.8)
    warm = evolved_run(SGDM, lr=lambda step: 0.1 * min((step + 1) / 60, 1))
    change = eq.explain(warm, evolved_run(both, seed=1, start=6.0)).change
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8, weight_decay=8e-3)
    before = model.get_parameter("0.weight").norm().item()
    names = {"torch": torch, "optimizer": optimizer, "model": model}
    exec(change.code, names)
    group = optimizer.param_groups[0]
    shown = {"lr": group["initial_lr"], "weight decay": group["weight_decay"], "momentum": group["momentum"]}
    wanted = {"lr": 0.1, "weight decay": 2e-3, "momentum": 0.9}
    for cause in change.causes:
        if cause in wanted:
            assert shown[cause] == pytest.approx(wanted[cause])
    assert "weight decay" in change.causes
    if "start norm" in change.causes:
        assert model.get_parameter("0.weight").norm().item() == pytest.approx(before / 3, rel=0.02)
    fresh = network()
    matrices = [param for param in fresh.parameters() if param.ndim > 1]
    names = {"optimizer": torch.optim.SGD(matrices, lr=0.2), "model": fresh}
    exec(change.schedule, names)
    assert isinstance(names["scheduler"], AngularSchedule)


def test_the_curve_of_angles_is_that_of_the_run():
    run = evolved_run(SGDM, scatter=0.0)
    curve = eq.explain(run, evolved_run(SGDM, seed=1)).angles()
    measured = run.table.filter([name == LAYERS[0] for name in run.table["param"].to_pylist()])
    later = measured["step"].to_numpy() > 50
    found = np.array([curve(step) for step in measured["step"].to_numpy()])
    np.testing.assert_allclose(found[later], measured["angle"].to_numpy()[later], rtol=0.02)
    assert curve.layers == LAYERS
    printed = eval(curve.code, {"numpy": np})
    np.testing.assert_allclose(
        [printed(step) for step in range(50, 600)], [curve(step) for step in range(50, 600)], rtol=0.06
    )


@pytest.mark.parametrize("since", [0, 60, 150])
@pytest.mark.parametrize("seed", range(4))
def test_the_step_at_which_two_losses_part_is_told(since, seed):
    """Losses that scatter by a tenth around one course, that of B by .2 above from a step on."""
    steps, draw = np.arange(300), np.random.default_rng(seed)
    a, b = (np.exp(-steps / 100) + 0.1 * draw.standard_normal(300) for _ in range(2))
    edges = np.array([0, 300])
    assert _parted(((steps, a), (steps, b)), edges) == (None, 0)
    found, stretch = _parted(((steps, a), (steps, b + np.where(steps >= since, 0.2, 0.0))), edges)
    # .2 is six errors of a stretch: the step lies in a stretch that shows it, or those before are lower by chance
    assert since - 3 * stretch <= found <= since + stretch
    assert _parted(((steps, a), (steps, b + 0.3 * (np.abs(steps - 100) < 50))), edges) == (None, 0)


def test_two_last_losses_are_compared_with_the_scatter_of_their_values():
    steps, edges, beyond = np.arange(1000), np.array([0, 1000]), []
    for seed in range(300):
        a, b = (0.1 * np.random.default_rng([seed, run]).standard_normal(1000) for run in (0, 1))
        a, b = (SimpleNamespace(metrics={"loss": (steps, 3 + values)}) for values in (a, b))
        (loss,) = _logged(a, b, edges)
        beyond.append("more than the" in loss.sentence)
        assert ("within the" in loss.sentence) != beyond[-1]
        assert loss.error == pytest.approx(0.1 * math.sqrt(2 / 100), rel=0.4)
    assert 0.02 < np.mean(beyond) < 0.09  # two standard errors: 4.6 % by chance
    (few,) = _logged(a, SimpleNamespace(metrics={"loss": (steps[::20], np.full(50, 3.0))}), edges)
    assert math.isnan(few.error) and "apart" not in few.sentence


# ---- input


def test_of_many_layers_those_furthest_apart_are_shown():
    names = tuple(f"blocks.{block}.weight" for block in range(60))
    a, b = evolved_run(SGDM, steps=60, layers=names), evolved_run(SGDM, steps=60, layers=names[:-1], seed=1)
    other = evolved_run(dataclasses.replace(SGDM, lr=0.4), steps=60, layers=names[-1:], seed=2, group=1)
    b.table = pa.concat_tables([b.table, other.table])
    b.metadata["params"] += other.metadata["params"]
    result = eq.explain(a, b)
    for shown in (str(result), result.table().html):
        assert names[-1] in shown.partition("Settings that differ")[0]
    assert "these layers are furthest apart, 20 more are in --json" in " ".join(str(result).split())


def test_lengths_differ_and_one_run_still_grows():
    result = eq.explain(evolved_run(SGDM, steps=600), evolved_run(SGDM, steps=300, seed=1))
    assert (result.first_step, result.last_step) == (0, 298)
    assert result.notes == ("A has samples up to step 598, B up to step 298; the steps that both have are compared",)


@pytest.mark.parametrize(("of_a", "of_b"), [("", "model."), ("net.model.", ""), ("a.", "b.c.")])
def test_names_that_begin_differently_are_matched_and_said(of_a, of_b):
    a, b = (tuple(f"{prefix}{name}" for name in LAYERS) for prefix in (of_a, of_b))
    result = eq.explain(evolved_run(SGDM, layers=a), evolved_run(dataclasses.replace(SGDM, lr=0.2), layers=b, seed=1))
    assert result.causes[0].name == "lr"
    assert [layer.name for layer in result.layers] == list(b)  # the code to paste is for B
    assert f'those of A count from "{of_a}" on, those of B from "{of_b}" on' in result.notes[0]


def test_samplings_differ():
    result = eq.explain(evolved_run(SGDM, every=1), evolved_run(dataclasses.replace(SGDM, lr=0.2), every=7, seed=1))
    assert result.causes[0].name == "lr"


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ({}, {"layers": ("other.weight",)}, "without a common layer"),
        ({"steps": 0}, {}, "without samples"),
    ],
)
def test_runs_that_cannot_be_compared_are_an_error(a, b, words):
    first = evolved_run(SGDM, **{**a, "steps": 10}) if a.get("steps") == 0 else evolved_run(SGDM, **a)
    if a.get("steps") == 0:
        first.table = first.table.slice(0, 0)
    with pytest.raises(EquilibriaError, match=words):
        eq.explain(first, evolved_run(SGDM, **b))


def test_a_run_that_ends_in_nan_is_compared_up_to_there():
    a, b = evolved_run(SGDM), evolved_run(dataclasses.replace(SGDM, lr=0.2), seed=1)
    place, step = b.table.column_names.index("norm"), b.table["step"].to_numpy()
    for end, words in ((400, "the weights of B are not finite from step 400 on"), (0, None)):
        norms = np.where(step >= end, np.nan, b.table["norm"].to_numpy())
        b.table = b.table.set_column(place, b.table.schema.field("norm"), [norms])
        if words is None:
            with pytest.raises(EquilibriaError, match="got b, a run whose weights are not finite from its first"):
                eq.explain(a, b)
        else:
            result = eq.explain(a, b)
            assert words in " ".join(result.notes)
            assert (result.last_step, result.causes[0].name) == (398, "lr")


def test_a_gradient_of_zero_makes_no_infinite_number():
    a, b = evolved_run(SGDM), evolved_run(SGDM, seed=1)
    place, step = b.table.column_names.index("grad_norm"), b.table["step"].to_numpy()
    for size in (0.0, 1e-200):
        lengths = np.where((step >= 200) & (step < 300), size, b.table["grad_norm"].to_numpy())
        b.table = b.table.set_column(place, b.table.schema.field("grad_norm"), [lengths])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = eq.explain(a, b)
        assert all(math.isfinite(cause.size) for cause in result.causes)
        assert all(abs(math.log(layer.unexplained)) < 0.05 for layer in result.layers)


def test_an_optimizer_without_a_law_is_another_one():
    a, b = evolved_run(ADAM), evolved_run(ADAM, seed=1)
    for entry in b.metadata["params"]:  # as with amsgrad
        entry["rule"] = entry["law"] = None
    result = eq.explain(a, b)
    assert {cause.name for cause in result.causes} <= {"optimizer"}
    assert [setting.sentence for setting in result.settings] == ["law: AdamW in A, none in B"]


def test_steps_apart_are_an_error():
    late = evolved_run(SGDM, steps=40)
    place = late.table.column_names.index("step")
    late.table = late.table.set_column(place, late.table.schema.field("step"), [late.table["step"].to_numpy() + 1000])
    with pytest.raises(EquilibriaError, match="without common steps"):
        eq.explain(late, evolved_run(SGDM, steps=40))


@pytest.mark.parametrize("bad", ["/nowhere/at/all", 3, None])
def test_what_is_no_run_is_an_error(bad):
    with pytest.raises(EquilibriaError):
        eq.explain(bad, evolved_run(SGDM))
    with pytest.raises(EquilibriaError):
        eq.explain(evolved_run(SGDM), bad)


def test_a_few_samples_are_enough_for_one_stretch():
    result = eq.explain(evolved_run(SGDM, steps=3), evolved_run(SGDM, steps=3, seed=1))
    assert len(result.step) == 1
    assert "one stretch" in " ".join(result.notes)
    assert str(result)


@pytest.mark.parametrize(
    "lr", [lambda step: 0.1, lambda step: 0.1 * min(1, (step + 1) / 40) * (0.1 if step > 250 else 1)]
)
def test_one_run_sampled_at_other_steps_has_no_cause(lr):
    """Only the steps that were sampled differ: dense at first and then rare, as with every="auto", or every fourth."""
    rare, even = (evolved_run(SGDM, steps=400, lr=lr, every=1) for _ in range(2))
    sampled = [step for step in range(400) if step < 9 or step % 17 == 0]
    rare.table = rare.table.filter(pc.is_in(rare.table["step"], value_set=pa.array(sampled)))
    even.table = even.table.filter(pc.equal(pc.bit_wise_and(even.table["step"], 3), 0))
    result = eq.explain(rare, even)
    assert [cause.name for cause in result.causes] == []
    assert result.settings == ()


# ---- the command and the page


@pytest.fixture
def folders(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        run = evolved_run(dataclasses.replace(SGDM, lr=lr), seed=int(10 * lr))
        run.loss = lr
        with RecordWriter(tmp_path / name, metadata=run.metadata) as writer:
            writer.append({column: run.table[column].combine_chunks() for column in run.table.column_names})
            writer.append(
                {name: run.metrics()[name].combine_chunks() for name in ("step", "name", "value")}, table="metrics"
            )
    return tmp_path


def explained(*line):
    result = CliRunner().invoke(app, ["explain", *map(str, line)], standalone_mode=False)
    assert result.exception is None
    return result.output


def test_the_command_prints_and_writes_a_page(folders):
    page = folders / "why.html"
    printed = explained(folders / "a", folders / "b", "--html", page)
    assert "1. lr: the learning rate makes the angle per step" in printed
    assert "loss: 0.1 in A, 0.2 in B" in printed
    html = page.read_text()
    assert "<script" not in html
    assert "Why a (A) and b (B) differ" in html


def test_json_has_the_causes_and_the_layers(folders):
    answer = json.loads(explained(folders / "a", folders / "b", "--json"))
    assert answer["causes"][0]["name"] == "lr"
    assert [layer["name"] for layer in answer["layers"]] == list(LAYERS)
    assert answer["change"]["causes"] == ["lr"]
