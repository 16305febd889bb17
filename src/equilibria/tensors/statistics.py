"""The running statistics behind each weight, found by doubling the weight in a forward pass.

A normalisation with running statistics (BatchNorm) has inputs that scale with the weights in front of it. Rescaling
such a weight requires rescaling these statistics, or the network changes in eval mode. Names and order of modules play
no role: each weight, or set of weights that is scaled as one, is doubled in a forward pass, and the mean and variance
of every normalisation's input are compared with those of a plain pass. Doubling rounds nothing in a binary number, so
without eps float32 answers as exactly as float64 would. The model stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from equilibria.errors import EquilibriaError
from equilibria.tensors.layout import is_sharded

_NEGLIGIBLE_EPS = 1e-20  # far below the last bit of any variance in a network
_DEGREE_TOLERANCE = 1e-3  # degrees are whole numbers; kernels that sum in varying order leave 1e-5
_OFFSET_TOLERANCE = 1e-5  # of the spread of the channel; float32 leaves 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Behind:
    """A normalisation whose running statistics scale with some weights.

    Attributes:
        name: the module's name in the model.
        module: the normalisation, with ``running_mean`` and ``running_var``.
        degrees: weight, or label of a set -> d per channel: scaling it by r scales the mean by r^d and the variance by
            r^(2 d).
        bias: the part of the mean that does not scale with the weights; None if there is none.
    """

    name: str
    module: nn.Module
    degrees: Mapping[str, Tensor]
    bias: nn.Parameter | None


@dataclass(frozen=True, slots=True, eq=False)
class _ChannelMoments:
    mean: Tensor
    var: Tensor


def normalisations(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of the model that keeps a running mean and variance, by name."""
    return {name: module for name, module in model.named_modules() if _has_statistics(module)}


def _has_statistics(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), Tensor) for name in ("running_mean", "running_var"))


def statistics_behind(
    model: nn.Module,
    weights: Mapping[str, Tensor | Sequence[Tensor]],
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> list[Behind]:
    """Find the running statistics that scale with some weights; one forward pass per weight or set, and one more.

    Args:
        model: the network.
        weights: tensors of the model, each scale-invariant by itself, or sequences of tensors that are so jointly, by a
            label for messages.
        args: positional arguments of the model: one batch.
        kwargs: keyword arguments of the model.

    Returns:
        One entry for each normalisation that has any of the weights in front of it.

    Raises:
        EquilibriaError: if the forward pass fails, weights are sharded, or statistics follow no power of a weight.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        >>> behind = statistics_behind(net, {"0.weight": net[0].weight}, args=[torch.randn(8, 3)])
        >>> [(norm.name, norm.degrees["0.weight"].tolist()) for norm in behind]
        [('1', [1, 1, 1, 1])]
    """
    norms = normalisations(model)
    if not norms:
        return []
    sets = {label: [entry] if isinstance(entry, Tensor) else list(entry) for label, entry in weights.items()}
    if any(is_sharded(weight) for tensors in sets.values() for weight in tensors):
        raise EquilibriaError(
            "got sharded weights (FSDP) in a network with BatchNorm; expected whole ones: scaling shards cannot find "
            "the statistics behind them. Use DistributedDataParallel, or norms without running statistics"
        )
    inputs = tree_map_only(Tensor, _at_least_float32, (tuple(args), dict(kwargs or {})))
    raw_names = {id(param): name for name, param in model.named_parameters()}
    with _prepared(model):
        plain = _moments(model, norms, inputs)
        doubled = {
            label: _moments(model, norms, inputs, doubled=[raw_names[id(weight)] for weight in tensors])
            for label, tensors in sets.items()
        }
    behind = (
        _behind(model, name, module, plain[name], {weight: moments[name] for weight, moments in doubled.items()})
        for name, module in norms.items()
    )
    return [norm for norm in behind if norm is not None]


def _at_least_float32(tensor: Tensor) -> Tensor:
    """Convert 16-bit numbers to float32, in which offsets stand out from rounding; leave others as they are."""
    is_short = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.detach().float() if is_short else tensor.detach()


@contextmanager
def _prepared(model: nn.Module) -> Iterator[None]:
    """Make normalisations use batch statistics and no eps; restore settings and random numbers on exit."""
    modules = list(model.modules())
    eps_before = [(module, module.eps) for module in modules if isinstance(getattr(module, "eps", None), float)]
    modes_before = [(module, module.training) for module in modules if _has_statistics(module)]
    devices = sorted({param.device.index or 0 for param in model.parameters() if param.device.type == "cuda"})
    kinds = {param.device.type for param in model.parameters()}
    kind = next(iter(kinds)) if len(kinds) == 1 else "cpu"
    try:
        for module, _ in eps_before:
            module.eps = _NEGLIGIBLE_EPS  # type: ignore[assignment]
        for module, _ in modes_before:
            module.training = True
        with torch.no_grad(), torch.random.fork_rng(devices=devices), torch.autocast(kind, enabled=False):
            yield
    finally:
        for module, eps in eps_before:
            module.eps = eps
        for module, mode in modes_before:
            module.training = mode


def _moments(
    model: nn.Module, norms: Mapping[str, nn.Module], inputs: tuple[Any, Any], *, doubled: Sequence[str] = ()
) -> dict[str, list[_ChannelMoments]]:
    """Mean and variance of every normalisation's input, one entry per call of it."""
    seen: dict[str, list[_ChannelMoments]] = defaultdict(list)
    state = {name: _at_least_float32(param) for name, param in model.named_parameters()}
    state |= {name: _at_least_float32(buffer).clone() for name, buffer in model.named_buffers()}  # they are written to
    state |= {name: 2 * state[name] for name in doubled}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: seen[name].append(_channel_moments(args[0], module))
        )
        for name, module in norms.items()
    ]
    try:
        torch.manual_seed(0)  # every pass draws the same dropout; `_prepared` restores the caller's generator
        functional_call(model, state, *inputs)
    except EquilibriaError:
        raise
    except Exception as error:
        raise EquilibriaError(
            f"got {type(error).__name__} from a forward pass of the network: {error}; expected it to run once more on "
            "this batch, in training mode and without autocast, to find the BatchNorm statistics behind the weights: "
            "pass a batch on which it runs as example="
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _channel_moments(tensor: Tensor, module: nn.Module) -> _ChannelMoments:
    channels = module.running_mean.numel()  # type: ignore[operator]
    axis = 1 if tensor.ndim > 1 and tensor.shape[1] == channels else tensor.ndim - 1
    rows = tensor.detach().transpose(0, axis).reshape(tensor.shape[axis], -1).double()
    return _ChannelMoments(rows.mean(1), rows.var(1, correction=0))


def _behind(
    model: nn.Module,
    name: str,
    module: nn.Module,
    plain: list[_ChannelMoments],
    doubled: Mapping[str, list[_ChannelMoments]],
) -> Behind | None:
    degrees: dict[str, Tensor] = {}
    biases: list[nn.Parameter | None] = []
    for weight, moments in doubled.items():
        calls = list(zip(plain, moments, strict=True))
        by_call = [_degree(before, after, weight=weight, name=name) for before, after in calls]
        if any(not torch.equal(degree, by_call[0]) for degree in by_call):
            raise EquilibriaError(
                f"got a module {name!r} that is called more than once, with inputs that scale differently with "
                f"{weight!r}; expected one normalisation for each place"
            )
        if by_call and by_call[0].any():
            degrees[weight] = by_call[0]
            biases += [_bias(model, *call, by_call[0], weight=weight, name=name) for call in calls]
    if len({id(bias) for bias in biases}) > 1:
        raise EquilibriaError(
            f"got different offsets in the mean in front of {name!r} for {', '.join(degrees)}; expected one bias: a "
            "bias in front of a BatchNorm has no effect, so leave it out (bias=False)"
        )
    return Behind(name, module, degrees, biases[0]) if degrees else None


def _degree(before: _ChannelMoments, after: _ChannelMoments, *, weight: str, name: str) -> Tensor:
    """d per channel: doubling the weight multiplies the variance by 4^d; constant channels get the d of the others."""
    moving = before.var > 1e-12 * before.mean**2  # otherwise it is the rounding of a constant
    if not moving.any():
        return torch.zeros_like(before.var, dtype=torch.int64)
    exact = torch.log2(after.var[moving] / before.var[moving]) / 2
    rounded = exact.round()
    worst = int((exact - rounded).abs().argmax())
    if not (exact - rounded).abs().max() <= _DEGREE_TOLERANCE:
        raise EquilibriaError(
            f"got a variance in front of {name!r} that is multiplied by {4 ** float(exact[worst]):.4g} when "
            f"{weight!r} is doubled; expected 1 or 4 (or a power of it): this is not scale-invariant by itself, or "
            "only a part of that input comes from it. Leave it out of `invariant`; eq.symmetries finds what is: use "
            "invariant=sym"
        )
    degree = torch.full_like(before.var, rounded[0].item()) if (rounded == rounded[0]).all() else None
    if degree is None:
        if not moving.all():
            raise EquilibriaError(
                f"got constant channels in front of {name!r}, of which only a part scales with {weight!r}; expected a "
                "batch on which every channel varies: pass a larger one as example="
            )
        degree = rounded
    return degree.to(torch.int64)


def _bias(
    model: nn.Module, before: _ChannelMoments, after: _ChannelMoments, degree: Tensor, *, weight: str, name: str
) -> nn.Parameter | None:
    """The parameter that is added to the scaled part of the mean: mean(r) = bias + r^d * scaled."""
    scales = degree > 0
    gain = torch.exp2(degree.double()) - 1
    offset = torch.where(scales, before.mean - (after.mean - before.mean) / gain.clamp_min(1), 0.0)
    size = _OFFSET_TOLERANCE * (before.mean.abs() + before.var.sqrt()).max()
    if offset.abs().max() <= size:
        return None
    for param in model.parameters():
        if param.shape == offset.shape and bool(((param.double() - offset).abs() <= size)[scales].all()):
            return param
    raise EquilibriaError(
        f"got an offset of up to {float(offset.abs().max()):.3g} in the mean in front of {name!r} that does not scale "
        f"with {weight!r} and equals no parameter of the network; expected a bias added right in front of it, or none: "
        "leave such biases out (bias=False), they have no effect in front of a BatchNorm"
    )
