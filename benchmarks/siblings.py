"""Tensors unlike their siblings: planted faults that `watch` must name, and healthy networks in which it must not.

Healthy: GPTs of six blocks, 48 wide, on the characters of Python's documentation (AdamW, lr 3e-3, betas 0.9 and 0.95,
weight decay 0.1); the same with normalised queries and keys, a tied head and Muon (lr 0.02) for the matrices of the
blocks; a pre-norm encoder of six blocks on patches of the digits, 30 % of the labels at random (AdamW); a GPT of four
blocks with eight experts each, two of them per token, stacked in one parameter, with a loss that balances their load;
and a ResNet of six blocks (SGD, momentum 0.9, lr 0.1, weight decay 5e-4). Three seeds each, 400 steps, warm-up over 40,
cosine to a tenth, a sample every fifth step. A false alarm is a matrix that a finding about siblings names. Limit: one
in 300 matrices.

Faults, each in one tensor that the seed draws, once in the GPT and once in the encoder (the expert: twice in the GPT
with experts), with other seeds than the healthy ones:

- lr x5: in a parameter group of its own
- lr 0: likewise
- no decay: likewise, weight decay 0
- init x10: its initial values times 10
- dead: the outputs of the first matrix of an MLP are 0 from the start
- dies: the same from step 200 on
- frozen: requires no gradient
- expert: one that no token is routed to

Found is a fault if a finding names the tensor. Limit: all of them. Networks, faults, seeds and limits were fixed before
the published run; trials used the seeds from 100 on. Writes benchmarks/siblings.md and siblings.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import equilibria as eq
from equilibria.lab.data import load_digits
from equilibria.lab.data.batches import CHARACTERS, TextBatches, python_documentation
from equilibria.lab.nets import GPT, BasicBlockResNet
from equilibria.lab.nets.gpt import TransformerBlock
from publishing import publish

STEPS, WARM_UP, EVERY, DIES = 400, 40, 5, 200
WIDTH, BLOCKS, CONTEXT, BATCH = 48, 6, 48, 8
SEEDS = (0, 1, 2)
FAULTY = (("gpt", 10), ("encoder", 11))
HEALTHY = ("gpt", "gpt-qk-norm-tied-muon", "encoder", "gpt-experts", "resnet")
FAULTS = ("lr x5", "lr 0", "no decay", "init x10", "dead", "dies", "frozen")
ALLOWED = 1 / 300
ABOUT_SIBLINGS = ("other lr", "other weight decay", "other steps", "other start", "at rest", "frozen")


class Experts(TransformerBlock):
    """A block whose MLP is eight stacked experts, two of them per token."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, turns=None, qk_norm=False)
        del self.up, self.down
        self.router = nn.Linear(WIDTH, 8, bias=False)
        self.register_buffer("closed", torch.zeros(8))
        self.up = nn.Parameter(0.02 * torch.randn(8, WIDTH, WIDTH))
        self.down = nn.Parameter(0.01 * torch.randn(8, WIDTH, WIDTH))
        self.imbalance = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        inputs = self.norm2(tokens)
        shares = (self.router(inputs) + self.closed).softmax(-1)
        weights = torch.zeros_like(shares).scatter(-1, shares.topk(2).indices, 1.0) * shares
        used = (weights > 0).to(shares.dtype).flatten(0, 1).mean(0)
        self.imbalance = 8 * (used * shares.flatten(0, 1).mean(0)).sum()
        hidden = functional.gelu(torch.einsum("btw,ewv->btev", inputs, self.up))
        outputs = torch.einsum("btev,evw->btew", hidden, self.down)
        return tokens + (weights.unsqueeze(-1) * outputs).sum(2)


class Encoder(nn.Module):
    """Pre-norm transformer on the 16 patches of a digit, without a causal mask; the mean token is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 10)
        self.places = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        for block in self.blocks.layers:  # torch copies one block, with its initial values
            for param in block.parameters():
                if param.ndim == 2:
                    nn.init.normal_(param, std=0.1)

    def forward(self, images: Tensor) -> Tensor:
        patches = functional.unfold(images, 2, stride=2).transpose(1, 2)
        scores: Tensor = self.head(self.blocks(self.embedding(patches) + self.places).mean(dim=1))
        return scores


def network(name: str) -> nn.Module:
    if name == "encoder":
        return Encoder()
    if name == "resnet":
        return BasicBlockResNet(8, (2, 2, 2))
    blocks = 4 if name == "gpt-experts" else BLOCKS
    qk_norm = "qk-norm" in name
    model = GPT(CHARACTERS, WIDTH, layers=blocks, context=CONTEXT, positions="learnt", qk_norm=qk_norm)
    if name == "gpt-experts":
        model.blocks = nn.Sequential(*(Experts() for _ in range(blocks)))
    if "tied" in name:
        model.head.weight = model.embedding.weight
    return model


def data(name: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    if name not in ("encoder", "resnet"):
        yield from TextBatches(python_documentation(), length=CONTEXT, batch_size=BATCH, seed=seed)
    digits, draw = load_digits(), torch.Generator().manual_seed(seed)
    images, labels = digits.train_images, digits.train_labels
    wrong = torch.rand(len(labels), generator=draw) < 0.3
    labels = torch.where(wrong, torch.randint(10, (len(labels),), generator=draw), labels)
    while True:
        chosen = torch.randint(len(labels), (32,), generator=draw)
        yield images[chosen], labels[chosen]


def optimizers(name: str, model: nn.Module, apart: Tensor | None, fault: str) -> list[torch.optim.Optimizer]:
    """One group with decay, one without, and one for the tensor with the fault."""
    trained = [p for p in model.parameters() if p.requires_grad and p is not apart]
    if name == "resnet":
        return [torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=5e-4)]
    inside = {id(p) for key, p in model.named_parameters() if key.startswith("blocks")}
    muon = [p for p in trained if "muon" in name and p.ndim == 2 and id(p) in inside]
    rest = [p for p in trained if not any(p is other for other in muon)]
    lr, decay = 3e-3, 0.1
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    if apart is not None:
        own = {"lr x5": 5 * lr, "lr 0": 0.0}.get(fault, lr)
        groups.append({"params": [apart], "lr": own, "weight_decay": 0.0 if fault == "no decay" else decay})
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    return [adam, *([torch.optim.Muon(muon, lr=0.02, weight_decay=decay)] if muon else [])]


def lr_factor(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


def plant(model: nn.Module, fault: str, seed: int) -> tuple[str, Tensor | None, Callable[[int], None]]:
    """Plants a fault: the name of the tensor, the tensor if it needs a parameter group of its own, and a switch."""
    draw = torch.Generator().manual_seed(seed)

    def pick(names: list[str]) -> str:
        return names[int(torch.randint(len(names), (1,), generator=draw))]

    matrices = [key for key, p in model.named_parameters() if key.startswith("blocks") and p.ndim == 2]
    if fault == "expert":
        block, expert = (int(torch.randint(count, (1,), generator=draw)) for count in (4, 8))
        model.blocks[block].closed[expert] = -1e9  # type: ignore[index, union-attr]
        return f"blocks.{block}.up[{expert}]", None, lambda step: None
    if fault in ("dead", "dies"):
        name = pick([key for key in matrices if key.endswith(("up.weight", "linear1.weight"))])
        alive = [1.0 if fault == "dies" else 0.0]
        layer = model.get_submodule(name.removesuffix(".weight"))
        layer.register_forward_hook(lambda _layer, _inputs, outputs: outputs * alive[0])

        def switch(step: int) -> None:
            if step == DIES:
                alive[0] = 0.0

        return name, None, switch
    name = pick(matrices)
    tensor = model.get_parameter(name)
    if fault == "frozen":
        tensor.requires_grad_(False)
    if fault == "init x10":
        with torch.no_grad():
            tensor.mul_(10)
    return name, tensor if fault in ("lr x5", "lr 0", "no decay") else None, lambda step: None


def train(name: str, seed: int, fault: str = "") -> tuple[Any, str]:
    """Trains one network; what `watch` saw, and the tensor with the fault."""
    torch.manual_seed(seed)
    model = network(name)
    planted, apart, switch = plant(model, fault, seed) if fault else ("", None, lambda step: None)
    own = optimizers(name, model, apart, fault)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor) for optimizer in own]
    monitor = eq.watch(model, own, every=EVERY)
    batches = data(name, seed)
    for step in range(STEPS):
        switch(step)
        inputs, labels = next(batches)
        scores = model(inputs)
        loss = functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        if name == "gpt-experts":
            loss = loss + 0.02 * sum(block.imbalance for block in model.blocks)  # type: ignore[union-attr]
        loss.backward()
        for optimizer, scheduler in zip(own, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        monitor.log(loss=loss.detach())
    return monitor, planted


def about_siblings(monitor: Any) -> list[str]:
    """The findings about siblings, as text."""
    kinds = (*ABOUT_SIBLINGS, "rows at rest")
    return [f"{each.subject}: {each.evidence}" for each in monitor.findings() if each.kind.startswith(kinds)]


def names_tensor(finding: str, planted: str) -> bool:
    tensor, bracket, number = planted.partition("[")
    return tensor in finding and (not bracket or f"[{number}" in finding)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None, help="runs such as gpt/0 or 'gpt/lr x5/10'")
    only = parser.parse_args().only
    result: dict[str, Any] = {"healthy": [], "faults": []}
    for name in HEALTHY:
        for seed in SEEDS if only is None else ():
            monitor, _ = train(name, seed)
            found = about_siblings(monitor)
            matrices = len(monitor.metadata["params"])
            result["healthy"].append({"network": name, "seed": seed, "matrices": matrices, "findings": found})
            print(name, seed, matrices, found, flush=True)
    faults = [(name, fault, seed) for fault in FAULTS for name, seed in FAULTY]
    faults += [("gpt-experts", "expert", seed) for _, seed in FAULTY]
    if only is not None:
        faults = [
            (name, fault, int(seed)) for name, fault, seed in (run.split("/") for run in only if run.count("/") > 1)
        ]
        for name, seed in (run.split("/") for run in only if run.count("/") == 1):
            print(name, seed, about_siblings(train(name, int(seed))[0]), flush=True)
    for name, fault, seed in faults:
        monitor, planted = train(name, seed, fault)
        found = about_siblings(monitor)
        hit = any(names_tensor(each, planted) for each in found)
        result["faults"].append(
            {"network": name, "fault": fault, "seed": seed, "tensor": planted, "found": hit, "findings": found}
        )
        print(name, fault, seed, planted, "found" if hit else "MISSED", found, flush=True)
    if only is None:
        publish(Path(__file__).with_name("siblings.md"), page(result))
    return 0


def page(result: dict[str, Any]) -> str:
    """The Markdown page."""
    healthy, faults = result["healthy"], result["faults"]
    matrices, alarms = sum(run["matrices"] for run in healthy), sum(len(run["findings"]) for run in healthy)
    met = "met" if alarms <= ALLOWED * matrices else "**missed**"
    lines = ["# Tensors unlike their siblings", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    lines += ["## Healthy", "", "| network | runs | matrices | findings |", "|---|---|---|---|"]
    for name in HEALTHY:
        runs = [run for run in healthy if run["network"] == name]
        texts = [text for run in runs for text in run["findings"]]
        lines.append(f"| {name} | {len(runs)} | {sum(run['matrices'] for run in runs)} | {'; '.join(texts) or '0'} |")
    lines += ["", f"{alarms} findings in {matrices} matrices of {len(healthy)} runs: {met}.", ""]
    lines += ["## Faults", "", "| fault | runs | found | a finding |", "|---|---|---|---|"]
    for fault in (*FAULTS, "expert"):
        runs = [run for run in faults if run["fault"] == fault]
        example = next((text for run in runs for text in run["findings"] if names_tensor(text, run["tensor"])), "")
        lines.append(f"| {fault} | {len(runs)} | {sum(run['found'] for run in runs)} | {example} |")
    others = sum(not names_tensor(text, run["tensor"]) for run in faults for text in run["findings"])
    met = "met" if all(run["found"] for run in faults) else "**missed**"
    lines += [
        "",
        f"All found: {met}. Findings in these runs that name another tensor only: {others} (a dead matrix takes",
    ]
    lines += ["the one behind it along)."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
