"""How far forecasts are off: runs that nothing was tuned on, forecast from a third of their steps.

`HELD_OUT` was fixed and committed before any of these runs was trained; the law and the bands of `forecasting` were not
changed after their result was seen. Train (about three minutes on one core) and judge with
`python benchmarks/forecast_accuracy.py DIRECTORY`; runs already in the directory are not trained again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.forecasting import FORECAST, BackTest, backtest
from equilibria.forecasting._backtest import rms
from equilibria.forecasting._fit import _smooth, fit, replay
from equilibria.forecasting._layers import Cohort, read_layers, whole_records
from equilibria.forecasting._paths import GAIN_POWER
from equilibria.lab.data.batches import CHARACTERS, TextBatches, python_documentation
from equilibria.records._metrics import metric_series
from equilibria.theory import evolve
from equilibria.theory._reals import Array
from equilibria.theory.moments import adam_step, angle_from_chord_sq, chord_sq
from equilibria.theory.rules import SGD, SGDW
from equilibria.theory.schedules import FromValues
from equilibria.theory.states import State, adam_settings
from equilibria.watching import RecordedRun, read_run, watch
from publishing import publish

STEPS, START = 1500, 500
CONTEXT = 24  # characters


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        network: "text" (transformer with RMSNorm after every matrix, characters of Python's documentation), "signals"
            (BatchNorm convolutions in one dimension, noisy tones), "sets" (LayerNorm perceptrons around a sum, noisy
            regression), "shapes" (residual GroupNorm convolutions, noisy images) or "table" (residual BatchNorm
            perceptron, classes from products of columns, 20 % fresh label noise).
        optimizer: "sgd", "sgdm" or "adamw".
        schedule: "step", "cosine", "one-cycle", "wsd" or "warm-up".
        seed: of weights and data.
    """

    network: str
    optimizer: str
    schedule: str
    seed: int

    @property
    def name(self) -> str:
        """Its directory."""
        return f"{self.optimizer}-{self.schedule}-{self.network}-{self.seed}"

    def factor(self, step: int) -> float:
        """The learning rate of a step over its peak."""
        part = step / STEPS
        if self.schedule == "step":
            return 1.0 if part < 0.6 else 0.1
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * part)) / 2
        if self.schedule == "one-cycle":
            return 0.04 + 0.96 * part / 0.3 if part < 0.3 else (1 + math.cos(math.pi * (part - 0.3) / 0.7)) / 2
        if self.schedule == "wsd":
            return min(1.0, (step + 1) / 100, (1 - part) / 0.3)
        return min(1.0, (step + 1) / 300)


_NETWORKS, _OPTIMIZERS = ("text", "signals", "sets", "shapes", "table"), ("sgd", "sgdm", "adamw")
_SCHEDULES = ("step", "cosine", "one-cycle", "wsd", "warm-up")
HELD_OUT = tuple(
    Training(_NETWORKS[(row + 2 * column) % 5], optimizer, schedule, 900 + 10 * row + column)
    for row, schedule in enumerate(_SCHEDULES)
    for column, optimizer in enumerate(_OPTIMIZERS)
)


class Normalised(nn.Module):
    """A weight, the normalisation after it, and perhaps a residual connection around both."""

    def __init__(self, weight: nn.Module, norm: nn.Module, *, residual: bool = False) -> None:
        super().__init__()
        self.weight, self.norm, self.residual = weight, norm, residual

    def forward(self, inputs: Tensor) -> Tensor:
        """The normalised output; with a residual connection it is activated and added to the input."""
        outputs: Tensor = self.norm(self.weight(inputs))
        return inputs + functional.gelu(outputs) if self.residual else outputs


def linear(inputs: int, outputs: int, norm: type[nn.Module] = nn.LayerNorm, *, residual: bool = False) -> Normalised:
    """A normalised linear layer."""
    return Normalised(nn.Linear(inputs, outputs, bias=False), norm(outputs), residual=residual)


class Text(nn.Module):
    """One transformer block between embedding and head, RMSNorm after every matrix of it."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.embedding = heads, nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(0.1 * torch.randn(CONTEXT, width))
        self.query, self.key, self.value, self.out, self.down = (linear(width, width, nn.RMSNorm) for _ in range(5))
        self.up, self.head = linear(width, width, nn.RMSNorm), nn.Linear(width, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits, characters x classes."""
        stream = self.embedding(characters) + self.positions
        parts = (part(stream).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        stream = stream + self.down(functional.gelu(self.up(stream)))
        logits: Tensor = self.head(stream)
        return logits.flatten(0, 1)


class Sets(nn.Module):
    """A function of the sum over a set's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.element = nn.Sequential(linear(6, 40), nn.SiLU(), linear(40, 40), nn.SiLU())
        self.whole = nn.Sequential(linear(40, 40), nn.SiLU(), nn.Linear(40, 1))

    def forward(self, sets: Tensor) -> Tensor:
        """One number per set."""
        value: Tensor = self.whole(self.element(sets).sum(dim=1))
        return value


def network(kind: str) -> nn.Module:
    """A small network with a normalisation after every weight but embeddings and the last."""
    if kind == "text":
        return Text()
    if kind == "sets":
        return Sets()
    if kind == "table":
        blocks = [linear(20, 48, nn.BatchNorm1d), *(linear(48, 48, nn.BatchNorm1d, residual=True) for _ in range(3))]
        return nn.Sequential(*blocks, nn.Linear(48, 5))
    if kind == "signals":
        convs = [nn.Conv1d(i, o, 5, stride=2, bias=False) for i, o in pairwise((1, 12, 16, 20))]
        parts = [part for conv in convs for part in (Normalised(conv, nn.BatchNorm1d(conv.out_channels)), nn.ReLU())]
        return nn.Sequential(*parts, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(20, 6))
    convs = [nn.Conv2d(i, 12, 3, padding=1, bias=False) for i in (1, 12, 12)]
    blocks = [Normalised(conv, nn.GroupNorm(3, 12), residual=place > 0) for place, conv in enumerate(convs)]
    return nn.Sequential(*blocks, nn.MaxPool2d(3), nn.Flatten(), nn.Linear(12 * 16, 4))


def batches(training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """Fresh batches without end."""
    draw = torch.Generator().manual_seed(training.seed)
    if training.network == "text":
        for inputs, targets in TextBatches(python_documentation(), length=CONTEXT, batch_size=16, seed=training.seed):
            yield inputs, targets.flatten()
    mixing = torch.randn(20, 5, generator=draw)
    while True:
        yield _batch(training.network, draw, mixing)


def _batch(kind: str, draw: torch.Generator, mixing: Tensor) -> tuple[Tensor, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if kind == "sets":
        sets = normal(40, 7, 6)
        return sets, sets.amax(dim=1).sum(dim=1, keepdim=True) - (sets[..., :1] * sets[..., 1:2]).sum(1) + normal(40, 1)
    if kind == "table":
        table = normal(50, 20)
        labels = ((table * table.roll(1, dims=1)) @ mixing).argmax(dim=1)
        noisy = torch.rand(50, generator=draw) < 0.2
        return table, torch.where(noisy, torch.randint(5, (50,), generator=draw), labels)
    if kind == "signals":
        labels = torch.randint(6, (36,), generator=draw)
        phase = 2 * math.pi * torch.rand(36, 1, generator=draw)
        tones = torch.sin(torch.arange(48) * (0.3 + 0.2 * labels[:, None]) + phase)
        return (tones + 1.5 * normal(36, 48))[:, None], labels
    labels = torch.randint(4, (30,), generator=draw)
    corner = torch.randint(6, (30, 2, 1), generator=draw)
    inside = (torch.arange(12) >= corner) & (torch.arange(12) < corner + 4)
    rows, columns = inside[:, 0, :, None], inside[:, 1, None, :]
    shapes = torch.stack([rows & columns, rows | columns, rows ^ columns, rows.expand(-1, -1, 12)])
    return (shapes[labels, torch.arange(30)].float() + 0.8 * normal(30, 12, 12))[:, None], labels


def train(training: Training, directory: Path) -> None:
    """Train one run and record every step of it."""
    torch.manual_seed(training.seed)
    torch.set_num_threads(1)
    model = network(training.network)
    normalised = [part.weight.weight for part in model.modules() if isinstance(part, Normalised)]
    others = [p for p in model.parameters() if all(p is not w for w in normalised)]
    settings = {"sgd": (0.3, 3e-3, 0.1), "sgdm": (0.06, 3e-3, 0.02), "adamw": (4e-3, 0.4, 4e-3)}
    lr, decay, other_lr = settings[training.optimizer]
    groups = [
        {"params": normalised, "lr": lr, "weight_decay": decay},
        {"params": others, "lr": other_lr, "weight_decay": 0.0},
    ]
    optimizer = (
        torch.optim.AdamW(groups)
        if training.optimizer == "adamw"
        else torch.optim.SGD(groups, momentum=0.9 if training.optimizer == "sgdm" else 0.0)
    )
    loss_of = functional.mse_loss if training.network == "sets" else functional.cross_entropy
    with watch(model, optimizer, log_dir=directory, every=1) as monitor:
        for step, (inputs, targets) in zip(range(STEPS), batches(training), strict=False):
            for group, peak in zip(optimizer.param_groups, (lr, other_lr), strict=True):
                group["lr"] = peak * training.factor(step)
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)


def with_true_l(run: RecordedRun, test: BackTest, *, true_gain: bool) -> tuple[float, ...]:
    """Median and 90th percentile of the errors of angle and norm by the recursion with the measured, smoothed L.

    Kappa of AdamW is forecast from the record, or measured and smoothed like L.
    """
    tests = {layer.forecast.name: layer for layer in test.layers}
    angles, norms = [], []
    for known, record in whole_records(run, read_layers(run, before=START).cohorts):
        later = record.since(START)
        least = 0.05 * later.plain_unit_grad_sq.mean(axis=0)
        norm_sq, turned = _recursion(known, record, np.maximum(_smooth(later.unit_grad_sq), least), true_gain)
        for column, name in enumerate(known.names):
            angles.append(rms(turned[:, column]) / tests[name].rms_angle - 1)
            norms.append(np.sqrt(norm_sq[:, column]) / tests[name].norm - 1)
    return tuple(np.percentile(np.abs(np.concatenate(errors)), q) for errors in (angles, norms) for q in (50, 90))


def _recursion(known: Cohort, record: Cohort, true: Array, true_gain: bool) -> tuple[Array, Array]:
    """||w||^2 before every step from `START` on, and the angle of the step, driven by the given L."""
    fitted, lr, rule = fit(known), record.since(START).lr, known.rule
    at = fitted.replay
    if isinstance(rule, SGD | SGDW):
        start = State(at.norm_sq, at.radial, at.buffer_sq, at.second, np.zeros(0), at.steps_done)
        path = evolve(rule, len(lr), start=start, unit_grad_sq=true, dim=known.entries, lr=FromValues(lr))
        return path.norm_sq[:-1], path.angle
    p, q, r, v, gain, reference = at.norm_sq, at.radial, at.buffer_sq, at.second, fitted.gain, np.exp(fitted.reference)
    replayed = replay(record, _smooth(record.unit_grad_sq))
    measured = (_smooth(record.moved_sq[replayed.sampled]) / _smooth(replayed.moved_sq))[-len(lr) :]
    (b1, b2), norm_sq, turned = rule.betas, np.empty_like(true), np.empty_like(true)
    for step, unit_grad_sq in enumerate(true):
        if true_gain:
            gain = measured[step]
        size, lost, coupled = adam_settings(rule, lr[step], rule.weight_decay, at.steps_done + step + 1)
        settings = (1 - b2) / known.entries / gain, size, lost, coupled, b1, b2
        before, norm_sq[step] = p, p
        p, q, r, v, moved = adam_step(p, q, r, v, gain * unit_grad_sq, *settings)
        turned[step] = angle_from_chord_sq(chord_sq(before, p, moved))
        p = p * (1 - lr[step] * fitted.pull) ** 2
        gain = 1 + (fitted.gain - 1) * np.minimum(moved / before / reference, 1) ** GAIN_POWER
    return norm_sq, turned


def judge(training: Training, directory: Path) -> tuple[float, ...]:
    """Errors of angle and norm (median, p90), coverage of both bands, errors with the true L, and with kappa too."""
    run = read_run(directory)
    test = backtest(run, start=START)
    own = test.scores[FORECAST]
    forecast = own.angle, own.angle_p90, own.norm, own.norm_p90, test.angle_coverage, test.norm_coverage
    return (*forecast, *with_true_l(run, test, true_gain=False), *with_true_l(run, test, true_gain=True))


def row(name: str, numbers: Sequence[float]) -> str:
    """A row of the table, in per cent."""
    a, b, c, d, e, f, *true = (100 * number for number in numbers)
    pairs = " | ".join(f"{median:.1f} / {p90:.1f}" for median, p90 in zip(true[::2], true[1::2], strict=True))
    return f"| {name} | {a:.1f} / {b:.1f} | {c:.1f} / {d:.1f} | {e:.0f}, {f:.0f} | {pairs} |"


def main(directory: str) -> int:
    """Train what is missing, judge every run, and write the table."""
    judged, diverged = {}, []
    for training in HELD_OUT:
        path = Path(directory) / training.name
        if not path.exists():
            train(training, path)
        steps, loss = metric_series(read_run(path).metrics())["loss"]
        if np.isfinite(loss).all():
            judged[training] = judge(training, path)
        else:
            first = int(steps[~np.isfinite(loss)][0])
            diverged.append(f"{training.name} diverged at step {first}: nothing to judge.\n")
    lines = [
        "# How far forecasts are off\n",
        f"{len(judged)} runs of {STEPS:,} steps that nothing was tuned on, forecast from step {START} "
        "(`forecast_accuracy.py`). Per cent: median / 90th percentile of each run, coverage of the 90 % bands of angle "
        "and norm; groups are means over their runs. With the true L: the recursion driven by the measured, smoothed "
        "L; then by the measured kappa of AdamW, too.\n",
        "| runs | angle | norm | covered | angle, true L | norm, true L | angle, true L and kappa | norm, both |",
        "|---|---|---|---|---|---|---|---|",
        *(row(training.name, numbers) for training, numbers in judged.items()),
    ]
    for kind in (*_OPTIMIZERS, *_SCHEDULES, *_NETWORKS, "all"):
        own = [
            numbers
            for training, numbers in judged.items()
            if kind in ("all", training.optimizer, training.schedule, training.network)
        ]
        lines.append(row(f"**{kind}** ({len(own)})", np.mean(own, axis=0).tolist()))
    text = "\n".join([*lines, "", *diverged])
    publish(Path(__file__).with_suffix(".md"), text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
