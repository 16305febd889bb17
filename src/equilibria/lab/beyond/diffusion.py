"""eq-diffusion: steps that pull back, on three networks and three optimizers, and how well each identity holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.lab.beyond.pull_back import (
    ADAMW,
    FIRST_ORDER,
    MAIN,
    MOMENTUM,
    NETS,
    OPTIMIZERS,
    SGD,
    SGDM,
    SMALL,
    Config,
    Stage,
    curvature_ratio,
    fitted_distances,
    key,
    momentum_share,
    noise_scales,
    over_many_steps,
    scaling,
    turned,
)
from equilibria.lab.beyond.trajectory import Array, NoisyDraws, follow, stage_statistics
from equilibria.lab.harness.claim import Claim, Source, demanded_if, diagnostic, identity
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.harness.task import progress_reporter
from equilibria.theory.angles import n_step_angles
from equilibria.theory.correlation import turning_ratio

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

    from equilibria.lab.data import ImageSet


def tasks(config: Config) -> dict[str, tuple[str, str, int]]:
    """Network, optimizer and seed; seeds outermost, so that an interrupted run has whole seeds."""
    return {
        key(network, optimizer, seed): (network, optimizer, seed)
        for seed in config.seeds
        for network in config.networks
        for optimizer in OPTIMIZERS
    }


def needs(config: Config) -> ImageSet:
    """The digits."""
    from equilibria.lab.data import load_digits

    return load_digits()


def run_task(config: Config, task: tuple[str, str, int]) -> Arrays:
    """Train through all stages; the statistics of each."""
    import torch

    network, optimizer, seed = task
    torch.set_num_threads(1)
    digits = needs(config)
    draw = NoisyDraws(digits.train_images, digits.train_labels, label_noise=config.label_noise, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _network(network, config.width)
    layers = [name for name, param in net.named_parameters() if param.ndim > 1 and not name.startswith("head")]
    stages = config.stages(optimizer)
    report = progress_reporter(sum(stage.settle + stage.steps for stage in stages.values()))
    arrays: dict[str, Any] = {"names": np.array(layers)}
    done = 0
    for name, stage in stages.items():
        settings = config.settings(optimizer, stage.factor)
        path = follow(
            net,
            _optimizer(optimizer, net, layers, settings),
            draw,
            batch_size=config.batch(stage),
            layers=layers,
            settle=stage.settle,
            steps=stage.steps,
            points=stage.points,
            progress=lambda steps, done=done: report(done + steps),  # type: ignore[misc]
        )
        done += stage.settle + stage.steps
        lags = min(config.lags if name == MAIN else 1, stage.steps // 2)
        measured = stage_statistics(path, lags=lags, distances=config.distances(stage), lr=settings["lr"])
        arrays |= {f"{name}_{what}": values for what, values in measured.items()}
    return arrays


def _network(name: str, width: int) -> nn.Module:
    from collections import OrderedDict

    from torch import nn

    from equilibria.lab.nets.conv_norm import ConvNorm

    parts: list[tuple[str, nn.Module]] = []
    if name == "mlp-bn":
        parts.append(("flat", nn.Flatten()))
        sides = (64, 4 * width, 4 * width, 2 * width)
        for place, (inputs, outputs) in enumerate(pairwise(sides), start=1):
            block = nn.Sequential(nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU())
            parts.append((f"layer{place}", block))
    else:
        norm = "batch" if name == "conv-bn" else "group"
        for place, (inputs, outputs, stride) in enumerate(
            ((1, width, 2), (width, width, 1), (width, 2 * width, 2)), start=1
        ):
            parts.append(
                (f"layer{place}", nn.Sequential(ConvNorm(inputs, outputs, stride=stride, norm=norm), nn.ReLU()))
            )
        parts.append(("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())))
    parts.append(("head", nn.Linear(2 * width, 10)))
    return nn.Sequential(OrderedDict(parts))


def _optimizer(
    name: str, net: nn.Module, layers: Sequence[str], settings: Mapping[str, float]
) -> torch.optim.Optimizer:
    import torch

    from equilibria.lab.training import decay_groups

    groups = decay_groups(net, layers, **settings)
    if name == ADAMW:
        return torch.optim.AdamW(groups)
    return torch.optim.SGD(groups, momentum=MOMENTUM if name == SGDM else 0.0)


# ---- judging

# Ratios of a correlation, whose sign a short window may get wrong, have no logarithm: their tolerances are absolute.
_NEAR = 0.05  # of the identities over many steps, and of linear scaling
_FORECAST = 0.10  # of a fitted spectrum, one doubling beyond the longest distance in the fit
_SUM = 0.05  # of a sum whose negative part is about -0.5
_CURVATURE = {"layer": 0.20, "all": 0.15}  # the loss is not quadratic along a move, and H is of single batches
_SHARE = 0.04
_NOISE_SCALE = 0.30
_WHERE = "beyond the papers"


def _says(law: str, text: str) -> Any:
    return Source("", _WHERE, law=f"correlation.{law}").says(text)


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge every identity on every network and optimizer, over seeds."""
    claims: list[Claim] = []
    numbers: dict[str, Any] = {}
    for network in config.networks:
        for optimizer in OPTIMIZERS:
            runs = [results[key(network, optimizer, seed)] for seed in config.seeds]
            claims += _judge(config, optimizer, f"{NETS[network]}, {OPTIMIZERS[optimizer]}", runs)
            numbers[f"{network}-{optimizer}"] = _numbers(config, optimizer, runs)
    return Outcome(demanded_if(config.main.steps >= 4096, claims), numbers)


def _judge(config: Config, optimizer: str, label: str, runs: Sequence[Arrays]) -> list[Claim]:
    errors = [over_many_steps(config, optimizer, run) for run in runs]

    def median(name: str) -> list[float]:
        return [float(np.median(error[name])) for error in errors]

    reach, (first, last) = config.reach, fitted_distances(config, optimizer)
    claims = [
        identity(  # the same moves, added up in two ways
            _says(
                "turning_ratio",
                f"{label}: (1 - cos) over n steps from the correlations of moves, largest error for n = 2 to {reach}, "
                "median layer",
            ).at_most(_NEAR, median("moves"))
        ),
        _says(
            "fit_relaxation_spectrum",
            f"{label}: spectrum fitted to n = {first} to {last}, error of D at {2 * last}, median layer",
        ).at_most(_FORECAST, median("spectrum")),
        Source("", _WHERE)
        .says(
            f"{label}: power of n between the last two distances, error of D one doubling further, at {reach}, "
            "median layer"
        )
        .at_most(_FORECAST, median("power")),
        _says(
            "mean_gradient_share",
            f"{label}: 2 <g, e> / e'He of all parameters, e the last move, H of a fresh batch",
        ).near(1.0, [float(curvature_ratio(run)[-1]) for run in runs], absolute=_CURVATURE["all"]),
        *_judge_scaling(config, optimizer, label, runs),
    ]
    if optimizer == SGDM:
        apart = [float(np.median(momentum_share(run) - run["main_shares"])) for run in runs]
        claims.append(
            _says(
                "mean_gradient_share_with_momentum",
                f"{label}: mean gradient's share from the momentum buffer, less that from independent batches, "
                "median layer",
            ).near(0.0, apart, absolute=_SHARE)
        )
    if optimizer == SGD:
        claims += _judge_plain(config, label, runs, errors)
    return claims


def _judge_scaling(config: Config, optimizer: str, label: str, runs: Sequence[Arrays]) -> list[Claim]:
    """The law of one scaled step. D(n) of the small steps is in prediction and measurement, and cancels: not tested."""
    claims = []
    for stage in config.stages(optimizer):
        if stage == SMALL:
            continue
        factor = round(config.stages(optimizer)[stage].factor / config.small.factor)
        pairs = [scaling(config, run, stage) for run in runs]
        rule = "square-root scaling of lr and wd" if optimizer == ADAMW else "linear scaling"
        claims.append(
            Source("", _WHERE)
            .says(
                f"{label}, {rule}: sqrt({factor}) times the angle of one step over that of one step with {factor} "
                "times the batch, median layer",
            )
            .near(1.0, [float(np.median(measured / predicted)) for predicted, measured in pairs], relative=_NEAR)
        )
    return claims


def _judge_plain(
    config: Config, label: str, runs: Sequence[Arrays], errors: Sequence[Mapping[str, Array]]
) -> list[Claim]:
    """The claims of plain SGD alone."""
    reach = config.reach
    exact = f"{label}: D from the correlations of gradients, largest error for n = 2 to {reach}"
    first = f"{label}: the same to first order in n lr wd, of 1 - cos, largest error for n = 2 to {FIRST_ORDER}"
    shares = [-run["main_gradients"][:, 1] / run["main_shares"] for run in runs]
    # Correlations and turning of the same steps: diagnostics of how stationary the window is.
    claims = [
        diagnostic(claim)
        for claim in (
            _says("cosine_over_steps", f"{exact}, median layer").at_most(
                _NEAR, [float(np.median(error["cosine"])) for error in errors]
            ),
            _says("cosine_over_steps", f"{exact}, worst layer").at_most(
                _NEAR, [float(np.max(error["cosine"])) for error in errors]
            ),
            _says("turning_ratio", f"{first}, median layer").at_most(
                _NEAR, [float(np.median(error["first order"])) for error in errors]
            ),
            _says(
                "cosine_over_steps",
                f"{label}: sum over k of (1 - lr wd)^k rho_k, until the factor is 1 %, median layer",
            ).near(0.0, [float(np.median(error["sum"])) for error in errors], absolute=_SUM),
        )
    ]
    claims += [
        _says(
            "mean_gradient_share",
            f"{label}: rho_1 over -lr_eff g'Hg / 2|g|^2 of a layer: 2 <g, e> over its part of e'He, median layer",
        ).near(1.0, [float(np.median(curvature_ratio(run)[:-1])) for run in runs], absolute=_CURVATURE["layer"]),
        _says(
            "mean_gradient_share",
            f"{label}: -rho_1 over the mean gradient's share from independent batches, median layer",
        ).near(1.0, [float(np.median(share)) for share in shares], absolute=_CURVATURE["layer"]),
    ]
    for stage, settings in config.stages(SGD).items():
        ratios = [np.divide(*noise_scales(config, run, stage)) for run in runs]  # linear in the noisier share
        claims.append(
            _says(
                "gradient_noise_scale",
                f"{label}: gradient noise scale from successive gradients over that from independent ones, batch "
                f"{config.batch(settings)}, median layer",
            ).near(1.0, [float(np.median(ratio)) for ratio in ratios], absolute=_NOISE_SCALE)
        )
    return claims


def _numbers(config: Config, optimizer: str, runs: Sequence[Arrays]) -> dict[str, Any]:
    """Means over seeds, a number per layer where there is one."""
    rows = [_row(config, optimizer, run) for run in runs]
    means = {name: np.round(np.mean([row[name] for row in rows], axis=0), 5).tolist() for name in rows[0]}
    return {"layers": runs[0]["names"].tolist(), "distances": config.distances(config.main), **means}


def _row(config: Config, optimizer: str, run: Arrays) -> dict[str, Array]:
    """The numbers of one seed."""
    diffusion = turned(run, MAIN)
    row = {
        "D(n)/(n D(1))": diffusion / diffusion[:, :1] / np.array(config.distances(config.main)),
        "rho_1 to rho_4": run["main_gradients"][:, 1:5],
        "loss, first and second half": run["main_losses"],
        "share of the mean gradient": run["main_shares"],
        "2<g,e>/e'He, layers and all": curvature_ratio(run),
        **over_many_steps(config, optimizer, run),
    }
    for stage, settings in config.stages(optimizer).items():
        if stage != SMALL:
            row[f"scaling to {stage}, predicted and measured"] = np.array(scaling(config, run, stage))
        row[f"D(n) at batch {config.batch(settings)}"] = turned(run, stage)
        if optimizer == SGD:
            name = f"share of the mean gradient at batch {config.batch(settings)}, successive and independent"
            row[name] = np.array([-run[f"{stage}_gradients"][:, 1], run[f"{stage}_shares"]])
    return row


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Turning over many steps, the identities of gradient and move, and what the batch size does."""
    return {
        "turning": _draw_turning(config, results),
        "identities": _draw_identities(config, results),
        "batch": _draw_batch(config, results),
    }


def _draw_turning(config: Config, results: TaskResults) -> Figure:
    """Turning over n steps of every layer: points for all seeds, the correlations of moves, independent gradients."""
    figure, axes = panels(len(config.networks), len(OPTIMIZERS), width=2.6, height=2.1)
    for place, axis in enumerate(axes):
        network = config.networks[place // len(OPTIMIZERS)]
        optimizer = list(OPTIMIZERS)[place % len(OPTIMIZERS)]
        runs = [results[key(network, optimizer, seed)] for seed in config.seeds]
        _draw_layers(axis, config, runs)
        distances = np.array(config.distances(config.main))
        apart = 1 - np.cos(n_step_angles(config.rule(optimizer), int(distances[-1])))
        axis.plot(distances, apart[distances] / (apart[1] * distances), color=THEORY, lw=0.8, ls="--")
        label_panel(
            axis, "abcdefghi"[place], f"{NETS[network]}, {OPTIMIZERS[optimizer]}", ylabel="", xscale="log", yscale="log"
        )
        axis.set_ylim((0.012, 2) if optimizer == SGD else (0.3, 30))
    for axis in axes[-len(OPTIMIZERS) :]:
        axis.set_xlabel("steps n")
    for axis in axes[:: len(OPTIMIZERS)]:
        axis.set_ylabel(r"$(1-\cos_n)\,/\,n\,(1-\cos_1)$")
    axes[0].plot([], [], color=THEORY, lw=0.8, ls="--", label="independent gradients")
    axes[0].legend()
    return figure


def _draw_layers(axis: Axes, config: Config, runs: Sequence[Arrays]) -> None:
    distances = np.array(config.distances(config.main))
    for place, colour in zip(range(len(runs[0]["names"])), COLOURS, strict=False):
        apart = np.array([1 - run["main_cosines"][place] for run in runs])
        axis.plot(distances, (apart / apart[:, :1] / distances).T, "o", color=colour, ms=2.5, alpha=0.4)
        law = np.mean([turning_ratio(run["main_moves"][place, 1:]) for run in runs], axis=0)
        reach = distances[distances <= len(law)]
        axis.plot(reach, law[reach - 1], color=colour, lw=1, label=f"layer {place + 1}")


def _draw_identities(config: Config, results: TaskResults) -> Figure:
    """Ratios that are 1 where an identity holds; a point per seed; shaded: the tolerance of plain SGD's claim."""
    figure, axes = panels(1, 3, width=3.1, height=2.6)
    factor = round(config.main.factor / config.small.factor)
    columns: dict[str, tuple[float, Callable[[str, Arrays], float]]] = {
        "2<g, e> / e'He, all parameters": (_CURVATURE["all"], lambda _, run: float(curvature_ratio(run)[-1])),
        "mean gradient's share / measured": (_CURVATURE["layer"], _share_ratio),
        f"sqrt({factor}) small steps / one scaled": (
            _NEAR,
            lambda _, run: float(np.median(np.divide(*scaling(config, run, MAIN)[::-1]))),
        ),
    }
    rows = [(network, optimizer) for network in config.networks for optimizer in OPTIMIZERS]
    for axis, letter, (title, (tolerance, ratio)) in zip(axes, "abc", columns.items(), strict=True):
        axis.axvspan(1 - tolerance, 1 + tolerance, color="#eef0f3", lw=0)
        for place, (network, optimizer) in enumerate(rows):
            values = [ratio(optimizer, results[key(network, optimizer, seed)]) for seed in config.seeds]
            colour = COLOURS[place // len(OPTIMIZERS)]
            axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.6)
        axis.axvline(1, color=THEORY, lw=0.8, ls="--")
        axis.set_ylim(len(rows) - 0.5, -0.5)
        names = [f"{NETS[network]}, {OPTIMIZERS[optimizer]}" for network, optimizer in rows]
        axis.set_yticks(range(len(rows)), names if axis is axes[0] else [""] * len(rows))
        label_panel(axis, letter, title, ylabel="")
    return figure


def _share_ratio(optimizer: str, run: Arrays) -> float:
    """Mean gradient's share from successive steps over that from independent batches; NaN where no law gives it."""
    if optimizer == ADAMW:
        return float("nan")
    share = momentum_share(run) if optimizer == SGDM else -run["main_gradients"][:, 1]
    return float(np.median(share / run["main_shares"]))


def _draw_batch(config: Config, results: TaskResults) -> Figure:
    """Plain SGD with three batch sizes: the diffusion per image, and the mean gradient's share."""
    count = len(config.networks)
    figure, axes = panels(2, count, width=2.8, height=2.2)
    for column, network in enumerate(config.networks):
        runs = [results[key(network, SGD, seed)] for seed in config.seeds]
        above, below = axes[column], axes[count + column]
        _draw_diffusion(above, config, runs)
        label_panel(above, "abc"[column], NETS[network], ylabel="", xscale="log", yscale="log", xlabel="images")
        _draw_shares(below, config, runs)
        label_panel(below, "def"[column], NETS[network], ylabel="", xlabel="batch, images")
        above.set_ylim(1e-6, 4e-5)
        below.set_ylim(5e-3, 2)
    axes[0].set_ylabel("D per image, middle layer")
    axes[count].set_ylabel("share of the mean gradient")
    axes[0].legend()
    axes[count].legend(loc="upper left")
    return figure


def _by_batch(config: Config) -> list[tuple[str, int]]:
    """Stages of plain SGD with their batch sizes, ascending."""
    stages = {name: config.batch(stage) for name, stage in config.stages(SGD).items()}
    return sorted(stages.items(), key=lambda item: item[1])


def _draw_diffusion(axis: Axes, config: Config, runs: Sequence[Arrays]) -> None:
    middle = len(runs[0]["names"]) // 2
    for (name, batch), colour in zip(_by_batch(config), COLOURS, strict=False):
        images = batch * np.array(config.distances(config.stages(SGD)[name]))
        curves = np.array([turned(run, name)[middle] for run in runs]) / images
        axis.plot(images, curves.mean(axis=0), "o-", color=colour, label=f"batch {batch}")


def _draw_shares(axis: Axes, config: Config, runs: Sequence[Arrays]) -> None:
    batches = [batch for _, batch in _by_batch(config)]
    for place, colour in zip(range(len(runs[0]["names"])), COLOURS, strict=False):
        successive = [np.mean([-run[f"{name}_gradients"][place, 1] for run in runs]) for name, _ in _by_batch(config)]
        independent = [np.mean([run[f"{name}_shares"][place] for run in runs]) for name, _ in _by_batch(config)]
        axis.plot(batches, successive, "o-", color=colour, label=f"layer {place + 1}: $-\\rho_1$")
        axis.plot(batches, independent, "x", color=colour, ms=5)
    axis.plot([], [], "x", color=THEORY, ms=5, label="independent batches")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_xticks([], minor=True)


_SMOKE = Config(
    networks=("mlp-bn", "conv-gn"),
    seeds=(0, 1, 2),
    batch_size=16,
    width=4,
    reach=16,
    main=Stage(1.0, 16, 64, 4),
    small=Stage(1 / 8, 16, 64, 4),
    large=Stage(2.0, 8, 16, 2),
)

EXPERIMENT = Experiment(
    id="eq-diffusion",
    title="Steps that pull back: turning over many steps, curvature, noise scale and batch scaling from correlations",
    source="beyond the papers",
    scales={"smoke": _SMOKE, "desk": Config()},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=needs,
)
