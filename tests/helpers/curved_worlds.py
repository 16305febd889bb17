"""Small losses and networks whose curvature is known, or can be computed another way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.objectives._objective import ModelObjective, Objective, objective


def quadratic(matrix: Tensor, point: Tensor | None = None) -> Objective:
    """w'Aw/2, whose Hessian is A everywhere."""
    start = torch.ones(len(matrix), dtype=matrix.dtype) if point is None else point
    return Objective(lambda params, _batch: params["w"] @ (matrix @ params["w"]) / 2, {"w": start})


def with_spectrum(values: Tensor, *, seed: int = 0) -> Tensor:
    """A random symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    matrix = (basis * values.double()) @ basis.T
    return (matrix + matrix.T) / 2


def batch_normalised_net(*, width: int = 4, classes: int = 3, eps: float = 1e-5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, bias=False),
        nn.BatchNorm2d(width, eps=eps),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, bias=False),
        nn.BatchNorm2d(width, eps=eps),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(4 * width, classes, bias=False),
    )


def images(count: int = 24, *, classes: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 6, 6, generator=generator, dtype=dtype), torch.randint(
        classes, (count,), generator=generator
    )


def net_objective(**shape: float) -> ModelObjective:
    return objective(batch_normalised_net(**shape), functional.cross_entropy)  # type: ignore[arg-type]


def dense_by_differences(objective_of_net: Objective, batch: object, names: list[str], *, step: float = 1e-5) -> Tensor:
    """The Hessian from central differences of gradients, entry by entry, in float64."""
    params = {name: param.double() for name, param in objective_of_net.params.items() if name in names}
    columns = []
    for name, param in params.items():
        for index in range(param.numel()):
            ends = []
            for sign in (1.0, -1.0):
                moved = {key: value.clone() for key, value in params.items()}
                moved[name].view(-1)[index] += sign * step
                grads = objective_of_net.value_and_grad(batch, params=moved)[1]
                ends.append(torch.cat([grads[key].reshape(-1) for key in params]))
            columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns)
