"""smd-detection: angles of all layers of a detector over stages of the learning rate, with and without rescaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, comparison, demanded_if, over_seeds
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, label_panel, panels, rms
from equilibria.lab.harness.task import device, train_branches
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.fig3_multistage import BEFORE, BRANCHES, RESCALED, STANDARD
from equilibria.lab.papers.smd.layer_angles import draw_layers, layer_column, rms_ratio
from equilibria.lab.papers.smd.trainings import Sgd
from equilibria.theory.settling import after_lr_drop

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Recipe
    from equilibria.lab.training.training import Training


_SGDM = Sgd("SGDM", lr=0.5, weight_decay=5e-4, other_lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Config:
    """A detector on scenes of digits, its learning rate divided by 10 at each of two drops.

    The stages have about the lengths of the paper's in units of their time constants (1 - momentum) / (4 lr wd): 24,
    0.32 and 0.016 there; 30, 0.26 and 0.013 here.

    Attributes:
        at_once: window after a drop, in steps.
        test_scenes: for the average precision at the end.
    """

    sgd: Sgd = _SGDM
    width: int = 8
    batch_size: int = 16
    drops: tuple[int, int] = (3000, 3256)
    steps: int = 3384
    divisor: float = 10.0
    layer: str = "stage2.conv.weight"
    at_once: tuple[int, int] = (10, 100)
    test_scenes: int = 400
    watch_every: int = 2
    seeds: tuple[int, ...] = tuple(range(8))


def needs(config: Config) -> ImageSet:
    """Load the digits."""
    from equilibria.lab.data import load_images

    return load_images("digits")


def run_task(config: Config, task: int) -> Arrays:
    """Train to the first drop, and from there to the end with and without rescaling."""
    recipes = {branch: _recipe(config, seed=task, rescale=branch == RESCALED) for branch in BRANCHES}
    trunk = replace(recipes[STANDARD], steps=config.drops[0])
    trained = train_branches(trunk, recipes, name=BEFORE)
    parts = [part.arrays(trainings.COLUMNS, prefix=f"{name}_") for name, part in trained.items()]
    return {name: values for part in parts for name, values in part.items()}


def _recipe(config: Config, *, seed: int, rescale: bool) -> Recipe:
    import torch

    from equilibria.control import RescaleOnDecay
    from equilibria.lab.data.scenes import Scenes
    from equilibria.lab.nets.detector import PyramidDetector, detection_loss
    from equilibria.lab.training import Recipe, decay_groups, drops

    digits, sgd = needs(config), config.sgd

    def rescaling(scheduler: LRScheduler, model: torch.nn.Module) -> LRScheduler:
        example = next(iter(Scenes.of_images(digits, batch_size=config.batch_size, seed=seed)))[0].to(device())
        return RescaleOnDecay(scheduler, model=model, invariant=trainings.invariant(model), example=example)

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        names = trainings.invariant(model)
        groups = decay_groups(model, names, lr=sgd.lr, weight_decay=sgd.weight_decay, other_lr=sgd.other_lr)
        return torch.optim.SGD(groups, momentum=sgd.momentum)

    return Recipe(
        model=lambda: PyramidDetector(config.width),
        optimizer=optimizer,
        data=Scenes.of_images(digits, batch_size=config.batch_size, seed=seed),
        steps=config.steps,
        seed=seed,
        loss=detection_loss,
        schedule=drops(config.drops, config.divisor),
        control=rescaling if rescale else None,
        measures={"test": Precision(digits, config.test_scenes)},
        measure_every=config.steps,
        watch_every=config.watch_every,
        watch_select=trainings.is_convolution,
        device=device(),
    )


class Precision:
    """A `Measure`: average precision on scenes of test digits, with BatchNorm statistics of the present weights."""

    def __init__(self, digits: ImageSet, count: int) -> None:
        from equilibria.lab.data.scenes import Scenes

        self._scenes = next(iter(Scenes.of_images(digits, batch_size=count, seed=1, test=True)))
        self._statistics = next(iter(Scenes.of_images(digits, batch_size=count, seed=2)))[0]

    def __call__(self, training: Training) -> Mapping[str, float]:
        """See `Measure`."""
        import torch

        from equilibria.lab.nets.detector import average_precision
        from equilibria.lab.training.measures import recomputed_statistics

        scenes, targets = self._scenes
        with recomputed_statistics(training.model, [self._statistics]), torch.no_grad():
            outputs = training.model(scenes.to(training.device)).cpu()
        return {"test_precision": 100 * average_precision(outputs, targets)}


# ---- judging

_LAGS = Source("smd", "fig. 3 (d)", law="settling.after_lr_drop")
_AT_ONCE = Source("smd", "fig. 3 (e), §5.2", law="states.rescale_factors")
_TABLE = Source("smd", "table 2 (Mask R-CNN on COCO)")
_DROPS = ("first", "second")
_POINTS = "points"


def _windows(config: Config) -> list[tuple[int, int]]:
    return [(drop + config.at_once[0], drop + config.at_once[1]) for drop in config.drops]


def _numbers(config: Config, run: Arrays) -> dict[str, Any]:
    """One seed: every layer's angle over its equilibrium after each drop (median layer), and the precision."""
    ratios = {
        branch: [rms_ratio(run, window, prefix=f"{branch}_") for window in _windows(config)] for branch in BRANCHES
    }
    before = rms_ratio(run, (config.drops[0] // 2, config.drops[0]), prefix=f"{BEFORE}_")
    return {
        "before": float(np.median(before)),
        "at_once": {branch: [float(np.median(layers)) for layers in ratios[branch]] for branch in BRANCHES},
        "precision": {branch: float(run[f"{branch}_test_precision"][-1]) for branch in BRANCHES},
    }


def _expected(config: Config) -> Iterator[float]:
    """The law's angle over equilibrium in the window after each drop, for a constant unit gradient."""
    gamma, ends = 1.0, (*config.drops[1:], config.steps)
    for stage, (begin, end) in enumerate(zip(config.drops, ends, strict=True), start=1):
        gamma *= config.divisor
        rule = replace(config.sgd.rule, lr=config.sgd.lr / config.divisor**stage)
        path = after_lr_drop(rule, gamma, steps=np.arange(end - begin))
        yield rms(path.angle_ratio[slice(*config.at_once)])
        gamma = float(path.norm_ratio[-1]) ** 4


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the angles after both drops, and compare the precision at the end with the paper's table."""
    seeds = over_seeds([_numbers(config, results[trainings.key(seed)]) for seed in config.seeds])
    at_once = {branch: [value[branch] for value in seeds["at_once"]] for branch in BRANCHES}
    precision = {branch: [value[branch] for value in seeds["precision"]] for branch in BRANCHES}
    first, last = config.at_once
    off = {branch: np.abs(np.log(np.array(at_once[branch]))) for branch in BRANCHES}
    claims: list[Claim] = [
        _LAGS.says("Angle of the median layer over its equilibrium, second half of the first stage").equals(
            1.0, seeds["before"], ratio=True
        )
    ]
    for place, (drop, expected) in enumerate(zip(_DROPS, _expected(config), strict=True)):
        where = f"Angle of the median layer over its new equilibrium, {first} to {last} steps after the {drop} drop"
        lagging, rescaled = ([value[place] for value in at_once[branch]] for branch in BRANCHES)
        claims += [
            _LAGS.says(f"{where}, by the law for a constant unit gradient").equals(expected, lagging, ratio=True),
            _AT_ONCE.says(f"With rescaled weights: {where[0].lower()}{where[1:]}").equals(1.0, rescaled, ratio=True),
            _AT_ONCE.says(
                f"After the {drop} drop the angle is nearer to its theory with rescaled weights: |ln(angle / theory)| "
                "with them minus that without, seed by seed"
            ).at_most(0.0, off[RESCALED][:, place] - off[STANDARD][:, place]),
        ]
    claims.append(
        comparison(
            _TABLE.says(
                "Average precision (overlap 0.5) with rescaled weights minus that without, seed by seed"
            ).equals(57.98 - 58.88, np.subtract(precision[RESCALED], precision[STANDARD]), unit=_POINTS)
        )
    )
    shows = config.steps >= Config().steps
    return Outcome(demanded_if(shows, claims), {**seeds, "at_once": at_once, "precision": precision})


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Figure 3 (d)-(f), for the first seed."""
    run = results[trainings.key(config.seeds[0])]
    columns = ("sampled_step", *trainings.COLUMNS)
    runs = {
        branch: {
            **{name: np.concatenate([run[f"{BEFORE}_{name}"], run[f"{branch}_{name}"]]) for name in columns},
            "names": run[f"{branch}_names"],
        }
        for branch in BRANCHES
    }
    figure, (standard, rescaled, norms) = panels(1, 3, width=2.6, height=2.2)
    for axes, branch, letter in ((standard, STANDARD, "d"), (rescaled, RESCALED, "e")):
        draw_layers(axes, runs[branch], average=10)
        low, high = (float(end(runs[branch]["angle_equilibrium"])) for end in (np.min, np.max))
        axes.set(yscale="log", ylim=(low / 20, 6 * high))
        label_panel(axes, letter, f"{branch}: angles of all layers, rad")
    standard.legend()
    for colour, branch in zip(COLOURS, BRANCHES, strict=False):
        chosen = runs[branch]
        column = layer_column(chosen, config.layer)
        norms.plot(chosen["sampled_step"], chosen["norm"][:, column], color=colour, label=branch)
    label_panel(norms, "f", "one layer: norm", xlabel="step", ylim=(0, None), legend=True)
    return {"angles": figure}


_SMOKE = Config(
    width=2,
    batch_size=4,
    drops=(20, 30),
    steps=40,
    at_once=(2, 10),
    test_scenes=20,
    seeds=(0, 1, 2),
)

EXPERIMENT = Experiment(
    id="smd-detection",
    title="A detector with a feature pyramid over stages of the learning rate: lagging, and on theory when rescaled",
    source="smd fig. 3 (d)-(f), table 2",
    scales={"smoke": _SMOKE, "desk": Config()},
    functions=(trainings.tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=needs,
)
