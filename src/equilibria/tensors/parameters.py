"""The parameters of a model: which of them are watched, their names, roles and row axes."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equilibria.errors import EquilibriaError, one_of
from equilibria.optimizers.copies import rule_groups
from equilibria.tensors.layout import first_local_row, local, row_axis_of

Select: TypeAlias = Callable[[str, Tensor], bool] | Iterable[str]
Unit: TypeAlias = Literal["tensor", "row"]
Granularity: TypeAlias = Unit | Mapping[str, Unit]

HALVES = (torch.bfloat16, torch.float16)

_LARGEST_STACK = 64  # matrices of a stack that are watched one by one unasked


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """A watched parameter.

    Attributes:
        name: its name in the model, without the prefixes of wrappers.
        aliases: further names of the same tensor, if weights are tied.
        param: the tensor itself.
        optimizer: index of its optimizer.
        group: index of its parameter group in that optimizer.
        axis: the axis that numbers its rows; None if it is watched as a whole.
        units: number of rows; 1 if it is watched as a whole.
        entries: number of real numbers in a row, or in the whole tensor.
        first_row: index of the first row on this process.
        has_bias: whether its module also has a bias.
        how: how it is invariant according to `symmetries`, in words; None without `symmetries`.
        invariant: for every unit, whether `symmetries` says that it is invariant by itself; None if unknown.
        master: the float32 tensor that the optimizer moves and then rounds to the parameter; None if there is none.
    """

    name: str
    aliases: tuple[str, ...]
    param: Tensor
    optimizer: int
    group: int
    axis: int | None
    units: int
    entries: int
    first_row: int
    has_bias: bool = False
    how: str | None = None
    invariant: tuple[bool, ...] | None = None
    master: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """What the optimizer moves: the master, or the parameter itself."""
        return self.param if self.master is None else self.master

    @property
    def unit_names(self) -> list[str]:
        """Names in the samples: the name, or ``name[row]``."""
        return [self.name] if self.axis is None else [f"{self.name}[{row}]" for row in range(self.units)]


def unwrap_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The torch optimizer inside the wrappers of trainers.

    Raises:
        EquilibriaError: if there is none.
    """
    inner: Any = optimizer
    while hasattr(getattr(inner, "optimizer", None), "param_groups") and inner.optimizer is not inner:
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise EquilibriaError(
            f"got optimizer of type {type(optimizer).__name__}; expected a torch.optim.Optimizer", argument="optimizer"
        )
    return inner


def unwrap_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers in an argument, each once: one, a list of several, or the values of a dict."""
    if isinstance(optimizers, Mapping):
        several = list(optimizers.values())
    else:
        several = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not several:
        raise EquilibriaError(
            f"got an empty {type(optimizers).__name__} of optimizers; expected at least one", argument="optimizer"
        )
    unwrapped = {id(optimizer): optimizer for optimizer in map(unwrap_optimizer, several)}
    for optimizer in unwrapped.values():
        # It steps with part of its parameters only: the others would seem to stand still.
        outer = getattr(optimizer, "equilibria_stepped_by", None)
        if outer is not None:
            raise EquilibriaError(
                f"got the {type(optimizer).__name__} inside of a {outer}; expected the {outer} itself: it is what "
                "steps, and which optimizer to watch, save and load",
                argument="optimizer",
            )
    return list(unwrapped.values())


def refuse_uninitialised(model: nn.Module) -> None:
    """Raise EquilibriaError if a lazy module has parameters without a shape, as before its first batch."""
    lazy = [name for name, param in model.named_parameters() if is_lazy(param)]
    if lazy:
        raise EquilibriaError(
            f"got a model with parameters that have no shape yet, such as {lazy[0]}; expected an initialised one: call "
            "it with a batch first, from which lazy modules get their shapes",
            argument="model",
        )


def find_watched(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    select: Select | None,
    granularity: Granularity,
) -> list[Watched]:
    """Find the tensors to watch, in the order of the optimizers.

    Args:
        model: the network.
        optimizers: the optimizers that train it.
        select: names, patterns such as ``"layer1.*"``, or a function of name and tensor; None for all tensors with at
            least two axes.
        granularity: see `checked_granularity`. Under "tensor" a stack of matrices, such as the experts of a layer in
            one parameter of three axes, counts as so many tensors, unless it is a convolution or has more than 64.

    Raises:
        EquilibriaError: if nothing is left to watch, or a name or pattern in ``select`` matches no parameter.
    """
    names, axes, kernels = names_of(model), row_axes(model), _kernels(model)
    every_name = {name for all_names in names.values() for name in all_names}
    trained = list(_trained(optimizers))
    twins = _twins(model, trained)
    for copied, twin in twins.items():
        names[copied] = names[id(twin)]
    _check_known(trained, names)
    called = [names.get(id(param)) or (f"optimizer{opt}.group{group}.{index}",) for opt, group, index, param in trained]
    wanted = selection(select, [name for all_names in called for name in all_names])
    watched: list[Watched] = []
    taken: set[int] = set()
    for (opt, group, _, param), all_names in zip(trained, called, strict=True):
        if param.requires_grad and any(wanted(name, param) for name in all_names):
            own = id(twins.get(id(param), param))
            unit, row_axis = _unit_of(all_names, granularity), axes.get(own, 0)
            is_split = param.ndim >= 2 if unit == "row" else unit is None and _is_stack(param, own in kernels)
            axis = row_axis if is_split else None
            # Two optimizers may share a tensor, but samples must not share a name.
            twice = id(param) in taken
            taken.add(id(param))
            own_names = [f"{name} (optimizer {opt})" for name in all_names] if twice else all_names
            has_bias = any(f"{name.removesuffix('weight')}bias" in every_name for name in all_names)
            watched.append(_watched(param, own_names, optimizer=opt, group=group, axis=axis, has_bias=has_bias))
    if not watched:
        raise EquilibriaError(
            f"got select={select!r}, which leaves nothing of {len(trained)} parameters to watch; expected names, "
            "patterns or a function select(name, tensor) that some trainable tensor satisfies",
            argument="select",
        )
    return watched


def checked_granularity(granularity: Granularity) -> Granularity:
    """Check what a user passed: "tensor", "row", or one of them by name or pattern; other tensors are then whole.

    Raises:
        EquilibriaError: if it is something else.
    """
    if not isinstance(granularity, Mapping):
        return one_of("granularity", granularity, get_args(Unit))
    for pattern, unit in granularity.items():
        if not isinstance(pattern, str) or unit not in get_args(Unit):
            raise EquilibriaError(
                f"got granularity={{{pattern!r}: {unit!r}}}; expected names or patterns with 'tensor' or 'row', such "
                "as {'embedding.weight': 'row'}",
                argument="granularity",
            )
    return dict(granularity)


def _unit_of(names: Sequence[str], granularity: Granularity) -> Unit | None:
    """What one sample is about; None where that is left to the shape of the tensor."""
    if not isinstance(granularity, Mapping):
        return None if granularity == "tensor" else granularity
    wanted = (unit for pattern, unit in granularity.items() if any(_matches(name, pattern) for name in names))
    return next(wanted, None)


def _is_stack(param: Tensor, is_kernel: bool) -> bool:
    """Whether a parameter holds several matrices, such as the experts of a layer."""
    return param.ndim == 3 and not is_kernel and 2 <= param.shape[0] <= _LARGEST_STACK and min(param.shape[1:]) >= 2


def _kernels(model: nn.Module) -> set[int]:
    """The ids of the parameters of convolutions."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd))
    return {id(param) for module in convolutions for param in module.parameters()}


def _watched(
    param: Tensor, names: Sequence[str], *, optimizer: int, group: int, axis: int | None, has_bias: bool
) -> Watched:
    units = 1 if axis is None else param.shape[axis]
    return Watched(
        name=names[0],
        aliases=tuple(names[1:]),
        param=param,
        optimizer=optimizer,
        group=group,
        axis=axis,
        units=units,
        entries=param.numel() * (2 if param.is_complex() else 1) // max(1, units),
        first_row=0 if axis is None else first_local_row(param, axis=axis),
        has_bias=has_bias,
    )


def _trained(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, int, int, Tensor]]:
    """(optimizer, group of one rule, index in the group, tensor) of every tensor in the optimizers."""
    for opt, optimizer in enumerate(optimizers):
        for number, group in enumerate(rule_groups(optimizer)):
            for index, param in enumerate(group["params"]):
                yield opt, number, index, param


def _twins(model: nn.Module, trained: Sequence[tuple[int, int, int, Tensor]]) -> dict[int, Tensor]:
    """By the id of a float32 tensor that an optimizer trains, the 16-bit parameter of the model that it rounds to."""
    stepped = {id(param) for *_, param in trained}
    halves = [param for param in model.parameters() if param.dtype in HALVES and id(param) not in stepped]
    own, twins = {id(param) for param in model.parameters()}, dict[int, Tensor]()
    for *_, param in trained if halves else ():
        if param.dtype is torch.float32 and id(param) not in own:
            place = next((k for k, half in enumerate(halves) if _rounds_to(param, half)), None)
            twins |= {} if place is None else {id(param): halves.pop(place)}
    return twins


def _rounds_to(tensor: Tensor, half: Tensor) -> bool:
    return tensor.shape == half.shape and torch.equal(local(tensor).to(half.dtype), local(half))


def names_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of every tensor, by its id, in the order of the model; tied tensors have several."""
    raw: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        # Tables, files and pages are UTF-8, which cannot encode lone surrogates.
        raw.setdefault(id(param), []).append(name.encode("utf-8", "backslashreplace").decode())
    plain = {key: tuple(map(plain_name, names)) for key, names in raw.items()}
    every_plain = [name for names in plain.values() for name in names]
    return plain if len(set(every_plain)) == len(every_plain) else {key: tuple(names) for key, names in raw.items()}


_WRAPPED = re.compile(r"_orig_mod|_wrapped_module|^module\.|parametrizations")  # most names have none of them


def plain_name(name: str) -> str:
    """Strip the parts that wrappers and parametrisations add to a parameter's name.

    Example:
        >>> plain_name("module._orig_mod.layer1.0.conv1.weight")
        'layer1.0.conv1.weight'
        >>> plain_name("fc.parametrizations.weight.original"), plain_name("fc.parametrizations.weight.original1")
        ('fc.weight', 'fc.weight.original1')
    """
    if not _WRAPPED.search(name):
        return name
    shorter = re.sub(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)
    shorter = re.sub(r"^(module\.)+", "", shorter)
    return re.sub(r"\bparametrizations\.(\w+)\.original(?:(\d+)|$)", _parametrised, shorter)


def _parametrised(match: re.Match[str]) -> str:
    return match[1] if match[2] is None else f"{match[1]}.original{match[2]}"


def row_axes(model: nn.Module) -> dict[int, int]:
    """For every tensor, by its id, the axis that numbers its rows."""
    axes: dict[int, int] = {}
    for module in model.modules():
        params = list(module.parameters(recurse=False))
        if nn.utils.parametrize.is_parametrized(module):  # its tensors are in a submodule
            params += module.parametrizations.parameters()  # type: ignore[union-attr]
        for param in params:
            axes.setdefault(id(param), row_axis_of(module))
    return axes


def selection(select: Select | None, names: Sequence[str]) -> Callable[[str, Tensor], bool]:
    """Convert ``select`` to a function of name and tensor.

    None selects all tensors with two axes or more, but no single numbers, which have no angle.

    Raises:
        EquilibriaError: if a name or pattern matches none of ``names``.
    """
    if select is None:
        return lambda _name, param: param.ndim >= 2 and param.numel() > 1
    if callable(select):
        return select
    patterns = select_patterns(select)
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3) or list(names[:3])
            raise EquilibriaError(
                f"got select {pattern!r}, which matches no parameter; there are: {', '.join(near)}", argument="select"
            )
    return lambda name, _param: any(_matches(name, pattern) for pattern in patterns)


def select_patterns(select: str | Iterable[str]) -> list[str]:
    """The names and patterns of a ``select`` that is not a function.

    Raises:
        EquilibriaError: if it is neither text nor a list of texts.
    """
    patterns = [select] if isinstance(select, str) or not isinstance(select, Iterable) else list(select)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise EquilibriaError(
                f"got {pattern!r} in select; expected names, patterns or a function(name, tensor)", argument="select"
            )
    return patterns


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)  # a name may contain brackets


def _check_known(trained: Sequence[tuple[int, int, int, Tensor]], names: Mapping[int, object]) -> None:
    if any(type(param).__name__ == "FlatParameter" for *_, param in trained):
        raise EquilibriaError(
            "got a model under FSDP1 with flattened parameters, which hide the single layers; expected "
            "use_orig_params=True, or fully_shard (FSDP2)",
            argument="model",
        )
    if not any(id(param) in names for *_, param in trained):
        raise EquilibriaError(
            f"got an optimizer whose {len(trained)} parameters are none of the model's {len(names)}; expected the "
            "optimizer that trains this model: create it after the model is moved, wrapped or parametrised",
            argument="optimizer",
        )


def roles_of(model: nn.Module) -> dict[str, str]:
    """Describe every parameter in a word or two, by name: "Conv weight", "BatchNorm scale", "Linear bias".

    Example:
        >>> roles_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
        {'0.weight': 'Conv weight', '0.bias': 'Conv bias', '1.weight': 'BatchNorm scale', '1.bias': 'BatchNorm shift'}
    """
    names = names_of(model)
    roles: dict[str, str] = {}
    for module in model.modules():
        kind = re.sub(r"\d+d$", "", type(module).__name__)
        params = dict(module.named_parameters(recurse=False))
        if nn.utils.parametrize.is_parametrized(module):
            kind = re.sub(r"^Parametrized", "", kind)
            params |= dict(module.parametrizations.named_parameters())  # type: ignore[union-attr]
        for own_name, param in params.items():
            roles.setdefault(names[id(param)][0], f"{kind} {_part(own_name, param, is_norm='norm' in kind.lower())}")
    return {name: roles[name] for name, *_ in names.values()}


def _part(own_name: str, param: Tensor, *, is_norm: bool) -> str:
    if own_name.endswith(".original0"):
        return "magnitude"  # of weight_norm
    if own_name.endswith(".original1"):
        return "direction"
    is_shift = "bias" in own_name
    if is_norm:
        return "shift" if is_shift else "scale"
    return "bias" if is_shift else "weight" if param.ndim >= 2 or own_name == "weight" else own_name
