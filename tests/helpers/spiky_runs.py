"""Small trainings of different kinds, healthy or with one accident, watched at every step, with their losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR

from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.watching import watch

STEPS, ACCIDENT = 160, 120
CLASSES, INPUTS = 4, 16
Batch = tuple[Tensor, Tensor]


def without_metrics(run: SampledRun) -> SampledRun:
    return dataclasses.replace(run, metrics={})


def _watched(monitor: Any, losses: dict[str, list[float]]) -> SampledRun:
    run = sampled_run(monitor.samples(), metadata=monitor.metadata)
    monitor.close()
    metrics = {name: (np.arange(len(values)), np.array(values)) for name, values in losses.items()}
    return dataclasses.replace(run, metrics=metrics)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    batches: Callable[[int], Batch],
    *,
    steps: int,
    clip: float | None = None,
    accident: str = "",
    every: int = 1,
) -> SampledRun:
    """Train, with one of the accidents "garbage labels", "inputs x 30" and "lr x 30" (for three steps)."""
    monitor, losses = watch(net, optimizer, every=every), []
    for step in range(steps):
        inputs, targets = batches(step)
        if accident == "garbage labels" and step == ACCIDENT:
            targets = (targets + 1) % CLASSES
        if accident == "inputs x 30" and step == ACCIDENT:
            inputs = 30 * inputs
        if accident == "lr x 30" and step in (ACCIDENT, ACCIDENT + 3):
            for group in optimizer.param_groups:
                group["lr"] *= 30 if step == ACCIDENT else 1 / 30
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return _watched(monitor, {"loss": losses})


def _clusters(seed: int, *, batch: int, steps: int, noise: float, shape: Sequence[int] = (INPUTS,)) -> list[Batch]:
    """Batches of points around a centre per class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, *shape, generator=generator)
    targets = torch.randint(CLASSES, (steps, batch), generator=generator)
    inputs = centres[targets] + noise * torch.randn(steps, batch, *shape, generator=generator)
    return list(zip(inputs, targets, strict=True))


def _warm_up(steps: int) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / 40) * max(0.1, 1 - step / steps)


def conv_bn(seed: int, steps: int = STEPS, **options: Any) -> SampledRun:
    """A BatchNorm conv net, SGD with momentum, lr / 10 after two thirds (not with an accident)."""
    torch.manual_seed(seed)
    hidden = [
        layer
        for width in (1, 6)
        for layer in (nn.Conv2d(width, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    ]
    net = nn.Sequential(*hidden, nn.Flatten(), nn.Linear(6 * 36, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    milestones = [] if options.get("accident") else [2 * steps // 3]
    batches = _clusters(seed, batch=16, steps=steps, noise=2.0, shape=(1, 6, 6))
    return train(net, optimizer, MultiStepLR(optimizer, milestones), batches.__getitem__, steps=steps, **options)


def ln_mlp(seed: int, steps: int = STEPS, **options: Any) -> SampledRun:
    """A LayerNorm perceptron, AdamW with warm-up and linear decay."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Linear(INPUTS, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()),
        nn.Linear(32, CLASSES),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, _warm_up(steps))
    batches = _clusters(seed, batch=16, steps=steps, noise=1.5)
    return train(net, optimizer, scheduler, batches.__getitem__, steps=steps, **options)


def plain_mlp(seed: int, steps: int = STEPS, batch: int = 16, **options: Any) -> SampledRun:
    """A perceptron without normalisation, SGD with momentum."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batches = _clusters(seed, batch=batch, steps=steps, noise=2.0)
    return train(net, optimizer, None, batches.__getitem__, steps=steps, **options)


def small_batches(seed: int, steps: int = STEPS) -> SampledRun:
    """The same with batches of two."""
    return plain_mlp(seed, steps, batch=2)


class _GPT(nn.Module):
    """One pre-norm block over eight tokens of sixteen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 16), nn.Parameter(0.02 * torch.randn(8, 16))
        self.before, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        q, k, v = self.qkv(self.before(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x + self.mlp(x))


def gpt(seed: int, steps: int = STEPS) -> SampledRun:
    """A small GPT on a Markov chain of tokens with Zipf's frequencies, AdamW, clipping and warm-up."""
    torch.manual_seed(seed)
    net, rng = _GPT(), np.random.default_rng(seed)
    frequencies = 1 / np.arange(1, 17)
    chain = np.cumsum(rng.dirichlet(frequencies / frequencies.sum() * 4, size=16), axis=1)
    tokens = np.zeros((steps, 8, 9), dtype=np.int64)
    tokens[:, :, 0] = rng.integers(16, size=(steps, 8))
    for place in range(1, 9):
        draws = rng.random((steps, 8, 1))
        tokens[:, :, place] = np.minimum((draws > chain[tokens[:, :, place - 1]]).sum(axis=2), 15)
    data = torch.from_numpy(tokens)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, _warm_up(steps))
    return train(net, optimizer, scheduler, lambda step: (data[step, :, :-1], data[step, :, 1:]), steps=steps, clip=1.0)


def word_model(seed: int, steps: int = STEPS) -> SampledRun:
    """The next of 200 words with Zipf's frequencies from the last one, batches of four: heavy-tailed losses."""
    torch.manual_seed(seed)
    net, rng = nn.Sequential(nn.Embedding(200, 16), nn.Linear(16, 200)), np.random.default_rng(seed)
    frequencies = 1 / np.arange(1, 201)
    words = torch.from_numpy(rng.choice(200, size=(steps, 2, 4), p=frequencies / frequencies.sum()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
    return train(net, optimizer, None, lambda step: (words[step, 0], words[step, 1]), steps=steps)


def gan(seed: int, steps: int = STEPS) -> SampledRun:
    """A generator and a discriminator with an Adam each, on a ring of eight clusters."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    net = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    optimizers = [
        torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in (discriminator, generator)
    ]
    monitor, losses = watch(net, optimizers, every=1), {"d_loss": [], "g_loss": []}
    for _ in range(steps):
        turn = 2 * torch.pi * torch.randint(8, (16,)) / 8
        real = torch.stack([turn.cos(), turn.sin()], dim=1) + 0.05 * torch.randn(16, 2)
        fake = generator(torch.randn(16, 4))
        judged = discriminator(real), discriminator(fake.detach())
        d_loss = functional.softplus(-judged[0]).mean() + functional.softplus(judged[1]).mean()
        _step(optimizers[0], d_loss)
        g_loss = functional.softplus(-discriminator(fake)).mean()
        _step(optimizers[1], g_loss)
        losses["d_loss"].append(d_loss.item())
        losses["g_loss"].append(g_loss.item())
    return _watched(monitor, losses)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


HEALTHY = {
    "conv, BatchNorm, SGD, step decay": conv_bn,
    "perceptron, LayerNorm, AdamW, warm-up": ln_mlp,
    "GPT, AdamW, clipping": gpt,
    "GAN, two optimizers": gan,
    "small batches, SGD": small_batches,
    "words, heavy-tailed": word_model,
}
