"""Trainings whose every step is watched, for eq-forecast: what the forecasts are judged by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.forecasting import BASELINES, FORECAST, BackTest, backtest
from equilibria.forecasting._backtest import rms
from equilibria.lab.harness.claim import Claim, Source, at_least, at_most, not_demanded
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Findings, Outcome
from equilibria.lab.harness.figures import COLOURS, THEORY, panels, title
from equilibria.records.tables import NUMBERS, SAMPLE_FIELDS

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor


SCHEDULES = ("constant", "step", "cosine", "warm-up")
OPTIMIZERS = ("sgdm", "adamw")
_KEPT = (
    *("lr", "weight_decay", "momentum", "norm", "cosine", "update_norm", "angle"),
    *("unit_grad_sq", "momentum_unit_grad_sq"),
)
_OTHERS_LR = 0.1  # the most that BatchNorm and the last layer of an SGD run get
_MOMENTUM = 0.9
_MOST_IMAGES = 30_000  # of CIFAR-10, its first three batches
_WARM_UP = 200  # steps; shorter than what is fitted, so that the fit sees lr change


@dataclass(frozen=True)
class Training:
    """One training.

    ``label_noise`` is the share of labels drawn anew for every batch, so that they cannot be learnt by heart.
    """

    data: str = "digits"
    optimizer: str = "sgdm"
    schedule: str = "constant"
    lr: float = 0.1
    weight_decay: float = 5e-3
    width: int = 8
    blocks: tuple[int, ...] = (1, 1)
    batch_size: int = 64
    label_noise: float = 0.3
    steps: int = 1500
    drop: float = 10.0
    drop_at: float = 0.4
    seed: int = 0

    def factor(self, step: int) -> float:
        """lr of a step over its peak."""
        if self.schedule == "step":
            return 1.0 if step < round(self.drop_at * self.steps) else 1 / self.drop
        if self.schedule == "constant":
            return 1.0
        ramp = _WARM_UP if self.schedule == "warm-up" else 0
        if step < ramp:
            return (step + 1) / ramp
        return (1 + math.cos(math.pi * (step - ramp) / (self.steps - ramp))) / 2


_ADAMW = {"optimizer": "adamw", "lr": 5e-3, "weight_decay": 0.5}
_CIFAR = {"data": "cifar", "blocks": (1, 1, 1), "batch_size": 128, "label_noise": 0.0, "steps": 1000}
# Another width, batch, noise, lr * wd and size of the drop than any run that the prior comes from.
_OTHER: dict[str, Any] = {"seed": 2, "width": 12, "drop": 5.0, "label_noise": 0.2, "batch_size": 48}
_FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "digits": {"sgdm": {"drop_at": 0.5}, "adamw": {"drop_at": 0.5, **_ADAMW}},
    "digits-other": {
        "sgdm": {**_OTHER, "lr": 0.2, "weight_decay": 2e-3},
        "adamw": {**_OTHER, **_ADAMW, "lr": 3e-3},
    },
    "cifar": {"sgdm": _CIFAR, "adamw": {**_CIFAR, **_ADAMW}},
}


@dataclass(frozen=True)
class Config:
    """Families of trainings, each under four schedules with two optimizers; ``steps`` of 0 leaves their own length.

    No training here is one of those that the forecast's prior comes from: seeds differ, and in "digits-other" also
    width, batch size, label noise, lr * wd and the drop.
    """

    families: tuple[str, ...] = tuple(_FAMILIES)
    schedules: tuple[str, ...] = SCHEDULES
    start: int = 300
    steps: int = 0


def tasks(config: Config) -> dict[str, tuple[str, str, str]]:
    """A training each."""
    return {
        f"{family}-{optimizer}-{schedule}": (family, optimizer, schedule)
        for family in config.families
        for schedule in config.schedules
        for optimizer in OPTIMIZERS
    }


def training(config: Config, task: tuple[str, str, str]) -> Training:
    """The training of a task."""
    family, optimizer, schedule = task
    found = Training(**_FAMILIES[family][optimizer], schedule=schedule)
    return replace(found, steps=config.steps) if config.steps else found


def needs(config: Config) -> None:
    """The data of all families."""
    for task in tasks(config).values():
        load(training(config, task).data)


def run_task(config: Config, task: tuple[str, str, str]) -> Arrays:
    """Every sampled step of one training."""
    return run_training(training(config, task))


def run_training(training: Training) -> Arrays:
    """The columns of the sample table, steps x layers, and the metadata as JSON."""
    import torch

    from equilibria.lab.nets import BasicBlockResNet
    from equilibria.watching import watch

    torch.set_num_threads(1)
    images, labels = load(training.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = BasicBlockResNet(training.width, training.blocks, in_channels=images.shape[1])
    optimizer = _optimizer(training, model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    with watch(model, optimizer, every=1) as monitor:
        for step, (inputs, targets) in zip(range(training.steps), _batches(training, images, labels), strict=False):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * training.factor(step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return pack(monitor.samples(), monitor.metadata)


@lru_cache(maxsize=1)
def load(data: str) -> tuple[Tensor, Tensor]:
    """Training images, standardised, and their labels.

    Raises:
        EquilibriaError: the data set is not on this machine.
    """
    from equilibria.lab.data import cifar10, load_digits

    found = load_digits() if data == "digits" else cifar10(size=16).standardised()
    return found.train_images[:_MOST_IMAGES], found.train_labels[:_MOST_IMAGES]


def _batches(training: Training, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from equilibria.lab.data import Batches

    return iter(
        Batches(
            images, labels, batch_size=training.batch_size, label_noise=training.label_noise, seed=training.seed + 1
        )
    )


def _optimizer(training: Training, model: Any) -> torch.optim.Optimizer:
    """Weight decay on the convolutions alone, which are scale-invariant."""
    import torch

    convolutions = [layer.conv.weight for _, layer in model.normalised()]
    others = [weight for weight in model.parameters() if all(weight is not known for known in convolutions)]
    lr, wd = training.lr, training.weight_decay
    if training.optimizer == "adamw":
        groups = [{"params": convolutions, "weight_decay": wd}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr)
    momentum = _MOMENTUM if training.optimizer == "sgdm" else 0.0
    groups = [
        {"params": convolutions, "weight_decay": wd},
        {"params": others, "weight_decay": 0.0, "lr": min(lr, _OTHERS_LR)},
    ]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def pack(samples: pa.Table, metadata: Mapping[str, Any]) -> Arrays:
    """Samples of every step as arrays of steps x layers; a column of nothing is left out."""
    names = [entry["name"] for entry in metadata["params"]]
    step = samples["step"].to_numpy()
    layers = {name: place for place, name in enumerate(names)}
    place = np.array([layers[name] for name in samples["param"].to_pylist()])
    rows = np.unique(step)
    found: dict[str, Any] = {"step": rows, "metadata": np.array(json.dumps(metadata))}
    for column in _KEPT:
        table = np.full((len(rows), len(names)), np.nan)
        table[np.searchsorted(rows, step), place] = samples[column].to_numpy()
        if np.isfinite(table).any():
            found[column] = table
    return found


@dataclass(frozen=True, slots=True)
class Packed:
    """A run made of such arrays, to be forecast as one that was recorded."""

    arrays: Arrays

    @property
    def metadata(self) -> dict[str, Any]:
        """What the monitor watched."""
        metadata: dict[str, Any] = json.loads(str(self.arrays["metadata"]))
        return metadata

    def samples(self) -> pa.Table:
        """The sample table."""
        names = [entry["name"] for entry in self.metadata["params"]]
        steps = self.arrays["step"]
        columns: dict[str, Any] = {"step": np.repeat(steps, len(names)), "param": names * len(steps)}
        nothing = np.full((len(steps), len(names)), np.nan)
        columns |= {name: self.arrays.get(name, nothing).ravel() for name in NUMBERS}
        columns |= {name: [None] * (len(steps) * len(names)) for name in ("state", "note")}
        plain = pa.schema(
            [
                field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
                for field in SAMPLE_FIELDS
            ]
        )
        table: pa.Table = pa.table({field.name: pa.array(columns[field.name], field.type) for field in plain})
        return table.cast(SAMPLE_FIELDS)


Array = NDArray[np.float64]

_GOALS = {"angle": (0.05, 0.12), "norm": (0.04, 0.10)}  # median and 90th percentile of the relative error
_COVERED = (0.85, 0.95)
_SOURCE = Source("", "beyond", law="transient.evolve")


def collect(config: Config, found: Findings) -> Outcome:
    """The goals, each over all layers and remaining steps of all trainings of a family and schedule."""
    tests = {key: backtest(Packed(arrays), start=config.start) for key, arrays in found.items()}
    claims: list[Claim] = []
    for family in config.families:
        for schedule in config.schedules:
            keys = [f"{family}-{optimizer}-{schedule}" for optimizer in OPTIMIZERS]
            own = [tests[key] for key in keys]
            claims += _claims(f"{family}, {schedule}", own)
    claims += _claims("all trainings", list(tests.values()))
    if config.steps:  # too short for anything to happen
        claims = [not_demanded(claim) for claim in claims]
    return Outcome(claims, {key: _numbers(test) for key, test in tests.items()})


def _claims(what: str, tests: list[BackTest]) -> list[Claim]:
    errors = {"angle": _errors(tests, "angle_error"), "norm": _errors(tests, "norm_error")}
    claims = []
    for name, (median, most) in _GOALS.items():
        found = np.percentile(errors[name], [50, 90])
        claims += [
            at_most(f"{what}: median error of the {name}", _SOURCE, bound=median, measured=float(found[0])),
            at_most(f"{what}: 90th percentile of it", _SOURCE, bound=most, measured=float(found[1])),
        ]
    for name in ("angle", "norm"):
        share = _covered(tests, name)
        claims += [
            at_least(f"{what}: share of {name}s inside the 90 % band", _SOURCE, bound=_COVERED[0], measured=share),
            at_most(f"{what}: the same is no more than", _SOURCE, bound=_COVERED[1], measured=share),
        ]
    own = float(np.median(errors["angle"]))
    for name in BASELINES:
        guess = np.concatenate([rms(each.guesses[name]) / each.rms_angle - 1 for test in tests for each in test.layers])
        bound = float(np.median(np.abs(guess)))
        claims.append(
            at_most(f"{what}: median error of the angle, against {name!r}", _SOURCE, bound=bound, measured=own)
        )
    return claims


def _errors(tests: list[BackTest], name: str) -> Array:
    errors: Array = np.abs(np.concatenate([getattr(each, name) for test in tests for each in test.layers]))
    return errors


def _covered(tests: list[BackTest], name: str) -> float:
    pairs = [(getattr(each, f"{name}_coverage"), len(each.angle)) for test in tests for each in test.layers]
    shares, weights = zip(*pairs, strict=True)
    return float(np.average(shares, weights=weights))


def _numbers(test: BackTest) -> dict[str, Any]:
    own = test.scores[FORECAST]
    return {
        "angle_median": own.angle,
        "angle_p90": own.angle_p90,
        "single_angle_median": own.single_angle,
        "norm_median": own.norm,
        "norm_p90": own.norm_p90,
        "angle_coverage": test.angle_coverage,
        "norm_coverage": test.norm_coverage,
        **{name: test.scores[name].angle for name in BASELINES},
        "by_horizon": [[first, score.angle, score.norm] for first, score in test.horizons],
    }


def draw(config: Config, found: Findings) -> Mapping[str, Figure]:
    """One layer of every training: measured before and after the forecast begins, the forecast and its band."""
    figures = {}
    for family in config.families:
        figure, axes = panels(len(OPTIMIZERS), len(config.schedules), width=2.4, height=2.0)
        for place, (optimizer, schedule) in enumerate((o, s) for o in OPTIMIZERS for s in config.schedules):
            key = f"{family}-{optimizer}-{schedule}"
            _draw(axes[place], found[key], backtest(Packed(found[key]), start=config.start))
            title(axes[place], "abcdefgh"[place], f"{optimizer}, {schedule}")
        axes[0].legend()
        figures[f"forecast-{family}"] = figure
    return figures


def _draw(axes: Axes, arrays: Arrays, test: BackTest) -> None:
    layer = test.layers[len(test.layers) // 2]
    own, known = layer.forecast, arrays["step"] < test.start
    names = [each["name"] for each in Packed(arrays).metadata["params"]]
    before = arrays["angle"][known, names.index(own.name)]
    axes.plot(arrays["step"][known], before, ",", color="#8a9199")
    axes.plot(own.step, layer.angle, ",", color=COLOURS[0])
    axes.plot([], [], ".", color=COLOURS[0], label="measured")
    axes.fill_between(own.step, own.angle.low, own.angle.high, color=COLOURS[1], alpha=0.25, lw=0)
    axes.plot(own.step, own.angle.value, color=COLOURS[1], label="forecast")
    axes.plot(own.step, own.angle_equilibrium, color=THEORY, ls="--", lw=0.8, label="equilibrium")
    axes.set(xlabel="step", ylabel="angle per step (rad)", yscale="log")
    axes.set_ylim(max(float(np.percentile(layer.angle, 2)) / 2, 1e-5), float(before.max()) * 1.5)


EXPERIMENT = Experiment(
    id="eq-forecast",
    version=2,  # the committed result is of version 1: of 30,000 images, and an earlier sampling of the runs
    title="Norm and angle of every layer, forecast from the first 300 steps of a run",
    source="beyond the papers",
    scales={
        "smoke": Config(families=("digits",), schedules=("step",), start=80, steps=160),
        "desk": Config(),
        "paper": Config(),
    },
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=needs,
)
