"""The trainings of the experiments on networks: schedules, measures, and the papers' settings on a stand-in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from equilibria.lab.data import ImageSet, load_digits
from equilibria.lab.harness import find
from equilibria.lab.harness.claim import CONTRADICTED, EXCLUDED, IDENTITY, SHOWN
from equilibria.lab.harness.figures import mean_in, rms_angle
from equilibria.lab.papers.explr import trainings
from equilibria.lab.papers.explr.fig2_stepdecay import across, across_key
from equilibria.lab.papers.explr.fig5_angle import FALLS, KEEPS, LESS_DECAY
from equilibria.lab.papers.explr.trainings import (
    COSINE,
    DECAY,
    EPOCH,
    FOLDED,
    ROUNDED,
    SMOKE,
    TEXP,
    TEXP_V2,
    Setting,
    Variant,
    exact_runs,
    runs,
)
from equilibria.lab.papers.nrq import fig3_networks
from equilibria.lab.training import chord_angle, train
from equilibria.theory.exponential import constant_schedule, decay_roots
from equilibria.theory.folding import fold
from equilibria.theory.texp import texp


def small(*variants: Variant, **more) -> Setting:
    return Setting(**{**SMOKE, **more}, variants=variants)


def test_the_cosine_changes_once_per_epoch_and_steps_divide():
    setting = small(steps=100, epoch=10)
    cosine = Variant("c", schedule=COSINE)
    assert setting.factor(cosine, 0) == setting.factor(cosine, 9) == 1.0
    assert setting.factor(cosine, 50) == pytest.approx(0.5) and setting.factor(cosine, 99) > 0
    steps = Variant("s", drops_at=(3, 6), divisor=10.0)
    assert [round(setting.factor(steps, t), 12) for t in (2, 3, 6)] == [1.0, 0.1, 0.01]


def test_all_parameters_are_invariant_jointly():
    """Multiplying all of them changes the outputs by what eps does."""
    images = load_digits()
    torch.manual_seed(0)
    model, batch = trainings.network(small(), images), images.train_images[:32]
    before = model(batch)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(64.0)
    assert torch.allclose(model(batch), before, rtol=0, atol=0.01 * float(before.detach().abs().max()))


def test_runs_with_weight_decay_and_folded_take_the_same_steps():
    """In float32: at step 4 rounding leaves about 1e-3 of an angle."""
    setting = small(Variant(DECAY), Variant(FOLDED, FOLDED), steps=5, weight_decay=0.02)
    decay, folded = (trainings.run_task(setting, (place, 0)) for place in (0, 1))
    assert decay["layer_angle"].shape == (5, 10)  # stem, two convolutions in each of three blocks, two shortcuts, head
    for name in ("layer_angle", "joint_angle"):
        np.testing.assert_allclose(folded[name], decay[name], rtol=0.01)


def test_the_joint_angle_is_that_of_all_parameters_as_one_vector():
    images, variant = load_digits(), Variant(FOLDED, FOLDED)
    setting = small(variant, steps=4)
    recipe = trainings.recipe(setting, variant, seed=0, images=images)
    names = [name for name, _ in trainings.network(setting, images).named_parameters()]
    ends = [train(replace(recipe, steps=steps)).state["model"] for steps in (3, 4)]
    before, after = (torch.cat([end[name].flatten() for name in names]) for end in ends)
    measured = trainings.run_task(setting, (0, 0))["joint_angle"][3, 0]
    assert measured == pytest.approx(chord_angle(before, after), rel=1e-3)


def test_one_rounding_is_one_rounding():
    images, setting = load_digits(), small()
    torch.manual_seed(0)
    plain = trainings._first(setting, Variant(DECAY), images)
    torch.manual_seed(0)
    rounded = trainings._first(setting, Variant(ROUNDED, ROUNDED), images)
    for one, other in zip(plain.parameters(), rounded.parameters(), strict=True):
        assert not torch.equal(one, other) and torch.allclose(one, other, rtol=2e-7, atol=1e-44)


def test_settings_of_every_step_are_the_variants():
    """Weight decay and learning rate after three steps, of which the last is after the drop."""
    images = load_digits()
    settings = {}
    for variant in find(["explr-angle"])[0].config("smoke").variants:
        early = replace(variant, drops_at=(2,))
        setting = small(early, steps=3, epoch=3)
        state = train(trainings.recipe(setting, early, seed=0, images=images)).state
        group = state["optimizer"]["param_groups"][0]
        settings[variant.name] = (group["lr"], group["weight_decay"])
    assert settings[KEEPS] == pytest.approx((0.01, 0.05))
    assert settings[LESS_DECAY] == pytest.approx((0.1, 5e-4))


def test_epoch_angles_continue_after_an_interruption():
    images, variant = load_digits(), Variant(FOLDED, FOLDED, drops_at=(4,))
    setting = small(variant, steps=6, epoch=2)
    recipe = trainings.recipe(setting, variant, seed=0, images=images)
    whole = train(recipe).curves
    half = train(replace(recipe, steps=4))
    rest = train(trainings.recipe(setting, variant, seed=0, images=images), start=half.state).curves
    np.testing.assert_array_equal(rest["epoch_angle"][-1], whole["epoch_angle"][-1])
    assert np.isnan(whole["epoch_angle"][0]).all() and (whole["epoch_angle"][1:] > 0).all()


def test_the_lr_that_is_drawn_is_that_of_the_step_also_where_powers_of_two_are_taken_out_after_it():
    images, variant = load_digits(), Variant(FOLDED, FOLDED, drops_at=(20,))
    setting = small(variant, seeds=(0,), steps=40, epoch=1, weight_decay=0.5, momentum=0.0)
    findings = {trainings.key(variant, 0): train(trainings.recipe(setting, variant, seed=0, images=images)).curves}
    (raw,), (shown,) = runs(setting, findings, variant), exact_runs(setting, findings, variant)
    exact = fold([0.1] * 20 + [0.01] * 20, 0.5, momentum=0.0).lr
    np.testing.assert_allclose(shown["lr"][1:], exact, rtol=1e-6)
    assert set(np.round(raw["lr"][1:] / exact)) == {1.0, 4.0}


def test_the_angle_of_an_epoch_is_that_of_the_cosine():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0])
    assert chord_angle(one, other) == pytest.approx(np.pi / 4)
    assert chord_angle(one, -one) == pytest.approx(np.pi)


def test_means_and_angles_of_a_window():
    run = {
        "step": np.array([0.0, 5, 10]),
        "test_accuracy": np.array([0.1, 0.2, 0.4]),
        "sampled_step": np.arange(10),
        "layer_angle": np.where(np.arange(10)[:, None] < 5, 3.0, np.array([3.0, 4.0, 50.0])),
    }
    assert mean_in(run, "test_accuracy", (5, 10)) == pytest.approx(30.0)
    assert rms_angle(run, (5, 10)) == pytest.approx(4.0)


def planted(name: str, angle=lambda variant, step: 1e-2, shift=lambda variant: 0.0):
    """An experiment's desk config, and curves that are level but for noise: those of a variant shifted by so much."""
    config = find([name])[0].config("desk")
    findings = {
        trainings.key(variant, seed): level(config, variant, seed, angle, shift)
        for variant in config.variants
        for seed in config.seeds
    }
    if name == "explr-stepdecay":
        few = across(config)
        findings |= {
            across_key(variant, seed): level(few, variant, seed, angle, shift)
            for variant in few.variants
            for seed in few.seeds
        }
    assert findings.keys() == find([name])[0].tasks(config).keys()
    return config, findings


def level(config: Setting, variant: Variant, seed: int, angle, shift) -> dict[str, np.ndarray]:
    step, sampled = np.arange(0.0, config.steps + 1, config.epoch), np.arange(0, config.steps, config.watch_every)
    rng = np.random.default_rng([seed, config.variants.index(variant)])
    curve = 0.6 + shift(variant) + rng.normal(0, 1e-3, step.shape)
    apart = 1 + 0.02 * (seed - np.mean(config.seeds))  # the same for all variants of a seed, and 1 in the mean
    angles = np.array([apart * angle(variant, int(t)) for t in sampled])
    return {
        "step": step,
        **dict.fromkeys(("test_accuracy", "train_accuracy", "loss"), curve),
        "sampled_step": sampled,
        "layer_angle": angles[:, None] * (1 + rng.normal(0, 1e-4, (len(sampled), 5))),
        "joint_angle": angles[:, None] * (1 + rng.normal(0, 1e-4, (len(sampled), 1))),
        "epoch_angle": np.full(len(step), 0.1),
    }


def verdicts(name: str, config, findings, containing: str) -> list[str]:
    return [claim.verdict for claim in find([name])[0].collect(config, findings).claims if containing in claim.text]


@pytest.mark.parametrize(("apart", "allowed"), [(0.0, {SHOWN, EXCLUDED}), (0.05, {CONTRADICTED})])
def test_curves_that_are_apart_do_not_coincide(apart, allowed):
    config, findings = planted(
        "explr-stepdecay",
        angle=lambda variant, step: 1e-2 * (1 + apart * (variant.name == FOLDED)),
        shift=lambda variant: apart * (variant.name == FOLDED),
    )
    claims = verdicts("explr-stepdecay", config, findings, "Folded")
    (by_chance,) = verdicts("explr-stepdecay", config, findings, "Folded: no farther apart than chance")
    assert len(claims) == 5 and set(claims) <= allowed | {by_chance}
    assert (by_chance == CONTRADICTED) == (apart > 0)  # of three seeds of noise the interval is wide


@pytest.mark.parametrize(("wrong", "same", "another"), [(TEXP, SHOWN, SHOWN), (FOLDED, CONTRADICTED, CONTRADICTED)])
def test_the_first_steps_distinguish_the_lr_of_texp_from_the_exact_one(wrong, same, another):
    """Curves that are equally good all along, of angles that are off by T-EXP's error in one of the runs."""
    config, findings = planted(
        "explr-stepdecay",
        angle=lambda variant, step: 1e-2 * (texp_error(variant)[step] if variant.name == wrong and step < 10 else 1.0),
    )
    assert verdicts("explr-stepdecay", config, findings, "as good in the end") == 4 * [SHOWN]
    assert verdicts("explr-stepdecay", config, findings, "the same trajectory") == 2 * [same]
    assert verdicts("explr-stepdecay", config, findings, "another trajectory") == 2 * [another]


def texp_error(variant: Variant) -> np.ndarray:
    """By hand, for a variant that drops at step 3 or not within ten."""
    rule = find(["explr-stepdecay"])[0].config("desk")
    drop = min(*variant.drops_at, 10)
    rates = [rule.lr] * drop + [rule.lr / 10] * (10 - drop)
    exact = fold(rates, rule.weight_decay, momentum=rule.momentum).lr
    phases = [(0, rule.lr), *([(drop, rule.lr / 10)] if drop < 10 else [])]
    return texp(phases, rule.weight_decay, steps=10, momentum=rule.momentum).lr / exact


def test_a_drop_that_is_folded_wrongly_is_detected():
    """An lr that falls by ten without the momentum's share of theorem 2.5: exact up to the drop, then off by z^-2."""
    config = find(["explr-stepdecay"])[0].config("desk")
    z1 = float(decay_roots(config.lr, config.weight_decay, momentum=config.momentum).z1)
    off = lambda variant, step: variant.name == FOLDED and variant.drops_at == (3,) and step >= 3  # noqa: E731
    config, findings = planted(
        "explr-stepdecay", angle=lambda variant, step: 1e-2 * (z1 if off(variant, step) else 1.0)
    )
    assert verdicts("explr-stepdecay", config, findings, "Folded, lr / 10 at step 3") == [CONTRADICTED]
    assert verdicts("explr-stepdecay", config, findings, "Folded: the same trajectory") == [SHOWN]


def test_the_growth_of_the_lr_is_no_claim_and_the_start_of_figure_1_is_one():
    config, findings = planted("explr-constant")
    for run in findings.values():
        last_step = np.maximum(run["step"] - 1, 0)
        run["lr"] = constant_schedule(config.lr, config.weight_decay, step=last_step, momentum=config.momentum).lr
        run["norm_sq"] = run["lr"] * 100
    claims = find(["explr-constant"])[0].collect(config, findings).claims
    assert [claim.text[:6] for claim in claims if claim.role == IDENTITY] == ["Growth"]
    assert verdicts("explr-constant", config, findings, "the same trajectory") == [SHOWN]


def test_the_second_drop_finds_norms_as_the_first_phase_left_them():
    """3.2 time constants after the first drop, by the closed form: an angle goes with the norm to the power -2."""
    config = find(["explr-v2"])[0].config("desk")
    left = np.exp(-3.2)
    for way, starts in ((TEXP, (10, 10 * (1 + 9 * left))), (TEXP_V2, (0.1, 0.1 * (1 - 0.9 * left)))):
        course = config.angle_course(way)
        for drop, start in enumerate(starts):
            at_once = course[config.variants[0].drops_at[drop]] / config.equilibrium(drop)
            assert at_once == pytest.approx(start**-0.5, rel=0.02)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, SHOWN), (1.5, CONTRADICTED), (0.5, CONTRADICTED)])
def test_angles_after_drops_are_judged_by_the_law(factor, verdict):
    config = find(["explr-v2"])[0].config("desk")
    courses = {way: config.angle_course(way) for way in (TEXP, TEXP_V2)}

    def angle(variant: Variant, step: int) -> float:
        return factor * courses[variant.name][step]

    config, findings = planted("explr-v2", angle=angle)
    assert verdicts("explr-v2", config, findings, "angle of T-EXP") == 8 * [verdict]
    assert verdicts("explr-v2", config, findings, "0.80 and 1.03 of equilibrium by the law: equally good") == [SHOWN]


@pytest.mark.parametrize(
    ("lag", "verdict"), [(1.0, SHOWN), (9.0, CONTRADICTED), (0.7, CONTRADICTED)], ids=["law", "a little", "too far"]
)
def test_the_fall_at_a_drop_is_judged_by_the_law(lag, verdict):
    """By hand: the norm's fourth power begins at 100 and at 10 of its new equilibrium; an angle that falls by a tenth
    only is below the old one, too."""

    def angle(variant: Variant, step: int) -> float:
        since = step - 1000
        if not 0 <= since < 100:
            return 1e-2
        fall = {
            KEEPS: (1 + 99 * np.exp(-since / 50)) ** -0.5,
            FALLS: 0.1**0.5 * (1 + 9 * np.exp(-since / 500)) ** -0.5,
            LESS_DECAY: 1.0,
        }
        return 1e-2 * lag * fall[variant.name]

    config, findings = planted("explr-angle", angle=angle)
    for place, run in enumerate(findings.values()):  # seeds differ by some per cent after the drop
        after = (run["sampled_step"] >= 1000) & (run["sampled_step"] < 1100)
        for name in ("layer_angle", "joint_angle"):
            run[name] = run[name] * np.where(after, 1 + 0.05 * (place % 3 - 1), 1.0)[:, None]
    assert verdicts("explr-angle", config, findings, "in the first epoch after the drop") == 2 * [verdict]


def test_the_angle_of_an_epoch_is_judged_by_the_law_for_independent_gradients():
    config, findings = planted("explr-angle")
    assert verdicts("explr-angle", config, findings, "law for independent gradients") == 4 * [CONTRADICTED]
    degrees = find(["explr-angle"])[0].collect(config, findings).numbers["of_pure_noise"]
    for name, run in findings.items():
        before, late = np.radians(degrees[name.rsplit("-", 1)[0]])
        apart = 1 + 0.01 * (int(name.rsplit("-", 1)[1]) - np.mean(config.seeds))
        run["epoch_angle"] = apart * np.where(run["step"] <= 1000, before, late)[:, None] * np.ones((1, 5))
    assert verdicts("explr-angle", config, findings, "law for independent gradients") == 4 * [SHOWN]


def stand_in() -> ImageSet:
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 10
    return ImageSet(images, labels, images, labels, tuple("abcdefghij"), "random")


@pytest.mark.parametrize("name", ["explr-constant", "explr-stepdecay", "explr-cosine", "explr-v2", "explr-angle"])
def test_all_that_the_papers_presets_train_decays(name):
    paper = find([name])[0].config("paper")
    with torch.device("meta"):
        model = trainings.network(paper, stand_in())
    (group,) = trainings._optimizer(paper, model).param_groups
    assert len(group["params"]) == len(list(model.parameters())) and group["weight_decay"] == 5e-4
    assert sum(param.dim() > 1 for param in model.parameters()) == 34  # 31 convolutions, two shortcuts, the head
    assert paper.depth == 32 and paper.epoch == EPOCH == 50_000 // paper.batch_size


@pytest.mark.parametrize(
    ("name", "place"),
    [("explr-constant", 1), ("explr-stepdecay", 2), ("explr-cosine", 1), ("explr-v2", 1), ("explr-angle", 0)],
)
@pytest.mark.slow
def test_the_papers_settings_start_and_run_on_a_stand_in(name, place):
    paper = find([name])[0].config("paper")
    tiny = replace(paper, batch_size=4, width=2, epoch=10, statistics=(1, 4), train_images=4)
    recipe = trainings.recipe(tiny, paper.variants[place], seed=0, images=stand_in())
    trained = train(replace(recipe, steps=10))
    assert trained.curves["step"].tolist() == [0, 10] and np.isfinite(trained.curves["test_loss"]).all()


@pytest.mark.slow
def test_the_papers_resnet18_starts_and_runs_on_a_stand_in():
    paper = find(["nrq-networks"])[0].config("paper")
    tiny = replace(paper, batch_size=4, width=2, measure_every=10, statistics=(1, 4), train_images=4)
    recipe = fig3_networks.recipe(tiny, paper.lines[-1], seed=0, images=stand_in())
    trained = train(replace(recipe, steps=10))
    assert trained.curves["step"].tolist() == [0, 10] and np.isfinite(trained.curves["test_loss"]).all()
