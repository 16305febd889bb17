"""Every controller of the table as a good citizen of torch."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.controllers import ROWS, Controls, Row
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR

from equilibria.control._optimizer import CheckedOptimizer
from equilibria.errors import EquilibriaError

pytestmark = pytest.mark.filterwarnings("ignore:the norm of:equilibria.control.RescaleWarning")  # short, unsettled runs
STEPS = 8
every_controller = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def network(dtype: torch.dtype = torch.float64, *, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), norm(8), nn.ReLU()]
    layers += [nn.Linear(8, 7, bias=False), norm(7), nn.ReLU(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(16, 6, generator=generator).to(dtype), torch.randint(3, (16,), generator=generator)


class Training:
    """A network under a controller. Each of its two groups has a normalised layer; the second also has the head."""

    def __init__(
        self,
        row: Row,
        *,
        model: nn.Sequential | None = None,
        only: int | None = None,
        lr_as: Callable[[float], Any] = float,
        **options: Any,
    ) -> None:
        self.model = network() if model is None else model
        layers = ((self.model[:3], 1), (self.model[3:], 2))
        groups, invariant = [], []
        for at, (part, factor) in enumerate(layers):
            weight = part[0].weight
            params = [weight] if row.only_invariant else list(part.parameters())
            if only in (None, at):
                invariant.append(weight)
                settings = {"lr": lr_as(row.lr / factor), "weight_decay": row.weight_decay * factor}
                groups.append({"params": params, **settings})
        self.trained = [param for group in groups for param in group["params"]]
        self.start = [param.detach().clone() for param in self.trained]
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


with_torch_inside = pytest.mark.parametrize("row", [row for row in ROWS if row.foreach], ids=lambda row: row.name)


def assert_together(first: Training, second: Training, *, within: float = 1e-11) -> None:
    """Whether two trainings of one start ended at the same weights, up to a part of the way that they went."""
    for a, b, start in zip(first.trained, second.trained, first.start, strict=True):
        assert torch.linalg.vector_norm(a - whole(b)) <= within * torch.linalg.vector_norm(a - start)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@with_torch_inside
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_foreach_and_fused_make_no_difference_but_rounding(row, option):
    one, many = (Training(row, foreach=False), Training(row, **{option: True}))
    assert_together(one.run(0, STEPS), many.run(0, STEPS))


def as_tensor(lr: float) -> Tensor:
    return torch.tensor(lr, dtype=torch.float64)


@every_controller
def test_a_learning_rate_may_be_a_tensor_which_stays_the_one_that_was_given(row):
    """A compiled step holds on to the tensor; replaced, it would be left with the old value."""
    plain, other = Training(row), Training(row, lr_as=as_tensor).run(0, 1)  # groups may have shared one before
    held = [group["lr"] for group in settings(other)]
    assert_together(plain.run(0, STEPS), other.run(1, STEPS))
    assert all(isinstance(lr, Tensor) for lr in held)
    assert all(group["lr"] is lr for group, lr in zip(settings(other), held, strict=True))


@every_controller
def test_a_learning_rate_may_be_one_tensor_for_all_groups(row):
    shared = as_tensor(row.lr)
    plain, other = Training(row, lr_as=lambda _: row.lr), Training(row, lr_as=lambda _: shared)
    assert_together(plain.run(0, STEPS), other.run(0, STEPS))


OPTIMIZERS = [row for row in ROWS if isinstance(Training(row).controls.optimizer, CheckedOptimizer)]
ON_THEIR_OWN = [row for row in OPTIMIZERS if Training(row).controls.scheduler is None]


@pytest.mark.parametrize("row", ON_THEIR_OWN, ids=lambda row: row.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("lr_as", [float, as_tensor])
def test_a_learning_rate_out_of_range_raises_before_anything_changes(row, bad, lr_as):
    training = Training(row, lr_as=lr_as).run(0, 2)
    training.backward(2)
    before, group = training.snapshot(), settings(training)[1]
    good, group["lr"] = group["lr"], lr_as(bad)
    with pytest.raises(EquilibriaError, match="lr"):
        training.controls.step()
    group["lr"] = good
    assert same(before, training.snapshot())


@pytest.mark.parametrize("row", ON_THEIR_OWN, ids=lambda row: row.name)
def test_a_learning_rate_on_a_device_is_not_fetched_to_be_checked(row):
    training = Training(row)
    for group in settings(training):
        group["lr"] = torch.tensor(row.lr, device="meta")  # has no value that could be fetched
    training.controls.step()  # without gradients: nothing but the checks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@every_controller
def test_a_compiled_step_does_the_same(row):
    steps = 4  # one after the learning rate has changed
    plain, compiled = Training(row, only=0).run(0, steps), Training(row, only=0, lr_as=as_tensor)
    torch._dynamo.reset()
    step = torch.compile(compiled.controls.optimizer.step, backend="eager")
    for at in range(steps):
        compiled.backward(at)
        step()
        compiled.controls.step_scheduler()
    assert_together(plain, compiled, within=row.rounding)


@pytest.fixture(scope="module")
def one_process():
    """A process group of this process alone, in its own memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@every_controller
def test_sharded_weights(row, one_process):
    """As FSDP shards them; without running statistics, behind which no shard can be looked."""
    plain, model = Training(row, model=network(norm=nn.LayerNorm)), network(norm=nn.LayerNorm)
    fully_shard(model, mesh=one_process)
    if not row.sharded:
        with pytest.raises(EquilibriaError, match="as a DTensor; expected whole tensors"):
            Training(row, model=model)
        return
    sharded = Training(row, model=model)
    assert all(isinstance(param, DTensor) for param in sharded.trained)
    assert_together(plain.run(0, STEPS), sharded.run(0, STEPS))


@every_controller
def test_a_step_that_fails_leaves_everything_as_it_was_and_training_goes_on(row):
    """Somebody else's hook raises, after those of the controller."""
    training, undisturbed = Training(row).run(0, STEPS), Training(row).run(0, STEPS + 1)
    before = training.snapshot()

    def broken(*_: Any) -> None:
        raise RuntimeError("the disk is full")

    handle = training.controls.optimizer.register_step_pre_hook(broken)
    training.backward(STEPS)
    before["model"] = copy.deepcopy(training.model.state_dict())  # the forward pass updates running statistics
    with pytest.raises(RuntimeError, match="the disk is full"):
        training.controls.step()
    assert same(before, training.snapshot())
    handle.remove()
    training.controls.step()
    assert same(undisturbed.snapshot(), training.snapshot())


WRAPPERS = [row for row in ROWS if hasattr(Training(row).controls.scheduler, "scheduler")]


@pytest.mark.parametrize("row", WRAPPERS, ids=lambda row: row.name)
def test_a_schedule_that_fails_inside_leaves_everything_as_it_was(row, monkeypatch):
    training = Training(row).run(0, STEPS)
    before = training.snapshot()

    def broken(*_: Any) -> None:
        raise RuntimeError("no more steps")

    monkeypatch.setattr(StepLR, "get_lr", broken)
    with pytest.raises(RuntimeError, match="no more steps"):
        training.controls.step_scheduler()
    assert same(before, training.snapshot())


def under_a_scaler(row: Row, *, overflow: int, **options: Any) -> Training:
    """The scale is a power of two, so unscaling is exact; before one step, one with an infinite gradient is skipped."""
    training, scaler = Training(row, **options), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in [*range(overflow), overflow, *range(overflow, STEPS)]:
        training.model.zero_grad()
        scaler.scale(training.loss(step)).backward()
        skips = step == overflow and scaler.get_scale() == 2.0**10
        if skips:
            training.model[3].weight.grad[0, 0] = math.inf
        scaler.step(training.controls.optimizer)
        scaler.update()
        if not skips:
            training.controls.step_scheduler()
    return training


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step.*")  # torch: the first may be skipped
@every_controller
@pytest.mark.parametrize("overflow", [0, STEPS // 2])
def test_under_a_gradient_scaler_it_steps_and_is_skipped(row, overflow):
    plain, scaled = Training(row).run(0, STEPS), under_a_scaler(row, overflow=overflow)
    assert all(torch.equal(a, b) for a, b in zip(plain.trained, scaled.trained, strict=True))


@with_torch_inside
def test_a_fused_step_that_skips_itself_under_a_gradient_scaler(row):
    """Not the first one: torch's fused SGD then leaves its new momentum buffer unfilled, and goes on with it."""
    assert_together(Training(row).run(0, STEPS), under_a_scaler(row, overflow=STEPS // 2, fused=True))


def pickled(tree: Any) -> Any:
    return pickle.loads(pickle.dumps(tree))


@every_controller
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_of_network_optimizer_and_scheduler_goes_on_to_the_bit(row, copied):
    training = Training(row).run(0, STEPS // 2)
    other = copied(training)
    hooked = [hook.__self__ for hook in other.controls.optimizer._optimizer_step_pre_hooks.values()]
    assert hooked == [other.controls.scheduler][: len(training.controls.optimizer._optimizer_step_pre_hooks)]
    assert other.trained[0] is not training.trained[0]
    training.run(STEPS // 2, STEPS)
    other.run(STEPS // 2, STEPS)
    assert same(training.snapshot(), other.snapshot())


@every_controller
def test_a_copy_between_the_optimizers_step_and_the_schedulers_goes_on_to_the_bit(row):
    training = Training(row).run(0, STEPS // 2)
    training.backward(STEPS // 2)
    training.controls.optimizer.step()
    other = copy.deepcopy(training)
    for each in (training, other):
        each.controls.step_scheduler()
        each.run(STEPS // 2 + 1, STEPS)
    assert same(training.snapshot(), other.snapshot())
