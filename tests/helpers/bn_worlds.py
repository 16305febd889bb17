"""A small BatchNorm network, fixed batches, and training with and without what is tested."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

TINY_EPS = 1e-30  # torch refuses 0; the equivalences hold without eps


def bn_net(
    *, dtype: torch.dtype = torch.float64, eps: float = TINY_EPS, seed: int = 0, bias: bool = False
) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inside, outside in itertools.pairwise((10, 16, 16, 16)):
            layers += [nn.Linear(inside, outside, bias=bias), nn.BatchNorm1d(outside, eps=eps), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(16, 5)).to(dtype)


def invariant_of(net: nn.Module) -> list[Tensor]:
    return [param for name, param in net.named_parameters() if param.ndim == 2 and not name.startswith("9.")]


def others_of(net: nn.Module) -> list[Tensor]:
    inside = {id(param) for param in invariant_of(net)}
    return [param for param in net.parameters() if id(param) not in inside]


def sgd(net: nn.Module, **settings: object) -> torch.optim.SGD:
    groups = [{"params": invariant_of(net)}, {"params": others_of(net)}]
    return torch.optim.SGD(groups, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3, **settings})


_GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(20, 32, 10, generator=_GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 5, (20, 32), generator=_GENERATOR)


def take_step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, closure: bool = False) -> Tensor:
    """One optimizer step on a fixed batch; the logits before it."""
    dtype = next(net.parameters()).dtype
    inputs, labels = INPUTS[step % 20].to(dtype), LABELS[step % 20]
    logits: list[Tensor] = []

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        logits.append(net(inputs))
        loss = functional.cross_entropy(logits[-1], labels)
        loss.backward()
        return loss

    if closure:
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()
    return logits[0].detach()


@torch.no_grad()
def eval_logits(net: nn.Module, step: int = 0) -> Tensor:
    net.eval()
    result = net(INPUTS[step % 20].to(next(net.parameters()).dtype))
    net.train()
    return result


@torch.no_grad()
def deviation(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


def largest_deviation(
    plain: tuple[nn.Module, torch.optim.Optimizer],
    other: tuple[nn.Module, torch.optim.Optimizer],
    *,
    steps: Iterable[int],
    between: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
) -> float:
    """The largest deviation of the logits of two runs, in training mode at each step, in eval mode at every fifth."""
    worst = 0.0
    for step in steps:
        seen = []
        for net, optimizer in (plain, other):
            between(step, optimizer)
            logits = take_step(net, optimizer, step)
            seen.append((logits, eval_logits(net, step + 1) if step % 5 == 4 else logits))
        worst = max([worst, *(deviation(a, b) for a, b in zip(*seen, strict=True))])
    return worst
