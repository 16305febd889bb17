"""eq-forecast: norm and angle of every layer, forecast from the first steps of a run and compared with the rest."""

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
from equilibria.lab.harness.claim import Claim, Source, demanded_if
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.records.tables import NUMBERS, SAMPLE_FIELDS, WORDS

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from torch import Tensor


SCHEDULES = ("constant", "step", "cosine", "warm-up")
OPTIMIZERS = ("sgdm", "adamw")
_KEPT = (
    *("lr", "weight_decay", "momentum", "norm", "cosine", "update_norm", "angle"),
    *("unit_grad_sq", "momentum_unit_grad_sq"),
)
_OTHERS_LR = 0.1  # at most, of BatchNorm and the last layer under SGD
_MOMENTUM = 0.9
_MOST_IMAGES = 30_000  # of CIFAR-10: its first three files
_WARM_UP = 200  # steps; fewer than are fitted, so that lr changes within the fit


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of one training, of which every step is watched.

    ``label_noise`` is the share of labels replaced in every batch, so that they cannot be memorised.
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
        """The learning rate of a step over its peak."""
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
# Width, batch size, noise, lr * wd and drop differ from all runs that the prior was fitted to.
_OTHER: dict[str, Any] = {"seed": 2, "width": 12, "drop": 5.0, "label_noise": 0.2, "batch_size": 48}
_FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "digits": {"sgdm": {"drop_at": 0.5}, "adamw": {"drop_at": 0.5, **_ADAMW}},
    "digits-other": {"sgdm": {**_OTHER, "lr": 0.2, "weight_decay": 2e-3}, "adamw": {**_OTHER, **_ADAMW, "lr": 3e-3}},
    "cifar": {"sgdm": _CIFAR, "adamw": {**_CIFAR, **_ADAMW}},
}


@dataclass(frozen=True)
class Config:
    """Families of trainings, each with four schedules and two optimizers; ``steps`` of 0 keeps their own length.

    The forecast's prior was fitted to none of these trainings: seeds differ, and in "digits-other" also width, batch
    size, label noise, lr * wd and the drop.
    """

    families: tuple[str, ...] = tuple(_FAMILIES)
    schedules: tuple[str, ...] = SCHEDULES
    start: int = 300
    steps: int = 0


def tasks(config: Config) -> dict[str, tuple[str, str, str]]:
    """Family, optimizer and schedule of each training."""
    return {
        f"{family}-{optimizer}-{schedule}": (family, optimizer, schedule)
        for family in config.families
        for schedule in config.schedules
        for optimizer in OPTIMIZERS
    }


def task_settings(config: Config, task: tuple[str, str, str]) -> TrainingSettings:
    """The training of a task."""
    family, optimizer, schedule = task
    training = TrainingSettings(**_FAMILIES[family][optimizer], schedule=schedule)
    return replace(training, steps=config.steps) if config.steps else training


def needs(config: Config) -> None:
    """Load the data of all families."""
    for task in tasks(config).values():
        load(task_settings(config, task).data)


def run_task(config: Config, task: tuple[str, str, str]) -> Arrays:
    """Train once; the columns of the sample table, steps x layers, and the metadata as JSON."""
    import torch

    from equilibria.lab.nets import BasicBlockResNet
    from equilibria.watching import watch

    training = task_settings(config, task)
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
    from equilibria.lab.data import load_images

    loaded = load_images("digits") if data == "digits" else load_images("cifar10", size=16)
    return loaded.train_images[:_MOST_IMAGES], loaded.train_labels[:_MOST_IMAGES]


def _batches(training: TrainingSettings, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from equilibria.lab.data import Batches

    return iter(
        Batches(
            images, labels, batch_size=training.batch_size, label_noise=training.label_noise, seed=training.seed + 1
        )
    )


def _optimizer(training: TrainingSettings, model: Any) -> torch.optim.Optimizer:
    """The optimizer, with weight decay on the convolutions alone, which are scale-invariant."""
    import torch

    from equilibria.lab.training import decay_groups

    names = [f"{name}.conv.weight" for name, _ in model.normalised()]
    lr, is_adamw = training.lr, training.optimizer == "adamw"
    groups = decay_groups(
        model, names, lr=lr, weight_decay=training.weight_decay, other_lr=lr if is_adamw else min(lr, _OTHERS_LR)
    )
    return torch.optim.AdamW(groups) if is_adamw else torch.optim.SGD(groups, momentum=_MOMENTUM)


def pack(samples: pa.Table, metadata: Mapping[str, Any]) -> Arrays:
    """Samples of every step as arrays of steps x layers; columns without finite values are left out."""
    names = [entry["name"] for entry in metadata["params"]]
    step = samples["step"].to_numpy()
    layers = {name: place for place, name in enumerate(names)}
    place = np.array([layers[name] for name in samples["param"].to_pylist()])
    rows = np.unique(step)
    arrays: dict[str, Any] = {"step": rows, "metadata": np.array(json.dumps(metadata))}
    for column in _KEPT:
        table = np.full((len(rows), len(names)), np.nan)
        table[np.searchsorted(rows, step), place] = samples[column].to_numpy()
        if np.isfinite(table).any():
            arrays[column] = table
    return arrays


@dataclass(frozen=True, slots=True)
class PackedRun:
    """A run made of the arrays of `pack`, which can be forecast like a recorded one."""

    arrays: Arrays

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the monitor."""
        metadata: dict[str, Any] = json.loads(str(self.arrays["metadata"]))
        return metadata

    def samples(self) -> pa.Table:
        """The sample table."""
        names = [entry["name"] for entry in self.metadata["params"]]
        steps = self.arrays["step"]
        columns: dict[str, Any] = {"step": np.repeat(steps, len(names)), "param": names * len(steps)}
        nothing = np.full((len(steps), len(names)), np.nan)
        columns |= {name: self.arrays.get(name, nothing).ravel() for name in NUMBERS}
        columns |= {name: [None] * (len(steps) * len(names)) for name in WORDS}
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


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the goals over all layers and remaining steps, for each family and schedule and for all trainings."""
    tests = {key: backtest(PackedRun(arrays), start=config.start) for key, arrays in results.items()}
    claims: list[Claim] = []
    for family in config.families:
        for schedule in config.schedules:
            keys = [f"{family}-{optimizer}-{schedule}" for optimizer in OPTIMIZERS]
            own = [tests[key] for key in keys]
            claims += _claims(f"{family}, {schedule}", own)
    claims += _claims("all trainings", list(tests.values()))
    claims = demanded_if(not config.steps, claims)  # shortened trainings are too short to test a forecast
    return Outcome(claims, {key: _numbers(test) for key, test in tests.items()})


def _claims(what: str, tests: list[BackTest]) -> list[Claim]:
    errors = {"angle": _errors(tests, "angle_error"), "norm": _errors(tests, "norm_error")}
    claims = []
    for name, (median, most) in _GOALS.items():
        percentiles = np.percentile(errors[name], [50, 90])
        claims += [
            _SOURCE.says(f"{what}: median error of the {name}").at_most(median, float(percentiles[0])),
            _SOURCE.says(f"{what}: 90th percentile of it").at_most(most, float(percentiles[1])),
        ]
    for name in ("angle", "norm"):
        share = _covered(tests, name)
        claims += [
            _SOURCE.says(f"{what}: share of {name}s inside the 90 % band").at_least(_COVERED[0], share),
            _SOURCE.says(f"{what}: the same is no more than").at_most(_COVERED[1], share),
        ]
    own = float(np.median(errors["angle"]))
    for name in BASELINES:
        guess = np.concatenate(
            [rms(layer.guesses[name]) / layer.rms_angle - 1 for test in tests for layer in test.layers]
        )
        bound = float(np.median(np.abs(guess)))
        claims.append(_SOURCE.says(f"{what}: median error of the angle, against {name!r}").at_most(bound, own))
    return claims


def _errors(tests: list[BackTest], name: str) -> Array:
    errors: Array = np.abs(np.concatenate([getattr(layer, name) for test in tests for layer in test.layers]))
    return errors


def _covered(tests: list[BackTest], name: str) -> float:
    pairs = [(getattr(layer, f"{name}_coverage"), len(layer.angle)) for test in tests for layer in test.layers]
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


def draw(config: Config, results: TaskResults) -> Figures:
    """One layer of every training: measured angles, the forecast and its band."""
    figures = {}
    for family in config.families:
        figure, axes = panels(len(OPTIMIZERS), len(config.schedules), width=2.4, height=2.0)
        for place, (optimizer, schedule) in enumerate((o, s) for o in OPTIMIZERS for s in config.schedules):
            key = f"{family}-{optimizer}-{schedule}"
            _draw(axes[place], results[key], backtest(PackedRun(results[key]), start=config.start))
            label_panel(axes[place], "abcdefgh"[place], f"{optimizer}, {schedule}")
        axes[0].legend()
        figures[f"forecast-{family}"] = figure
    return figures


def _draw(axes: Axes, arrays: Arrays, test: BackTest) -> None:
    layer = test.layers[len(test.layers) // 2]
    own, known = layer.forecast, arrays["step"] < test.start
    names = [entry["name"] for entry in PackedRun(arrays).metadata["params"]]
    before = arrays["angle"][known, names.index(own.name)]
    axes.plot(arrays["step"][known], before, "o", ms=1.2, mew=0, color="#8a9199")
    axes.plot(own.step, layer.angle, "o", ms=1.2, mew=0, color=COLOURS[0])
    axes.plot([], [], "o", color=COLOURS[0], label="measured")
    axes.fill_between(own.step, own.angle.low, own.angle.high, color=COLOURS[1], alpha=0.25, lw=0)
    axes.plot(own.step, own.angle.value, color=COLOURS[1], label="forecast")
    axes.plot(own.step, own.angle_equilibrium, color=THEORY, ls="--", lw=0.8, label="equilibrium")
    axes.set(xlabel="step", ylabel="angle per step (rad)", yscale="log")
    axes.set_ylim(max(float(np.percentile(layer.angle, 2)) / 2, 1e-5), float(before.max()) * 1.5)


EXPERIMENT = Experiment(
    id="eq-forecast",
    version=2,  # the committed result is of version 1, with 30,000 images and an earlier sampling of the runs
    title="Norm and angle of every layer, forecast from the first 300 steps of a run",
    source="beyond the papers",
    scales={
        "smoke": Config(families=("digits",), schedules=("step",), start=80, steps=160),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=needs,
)
