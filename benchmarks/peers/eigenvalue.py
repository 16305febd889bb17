"""Who finds the top eigenvalue of the Hessian of a BatchNorm network in training mode?"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.data.image_set import load_digits
from peers import failure

Batch = tuple[Tensor, Tensor]
STARTS = 3


@dataclass(frozen=True)
class Answer:
    """An eigenvalue, how many Hessian-vector products it took, and what the tool said about it."""

    value: float
    products: int
    remark: str = ""


Solver = Callable[[nn.Module, Batch, int], Answer]


@dataclass
class Answers:
    """Of one tool, from several random starts.

    Attributes:
        failure: the first line of what it raised.
        left: what it changed of the model.
    """

    name: str
    found: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""
    left: set[str] = field(default_factory=set)

    def error(self, truth: float) -> float:
        """The largest relative one."""
        return max(abs(each.value / truth - 1) for each in self.found)

    @property
    def products(self) -> list[int]:
        return [each.products for each in self.found]


def digits_net() -> tuple[nn.Module, Batch]:
    """Six convolutions with BatchNorm after 40 steps on handwritten digits; 128 of them."""
    digits = load_digits()
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, width in pairwise((1, 16, 16, 32, 32, 32, 32)):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer, random = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), torch.Generator().manual_seed(1)
    for _ in range(40):
        part = torch.randint(len(digits.train_images), (128,), generator=random)
        optimizer.zero_grad()
        functional.cross_entropy(net(digits.train_images[part]), digits.train_labels[part]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net, (digits.train_images[:128], digits.train_labels[:128])


def plain_net() -> nn.Module:
    """Without normalisation, for the same images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def by_eigsh(*, tol: float = 0, vectors: int | None = None) -> Solver:
    """scipy's Lanczos with its default settings, or others, and products by hand."""

    def solve(net: nn.Module, batch: Batch, start: int) -> Answer:
        return _by_eigsh(net, batch, start, tol=tol, vectors=vectors)

    return solve


def truth(net: nn.Module, batch: Batch) -> float:
    """In float64, in training mode."""
    return _by_eigsh(copy.deepcopy(net).double(), (batch[0].double(), batch[1]), 99, tol=1e-8, vectors=None).value


def _by_eigsh(net: nn.Module, batch: Batch, start: int, *, tol: float, vectors: int | None) -> Answer:
    """One forward pass; the graph of the gradient is kept from product to product, as ours keeps it."""
    params = list(net.parameters())
    loss = functional.cross_entropy(net(batch[0]), batch[1])
    flat = _flat(torch.autograd.grad(loss, params, create_graph=True))
    size, kind, calls = flat.numel(), flat.detach().numpy().dtype, []

    def matvec(vector: np.ndarray) -> np.ndarray:
        calls.append(1)
        direction = torch.from_numpy(np.ascontiguousarray(vector.reshape(-1)))
        found: np.ndarray = _flat(torch.autograd.grad(flat @ direction, params, retain_graph=True)).numpy()
        return found

    operator = LinearOperator((size, size), matvec=matvec, dtype=kind)
    first = np.random.default_rng(start).normal(size=size).astype(kind)
    found = eigsh(operator, k=1, which="LA", v0=first, tol=tol, ncv=vectors)[0]
    return Answer(float(found[0]), len(calls))


def ask(solvers: dict[str, Solver], net: nn.Module, batch: Batch) -> Iterable[Answers]:
    """Every solver from every start, in turns."""
    table = {name: Answers(name) for name in solvers}
    for start in range(STARTS):
        for name, solve in solvers.items():
            if not table[name].failure:
                _ask_once(table[name], solve, copy.deepcopy(net), batch, start)
    return table.values()


def _ask_once(row: Answers, solve: Solver, net: nn.Module, batch: Batch, start: int) -> None:
    before = _state(net)
    begin = time.process_time()
    try:
        row.found.append(solve(net, batch, start))
    except Exception as error:
        row.failure = failure.in_a_line(error)
        return
    row.seconds.append(time.process_time() - begin)
    row.left |= {name for name, now in _state(net).items() if now != before[name]}


def _state(net: nn.Module) -> dict[str, object]:
    return {
        "mode": net.training,
        "running statistics": [buffer.double().sum().item() for buffer in net.buffers()],
        "gradients": [param.grad is not None for param in net.parameters()],
        "weights": [param.double().sum().item() for param in net.parameters()],
    }


def _flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
