"""Nightly trainings in which one thing goes wrong: does `history` find the run, and stay silent on healthy ones?

Three small networks (BatchNorm with SGD and momentum, a pre-norm transformer with AdamW, LayerNorm with AdamW), each
trained night after night with another seed for initial weights and batches. `equilibria.comparing.history` judges each
night against those before it. Fixed before the judged seeds ran: networks, faults, number of nights, and what counts:
at least nine in ten of the planted faults are found, and at most one in fifty healthy nights is out of its band.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import equilibria as eq
from equilibria.comparing import history
from publishing import publish

STEPS, BATCH = 400, 64
HEALTHY = 20  # nights of each network
FAULTY_AFTER = 10  # healthy nights before a fault
TRIAL, JUDGED = 1000, 5000  # first seeds: thresholds were tried on the former only


@dataclass(frozen=True)
class Night:
    """One training: the seed, and what is wrong with it."""

    seed: int
    lr: float = 1.0  # factors
    weight_decay: float = 1.0
    beta: float | None = None
    batch: float = 1.0
    init: float = 1.0
    noise: float = 0.0  # share of wrong labels
    classes: int = 10  # in the data
    first_lr: float = 1.0  # of the first layer alone
    frozen: bool = False  # the first layer
    bad_batches: int = 0
    warmup: bool = True
    bf16: bool = False


FAULTS: dict[str, Callable[[int], Night]] = {
    "lr x 1.5": lambda seed: Night(seed, lr=1.5),
    "weight decay x 4": lambda seed: Night(seed, weight_decay=4.0),
    "momentum or beta1 .5": lambda seed: Night(seed, beta=0.5),
    "batch / 4": lambda seed: Night(seed, batch=0.25),
    "initial weights x 2": lambda seed: Night(seed, init=2.0),
    "half of the labels wrong": lambda seed: Night(seed, noise=0.5),
    "three of ten classes": lambda seed: Night(seed, classes=3),
    "first layer lr x 3": lambda seed: Night(seed, first_lr=3.0),
    "first layer frozen": lambda seed: Night(seed, frozen=True),
    "three bad batches": lambda seed: Night(seed, bad_batches=3),
    "no warm-up": lambda seed: Night(seed, warmup=False),
    "weights in bfloat16": lambda seed: Night(seed, bf16=True),
}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 handwritten digits of scikit-learn, centred."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16 - 0.3, dtype=torch.float32), torch.tensor(data.target)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm1(x)
        x = x + self.attention(inner, inner, inner, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Eight tokens of eight pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32, bias=False)
        self.position = nn.Parameter(0.02 * torch.randn(8, 32))
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x.view(-1, 8, 8)) + self.position)).mean(1))


def batchnorm() -> nn.Module:
    layers = [nn.Linear(64, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU()]
    layers += [nn.Linear(96, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 10)]
    return nn.Sequential(*layers)


def layernorm() -> nn.Module:
    layers = [nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.GELU()]
    layers += [nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], bool, float, float]] = {  # is AdamW, lr, weight decay
    "BatchNorm, SGD": (batchnorm, False, 0.1, 5e-3),
    "transformer, AdamW": (Transformer, True, 3e-3, 0.1),
    "LayerNorm, AdamW": (layernorm, True, 3e-3, 0.5),
}


def optimizer_of(model: nn.Module, network: str, night: Night) -> torch.optim.Optimizer:
    _, is_adamw, lr, decay = NETWORKS[network]
    first, *others = (param for param in model.parameters() if param.ndim > 1)
    others += [param for param in model.parameters() if param.ndim == 1]
    lr, decay = lr * night.lr, decay * night.weight_decay
    groups = [{"params": [first], "lr": lr * night.first_lr}, {"params": others}]
    if is_adamw:
        return torch.optim.AdamW(groups, lr=lr, weight_decay=decay, betas=(night.beta or 0.9, 0.99))
    return torch.optim.SGD(groups, lr=lr, weight_decay=decay, momentum=night.beta or 0.9)


def train(network: str, night: Night, folder: Path) -> None:
    torch.manual_seed(night.seed)
    inputs, targets = digits()
    inputs, targets = inputs[targets < night.classes], targets[targets < night.classes]
    wrong = torch.rand(len(targets)) < night.noise
    targets = torch.where(wrong, torch.randint(0, 10, targets.shape), targets)
    model = NETWORKS[network][0]()
    first = next(param for param in model.parameters() if param.ndim > 1)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(night.init)
    first.requires_grad_(not night.frozen)
    kind = torch.bfloat16 if night.bf16 else torch.float32
    model.to(kind)
    optimizer = optimizer_of(model, network, night)

    def warm_up_and_drop(step: int) -> float:
        return (min(1, (step + 1) / 40) if night.warmup else 1) * (0.1 if step >= 0.8 * STEPS else 1)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_drop)
    bad = set(torch.randperm(STEPS // 2)[: night.bad_batches].add(STEPS // 5).tolist())
    with eq.watch(model, optimizer, log_dir=folder, every=5) as monitor:
        for step in range(STEPS):
            rows = torch.randint(0, len(inputs), (int(BATCH * night.batch),))
            batch, labels = inputs[rows].to(kind), targets[rows]
            if step in bad:
                batch, labels = 30 * torch.randn_like(batch), torch.zeros_like(labels)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch).float(), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            monitor.log(loss=loss)


def judge(network: str, seed: int, folder: Path) -> Iterator[dict[str, object]]:
    """The healthy nights, each against those before it; every fault after the first ten of them."""
    for night in range(HEALTHY):
        train(network, Night(seed + night), folder / "healthy" / f"night-{night:02}")
    nights = sorted((folder / "healthy").iterdir())
    judged = history(nights)
    for run in judged.runs:
        if run.compared_with:
            yield {"network": network, "fault": None, "in_band": run.in_band, "said": _said(judged, run.name)}
    for number, (fault, planted) in enumerate(FAULTS.items()):
        path = folder / f"fault-{number:02}"
        train(network, planted(seed + 100 + number), path)
        judged = history([*nights[:FAULTY_AFTER], path])
        run = judged.runs[-1]
        changes = [str(change) for change in run.changes]
        yield {
            "network": network,
            "fault": fault,
            "in_band": run.in_band,
            "said": _said(judged, run.name),
            "changes": changes,
        }


def _said(judged: object, name: str) -> str:
    return "".join(f.evidence for f in judged.findings if f.subject.startswith(name))  # type: ignore[attr-defined]


PAGE = """# Nightly trainings: what `equilibria history` finds

Three small networks, {steps} steps a night, {healthy} healthy nights each with another seed, and {faults} faults, each
in a night after the first {after} healthy ones. Written by `python benchmarks/history.py --judged` (minutes).

- **Healthy nights out of their band: {false} of {judged}** (limit: one in fifty).
- **Faults found: {found} of {planted}** (goal: nine in ten). The table has those that were not.

| network | fault | found | what is printed |
|---|---|---|---|
{rows}
"""


def main() -> None:
    """Run everything, print it, and with ``--judged`` write the page."""
    seed = JUDGED if "--judged" in sys.argv else TRIAL
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, network in enumerate(NETWORKS):
            for row in judge(network, seed + 200 * number, Path(folder) / str(number)):
                rows.append(row)
                print(json.dumps(row), flush=True)
    healthy, faulty = ([row for row in rows if (row["fault"] is None) is good] for good in (True, False))
    counts = {
        "false": sum(not row["in_band"] for row in healthy),
        "judged": len(healthy),
        "found": sum(not row["in_band"] for row in faulty),
        "planted": len(faulty),
    }
    print(counts)
    if seed == JUDGED:
        lines = [
            f"| {row['network']} | {row['fault']} | {'no' if row['in_band'] else 'yes'} | {row['said'] or '–'} |"
            for row in faulty
        ]
        shape = {"steps": STEPS, "healthy": HEALTHY, "faults": len(FAULTS), "after": FAULTY_AFTER}
        publish(Path(__file__).with_suffix(".md"), PAGE.format(rows="\n".join(lines), **shape, **counts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
