"""Every controller of the table as a good citizen of torch."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from controllers import ROWS, Controls, Row
from torch import Tensor, nn

from equilibria.errors import EquilibriaError

STEPS = 8
every_controller = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()]
    layers += [nn.Linear(8, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(16, 6, generator=generator).to(dtype), torch.randint(3, (16,), generator=generator)


class Training:
    """A network under a controller. Each of its two groups has a normalised layer; the second also has the head."""

    def __init__(self, row: Row, *, model: nn.Sequential | None = None, only: int | None = None, **options: Any):
        self.model = network() if model is None else model
        layers = ((self.model[:3], 1), (self.model[3:], 2))
        groups, invariant = [], []
        for at, (part, factor) in enumerate(layers):
            weight = part[0].weight
            params = [weight] if row.only_invariant else list(part.parameters())
            if only in (None, at):
                invariant.append(weight)
                groups.append({"params": params, "lr": row.lr / factor, "weight_decay": row.weight_decay * factor})
        self.trained = [param for group in groups for param in group["params"]]
        self.controls: Controls = row.make(self.model, groups, invariant, options)

    def loss(self, step: int) -> Tensor:
        images, labels = batch(step, self.trained[0].dtype)
        return nn.functional.cross_entropy(self.model(images), labels)

    def backward(self, step: int) -> Tensor:
        self.model.zero_grad()
        loss = self.loss(step)
        loss.backward()
        return loss

    def run(self, first: int, last: int, meddle: Callable[[int], None] = lambda step: None) -> Training:
        for step in range(first, last):
            self.backward(step)
            meddle(step)
            self.controls.step()
        return self

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "controls": self.controls.state_dict()})


def numbers(tree: Any) -> list[Any]:
    """All leaves of nested containers, in order."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in numbers(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in numbers(value)]
    return [tree]


def same(first: Any, second: Any) -> bool:
    """Whether two nested containers hold the same, to the bit."""
    a, b = numbers(first), numbers(second)
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


@every_controller
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_number_types(row, dtype):
    if dtype == torch.bfloat16 and not row.bf16:
        with pytest.raises(EquilibriaError, match=r"bfloat16.*float32"):
            Training(row, model=network(dtype)).run(0, 1)
        return
    training = Training(row, model=network(dtype))
    before = [param.detach().clone() for param in training.trained]
    training.run(0, STEPS)
    for old, new in zip(before, training.trained, strict=True):
        assert new.dtype == dtype
        assert torch.isfinite(new).all()
        assert not torch.equal(old, new)


@every_controller
def test_two_groups_are_two_optimizers_with_settings_of_their_own(row):
    together, apart = Training(row), network()
    halves = [Training(row, model=apart, only=at) for at in (0, 1)]
    together.run(0, STEPS)
    for step in range(STEPS):
        halves[0].backward(step)
        for half in halves:
            half.controls.step()
    assert same(together.model.state_dict(), apart.state_dict())


@every_controller
def test_a_round_trip_of_the_state_in_the_middle_changes_nothing(row):
    whole, interrupted = Training(row).run(0, STEPS), Training(row).run(0, STEPS // 2)
    interrupted.controls.load_state_dict(copy.deepcopy(interrupted.controls.state_dict()))
    interrupted.run(STEPS // 2, STEPS)
    assert same(whole.snapshot(), interrupted.snapshot())


@every_controller
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_resuming_from_a_file_continues_to_the_bit(row, dtype):
    whole, first = (Training(row, model=network(dtype)) for _ in range(2))
    whole.run(0, STEPS)
    file = io.BytesIO()
    torch.save(first.run(0, STEPS // 2).snapshot(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = Training(row, model=network(dtype))
    resumed.controls.load_state_dict(saved["controls"])  # the order should not matter
    resumed.model.load_state_dict(saved["model"])
    resumed.run(STEPS // 2, STEPS)
    assert same(whole.snapshot(), resumed.snapshot())


@every_controller
def test_a_closure_does_what_a_backward_before_the_step_does(row):
    plain, closed = Training(row), Training(row)
    for step in range(STEPS):
        expected = plain.backward(step)
        plain.controls.step()
        found = closed.controls.step(lambda step=step: closed.backward(step))
        assert torch.equal(found, expected)
    assert same(plain.snapshot(), closed.snapshot())


@every_controller
def test_a_closure_that_raises_leaves_everything_as_it_was(row):
    training = Training(row).run(0, STEPS)
    before = training.snapshot()

    def broken() -> Tensor:
        raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        training.controls.step(broken)
    assert same(before, training.snapshot())


@every_controller
def test_a_frozen_parameter_stays_and_the_others_move(row):
    model = network()
    frozen = model[0].weight.requires_grad_(False)
    before = frozen.detach().clone()
    training = Training(row, model=model).run(0, STEPS)
    assert torch.equal(frozen, before)
    assert not torch.equal(model[3].weight, network()[3].weight)
    assert frozen not in training.controls.optimizer.state


@every_controller
def test_a_parameter_without_gradient_waits_for_the_next_one(row):
    training = Training(row)
    weight = training.model[3].weight

    def without(step: int) -> None:
        if step == STEPS // 2:
            weight.grad = None

    training.run(0, STEPS // 2)
    before = weight.detach().clone()
    training.run(STEPS // 2, STEPS // 2 + 1, without)
    assert torch.equal(weight, before)
    training.run(STEPS // 2 + 1, STEPS)
    assert not torch.equal(weight, before)
    assert all(torch.isfinite(param).all() for param in training.trained)


@every_controller
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(row, bad):
    training, undisturbed = Training(row).run(0, STEPS), Training(row).run(0, STEPS)
    training.backward(STEPS)
    undisturbed.run(STEPS, STEPS + 1)
    weight = training.model[3].weight
    good = weight.grad.clone()
    weight.grad[0, 0] = bad
    before = training.snapshot()
    if not row.refuses_nan:  # torch's optimizer lets it in; the controller must not carry it on
        training.controls.step()
        assert all(math.isfinite(group[key]) for group in settings(training) for key in ("lr", "weight_decay"))
        return
    with pytest.raises(EquilibriaError, match="1 of 56 entries not finite"):
        training.controls.step()
    assert same(before, training.snapshot())
    weight.grad = good
    training.controls.step()
    assert same(undisturbed.snapshot(), training.snapshot())


def settings(training: Training) -> list[dict[str, Any]]:
    return training.controls.optimizer.param_groups


@pytest.mark.parametrize("row", [row for row in ROWS if row.foreach], ids=lambda row: row.name)
def test_foreach_makes_no_difference_but_rounding(row):
    one, many = (Training(row, foreach=foreach).run(0, STEPS) for foreach in (False, True))
    for a, b in zip(one.trained, many.trained, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings(
    "ignore:.*lr_scheduler.step.*before.*optimizer.step.*"
)  # torch: the skipped step may be the first
@every_controller
def test_under_a_gradient_scaler_it_steps_and_is_skipped(row):
    """The scale is a power of two, so unscaling is exact; an overflow is skipped by the scaler and never arrives."""
    plain, scaled = Training(row).run(0, STEPS), Training(row)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(-1, STEPS):
        scaled.model.zero_grad()
        scaler.scale(scaled.loss(step) if step >= 0 else scaled.loss(0)).backward()
        if step < 0:
            scaled.model[3].weight.grad[0, 0] = math.inf
        scaler.step(scaled.controls.optimizer)
        scaler.update()
        if scaled.controls.scheduler is not None and step >= 0:
            scaled.controls.scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.trained, scaled.trained, strict=True))
