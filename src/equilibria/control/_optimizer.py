"""The base classes of this package's optimizers: groups and gradients are checked before a step changes anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError, number, within
from equilibria.optimizers.controllers import announce
from equilibria.optimizers.rules import rule_of_group
from equilibria.tensors.inner_products import products_of
from equilibria.tensors.layout import flat, is_sharded, local
from equilibria.theory.rules import Rule

_VALID_LR = 1e-30  # stands in for a learning rate that is not read; every check accepts it


class CheckedOptimizer(Optimizer):
    """Checks parameter groups when they are added, and groups and gradients before every step.

    A subclass checks its settings in `_check_group` and moves one weight in `_move`, or all of them in `_move_all`,
    which must raise before it changes anything.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the settings of a parameter group and add it."""
        if isinstance(param_group, dict):  # torch reports what is wrong with anything else
            self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads the gradients' values, by address
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; ``closure`` computes the loss and its gradients, and its value is returned.

        Raises:
            EquilibriaError: a setting is out of range (a tensor lr on a device other than the CPU is not read), a
                gradient is sparse, complex or not finite, or the optimizer cannot take this step. Nothing has been
                changed then.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            self._check_group(_readable(group))
        require_usable((weight for _, weights in self._moving() for weight in weights), by=type(self).__name__)
        self._move_all()
        return loss

    def _moving(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Every group with those of its parameters that have a gradient."""
        return [(group, with_gradient(group["params"])) for group in self.param_groups]

    def _check_group(self, settings: dict[str, Any]) -> None:
        """Raise EquilibriaError if a group's settings are out of range."""

    def _move_all(self) -> None:
        for group, weights in self._moving():
            for weight in weights:
                self._move(weight, group)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class OptimizerWrapper(CheckedOptimizer):
    """Takes an optimizer's place: shares its groups and state, and acts around its steps.

    The wrapped one must no longer be stepped directly. A subclass sets its attributes, then calls this constructor, and
    acts in `_move_all`.

    Attributes:
        plain: the wrapped optimizer.
    """

    plain: Optimizer
    _attributes: ClassVar[tuple[str, ...]] = ("plain",)  # those that copies and pickles keep

    def __init__(self, optimizer: Optimizer) -> None:
        self.plain = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()
        vars(optimizer)["equilibria_stepped_by"] = type(self).__name__  # `watch` then asks for this one
        announce(self, self)

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        raise NotImplementedError

    def equilibria_rule(self, group: dict[str, Any]) -> Rule:
        """The rule that the wrapped optimizer follows on a group."""
        law = rule_of_group(self.plain, group)
        if law.rule is None:
            raise EquilibriaError(law.reason)
        return law.rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of further parameters, which the wrapped optimizer steps."""
        if self.__dict__.get("param_groups") is self.plain.param_groups:
            self.plain.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint of this optimizer."""
        self.plain.load_state_dict(state_dict)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        announce(self, self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._attributes}}

    def _check_group(self, settings: dict[str, Any]) -> None:
        within("lr", as_number("lr", settings["lr"]), low=0)

    def _share(self) -> None:
        self.param_groups, self.state = self.plain.param_groups, self.plain.state


def require_optimizer(optimizer: object) -> None:
    """Raise unless this is an optimizer that a wrapper can step.

    Raises:
        EquilibriaError: with its type.
    """
    if not isinstance(optimizer, Optimizer):
        raise EquilibriaError(
            f"got optimizer of type {type(optimizer).__name__}; expected a torch.optim.Optimizer", argument="optimizer"
        )


def _readable(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings without a learning rate on a device: fetching it at every step would wait for the device."""
    lr = group["lr"]
    return {**group, "lr": _VALID_LR} if isinstance(lr, Tensor) and lr.device.type != "cpu" else group


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Run the closure that a step received, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that have a gradient."""
    return [param for param in params if param.grad is not None]


# ---- checks of gradients and weights


def require_usable(params: Iterable[Tensor], *, by: str) -> None:
    """Raise if a gradient would spoil weights or state: a sparse, complex or non-finite one.

    Called before anything is changed, so that a step that raises leaves weights and state as they were.

    Args:
        params: parameters that have a gradient.
        by: the optimizer, for the message.

    Raises:
        EquilibriaError: with the shape of the parameter and what to do.
    """
    params = list(params)
    for param in params:
        _require_dense_and_real(param, by)
    # One number per tensor, and only their sum is fetched from a device. It may overflow for finite gradients, so each
    # gradient is read before the step is rejected.
    if params and not math.isfinite(_sum_of_norms([_gradient(param) for param in params])):
        for param in params:
            _require_finite(param, by)


def _sum_of_norms(gradients: list[Tensor]) -> float:
    norms = torch._foreach_norm([local(gradient) for gradient in gradients])  # each process reads its own shards
    return float(sum(norm.to(norms[0].device, torch.float32) for norm in norms))


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _require_dense_and_real(param: Tensor, by: str) -> None:
    gradient, shape = _gradient(param), tuple(param.shape)
    if gradient.layout != torch.strided:
        raise EquilibriaError(
            f"got a sparse gradient for a parameter of shape {shape}; {by} needs dense ones: use sparse=False in the "
            "embedding, or torch.optim.SparseAdam"
        )
    if gradient.is_complex():
        raise EquilibriaError(
            f"got a complex parameter of shape {shape}; {by} needs real ones: pass torch.view_as_real of it",
            argument="params",
        )


def _require_finite(param: Tensor, by: str) -> None:
    bad = int((~torch.isfinite(local(_gradient(param)))).sum())
    if bad:
        raise EquilibriaError(
            f"got a gradient with {bad} of {param.numel()} entries not finite for a parameter of shape "
            f"{tuple(param.shape)}; {by} took no step, weights and state are as they were: lower lr, clip gradients, "
            "or skip such batches (torch.amp.GradScaler does)"
        )


def require_whole(name: str, weight: Tensor) -> None:
    """Raise for a tensor whose norm is spread over processes.

    Raises:
        EquilibriaError: with its name.
    """
    if is_sharded(weight):
        raise EquilibriaError(
            f"got {name} as a DTensor; expected whole tensors: its norm is spread over processes", argument="invariant"
        )


def require_fine(params: Iterable[Tensor], *, by: str) -> None:
    """Raise if weights are stored in a type coarser than float32: it would round away what a step turns them by.

    Raises:
        EquilibriaError: with the type and what to do.
    """
    for param in params:
        if param.dtype not in (torch.float32, torch.float64):
            raise EquilibriaError(
                f"got a parameter of {param.dtype}; {by} needs float32 or float64, because coarser types round away "
                "what a step turns a weight by: keep the weights in float32 and run the network under torch.autocast",
                argument="params",
            )


# ---- arithmetic


def as_number(name: str, value: Any) -> float:
    """A setting of a group as a finite number; a learning rate may be a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise EquilibriaError(f"got {name} of shape {shape}; expected a number or one element", argument=name)
        value = value.item()
    return number(name, value)


def as_factor(value: float | Tensor) -> float | Tensor:
    """A learning rate as a factor; a tensor stays on its device, because fetching it would wait."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def descend(weight: Tensor, update: Tensor, *, lr: float | Tensor) -> None:
    """``weight -= lr * update``, without a temporary if lr is a number; as ``alpha``, a tensor would be fetched."""
    if isinstance(lr, Tensor):
        weight.sub_(update * lr)
    else:
        weight.sub_(update, alpha=lr)


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all tensors together, in float64; of sharded tensors over all processes."""
    return sum(_square(tensor.detach()) for tensor in tensors)


def _square(tensor: Any) -> float:
    if is_sharded(tensor):
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64).full_tensor()) ** 2
    vector = flat(tensor)
    return products_of(vector, vector)[0]
