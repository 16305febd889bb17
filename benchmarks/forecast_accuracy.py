"""How far forecasts are off: runs that nothing was tuned on, forecast from a third of their steps.

`HELD_OUT` was fixed and committed before any of these runs was trained, and the law before any was judged. Four of its
first fifteen were refused, near interpolation; four noisier ones with other seeds, listed then, take their places.
Train (four minutes on one core) and judge with `python benchmarks/forecast_accuracy.py DIRECTORY`; runs already in
the directory are not trained again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.forecasting import FORECAST, BackTest, backtest
from equilibria.forecasting._backtest import RMS_SAMPLES, rms
from equilibria.forecasting._fit import _smooth, fit_l, replay
from equilibria.forecasting._layers import read_layers, whole_records
from equilibria.records._metrics import metric_series
from equilibria.theory import evolve
from equilibria.theory._reals import Array
from equilibria.theory.rules import AdamW
from equilibria.theory.schedules import FromValues
from equilibria.theory.states import State
from equilibria.watching import RecordedRun, read_run, watch
from publishing import publish

STEPS, START = 1500, 500


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        network: "chains" (attention with RMSNorm after every matrix, next symbols of noisy Markov chains), "gratings"
            (BatchNorm convolutions, noisy gratings), "matches" (BatchNorm perceptron, noisy bilinear forms), "gaps"
            (residual LayerNorm perceptron, missing entries of correlated vectors) or "pulses" (GroupNorm convolutions
            in one dimension, places of pulses in heavy-tailed noise); "faint-": with three times the noise.
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


_NETWORKS, _OPTIMIZERS = ("chains", "gratings", "matches", "gaps", "pulses"), ("sgd", "sgdm", "adamw")
_SCHEDULES = ("step", "cosine", "one-cycle", "wsd", "warm-up")
_REPLACEMENTS = (
    Training("faint-pulses", "adamw", "step", 7902),
    Training("faint-gratings", "sgd", "cosine", 7910),
    Training("faint-pulses", "sgdm", "one-cycle", 7921),
    Training("faint-gratings", "adamw", "one-cycle", 7922),
)
HELD_OUT = _REPLACEMENTS + tuple(
    Training(_NETWORKS[(row + 2 * column) % 5], optimizer, schedule, 6900 + 10 * row + column)
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


class Chains(nn.Module):
    """One attention block between an embedding of eight symbols and a head."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.symbols = heads, nn.Embedding(8, width)
        self.query, self.key, self.value, self.out = (linear(width, width, nn.RMSNorm) for _ in range(4))
        self.mixed, self.head = linear(width, width, nn.RMSNorm, residual=True), nn.Linear(width, 8)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits of the next symbols."""
        stream = self.symbols(symbols)
        parts = (part(stream).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        logits: Tensor = self.head(self.mixed(stream + self.out(seen.transpose(1, 2).flatten(2))))
        return logits.flatten(0, 1)


def network(kind: str) -> nn.Module:
    """A small network with a normalisation after every weight but embeddings and the last."""
    if kind == "chains":
        return Chains()
    if kind.endswith("gratings"):
        planes = [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False) for i, o in pairwise((1, 10, 16, 16))]
        parts = [part for conv in planes for part in (Normalised(conv, nn.BatchNorm2d(conv.out_channels)), nn.ReLU())]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 4, 6))
    if kind == "matches":
        parts = [part for i, o in pairwise((20, 56, 40, 40)) for part in (linear(i, o, nn.BatchNorm1d), nn.SiLU())]
        return nn.Sequential(*parts, nn.Linear(40, 1))
    if kind == "gaps":
        blocks = [linear(32, 48), *(linear(48, 48, residual=True) for _ in range(2))]
        return nn.Sequential(*blocks, nn.Linear(48, 16))
    convs = [nn.Conv1d(i, 12, 5, stride=2, padding=2, bias=False) for i in (1, 12, 12)]
    parts = [part for conv in convs for part in (Normalised(conv, nn.GroupNorm(4, 12)), nn.GELU())]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(12 * 6, 1))


def batches(training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """Fresh batches without end."""
    draw = torch.Generator().manual_seed(training.seed)
    mixing = torch.randn(16, 16, generator=draw) / 4
    while True:
        yield _batch(training.network, draw, mixing)


def _batch(kind: str, draw: torch.Generator, mixing: Tensor) -> tuple[Tensor, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if kind == "chains":
        odds = (4 * mixing[:8, :8]).softmax(dim=1)
        symbols = torch.randint(8, (24, 17), generator=draw)
        for place in range(2, 17):
            before = torch.where(torch.rand(24, generator=draw) < 0.5, symbols[:, place - 1], symbols[:, place - 2])
            symbols[:, place] = torch.multinomial(odds[before], 1, generator=draw)[:, 0]
        return symbols[:, :-1], symbols[:, 1:].flatten()
    noise = 3.0 if kind.startswith("faint") else 1.0
    if kind.endswith("gratings"):
        labels = torch.randint(6, (32,), generator=draw)
        turned, phase = labels * math.pi / 6, 6.3 * torch.rand(32, 1, 1, generator=draw)
        grid = torch.arange(12.0)
        along = turned.cos()[:, None, None] * grid[:, None] + turned.sin()[:, None, None] * grid
        return ((along + phase).sin() + 1.2 * noise * normal(32, 12, 12))[:, None], labels
    if kind == "matches":
        pairs = normal(40, 2, 10)
        fit = torch.einsum("ni,ij,nj->n", pairs[:, 0], mixing[:10, :10], pairs[:, 1])
        return pairs.flatten(1), fit[:, None] / 2 + normal(40, 1)
    if kind == "gaps":
        whole = normal(36, 6) @ mixing[:6] * 2 + 0.4 * normal(36, 16)
        known = (torch.rand(36, 16, generator=draw) < 0.6).float()
        return torch.cat([whole * known, known], dim=1), whole
    places = 40 * torch.rand(36, 1, generator=draw) + 4
    pulses = 3 * (-((torch.arange(48) - places) ** 2) / 8).exp()
    heavy = normal(36, 48) / (normal(36, 48) ** 2 + normal(36, 48) ** 2 + normal(36, 48) ** 2).sqrt()
    return (pulses + noise * heavy)[:, None], (places - 24) / 12


def train(training: Training, directory: Path) -> None:
    """Train one run and record every step of it."""
    torch.manual_seed(training.seed)
    torch.set_num_threads(1)
    model = network(training.network)
    normalised = [part.weight.weight for part in model.modules() if isinstance(part, Normalised)]
    others = [p for p in model.parameters() if all(p is not w for w in normalised)]
    settings = {"sgd": (0.25, 4e-3, 0.1), "sgdm": (0.05, 4e-3, 0.02), "adamw": (3e-3, 0.5, 3e-3)}
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
    losses = dict.fromkeys(("matches", "gaps", "pulses", "faint-pulses"), functional.mse_loss)
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


def with_true_inputs(run: RecordedRun, test: BackTest) -> tuple[float, ...]:
    """Median and 90th percentile of the errors of angle and norm by the recursion with its inputs as measured.

    The input is L, smoothed; it contains the correlation of gradient and momentum. AdamW has two: L without that
    correlation, and kappa with it. AdamW's pull is the one of the record before `START`.
    """
    tests = {layer.forecast.name: layer for layer in test.layers}
    angles, norms = [], []
    for known, record in whole_records(run, read_layers(run, before=START).cohorts):
        fitted, later, kappa = fit_l(known), record.since(START), np.ones_like(record.norm_sq)
        if isinstance(known.rule, AdamW):
            replayed = replay(record, _smooth(record.unit_grad_sq))
            kappa[replayed.sampled] = _smooth(record.moved_sq[replayed.sampled]) / _smooth(replayed.moved_sq)
        true = np.maximum(_smooth(later.unit_grad_sq), 0.05 * later.plain_unit_grad_sq.mean(axis=0))
        at = fitted.replay
        for layer, name in enumerate(known.names):
            state = (values[[layer]] for values in (at.norm_sq, at.radial, at.buffer_sq, at.second))
            rule = replace(known.rule, weight_decay=known.rule.weight_decay + float(fitted.pull[layer]))
            path = evolve(
                rule,
                len(later.lr),
                start=State(*state, np.zeros(0), at.steps_done),
                unit_grad_sq=true[:, [layer]],
                dim=known.entries[[layer]],
                lr=FromValues(later.lr),
                update_gain=kappa[-len(later.lr) :, [layer]],
            )
            angles.append(rms(path.angle[:, 0]) / tests[name].rms_angle - 1)
            norms.append(np.sqrt(path.norm_sq[:-1, 0]) / tests[name].norm - 1)
    return (*quantiles(angles), *quantiles(norms))


def quantiles(errors: Sequence[Array]) -> tuple[float, float]:
    """Median and 90th percentile of the absolute errors of all layers together."""
    return tuple(np.percentile(np.abs(np.concatenate(errors)), (50, 90)).tolist())


def noise_alone(test: BackTest) -> tuple[float, float]:
    """Median and 90th percentile of the error of a perfect forecast: the sampling noise of the rms of 50 steps.

    With d the deviation of a squared angle over its forecast from the mean of that ratio over 300 steps, the mean of 50
    has variance (c_0 + 2 sum_k (1 - k/50) c_k) / 50, c_k the covariance of d with itself k steps later, for k up to 30:
    momentum remembers ten. An rms has half of that standard deviation. The mean over 300 contains a share of every
    deviation, which is added back. Slower changes count as the network's.
    """
    lags, normal = np.arange(1, 31), NormalDist()
    errors = []
    for layer in test.layers:
        ratio = (layer.angle / layer.forecast.angle.value) ** 2
        deviation = ratio / _mean_around(ratio, 300) - 1
        total = len(deviation)
        covariance = np.array([np.mean(deviation[k:] * deviation[: total - k]) for k in (0, *lags)])
        covariance += (covariance[0] + 2 * covariance[1:].sum()) / 300
        variance = (covariance[0] + 2 * ((1 - lags / RMS_SAMPLES) * covariance[1:]).sum()) / RMS_SAMPLES
        quantiles_of_normal = np.array([normal.inv_cdf((place + 0.5) / total) for place in range(total)])
        errors.append(0.5 * math.sqrt(max(variance, 0.0)) * quantiles_of_normal)
    return quantiles(errors)


def over_200_steps(test: BackTest) -> tuple[float, float]:
    """Median and 90th percentile of the error of the angle over 200 steps, each step by its ratio to the forecast."""
    ratios = [(layer.angle / layer.forecast.angle.value) ** 2 for layer in test.layers]
    return quantiles([_mean_around(ratio, 200) ** -0.5 - 1 for ratio in ratios])


def _mean_around(values: Array, count: int) -> Array:
    """The mean of the values around every value, fewer at the ends."""
    return rms(np.sqrt(values), samples=count) ** 2


def judge(directory: Path) -> tuple[float, ...]:
    """In pairs: angle, its noise, angle without, over 200 steps, norm, coverage, angle and norm with true inputs."""
    run = read_run(directory)
    test = backtest(run, start=START)
    own = test.scores[FORECAST]
    raw, noise = (own.angle, own.angle_p90), noise_alone(test)
    without = (math.sqrt(max(error**2 - part**2, 0.0)) for error, part in zip(raw, noise, strict=True))
    angle = *raw, *noise, *without, *over_200_steps(test)
    covered = test.angle_coverage, test.norm_coverage
    return (*angle, own.norm, own.norm_p90, *covered, *with_true_inputs(run, test))


def row(name: str, numbers: Sequence[float]) -> str:
    """A row of the table, in per cent."""
    pairs = [f"{100 * a:.1f} / {100 * b:.1f}" for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    pairs[5] = f"{100 * numbers[10]:.0f}, {100 * numbers[11]:.0f}"
    return f"| {name} | {' | '.join(pairs)} |"


def main(directory: str) -> int:
    """Train what is missing, judge every run, and write the table."""
    judged, unjudged = {}, []
    for training in HELD_OUT:
        path = Path(directory) / training.name
        if not path.exists():
            train(training, path)
        steps, loss = metric_series(read_run(path).metrics())["loss"]
        if not np.isfinite(loss).all():
            first = int(steps[~np.isfinite(loss)][0])
            unjudged.append(f"{training.name} diverged at step {first}: nothing to judge.\n")
            continue
        try:
            judged[training] = judge(path)
        except EquilibriaError as error:
            unjudged.append(f"The forecast of {training.name} was refused: {error}.\n")
    lines = [
        "# How far forecasts are off\n",
        f"{len(judged)} runs of {STEPS:,} steps that nothing was tuned on, forecast from step {START} "
        "(`forecast_accuracy.py`). Per cent: median / 90th percentile of each run; groups are means over their runs. "
        "Angle: of the root mean square of 50 steps. Noise alone: the same error of a perfect forecast, from the "
        "scatter and the correlation of single steps. Without noise: what is left of the error in squares; the goal of "
        "5 / 12 is of the angle itself, whose noise alone reaches it. 200 steps: the angle over 200 steps, each by its "
        "ratio to the forecast. Covered: by the 90 % bands of angle and norm. True inputs: the recursion driven by the "
        "measured, smoothed L, and the measured kappa of AdamW.\n",
        "| runs | angle | noise alone | without noise | 200 steps | norm | covered | angle, true inputs "
        "| norm, true inputs |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(training.name, numbers) for training, numbers in judged.items()),
    ]
    for kind in (*_OPTIMIZERS, *_SCHEDULES, "all"):
        own = [
            numbers for training, numbers in judged.items() if kind in ("all", training.optimizer, training.schedule)
        ]
        lines.append(row(f"**{kind}** ({len(own)})", np.mean(own, axis=0).tolist()))
    text = "\n".join([*lines, "", *unjudged])
    publish(Path(__file__).with_suffix(".md"), text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
