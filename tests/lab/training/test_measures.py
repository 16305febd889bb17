"""Evaluation with recomputed statistics, gradient descent in chunks, sharpness on the way, parameter groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.training_cases import StoppedError, recipe, stop_at
from torch import nn
from torch.nn import functional

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.lab.training import (
    Evaluation,
    FullBatch,
    Recipe,
    SharpnessMeasure,
    Training,
    decay_groups,
    drops,
    recomputed_statistics,
    train,
    warmed_up,
)


def linear_net(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5, bias=False), norm, nn.Tanh(), nn.Linear(5, 2)).double()


def samples(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(2, (count,), generator=generator)


def descent(norm: nn.Module, *, chunk: int | None = None, steps: int = 6, **more) -> Recipe:
    return Recipe(
        model=lambda: linear_net(norm),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=0.01),
        data=FullBatch(*samples()),
        steps=steps,
        chunk=chunk,
        measure_every=2,
        **more,
    )


def test_statistics_are_the_mean_over_the_batches_and_come_back_bit_for_bit():
    model = linear_net(nn.BatchNorm1d(5))
    model(samples()[0])
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [samples()[0][:10], samples()[0][10:]]
    with recomputed_statistics(model, batches):
        assert not any(module.training for module in model.modules())
        hidden = [batch @ model[0].weight.T for batch in batches]
        mean = sum(len(each) * each.mean(0) for each in hidden) / 24
        var = sum(len(each) * each.var(0, correction=0) for each in hidden) / 24
        torch.testing.assert_close(model[1].running_mean, mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model[1].running_var, var, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert model.training and not model[0].training and model[1].momentum == 0.1


def test_on_the_batch_that_is_trained_on_an_evaluation_is_the_training_loss():
    """Torch's running variance is larger by n / (n - 1), which a small batch shows."""
    inputs, labels = samples(8)
    training = Training(descent(nn.BatchNorm1d(5)))
    trained = float(functional.cross_entropy(training.model(inputs), labels).detach())
    found = Evaluation([inputs], train=(inputs, labels))(training)["train_loss"]
    assert found == pytest.approx(trained, rel=1e-12)


def test_of_images_every_pixel_counts():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)).double()
    images = torch.randn(3, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = model(images)
    with recomputed_statistics(model, [images]):
        torch.testing.assert_close(model(images), wanted, rtol=1e-12, atol=1e-14)


def test_layers_that_are_frozen_keep_their_statistics():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    model[0].eval()
    with recomputed_statistics(model, [samples()[0] + 5]):
        assert torch.equal(model[0].running_mean, torch.zeros(3).double())
        torch.testing.assert_close(model[1].running_mean, model[0](samples()[0] + 5).mean(0))
    model.eval()  # as a whole: nothing is frozen
    with recomputed_statistics(model, [samples()[0] + 5]):
        torch.testing.assert_close(model[0].running_mean, (samples()[0] + 5).mean(0))


def test_they_come_back_after_an_error_too():
    model = linear_net(nn.BatchNorm1d(5))
    before = model[1].running_var.clone()
    with pytest.raises(KeyError), recomputed_statistics(model, [samples()[0]]):
        raise KeyError
    assert model.training and torch.equal(model[1].running_var, before)


def test_evaluation_is_loss_and_accuracy_of_the_whole_set(monkeypatch):
    from equilibria.lab.training import measures

    monkeypatch.setattr(measures, "_EVALUATED_AT_ONCE", 7)
    inputs, labels = samples()
    training = Training(descent(nn.LayerNorm(5)))
    found = Evaluation(test=(inputs, labels))(training)
    outputs = training.model(inputs).detach()
    assert found["test_loss"] == pytest.approx(float(functional.cross_entropy(outputs, labels)), rel=1e-12)
    assert found["test_accuracy"] == float((outputs.argmax(1) == labels).double().mean())


@pytest.mark.parametrize("chunk", [None, 24, 7])
def test_gradient_descent_in_chunks_is_that_of_the_full_batch(chunk):
    trained = train(descent(nn.LayerNorm(5), chunk=chunk))
    assert trained.covers == {None: "one batch", 24: "one batch", 7: "full batch"}[chunk]
    torch.manual_seed(0)
    by_hand = linear_net(nn.LayerNorm(5))
    for _ in range(6):
        loss = functional.cross_entropy(by_hand(samples()[0]), samples()[1])
        grads = torch.autograd.grad(loss, list(by_hand.parameters()))
        with torch.no_grad():
            for param, grad in zip(by_hand.parameters(), grads, strict=True):
                param.copy_((1 - 0.3 * 0.01) * param - 0.3 * grad)
    for one, two in zip(trained.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_batchnorm_makes_ghost_batches_of_chunks_and_says_so():
    trained = train(descent(nn.BatchNorm1d(5), chunk=8))
    assert trained.covers == "ghost batches"
    assert train(descent(nn.BatchNorm1d(5))).covers == "one batch"


def test_sharpness_on_the_way_is_that_of_the_weights_then():
    batch = samples()
    recipe = descent(nn.LayerNorm(5), steps=4, measures={"edge": SharpnessMeasure(batch, tol=1e-6)})
    trained = train(recipe)
    objective = eq.objective(trained.model, functional.cross_entropy)
    alone = eq.sharpness(objective, batch, tol=1e-6)
    assert trained.curves["sharpness"][-1] == pytest.approx(alone.value, rel=1e-5)
    assert trained.curves["norm_sq"][-1] == pytest.approx(alone.norm_sq)


def test_sharpness_resumes_warm_after_a_kill(tmp_path):
    """Only the next search shows whether the vectors were kept: it takes the same products and finds the same bits."""

    def wide(**more) -> Recipe:
        return Recipe(
            model=lambda: nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2)).double(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
            data=FullBatch(*samples()),
            steps=8,
            measure_every=2,
            measures={"edge": SharpnessMeasure(samples())},
            **more,
        )

    whole = train(wide())
    with pytest.raises(StoppedError):
        train(wide(), folder=tmp_path, checkpoint_steps=5, progress=stop_at(5))
    cut = train(wide(), folder=tmp_path)
    np.testing.assert_array_equal(cut.curves["sharpness"], whole.curves["sharpness"])
    np.testing.assert_array_equal(cut.curves["products"], whole.curves["products"])


def test_groups_hold_every_parameter_once():
    model = linear_net(nn.BatchNorm1d(5))
    groups = decay_groups(model, ["0.weight"], lr=0.5, weight_decay=0.1, other_lr=0.2)
    held = [param for group in groups for param in group["params"]]
    assert {id(param) for param in held} == {id(param) for param in model.parameters()} and len(held) == 5
    with pytest.raises(EquilibriaError, match=r"got invariant='1\.wait', which the model lacks"):
        decay_groups(model, ["1.wait"], lr=0.5, weight_decay=0.1, other_lr=0.2)


def test_the_others_decay_except_normalisations():
    model = linear_net(nn.BatchNorm1d(5))
    groups = decay_groups(model, ["0.weight"], lr=0.5, weight_decay=0.1, other_lr=0.2, other_decay=0.05)
    shown = [
        ([tuple(param.shape) for param in group["params"]], group["lr"], group["weight_decay"]) for group in groups
    ]
    assert shown == [([(5, 3)], 0.5, 0.1), ([(2, 5), (2,)], 0.2, 0.05), ([(5,), (5,)], 0.2, 0.0)]


def test_a_warm_up_is_a_line_to_the_first_value_and_then_the_schedule():
    schedule = warmed_up(drops([6], 10), 4, start=0.2)
    assert [schedule(step) for step in range(8)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 0.1, 0.1])
    assert [warmed_up(drops([6], 10), 0, start=0.2)(step) for step in (0, 5, 6)] == [1.0, 1.0, 0.1]


def test_drops_divide_at_every_listed_step():
    schedule = drops([10, 4], 10)
    assert [schedule(step) for step in (0, 3, 4, 9, 10, 99)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_learning_rate_of_a_step_is_that_of_the_schedule():
    seen: list[float] = []
    given = recipe(measures={}, watch_every=None)
    training = Training(given)
    training.optimizer.register_step_pre_hook(lambda rule, *_: seen.append(rule.param_groups[0]["lr"]))
    for batch, _ in zip(training.batches(), range(14), strict=False):
        training.advance(batch)
    assert seen == pytest.approx([0.1] * 12 + [0.02] * 2)
