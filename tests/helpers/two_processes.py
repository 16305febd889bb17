"""One of two processes that train together; what it finds is written to a file. Started by the tests beside it."""

from __future__ import annotations

import datetime
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import equilibria as eq
from equilibria.errors import WatchWarning
from equilibria.monitor.monitor import Monitor
from equilibria.monitor.sample_rows import SampleBuilder
from equilibria.tensors import sharding

STEPS = 6
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
}


def make_net() -> nn.Module:
    """Float64, so that the order in which gradients are added up does not matter; 5 rows do not divide by 2."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 5, bias=False), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 1, bias=False), nn.Linear(1, 3)
    return nn.Sequential(*layers).double()


def batch(step: int, *, part: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """All of a batch, or the half that one process trains on."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(16, 6, generator=generator).double(), torch.randint(0, 3, (16,), generator=generator)
    return (inputs, targets) if part is None else (inputs[part::2], targets[part::2])


def train(net: nn.Module, optimizer: torch.optim.Optimizer, *, part: int | None, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step, part=part)
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()


def wrapped(kind: str) -> nn.Module:
    net = make_net()
    if kind == "FSDP2":
        for layer in (net[0], net[3], net):
            fully_shard(layer)
        return net
    return nn.parallel.DistributedDataParallel(net) if kind == "DDP" else net


def watched(kind: str, name: str, granularity: str, part: int | None) -> list[dict[str, Any]]:
    net = wrapped(kind)
    optimizer = OPTIMIZERS[name](net.parameters())
    with Monitor(net, optimizer, every=1, granularity=granularity) as monitor:
        train(net, optimizer, part=part)
        assert monitor.failure is None, monitor.failure
        return monitor.samples().to_pylist()


def with_a_failure(rank: int, *, watch: bool) -> tuple[list[float], str | None]:
    """The second process stumbles over its third sample; both have to finish their training."""
    net = wrapped("FSDP2")
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    monitor = Monitor(net, optimizer, every=1) if watch else None
    if monitor is not None and rank == 1:
        builder, plain = monitor._builders[0], SampleBuilder.build
        calls: list[int] = []

        def build(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise ZeroDivisionError("only here")
            return plain(builder, *args)

        builder.build = build  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        train(net, optimizer, part=rank, steps=40)
    weight: Any = net[0].weight
    trained = [float(each) for each in weight.full_tensor().detach().flatten()]
    return trained, None if monitor is None else monitor.failure


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    found: dict[str, Any] = {"sums": {}}
    plain, sums = dist.all_reduce, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        sums.append(1)
        return plain(*args, **kwargs)

    sharding.dist.all_reduce = counted  # type: ignore[assignment]
    for name in OPTIMIZERS:
        for granularity in ("tensor", "row"):
            found[f"one {name} {granularity}"] = watched("one", name, granularity, None)
            for kind in ("FSDP2", "DDP"):
                sums.clear()
                found[f"{kind} {name} {granularity}"] = watched(kind, name, granularity, rank)
                found["sums"][f"{kind} {name} {granularity}"] = len(sums)
    net = wrapped("FSDP2")
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    with eq.watch(net, optimizer, log_dir=folder / "run") as monitor:
        train(net, optimizer, part=rank, steps=30)
        found["auto steps"] = sorted(set(monitor.samples()["step"].to_pylist()))
        found["log_dir"] = None if monitor.log_dir is None else str(monitor.log_dir)
    found["trained alone"], _ = with_a_failure(rank, watch=False)
    found["trained with a failure"], found["failure"] = with_a_failure(rank, watch=True)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
