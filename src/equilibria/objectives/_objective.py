"""A loss as a pure function of named parameters and a batch.

`Objective` wraps a function ``fn(params, batch)``. `objective` makes one from a network, as a `ModelObjective` that
evaluates an isolated replica of it: the model itself never changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from equilibria.errors import EquilibriaError, one_of
from equilibria.objectives._isolation import (
    IsolatedLoss,
    WithoutDropout,
    check_not_scripted,
    converted,
    converted_module,
    disable_dropout_modules,
    make_replica,
    preserved_rng,
    without_gradient_checkpointing,
)
from equilibria.tensors.layout import densify
from equilibria.tensors.parameters import Select, names_of, refuse_uninitialised, row_axes, selection

Params: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Unpack: TypeAlias = Callable[[Any], Any]
ObjectiveMode: TypeAlias = Literal["train", "eval"]


class Objective:
    """A loss as a function ``fn(params, batch)`` of named tensors and a batch.

    Args:
        fn: returns the loss, a tensor with one number, differentiable in the tensors of its first argument.
        params: the point at which the loss is evaluated by default, name -> tensor. The tensors are shared, not copied.

    Example:
        >>> objective = Objective(lambda params, batch: (params["w"] * batch).sum() ** 2, {"w": torch.ones(3)})
        >>> value, grads = objective.value_and_grad(torch.tensor([1.0, 2.0, 3.0]))
        >>> value, grads["w"]
        (tensor(36.), tensor([12., 24., 36.]))
    """

    def __init__(self, fn: Callable[[Params, Any], Tensor], params: Mapping[str, Tensor]) -> None:
        if not callable(fn):
            raise EquilibriaError(
                f"got fn of type {type(fn).__name__}; expected a function fn(params, batch)", argument="fn"
            )
        _check_params(params)
        self._fn = fn
        self._params = dict(params)

    @property
    def params(self) -> Params:
        """The present values of the named tensors, detached; they share memory with the originals."""
        return {name: param.detach() for name, param in self._params.items()}

    @property
    def row_axis(self) -> dict[str, int]:
        """For every tensor, the axis that numbers its rows (outputs)."""
        return dict.fromkeys(self._params, 0)

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Evaluate the loss at ``params``; names that ``params`` leaves out keep their present values.

        Raises:
            EquilibriaError: if a name is unknown, or the loss is not one number.
        """
        with preserved_rng(self._params.values()), without_gradient_checkpointing():
            return _one_number(self._fn(self._merged(params), batch))

    def value_and_grad(
        self, batch: Any, *, params: Mapping[str, Tensor] | None = None, create_graph: bool = False
    ) -> tuple[Tensor, Params]:
        """Evaluate the loss and its gradient.

        Args:
            batch: the data.
            params: the point, and the tensors to differentiate by; default: all tensors at their present values.
            create_graph: whether the gradient can itself be differentiated, for Hessian-vector products. Tensors of
                ``params`` that require a gradient are then used themselves, not as detached copies.

        Returns:
            The loss, and name -> gradient; zeros for a tensor that the loss does not use.

        Raises:
            EquilibriaError: if the loss is not differentiable.
        """
        point = self.params if params is None else params
        leaves = {name: _leaf(param, keep=create_graph) for name, param in point.items()}
        with torch.enable_grad():
            value = self(leaves, batch)
            if not value.requires_grad:
                raise EquilibriaError(
                    "got a loss that is not differentiable: it does not require a gradient; expected a loss that torch "
                    "computes from the parameters, without .item(), .detach() or no_grad"
                )
            computed = torch.autograd.grad(value, list(leaves.values()), create_graph=create_graph, allow_unused=True)
        grads = {
            name: torch.zeros_like(leaf) if grad is None else densify(grad)
            for (name, leaf), grad in zip(leaves.items(), computed, strict=True)
        }
        return (value if create_graph else value.detach()), grads

    def outputs(self, params: Mapping[str, Tensor], batch: Any) -> Tensor | None:
        """The outputs that the loss is computed from, as one tensor (logits); None if only the loss is known."""
        return None

    def double(self) -> Objective:
        """The same loss in float64, on copies of the parameters; batches are converted too."""
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> Objective:
        """The same loss in another floating-point type, on copies of the parameters; batches are converted too."""
        fn = self._fn
        copies = {name: converted(param, dtype).clone() for name, param in self.params.items()}
        return Objective(lambda params, batch: fn(params, _converted_batch(batch, dtype)), copies)

    def _merged(self, params: Mapping[str, Tensor]) -> Params:
        unknown = [name for name in params if name not in self._params]
        if unknown:
            raise EquilibriaError(
                f"got a parameter {unknown[0]!r}; expected names among: {_some(self._params)}", argument="params"
            )
        return {**self.params, **params}


class ModelObjective(Objective):
    """The loss of a network; made by `objective`.

    Evaluations call a replica of the model: its own modules around the model's tensors. Buffers such as BatchNorm's
    statistics are cloned for every call.
    """

    def __init__(self, replica: nn.Module, names: Mapping[str, str], loss: Loss | None, unpack: Unpack | None) -> None:
        self._replica, self._names, self._loss, self._unpack = replica, dict(names), loss, unpack
        by_raw_name = dict(replica.named_parameters())
        super().__init__(self._loss_at, {name: by_raw_name[raw] for name, raw in names.items()})

    @property
    def modules(self) -> nn.Module:
        """The replica of the model: inspect it, do not change it."""
        return self._replica

    @property
    def row_axis(self) -> dict[str, int]:
        """For every tensor, the axis that numbers its rows: 1 for transposed convolutions, else 0."""
        axes, by_raw_name = row_axes(self._replica), dict(self._replica.named_parameters())
        return {name: axes[id(by_raw_name[raw])] for name, raw in self._names.items()}

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained at present: ``requires_grad`` is False."""
        return frozenset(name for name, param in self._params.items() if not param.requires_grad)

    def outputs(self, params: Mapping[str, Tensor], batch: Any) -> Tensor | None:
        """The network's output as one tensor: itself, its ``logits``, or all its tensors concatenated.

        None if the network returns nothing but its loss.
        """
        with preserved_rng(self._params.values()), without_gradient_checkpointing():
            output = self._output(self._merged(params), self.split(batch)[0])
        return _main_tensor(_without_loss(output) if self._loss is None else output)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into (input, target); the target is None if the model returns its own loss."""
        if self._loss is not None:
            return _pair(batch if self._unpack is None else self._unpack(batch))
        inputs = batch if self._unpack is None else self._unpack(batch)
        return (dict(inputs) if isinstance(inputs, Mapping) else inputs), None

    def of_pairs(self) -> ModelObjective:
        """The same loss on batches that `split` has already split."""
        return ModelObjective(self._replica, self._names, self._loss, self._of_pair)

    def double(self) -> ModelObjective:
        """The same loss in float64, on a deep copy of the model; inputs and targets are converted too."""
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> ModelObjective:
        """The same loss in another floating-point type, on a deep copy of the model; batches are converted too."""
        loss = self._loss.to(dtype) if isinstance(self._loss, IsolatedLoss) else self._loss
        original = self

        def unpack(batch: Any) -> Any:
            return original._of_pair(_converted_batch(original.split(batch), dtype))

        return ModelObjective(converted_module(self._replica, dtype), self._names, loss, unpack)

    def _of_pair(self, pair: tuple[Any, Any]) -> Any:
        """What `unpack` returns for a batch that is already split."""
        return pair[0] if self._loss is None else pair

    def _loss_at(self, params: Params, batch: Any) -> Tensor:
        inputs, target = self.split(batch)
        output = self._output(params, inputs)
        if self._loss is None:
            return _returned_loss(output)
        try:
            return self._loss(output, target)
        except Exception as error:
            if isinstance(output, Tensor) or isinstance(error, EquilibriaError):
                raise
            raise EquilibriaError(
                f"got a model that returns {_described(output)}, which loss= does not take ({type(error).__name__}: "
                f"{error}); expected objective(model), without a loss, if the model returns its loss, or "
                "loss=lambda output, target: ... that takes from the output what it needs",
                argument="loss",
            ) from error

    def _output(self, params: Params, inputs: Any) -> Any:
        tensors = {self._names[name]: param for name, param in params.items()}
        tensors |= {name: buffer.clone() for name, buffer in self._replica.named_buffers()}
        args, kwargs = _call_arguments(inputs)
        try:
            with WithoutDropout():
                return functional_call(self._replica, tensors, args, kwargs)
        except TypeError as error:
            if _accepts(self._replica, args, kwargs):
                raise
            raise EquilibriaError(
                f"got {_described(inputs)} as the model's input, with which {type(self._replica).__name__} cannot be "
                f"called ({error}); expected {self._expected_batch}",
                argument="unpack" if self._unpack is not None else "loss",
            ) from error

    @property
    def _expected_batch(self) -> str:
        if self._loss is not None:
            return "batches of (input, target), where input is a tensor, a tuple or a dict of the model's arguments"
        return (
            "batches of the model's own arguments, model(*batch) or model(**batch), because no loss is given; pass "
            "loss= if batches are (input, target)"
        )


def objective(
    model: nn.Module,
    loss: Loss | None = None,
    *,
    unpack: Unpack | None = None,
    select: Select | None = None,
    mode: ObjectiveMode = "train",
) -> ModelObjective:
    """Make the loss of a network a function of its named parameters and a batch.

    The model never changes: weights, gradients, buffers, mode and random numbers stay as they are, and the objective
    follows the weights as training changes them. Dropout is off, because a function must not be random; so is gradient
    checkpointing, which changes only the memory needed. A loss module is isolated in the same way. Forward hooks of the
    model run at every evaluation, because its outputs may depend on them.

    Args:
        model: the network.
        loss: ``loss(output, target)``, one number, such as ``torch.nn.functional.cross_entropy``. None if the model
            returns its loss, as those of transformers do when they are given labels: as a scalar, as ``loss`` of its
            output (an attribute or a key), or as the only scalar in a tuple.
        unpack: splits a batch into (input, target); default: a batch is such a pair. With ``loss=None`` it returns the
            input alone; default: the batch is the input. The input is a tensor, a tuple of positional arguments or a
            dict of keyword arguments.
        select: the parameters it is a function of: names, patterns such as ``"layer1.*"``, or a function of name and
            tensor; default: all with ``requires_grad``.
        mode: "train" (each module as in training; BatchNorm normalises by the batch) or "eval".

    Returns:
        The objective. It names parameters as `watch` does: without the prefixes of wrappers.

    Raises:
        EquilibriaError: if no parameter is selected, or the model cannot be copied.

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
        raise EquilibriaError(f"got model of type {type(model).__name__}; expected a torch.nn.Module", argument="model")
    if isinstance(loss, type):
        raise EquilibriaError(
            f"got loss={loss.__name__}, a class; expected a function loss(output, target), such as {loss.__name__}()",
            argument="loss",
        )
    if loss is not None and not callable(loss):
        raise EquilibriaError(
            f"got loss of type {type(loss).__name__}; expected a function loss(output, target), or None if the model "
            "returns its loss",
            argument="loss",
        )
    if unpack is not None and not callable(unpack):
        raise EquilibriaError(
            f"got unpack of type {type(unpack).__name__}; expected a function of a batch", argument="unpack"
        )
    one_of("mode", mode, ["train", "eval"])
    inner = unwrap_model(model)
    check_not_scripted(inner)
    refuse_uninitialised(inner)
    names = _selected_names(inner, select)
    replica = make_replica(inner)
    if mode == "eval" or not inner.training:  # a model in training mode may hold modules in eval mode on purpose
        replica.train(mode == "train")
    disable_dropout_modules(replica)
    isolated = IsolatedLoss(make_replica(loss)) if isinstance(loss, nn.Module) else loss
    return ModelObjective(replica, names, isolated, unpack)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel, DataParallel and torch.compile."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _converted_batch(tree: Any, dtype: torch.dtype) -> Any:
    """Convert every floating-point tensor in nested tuples, lists and dicts."""
    return pytree.tree_map(lambda leaf: converted(leaf, dtype) if isinstance(leaf, Tensor) else leaf, tree)


def _selected_names(model: nn.Module, select: Select | None) -> dict[str, str]:
    """For every selected parameter: plain name -> name in the model."""
    all_names = names_of(model)
    by_name = {all_names[id(param)][0]: (raw, param) for raw, param in model.named_parameters()}
    aliases = [name for names in all_names.values() for name in names]
    wanted = (lambda _name, param: param.requires_grad) if select is None else selection(select, aliases)
    chosen = {
        name: raw
        for name, (raw, param) in by_name.items()
        if any(wanted(alias, param) for alias in all_names[id(param)])
    }
    if not chosen:
        raise EquilibriaError(
            f"got select={select!r}, which leaves none of {len(by_name)} parameters; expected names, patterns or a "
            "function select(name, tensor) that some parameter satisfies (default: those with requires_grad)",
            argument="select",
        )
    return chosen


def _check_params(params: Mapping[str, Tensor]) -> None:
    valid = isinstance(params, Mapping) and params and all(isinstance(param, Tensor) for param in params.values())
    if not valid:
        shown = f"{params!r:.80}" if isinstance(params, Mapping) else type(params).__name__
        raise EquilibriaError(
            f"got params={shown}; expected a dict of name -> tensor with at least one entry", argument="params"
        )
    for name, param in params.items():
        if not (param.is_floating_point() or param.is_complex()):
            raise EquilibriaError(
                f"got parameter {name!r} of {param.dtype}; expected floating-point numbers", argument="params"
            )


def _one_number(value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise EquilibriaError(
            f"got {shown} as loss; expected a tensor with one number (a mean over the batch)", argument="loss"
        )
    return value.reshape(())


def _leaf(param: Tensor, *, keep: bool) -> Tensor:
    return param if keep and param.requires_grad else param.detach().requires_grad_()


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)}" if isinstance(batch, tuple | list | Mapping) else ""
    raise EquilibriaError(
        f"got a batch that is a {type(batch).__name__}{size}; expected (input, target), or unpack= that makes such a "
        'pair, such as unpack=lambda batch: ({"input_ids": batch["input_ids"]}, batch["labels"]), or loss=None if the '
        "model returns its loss",
        argument="unpack",
    )


def _call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _accepts(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module can be called with these arguments, as far as its signature says."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # compiled functions may have no signature
        return True
    return True


def _returned_loss(output: Any) -> Tensor:
    """The loss in the output of a model that computes it itself."""
    if isinstance(output, Tensor):
        return _one_number(output)
    if isinstance(output, tuple | list):
        scalars: list[Tensor] = [part for part in output if _is_scalar(part)]
        if len(scalars) == 1:
            return scalars[0]
        raise EquilibriaError(
            f"got a model that returns a {type(output).__name__} with {len(scalars)} scalars among {len(output)} "
            f"entries, {_described(output)}; expected exactly one, its loss: {_HOW_TO_GET_A_LOSS}",
            argument="loss",
        )
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return _one_number(loss)
    keys = f" with keys {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise EquilibriaError(
        f"got a model that returns a {type(output).__name__}{keys} whose loss is {loss!r}; expected a scalar, an "
        f"output with a loss, or a tuple with one scalar: {_HOW_TO_GET_A_LOSS}",
        argument="loss",
    )


_HOW_TO_GET_A_LOSS = (
    'give the model labels (batches such as {"input_ids": ids, "labels": labels}, or (input, target) if forward takes '
    "both), or pass loss=, a function loss(output, target)"
)


def _described(value: Any) -> str:
    """A value in a few words: the shapes of tensors, the entries of tuples, the keys of dicts."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        entries = [f"tensor {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__ for part in value]
        return f"a {type(value).__name__} of {', '.join(entries[:5]) or 'nothing'}{', ...' if len(entries) > 5 else ''}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {', '.join(map(str, value))}"
    return f"a {type(value).__name__}"


def _without_loss(output: Any) -> Any:
    """The output of a model that computes its own loss, less the loss."""
    if isinstance(output, Mapping):
        return {key: value for key, value in output.items() if key != "loss"}
    if isinstance(output, tuple | list):
        return [part for part in output if not _is_scalar(part)]
    return None if isinstance(output, Tensor) else output


def _is_scalar(part: object) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and part.ndim == 0 and part.is_floating_point()


def _main_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    parts = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(parts, tuple | list):
        return None
    return _concatenated([part for part in parts if isinstance(part, Tensor) and part.is_floating_point()])


def _concatenated(tensors: list[Tensor]) -> Tensor | None:
    """Several tensors as one, with samples along the first axis if all have equally many."""
    if len(tensors) <= 1:
        return tensors[0] if tensors else None
    by_sample = all(tensor.ndim for tensor in tensors) and len({len(tensor) for tensor in tensors}) == 1
    dtype = torch.promote_types(tensors[0].dtype, tensors[-1].dtype)
    parts = [tensor.to(dtype).reshape(len(tensor) if by_sample else 1, -1) for tensor in tensors]
    joined = torch.cat(parts, dim=1)
    return joined if by_sample else joined[0]


def _some(names: Mapping[str, object]) -> str:
    shown = ", ".join(list(names)[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names)} in all)"
