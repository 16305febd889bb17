"""Weight decay against a held norm at translated learning rates: do networks train alike?

Scale-invariant weights start at eight times their usual norm, with a weight decay that brings them to equilibrium on
the way. In the first three cases all others are frozen (the GPT's after 200 steps of training, with queries and keys
drawn again), so that the loss depends on how far these weights turn; in the last two all are trained. All seeds of a
case have one network and other batches, which the four arms share: weight decay; `Hyperball` at the learning rates
and with the scaled gradients of `eq.translate(to="sphere", scale_gradients=True)`, one schedule per weight, by the
predicted norms and by those that the first arm measured; and, as a control, `Hyperball` at the learning rates of the
original. Running statistics of BatchNorm are averaged over 50 batches after the training: during it they lag behind a
norm that falls.

Fixed before the seeds were run: an arm agrees if the mean difference of its final test loss from the original's is
within the standard deviation of the original over seeds. A case has power if the control does not agree. Angles are
compared in the mean over 50 steps, over weights and seeds; the target is 0.5 %.

    python benchmarks/sphere.py     # some minutes of one core
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import functools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import equilibria as eq
from equilibria.control import Hyperball
from equilibria.lab.data import load_digits
from equilibria.lab.nets import GPT
from equilibria.theory import AdamW, Muon, Rule
from equilibria.theory.schedules import Cosine, Warmup
from publishing import publish

RUNS = Path("sphere-runs.jsonl")
ARMS = ("weight decay", "sphere, predicted norm", "sphere, measured norm", "sphere, untranslated")
START, PRETRAINING = 8.0, 200  # factor on the norm of the weights at the start; steps
BLOCK, ANGLE = 50, 0.005
SEEDS = range(410, 416)
TEXT = torch.tensor(
    list("".join(path.read_text() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))).encode())
)


@dataclass(frozen=True)
class Case:
    """A network, its optimizer, how long it is trained, and whether the other parameters are trained from scratch."""

    name: str
    rule: Rule
    steps: int
    build: Callable[[], tuple[nn.Module, list[str]]]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    pretraining: int = 0
    trains_all: bool = False


def digits_net() -> tuple[nn.Module, list[str]]:
    layers = [nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()]
    layers += [nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), ["0.weight", "3.weight"]


def gpt() -> tuple[nn.Module, list[str]]:
    model = GPT(256, 32, layers=2, heads=2, context=32, qk_norm=True)
    return model, [name for name, _ in model.named_parameters() if name.endswith(("query.weight", "key.weight"))]


def digits_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """64 images, a fifth of them with a random label: the gradients stay noisy."""
    chosen = torch.randint(len(DIGITS.train_labels), (64,), generator=generator)
    labels = DIGITS.train_labels[chosen]
    wrong = torch.rand(64, generator=generator) < 0.2
    return DIGITS.train_images[chosen].flatten(1), torch.where(
        wrong, torch.randint(10, (64,), generator=generator), labels
    )


def text_batch(generator: torch.Generator, rows: int = 8) -> tuple[Tensor, Tensor]:
    first = torch.randint(len(TEXT) - 33, (rows, 1), generator=generator)
    tokens = TEXT[first + torch.arange(33)].long()
    return tokens[:, :-1], tokens[:, 1:]


DIGITS = load_digits()
DIGITS_TEST = (DIGITS.test_images.flatten(1), DIGITS.test_labels)
TEXT_TEST = text_batch(torch.Generator().manual_seed(1), 64)
IMAGES, LETTERS = (digits_net, digits_batch, DIGITS_TEST), (gpt, text_batch, TEXT_TEST)
FOR_IMAGES, FOR_LETTERS = AdamW(3e-3, 6.0, betas=(0.9, 0.99)), AdamW(3e-3, 6.0, betas=(0.9, 0.95))
CASES = [
    Case("BatchNorm, AdamW", FOR_IMAGES, 600, *IMAGES),
    Case("BatchNorm, Muon", Muon(0.02, 1.0), 600, *IMAGES),
    Case("GPT with QK-norm, AdamW", FOR_LETTERS, 400, *LETTERS, pretraining=PRETRAINING),
    Case("BatchNorm, AdamW, all trained", FOR_IMAGES, 600, *IMAGES, trains_all=True),
    Case("GPT with QK-norm, AdamW, all trained", FOR_LETTERS, 400, *LETTERS, trains_all=True),
]


@functools.cache
def start(case: Case) -> tuple[nn.Module, list[str]]:
    """A network with invariant weights of a large norm, and their names; all others frozen unless all are trained."""
    torch.manual_seed(0)
    model, names = case.build()
    weights = [dict(model.named_parameters())[name] for name in names]
    fresh = [weight.detach().clone() for weight in weights]
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(5000)
    for _ in range(case.pretraining):
        loss_of(model, *case.batch(generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for weight, old in zip(weights, fresh, strict=True):
            weight.copy_(START * old.flip(0))
    for param in model.parameters():
        param.requires_grad = case.trains_all or any(param is weight for weight in weights)
    return model, names


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train(case: Case, arm: str, seed: int, measured: list[list[float]]) -> dict[str, Any]:
    """Final test loss, norms at every step, and the mean angle of the weights in every block of steps.

    Args:
        case: the network.
        arm: one of `ARMS`.
        seed: of the batches.
        measured: the norms of each weight in the first arm.
    """
    first, names = start(case)
    model = copy.deepcopy(first)
    weights = [dict(model.named_parameters())[name] for name in names]
    others = [
        param for param in model.parameters() if param.requires_grad and not any(param is weight for weight in weights)
    ]
    schedule = Warmup(
        Cosine(case.rule.lr, steps=case.steps - case.steps // 10, end=case.rule.lr / 10), steps=case.steps // 10
    )
    lrs = schedule.values(case.steps)
    held = arm != ARMS[0]
    kind = torch.optim.Muon if isinstance(case.rule, Muon) else torch.optim.AdamW
    own = {} if isinstance(case.rule, Muon) else {"betas": case.rule.betas}
    decay = 0.0 if held else case.rule.weight_decay
    turning = kind([{"params": [weight]} for weight in weights], lr=1.0, weight_decay=decay, **own)
    turning = Hyperball(turning, invariant=weights) if held else turning
    rest = torch.optim.AdamW(others, lr=1.0, weight_decay=0.0) if others else None
    planned, factors = [lrs] * len(weights), [np.ones(case.steps)] * len(weights)
    if arm in ARMS[1:3]:
        there = [
            eq.translate(
                case.rule,
                to="sphere",
                schedule=schedule,
                steps=case.steps,
                init_norm=weight.norm().item(),
                norm=norms if arm == ARMS[2] else None,
                scale_gradients=True,
                shape=tuple(weight.shape),
            )
            for weight, norms in zip(weights, measured, strict=True)
        ]
        planned, factors = [one.lr for one in there], [one.gradient for one in there]
    generator = torch.Generator().manual_seed(1000 + seed)
    angles, norms = np.zeros(case.steps), list[list[float]]()
    for step in range(case.steps):
        for group, values in zip(turning.param_groups, planned, strict=True):
            group["lr"] = float(values[step])
        model.zero_grad()
        loss_of(model, *case.batch(generator)).backward()
        for weight, values in zip(weights, factors, strict=True):
            assert weight.grad is not None
            weight.grad *= float(values[step])
        before = [weight.detach().double().clone() for weight in weights]
        norms.append([old.norm().item() for old in before])
        turning.step()
        if rest is not None:
            rest.param_groups[0]["lr"] = 3e-3 * lrs[step] / case.rule.lr
            rest.step()
        turned = [angle(old, new.detach().double()) for old, new in zip(before, weights, strict=True)]
        angles[step] = statistics.mean(turned)
    loss = final_loss(case, model)
    return {"loss": loss, "angles": angles.reshape(-1, BLOCK).mean(1).tolist(), "norms": np.transpose(norms).tolist()}


@torch.no_grad()
def final_loss(case: Case, model: nn.Module) -> float:
    """Test loss, with BatchNorm's statistics averaged over fifty batches."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
            module.momentum = None  # the plain mean of all batches
    generator = torch.Generator().manual_seed(6000)
    for _ in range(50):
        model(case.batch(generator)[0])
    model.eval()
    return loss_of(model, *case.test).item()


def angle(old: Tensor, new: Tensor) -> float:
    return 2 * math.asin(float((old / old.norm() - new / new.norm()).norm()) / 2)


def main() -> None:
    torch.set_num_threads(1)
    known = [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []
    done = {(entry["case"], entry["arm"], entry["seed"]): entry for entry in known}
    for case in CASES:
        for seed in SEEDS:
            for arm in ARMS:
                key = (case.name, arm, seed)
                if key not in done:
                    norms = done[case.name, ARMS[0], seed]["norms"] if arm != ARMS[0] else []
                    done[key] = {"case": case.name, "arm": arm, "seed": seed, **train(case, arm, seed, norms)}
                    with RUNS.open("a") as file:
                        file.write(json.dumps(done[key]) + "\n")
                    print(*key, f"{done[key]['loss']:.4f}", flush=True)
    report(done)


def report(done: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    lines = [
        "# Weight decay and a held norm: do networks train alike?",
        "",
        "\n\n".join(paragraph.replace("\n", " ") for paragraph in (__doc__ or "").split("\n\n")[1:3]),
        "",
        "| network | arm | final test loss | spread over seeds | difference | agrees | angle over original, mean | "
        "worst 50 steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    close = dict.fromkeys(ARMS[1:3], 0)
    for case in CASES:
        losses = {arm: [done[case.name, arm, seed]["loss"] for seed in SEEDS] for arm in ARMS}
        angles = {arm: np.mean([done[case.name, arm, seed]["angles"] for seed in SEEDS], axis=0) for arm in ARMS}
        spread = statistics.stdev(losses[ARMS[0]])
        for arm in ARMS:
            difference = statistics.mean(losses[arm]) - statistics.mean(losses[ARMS[0]])
            ratio = angles[arm] / angles[ARMS[0]]
            worst = ratio[np.argmax(np.abs(ratio - 1))]
            if arm in close:
                close[arm] += abs(ratio.mean() - 1) <= ANGLE
            verdict = "" if arm == ARMS[0] else "yes" if abs(difference) <= spread else "no"
            lines.append(
                f"| {case.name} | {arm} | {statistics.mean(losses[arm]):.4f} | {statistics.stdev(losses[arm]):.4f} | "
                f"{difference:+.4f} | {verdict} | {ratio.mean():.4f} | {worst:.4f} |"
            )
    lines += [
        "",
        f"Mean angle within {100 * ANGLE:g} % of the original's: {close[ARMS[1]]} of {len(CASES)} networks with "
        f"predicted norms, {close[ARMS[2]]} with measured ones.",
    ]
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
