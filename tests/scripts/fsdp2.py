"""One of two processes of PyTorch's FSDP2 example in small: a sharded GPT under Adam; started by the test beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import equilibria as eq
from tests.helpers.scripts import text, token_batch
from tests.scripts.nanogpt import GPT

STEPS = 30


def train(*, watched: bool) -> tuple[dict[str, list[float]], eq.watching.WatchedRun | None]:
    torch.manual_seed(0)
    model, tokens = GPT(), text(4000, 16)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = eq.watch(model, optimizer, every=1) if watched else None
    for _ in range(STEPS):
        _, loss = model(*token_batch(tokens, 4, 16, draw))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log(loss=loss)
    return {name: param.full_tensor().flatten().tolist() for name, param in model.named_parameters()}, monitor


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    plain, _ = train(watched=False)
    watched, monitor = train(watched=True)
    assert monitor is not None
    monitor.close()
    outcome = {
        "same": plain == watched,
        "failure": monitor.failure,
        "findings": list(map(str, monitor.findings())),
        "severities": [finding.severity for finding in monitor.findings()],
        "angles": monitor.samples()["angle"].to_pylist(),
    }
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
