"""The loss as a function of named parameters and a batch; nothing of the model is ever disturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from equilibria.errors import EquilibriaError, one_of
from equilibria.objectives._isolation import (
    PrivateLoss,
    WithoutDropout,
    double_module,
    refuse_scripted,
    shell_of,
    switch_off_dropout,
    to_double,
    without_checkpoints,
)
from equilibria.tensors.parameters import Select, names_of, refuse_uninitialised, row_axes, selection

Params: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Unpack: TypeAlias = Callable[[Any], tuple[Any, Any]]


class Objective:
    """A loss as a function ``fn(params, batch)`` of named tensors and a batch.

    Args:
        fn: returns the loss, one number; differentiable in the tensors of its first argument.
        params: the point at which the loss is looked at, name -> tensor. The tensors are kept, not copied.

    Example:
        >>> objective = Objective(lambda params, batch: (params["w"] * batch).sum() ** 2, {"w": torch.ones(3)})
        >>> value, grads = objective.value_and_grad(torch.tensor([1.0, 2.0, 3.0]))
        >>> value, grads["w"]
        (tensor(36.), tensor([12., 24., 36.]))
    """

    def __init__(self, fn: Callable[[Params, Any], Tensor], params: Mapping[str, Tensor]) -> None:
        if not callable(fn):
            raise EquilibriaError(f"got fn of type {type(fn).__name__}; expected a function fn(params, batch)")
        _check_params(params)
        self._fn = fn
        self._params = dict(params)

    @property
    def params(self) -> Params:
        """The named tensors as they are now, without history; they share memory with those that were given."""
        return {name: param.detach() for name, param in self._params.items()}

    @property
    def row_axis(self) -> dict[str, int]:
        """The axis that numbers the rows (outputs) of every tensor."""
        return dict.fromkeys(self._params, 0)

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss at ``params``, which may hold some of the names only: the others stay where they are.

        Raises:
            EquilibriaError: if a name is unknown, or the loss is not one number.
        """
        with preserved_rng(self._params.values()), without_checkpoints():
            return _one_number(self._fn(self._merged(params), batch))

    def value_and_grad(
        self, batch: Any, *, params: Mapping[str, Tensor] | None = None, create_graph: bool = False
    ) -> tuple[Tensor, Params]:
        """The loss and its gradient.

        Args:
            batch: what the loss is evaluated on.
            params: where, and with respect to what; default: all tensors, as they are now.
            create_graph: whether the gradient can itself be differentiated, for Hessian-vector products.

        Returns:
            The loss, and name -> gradient; zeros for a tensor that the loss does not use. With ``create_graph`` the
            tensors of ``params`` are used as they are, if they require a gradient.

        Raises:
            EquilibriaError: if the loss is not differentiable.
        """
        at = self.params if params is None else params
        leaves = {name: _leaf(param, keep=create_graph) for name, param in at.items()}
        with torch.enable_grad():
            value = self(leaves, batch)
            if not value.requires_grad:
                raise EquilibriaError(
                    "got a loss that is not differentiable: it has no history of its parameters; expected a loss "
                    "computed from the parameters by torch, without .item(), .detach() or no_grad"
                )
            found = torch.autograd.grad(value, list(leaves.values()), create_graph=create_graph, allow_unused=True)
        grads = {
            name: torch.zeros_like(leaf) if grad is None else _dense(grad)
            for (name, leaf), grad in zip(leaves.items(), found, strict=True)
        }
        return (value if create_graph else value.detach()), grads

    def outputs(self, params: Mapping[str, Tensor], batch: Any) -> Tensor | None:
        """What the loss is computed from, as one tensor (a network's logits); None if only the loss is known."""
        return None

    def double(self) -> Objective:
        """The same loss in float64, on copies: parameters and batches are converted."""
        fn = self._fn
        return Objective(lambda params, batch: fn(params, as_double(batch)), _double_copies(self.params))

    def _merged(self, params: Mapping[str, Tensor]) -> Params:
        unknown = [name for name in params if name not in self._params]
        if unknown:
            raise EquilibriaError(f"got a parameter {unknown[0]!r}; expected names among: {_some(self._params)}")
        return {**self.params, **params}


class ModelObjective(Objective):
    """The loss of a network; made by `objective`.

    A private shell of the model is called: the same tensors in modules of its own, so that mode, dropout and hooks of
    the model itself are never touched. Buffers such as BatchNorm's statistics are cloned for every call.
    """

    def __init__(self, shell: nn.Module, names: Mapping[str, str], loss: Loss, unpack: Unpack) -> None:
        self._shell, self._names, self._loss, self._unpack = shell, dict(names), loss, unpack
        held = dict(shell.named_parameters())
        super().__init__(self._loss_at, {name: held[raw] for name, raw in names.items()})

    @property
    def modules(self) -> nn.Module:
        """The shell: to look at, not to change."""
        return self._shell

    @property
    def row_axis(self) -> dict[str, int]:
        """The axis that numbers the rows of every tensor: 1 for transposed convolutions, else 0."""
        axes, held = row_axes(self._shell), dict(self._shell.named_parameters())
        return {name: axes[id(held[raw])] for name, raw in self._names.items()}

    @property
    def frozen(self) -> frozenset[str]:
        """The names of those that are not trained now: their ``requires_grad`` is False."""
        return frozenset(name for name, param in self._params.items() if not param.requires_grad)

    def outputs(self, params: Mapping[str, Tensor], batch: Any) -> Tensor | None:
        """The network's output as one tensor: itself, its ``logits``, or all tensors in it side by side."""
        with preserved_rng(self._params.values()), without_checkpoints():
            return _main_tensor(self._output(self._merged(params), self.split(batch)[0]))

    def split(self, batch: Any) -> tuple[Any, Any]:
        """A batch as (input, target)."""
        return _pair(self._unpack(batch))

    def of_pairs(self) -> ModelObjective:
        """The same loss on batches that `split` has already split."""
        return ModelObjective(self._shell, self._names, self._loss, lambda batch: batch)

    def double(self) -> ModelObjective:
        """The same loss in float64, on a deep copy of the model; inputs and targets are converted."""
        unpack = self._unpack
        loss = self._loss.double() if isinstance(self._loss, PrivateLoss) else self._loss
        shell = double_module(self._shell)
        return ModelObjective(shell, self._names, loss, lambda batch: as_double(_pair(unpack(batch))))

    def _loss_at(self, params: Params, batch: Any) -> Tensor:
        inputs, target = self.split(batch)
        return self._loss(self._output(params, inputs), target)

    def _output(self, params: Params, inputs: Any) -> Any:
        tensors = {self._names[name]: param for name, param in params.items()}
        tensors |= {name: buffer.clone() for name, buffer in self._shell.named_buffers()}
        args, kwargs = _call_arguments(inputs)
        with WithoutDropout():
            return functional_call(self._shell, tensors, args, kwargs)


def objective(
    model: nn.Module,
    loss: Loss,
    *,
    unpack: Unpack | None = None,
    select: Select | None = None,
    mode: str = "train",
) -> ModelObjective:
    """The loss of a network as a function of its named parameters and a batch.

    The model is never disturbed: weights, gradients, buffers, mode and random numbers stay as they were. The objective
    follows the model's weights as they change. Dropout is switched off, for a function must not be random: in the
    copy's modules and where torch's functions are called, never in a config, which the model may share with others.
    Gradient checkpointing is off as well, which changes nothing but the memory that is needed. A loss that is a module
    is copied likewise. Forward hooks of the model are called at every evaluation, for its outputs may depend on them.

    Args:
        model: the network.
        loss: ``loss(output, target)``, one number, such as ``torch.nn.functional.cross_entropy``.
        unpack: splits a batch into (input, target); default: a batch is such a pair. The input is a tensor, a tuple of
            positional arguments or a dict of keyword arguments.
        select: the parameters it is a function of: names, patterns such as ``"layer1.*"``, or a function of name and
            tensor; default: all that are trained.
        mode: "train" (each module as in training; BatchNorm normalises by the batch) or "eval".

    Returns:
        The objective. Its names are those of `watch`: without the prefixes of wrappers.

    Raises:
        EquilibriaError: if nothing is selected, or the model cannot be copied.

    Example:
        >>> from torch.nn import functional
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        >>> objective_of_net = objective(net, functional.cross_entropy)
        >>> batch = torch.randn(16, 4), torch.randint(3, (16,))
        >>> value, grads = objective_of_net.value_and_grad(batch)
        >>> list(grads)
        ['0.weight', '0.bias', '1.weight', '1.bias', '3.weight', '3.bias']
        >>> net[1].num_batches_tracked.item()
        0
    """
    if not isinstance(model, nn.Module):
        raise EquilibriaError(f"got model of type {type(model).__name__}; expected a torch.nn.Module")
    if not callable(loss):
        raise EquilibriaError(f"got loss of type {type(loss).__name__}; expected a function loss(output, target)")
    if unpack is not None and not callable(unpack):
        raise EquilibriaError(f"got unpack of type {type(unpack).__name__}; expected a function of a batch")
    one_of("mode", mode, ["train", "eval"])
    inner = unwrap_model(model)
    refuse_scripted(inner)
    refuse_uninitialised(inner)
    names = _selected_names(inner, select)
    shell = shell_of(inner)
    if mode == "eval" or not inner.training:  # a model in training may hold modules that are frozen on purpose
        shell.train(mode == "train")
    switch_off_dropout(shell)
    private = PrivateLoss(shell_of(loss)) if isinstance(loss, nn.Module) else loss
    return ModelObjective(shell, names, private, unpack or (lambda batch: batch))


def unwrap_model(model: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel, DataParallel and torch.compile."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def preserved_rng(tensors: Any = ()) -> Iterator[None]:
    """Random numbers drawn inside are not missed outside: torch on the tensors' devices, numpy and Python."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    on_devices = {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        for device, state in on_devices.items():
            torch.cuda.set_rng_state(state, device)


def as_double(tree: Any) -> Any:
    """Every floating-point tensor of nested tuples, lists and dicts in float64."""
    return pytree.tree_map(lambda leaf: to_double(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _double_copies(params: Params) -> Params:
    return {name: to_double(param).clone() for name, param in params.items()}


def _selected_names(model: nn.Module, select: Select | None) -> dict[str, str]:
    """Plain name -> name in the model, of every parameter that is selected."""
    called = names_of(model)
    raw = {called[id(param)][0]: (name, param) for name, param in model.named_parameters()}
    every = [name for names in called.values() for name in names]
    wanted = (lambda _name, param: param.requires_grad) if select is None else selection(select, every)
    chosen = {
        name: inside
        for name, (inside, param) in raw.items()
        if any(wanted(alias, param) for alias in called[id(param)])
    }
    if not chosen:
        raise EquilibriaError(
            f"got select={select!r}, which leaves none of {len(raw)} parameters; expected names, patterns or a "
            "function select(name, tensor) that some parameter satisfies (default: those with requires_grad)"
        )
    return chosen


def _check_params(params: Mapping[str, Tensor]) -> None:
    good = isinstance(params, Mapping) and params and all(isinstance(param, Tensor) for param in params.values())
    if not good:
        shown = f"{params!r:.80}" if isinstance(params, Mapping) else type(params).__name__
        raise EquilibriaError(f"got params={shown}; expected a dict of name -> tensor with at least one entry")
    for name, param in params.items():
        if not (param.is_floating_point() or param.is_complex()):
            raise EquilibriaError(f"got parameter {name!r} of {param.dtype}; expected floating-point numbers")


def _one_number(value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise EquilibriaError(f"got {shown} as loss; expected a tensor with one number (a mean over the batch)")
    return value.reshape(())


def _leaf(param: Tensor, *, keep: bool) -> Tensor:
    return param if keep and param.requires_grad else param.detach().requires_grad_()


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.layout != torch.strided else grad


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)}" if isinstance(batch, tuple | list | Mapping) else ""
    raise EquilibriaError(
        f"got a batch that is a {type(batch).__name__}{size}; expected (input, target), or unpack= that makes such a "
        'pair, such as unpack=lambda batch: ({"input_ids": batch["input_ids"]}, batch["labels"])'
    )


def _call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _main_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = list(output.values()) if isinstance(output, Mapping) else output
    candidates = values if isinstance(values, tuple | list) else ()
    return _side_by_side([each for each in candidates if isinstance(each, Tensor) and each.is_floating_point()])


def _side_by_side(tensors: list[Tensor]) -> Tensor | None:
    """Several tensors as one, with their samples in the first axis if all have as many."""
    if len(tensors) <= 1:
        return tensors[0] if tensors else None
    by_sample = all(tensor.ndim for tensor in tensors) and len({len(tensor) for tensor in tensors}) == 1
    common = torch.promote_types(tensors[0].dtype, tensors[-1].dtype)
    parts = [tensor.to(common).reshape(len(tensor) if by_sample else 1, -1) for tensor in tensors]
    joined = torch.cat(parts, dim=1)
    return joined if by_sample else joined[0]


def _some(names: Mapping[str, object]) -> str:
    shown = ", ".join(list(names)[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names)} in all)"
