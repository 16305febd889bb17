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


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        network: "ranks" (BatchNorm perceptron, noisy comparisons of two items), "counts" (LayerNorm perceptron, Poisson
            counts), "angles" (residual RMSNorm perceptron, noisy directions), "edges" (GroupNorm convolutions in one
            dimension, noisy steps) or "fields" (mixer with LayerNorm after every matrix, random fields).
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


_NETWORKS, _OPTIMIZERS = ("ranks", "counts", "angles", "edges", "fields"), ("sgd", "sgdm", "adamw")
_SCHEDULES = ("step", "cosine", "one-cycle", "wsd", "warm-up")
HELD_OUT = tuple(
    Training(_NETWORKS[(row + 2 * column) % 5], optimizer, schedule, 1900 + 10 * row + column)
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


class Mixer(nn.Module):
    """Nine patches of an image, mixed over patches and over channels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.channels = linear(16, width), linear(width, width, residual=True)
        self.places, self.head = linear(9, 9, residual=True), nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images of 12 x 12 pixels."""
        patches = images.unfold(1, 4, 4).unfold(2, 4, 4).flatten(1, 2).flatten(2)
        mixed = self.places(self.patches(patches).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(self.channels(mixed).mean(dim=1))
        return logits


def network(kind: str) -> nn.Module:
    """A small network with a normalisation after every weight but the last."""
    if kind == "fields":
        return Mixer()
    if kind == "edges":
        convs = [nn.Conv1d(i, o, 3, stride=2, padding=1, bias=False) for i, o in pairwise((1, 8, 16, 16))]
        parts = [part for conv in convs for part in (Normalised(conv, nn.GroupNorm(2, conv.out_channels)), nn.ReLU())]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 4, 8))
    if kind == "ranks":
        parts = [part for i, o in pairwise((24, 40, 40, 40)) for part in (linear(i, o, nn.BatchNorm1d), nn.Tanh())]
        return nn.Sequential(*parts, nn.Linear(40, 2))
    if kind == "counts":
        parts = [part for i, o in pairwise((10, 64, 32, 32)) for part in (linear(i, o), nn.ELU())]
        return nn.Sequential(*parts, nn.Linear(32, 1))
    blocks = [linear(12, 40, nn.RMSNorm), *(linear(40, 40, nn.RMSNorm, residual=True) for _ in range(3))]
    return nn.Sequential(*blocks, nn.Linear(40, 2))


def batches(training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """Fresh batches without end."""
    draw = torch.Generator().manual_seed(training.seed)
    mixing = torch.randn(12, 6, generator=draw) / 12**0.5
    while True:
        yield _batch(training.network, draw, mixing)


def _batch(kind: str, draw: torch.Generator, mixing: Tensor) -> tuple[Tensor, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if kind == "ranks":
        pairs = normal(40, 2, 12)
        worth = (pairs @ mixing).sin().sum(dim=2) + 0.7 * normal(40, 2)
        return pairs.flatten(1), worth.argmax(dim=1)
    if kind == "counts":
        items = normal(48, 10)
        rates = (0.5 + (items @ mixing[:10, :4]).tanh().sum(dim=1, keepdim=True) / 2).exp()
        return items, torch.poisson(rates, generator=draw)
    if kind == "angles":
        items = normal(32, 12)
        targets = (items @ mixing[:, :2]) + 0.5 * (items**2 @ mixing[:, 2:4]) + 0.5 * normal(32, 2)
        return items, functional.normalize(targets, dim=1)
    if kind == "edges":
        labels = torch.randint(8, (40,), generator=draw)
        steps = (torch.arange(32) >= 4 * labels[:, None]).float() * normal(40, 1).sign()
        return (steps + normal(40, 32))[:, None], labels
    labels = torch.randint(4, (32,), generator=draw)
    rough, smooth = normal(32, 12, 12), functional.avg_pool2d(normal(32, 1, 16, 16), 5, stride=1)[:, 0]
    share = 0.2 + 0.2 * labels[:, None, None]
    return share * 5 * smooth + (1 - share) * rough, labels


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
    losses = {"counts": functional.poisson_nll_loss, "angles": functional.mse_loss}
    loss_of = losses.get(training.network, functional.cross_entropy)
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
