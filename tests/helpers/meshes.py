"""One of several processes that train on a mesh; what it measures is written to a file. Started by the tests."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from equilibria.monitor.monitor import Monitor
from equilibria.tensors import sharding

STEPS = 4
WHOLE = Replicate()
PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {  # shape, and placements along both axes of the mesh
    "first, second": ((5, 6), [Shard(0), Shard(1)]),
    "second, first": ((4, 7), [Shard(1), Shard(0)]),
    "first twice": ((9, 3), [Shard(0), Shard(0)]),
    "whole, first": ((6, 4), [WHOLE, Shard(0)]),
    "second, whole": ((4, 5), [Shard(1), WHOLE]),
    "whole": ((3, 4), [WHOLE, WHOLE]),
    "experts apart": ((5, 4, 3), [Shard(0), WHOLE]),
    "experts split": ((3, 4, 6), [Shard(1), Shard(2)]),
    "experts both": ((3, 4, 6), [Shard(0), Shard(1)]),
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
}


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def samples_of(net: nn.Module, optimizer: torch.optim.Optimizer, granularity: Any, step: Any) -> list[dict[str, Any]]:
    with Monitor(net, optimizer, every=1, granularity=granularity) as monitor:
        for number in range(STEPS):
            step(number)
        assert monitor.failure is None, monitor.failure
        return monitor.samples().to_pylist()


def placed(mesh: DeviceMesh | None, name: str, granularity: str) -> list[dict[str, Any]]:
    """Tensors of all placements under the same gradients, whole without a mesh."""

    def put(tensor: torch.Tensor, placements: list[Placement]) -> torch.Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, placements)

    net = nn.ParameterDict(
        {
            key: nn.Parameter(put(draw(shape, seed), where))
            for seed, (key, (shape, where)) in enumerate(PLACEMENTS.items())
        }
    )
    optimizer = OPTIMIZERS[name](net.parameters())

    def step(number: int) -> None:
        for seed, (key, (shape, where)) in enumerate(PLACEMENTS.items()):
            net[key].grad = put(draw(shape, 100 * (number + 1) + seed), where)
        optimizer.step()

    return samples_of(net, optimizer, granularity, step)


def transformed(mesh: DeviceMesh | None, name: str, granularity: str) -> list[dict[str, Any]]:
    """FSDP2 over tensor parallelism, which shards one axis twice; every data-parallel rank has its part of a batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False), nn.LayerNorm(4)).double()
    rank, ranks = (0, 1) if mesh is None else (mesh["dp"].get_local_rank(), mesh["dp"].size())
    if mesh is not None:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh["dp"])
    optimizer = OPTIMIZERS[name]([net[0].weight, net[2].weight])

    def step(number: int) -> None:
        optimizer.zero_grad()
        inputs, targets = draw((8, 6), 7 + number)[rank::ranks], torch.arange(8)[rank::ranks] % 4
        functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    return samples_of(net, optimizer, granularity, step)


def main(folder: Path, *, runs: Any, optimizers: Any, granularities: Any) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, int(os.environ["WORLD_SIZE"]) // 2), mesh_dim_names=("dp", "tp"))
    plain, sums, found = dist.all_reduce, [], {}

    def counted(*args: Any, **kwargs: Any) -> Any:
        sums.append(1)
        return plain(*args, **kwargs)

    sharding.dist.all_reduce = counted  # type: ignore[assignment]
    for name in optimizers:
        for granularity in granularities:
            for run in runs:
                sums.clear()
                found[f"{run.__name__} {name} {granularity}"] = (
                    run(mesh, name, granularity),
                    run(None, name, granularity),
                )
                found[f"{run.__name__} sums"] = len(sums)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:] == ["quick"]:
        main(Path(sys.argv[1]), runs=(placed,), optimizers=("SGD",), granularities=("tensor",))
    else:
        main(Path(sys.argv[1]), runs=(placed, transformed), optimizers=OPTIMIZERS, granularities=("tensor", "row"))
