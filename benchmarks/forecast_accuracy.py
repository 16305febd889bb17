"""How far forecasts are off: runs that nothing was tuned on, forecast from a third of their steps.

`HELD_OUT` was fixed and committed before any of these runs was trained; the law and the bands of `forecasting` were not
changed after their result was seen. Train (about two minutes on one core) and judge with
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
from equilibria.forecasting._fit import _smooth, fit
from equilibria.forecasting._layers import read_layers, whole_record
from equilibria.lab.data import Batches, load_digits
from equilibria.theory import evolve
from equilibria.theory.schedules import FromValues
from equilibria.theory.states import State
from equilibria.watching import RecordedRun, read_run, watch
from publishing import publish

STEPS, START = 1500, 500


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        network: "regression" (BatchNorm perceptron, noisy teacher), "digits" (GroupNorm convolutions, 30 % fresh label
            noise) or "mixture" (LayerNorm perceptron, overlapping classes).
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


_NETWORKS, _OPTIMIZERS = ("regression", "digits", "mixture"), ("sgd", "sgdm", "adamw")
_SCHEDULES = ("step", "cosine", "one-cycle", "wsd", "warm-up")
HELD_OUT = tuple(
    Training(_NETWORKS[(row + column) % 3], optimizer, schedule, 700 + 10 * row + column)
    for row, schedule in enumerate(_SCHEDULES)
    for column, optimizer in enumerate(_OPTIMIZERS)
)


def network(kind: str) -> nn.Module:
    """A small network with a normalisation after every weight but the last."""
    if kind == "digits":
        convs = [(1, 8, 1), (8, 16, 2), (16, 16, 1)]
        blocks = [
            nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False), nn.GroupNorm(1, o), nn.ReLU())
            for i, o, s in convs
        ]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    norm, last = (nn.BatchNorm1d, 1) if kind == "regression" else (nn.LayerNorm, 6)
    widths = (24, 48, 48, 48)
    blocks = [nn.Sequential(nn.Linear(i, o, bias=False), norm(o), nn.GELU()) for i, o in pairwise(widths)]
    return nn.Sequential(*blocks, nn.Linear(widths[-1], last))


def batches(training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """Fresh batches of 32 without end."""
    draw = torch.Generator().manual_seed(training.seed)
    if training.network == "digits":
        digits = load_digits()
        yield from Batches(digits.train_images, digits.train_labels, batch_size=32, label_noise=0.3, seed=training.seed)
    elif training.network == "regression":
        teacher = torch.randn(24, 8, generator=draw) / 24**0.5
        while True:
            inputs = torch.randn(32, 24, generator=draw)
            noise = torch.randn(32, 1, generator=draw)
            yield inputs, (inputs @ teacher).tanh().sum(1, keepdim=True) + noise
    else:
        centres = torch.randn(6, 24, generator=draw) * 0.5
        while True:
            labels = torch.randint(6, (32,), generator=draw)
            yield centres[labels] + torch.randn(32, 24, generator=draw), labels


def train(training: Training, directory: Path) -> None:
    """Train one run and record every step of it."""
    torch.manual_seed(training.seed)
    torch.set_num_threads(1)
    model = network(training.network)
    normalised = [p for p in model.parameters() if p.dim() > 1][:-1]
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
    loss_of = functional.mse_loss if training.network == "regression" else functional.cross_entropy
    with watch(model, optimizer, log_dir=directory, every=1) as monitor:
        for step, (inputs, targets) in zip(range(STEPS), batches(training), strict=False):
            for group, peak in zip(optimizer.param_groups, (lr, other_lr), strict=True):
                group["lr"] = peak * training.factor(step)
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)


def with_true_l(run: RecordedRun, test: BackTest) -> tuple[float, ...]:
    """Median and 90th percentile of the errors of angle and norm by the recursion with the measured, smoothed L."""
    tests = {layer.forecast.name: layer for layer in test.layers}
    angles, norms = [], []
    for known in read_layers(run, before=START).cohorts:
        (record,) = whole_record(run, known)
        later, fitted = record.since(START), fit(known)
        least = 0.05 * later.plain_unit_grad_sq.mean(axis=0)
        true = np.maximum(_smooth(later.unit_grad_sq), least)
        at = fitted.replay
        start = State(at.norm_sq, at.radial, at.buffer_sq, at.second, np.zeros(0), at.steps_done)
        path = evolve(
            known.rule, len(later.step), start=start, unit_grad_sq=true, dim=known.entries, lr=FromValues(later.lr)
        )
        for column, name in enumerate(known.names):
            angle = path.angle[:, column] * fitted.angle_scale[column]
            angles.append(rms(angle) / tests[name].rms_angle - 1)
            norms.append(np.sqrt(path.norm_sq[:-1, column]) / tests[name].norm - 1)
    return tuple(np.percentile(np.abs(np.concatenate(errors)), q) for errors in (angles, norms) for q in (50, 90))


def judge(training: Training, directory: Path) -> tuple[float, ...]:
    """Errors of angle and norm (median, p90), coverage of both bands, and the errors with the true L."""
    run = read_run(directory)
    test = backtest(run, start=START)
    own = test.scores[FORECAST]
    forecast = own.angle, own.angle_p90, own.norm, own.norm_p90, test.angle_coverage, test.norm_coverage
    return (*forecast, *with_true_l(run, test))


def row(name: str, numbers: Sequence[float]) -> str:
    """A row of the table, in per cent."""
    a, b, c, d, e, f, g, h, i, j = (100 * number for number in numbers)
    return (
        f"| {name} | {a:.1f} / {b:.1f} | {c:.1f} / {d:.1f} | {e:.0f}, {f:.0f} | {g:.1f} / {h:.1f} | {i:.1f} / {j:.1f} |"
    )


def main(directory: str) -> int:
    """Train what is missing, judge every run, and write the table."""
    judged = {}
    for training in HELD_OUT:
        path = Path(directory) / training.name
        if not path.exists():
            train(training, path)
        judged[training] = judge(training, path)
    lines = [
        "# How far forecasts are off\n",
        f"{len(HELD_OUT)} runs of {STEPS:,} steps that nothing was tuned on, forecast from step {START} "
        "(`forecast_accuracy.py`). Per cent: median / 90th percentile of each run, coverage of the 90 % bands of angle "
        "and norm; groups are means over their runs. With the true L: the recursion driven by the measured, smoothed "
        "L.\n",
        "| runs | angle | norm | covered | angle, true L | norm, true L |",
        "|---|---|---|---|---|---|",
        *(row(training.name, numbers) for training, numbers in judged.items()),
    ]
    for kind in (*_OPTIMIZERS, *_SCHEDULES, "all"):
        own = [
            numbers for training, numbers in judged.items() if kind in ("all", training.optimizer, training.schedule)
        ]
        lines.append(row(f"**{kind}** ({len(own)})", np.mean(own, axis=0).tolist()))
    text = "\n".join([*lines, ""])
    publish(Path(__file__).with_suffix(".md"), text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
