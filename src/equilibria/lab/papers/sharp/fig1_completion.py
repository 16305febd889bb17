"""sharp-completion: matrix completion with BatchNorm moves to low rank at the edge of stability (fig. 1, 6, 7, 11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, identity, not_demanded
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.problems import Completion, Moment, Simulation
from equilibria.theory.eos_series import ratio_crossings
from equilibria.theory.rules import SGD
from equilibria.theory.stability import crossing_time, effective_lr, eos_delay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Array = NDArray[np.float64]
SEEN = 1e-6
"""Training loss below which a run has fitted; later, the oscillation counts as visible above it."""
_EVERY = 10  # steps between two records of the losses


@dataclass(frozen=True)
class Config:
    """Sizes d and numbers N of observed entries of figures 1, 6 and 7; the paper's lr and weight decay."""

    small: int = 50
    small_observed: tuple[int, ...] = (400, 800, 1200, 1600)
    large: int = 100
    large_observed: tuple[int, ...] = (1600, 2400, 3200)
    closer_look: int = 800
    matrices: int = 3
    rank: int = 2
    lr: float = 0.1
    weight_decay: float = 0.01
    steps: int = 30_000
    sparse_every: int = 250
    window: int = 900
    seed: int = 0

    @property
    def rate(self) -> float:
        """lr*wd."""
        return self.lr * self.weight_decay

    @property
    def rule(self) -> SGD:
        """The optimizer."""
        return SGD(lr=self.lr, weight_decay=self.weight_decay)

    @property
    def cases(self) -> list[tuple[int, int]]:
        """d and N of every panel."""
        small = [(self.small, observed) for observed in self.small_observed]
        return small + [(self.large, observed) for observed in self.large_observed]

    @property
    def seeds(self) -> range:
        """Seeds; each has its own matrix, observed entries and start."""
        return range(self.seed, self.seed + self.matrices)

    def problem(self, dim: int, observed: int, *, seed: int) -> Completion:
        """The problem of one matrix."""
        return Completion.generate([seed], dim=dim, rank=self.rank, observed=observed)


def key(dim: int, observed: int, seed: int) -> str:
    """Key of a task."""
    return f"d{dim}-n{observed}-s{seed}"


def tasks(config: Config) -> dict[str, tuple[str, int, int, int]]:
    """One run per matrix, and a closer look at one of them as it enters the edge of stability."""
    runs = {key(d, n, seed): ("run", d, n, seed) for d, n in config.cases for seed in config.seeds}
    return {**runs, "entry": ("entry", config.small, config.closer_look, config.seed)}


def run_task(config: Config, task: tuple[str, int, int, int]) -> Arrays:
    """Run a matrix, or the closer look."""
    kind, dim, observed, seed = task
    problem = config.problem(dim, observed, seed=seed)
    return _entry(config, problem) if kind == "entry" else _run(config, problem)


def _run(config: Config, problem: Completion) -> Arrays:
    """Record losses every few steps; sharpness and singular values, which cost more, less often."""
    run = Simulation(
        problem,
        problem.initial,
        rule=config.rule,
        steps=config.steps,
        every=_EVERY,
        record={
            **{name: name for name in ("loss", "risk", "norm")},
            "sharpness": _sometimes(config.sparse_every, problem.sharpness, 1),
            "singular": _sometimes(config.sparse_every, lambda weights: problem.singular_values(weights)[:, :3], 3),
        },
    ).run()
    sparse = run.steps % config.sparse_every == 0
    return {
        "step": run.steps,
        **{name: run[name][:, 0] for name in ("loss", "risk", "norm")},
        "sparse_step": run.steps[sparse],
        "sharpness": run["sharpness"][sparse, 0, 0],
        "singular": run["singular"][sparse, 0],
    }


def _sometimes(every: int, measure: Callable[[Array], Array], width: int) -> Callable[[Moment], Array]:
    """A recorder that measures at multiples of ``every`` steps and returns NaN in between."""

    def recorder(moment: Moment) -> Array:
        if moment.step % every:
            return np.full((len(moment.weights), width), np.nan)
        return measure(moment.weights).reshape(len(moment.weights), width)

    return recorder


def _entry(config: Config, problem: Completion) -> Arrays:
    """Record every step around the crossing that is predicted when the loss has collapsed."""
    first = Simulation(problem, problem.initial, rule=config.rule, steps=config.steps, record=["loss"])
    fitted = next(stretch.state for stretch in first.stream(chunk=50) if stretch["loss"][-1, 0] < SEEN)
    lr = effective_lr(config.lr, config.weight_decay, norm_sq=float(np.sum(fitted.weights**2)))
    sharpness = problem.sharpness(fitted.weights)
    expected = float(crossing_time(lr, sharpness, intrinsic_lr=config.rate, start=fitted.step)[0])
    begin = round(expected) - config.window // 10
    there = replace(first, steps=begin, record=()).run(state=fitted).state
    look = replace(first, steps=begin + config.window, record=("loss", "norm", "sharpness")).run(state=there)
    return {
        "step": look.steps,
        **{name: look[name][:, 0] for name in ("loss", "norm", "sharpness")},
        "expected_crossing": np.asarray(expected),
    }


_FIGURE_1 = Source("sharp", "fig. 1")
_FIGURES = Source("sharp", "fig. 1, 6, 7, Appendix P.1")
_FIGURE_11 = Source("sharp", "fig. 11, Theorem 4.3", law="stability.crossing_time")
_SIZE = Source(
    "sharp", "fig. 7", corrected="its caption says 50 x 50, which has 2,500 entries; the text's 100 x 100 is right"
)
_LEVEL = Source("", "ours, on fig. 1", law="stability.edge_of_stability")
_PAPERS_SIZE = 50
_LATE = 0.8  # "the end" is the steps after this share


@dataclass(frozen=True)
class _CompletionRun:
    """The numbers of one run before the edge of stability and at its end."""

    case: tuple[int, int]
    crossing: float
    seen: int
    plateau: float
    at_crossing: float
    end: float
    sharpness: tuple[float, float]
    singular: tuple[Array, Array]
    lag: float
    level: float


def _read_run(config: Config, case: tuple[int, int], run: Arrays) -> _CompletionRun:
    step, loss, risk = run["step"], run["loss"], run["risk"]
    fitted = int(np.argmax(loss < SEEN))
    first = int(np.searchsorted(run["sparse_step"], step[fitted]))  # sharpness is known from there on
    lr = effective_lr(config.lr, config.weight_decay, norm_sq=run["norm"] ** 2)
    start = run["sparse_step"][first]
    here = int(np.searchsorted(step, start))
    crossing = float(crossing_time(lr[here], run["sharpness"][first], intrinsic_lr=config.rate, start=float(start)))
    beyond = int(np.searchsorted(step, crossing))
    seen = int(step[beyond + np.argmax(loss[beyond:] > SEEN)])
    late, sparse_late = step >= _LATE * config.steps, run["sparse_step"] >= _LATE * config.steps
    falls = step[np.argmax((step > crossing) & (risk < 0.9 * risk[here]))]
    eased = (run["sparse_step"] > crossing) & (run["sharpness"] < 0.9 * run["sharpness"][first])
    return _CompletionRun(
        case,
        crossing,
        seen,
        float(risk[here]),
        float(risk[beyond - 1]),
        float(risk[late].mean()),
        (float(run["sharpness"][first]), float(run["sharpness"][sparse_late].mean())),
        (run["singular"][first], run["singular"][-1]),
        float(falls - run["sparse_step"][np.argmax(eased)]),
        float(loss[late].mean() / (config.rate * np.mean(2 / lr[late]) / 4)),
    )


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the paper's numbers of figure 1, its statements on all runs, and the entry into the edge of stability."""
    runs = [_read_run(config, case, results[key(*case, seed)]) for case in config.cases for seed in config.seeds]
    claims = [
        *_judge_figure_1(config, [run for run in runs if run.case == (config.small, config.closer_look)]),
        *_judge_all(config, runs),
        *_judge_entry(config, results["entry"]),
    ]
    numbers = {
        "case": [run.case for run in runs],
        "crossing": [run.crossing for run in runs],
        "oscillation_seen": [run.seen for run in runs],
        "test_before": [run.plateau for run in runs],
        "test_end": [run.end for run in runs],
        "sharpness": [run.sharpness for run in runs],
        "singular_before": [run.singular[0] for run in runs],
        "singular_end": [run.singular[1] for run in runs],
    }
    return Outcome(claims, numbers)


def _judge_figure_1(config: Config, runs: Sequence[_CompletionRun]) -> list[Claim]:
    papers_numbers = [
        _FIGURE_1.says(
            "The oscillation that lowers the sharpness raises the loss above 1e-6 again at step ~2000: mean"
        ).near(
            2000,
            float(np.mean([run.seen for run in runs])),
            relative=0.1,  # read off a figure, with one digit
            unit="steps",
        ),
        _FIGURE_1.says("Test loss before: the paper's one matrix among ours").among(
            1.12, [run.plateau for run in runs]
        ),
        _FIGURE_1.says("Test loss at the end: the paper's one matrix among ours").among(
            0.013, [run.end for run in runs]
        ),
        _FIGURE_1.says("The third singular value collapses: largest sigma_3/sigma_2 at the end, of any matrix").at_most(
            0.1, max(float(run.singular[1][2] / run.singular[1][1]) for run in runs)
        ),
    ]
    level = _LEVEL.says(
        "Training loss at the end over lr wd lambda1/4, with lambda1 = 2/lr: the matrix farthest off"
    ).near(
        1.0,
        max((run.level for run in runs), key=lambda value: abs(value - 1)),
        relative=(2 * config.rate) ** 0.5,  # the law is the limit of small eta
    )
    if config.small != _PAPERS_SIZE:
        papers_numbers = [not_demanded(claim) for claim in papers_numbers]
    return [*papers_numbers, level]


def _judge_all(config: Config, runs: Sequence[_CompletionRun]) -> list[Claim]:
    hardest, *others = ([run for run in runs if run.case == case] for case in config.cases)
    entries = config.rank * (2 * config.small - config.rank)
    starved = (
        Source("", "ours, on fig. 6")
        .says(f"N = {config.cases[0][1]} for {entries} degrees of freedom is not recovered: least test loss at the end")
        .at_least(0.1, min(run.end for run in hardest))
    )
    easiest, middle = others[-1], others[-2]
    large = [
        _FIGURES.says(
            f"d = {config.large}, N = {easiest[0].case[1]}: sigma_3 collapses; largest sigma_3/sigma_2 at the end"
        ).at_most(0.1, max(1 / _gap(run.singular[1]) for run in easiest)),
        Source("", "ours, on fig. 7")
        .says(f"d = {config.large}, N = {middle[0].case[1]}: it has not collapsed by the last step; smallest ratio")
        .at_least(0.3, min(1 / _gap(run.singular[1]) for run in middle)),
    ]
    return [
        _FIGURES.says("The spherical sharpness falls in every run: smallest factor").at_least(
            2, min(run.sharpness[0] / run.sharpness[1] for run in runs)
        ),
        _FIGURES.says(
            "The gap between the second and the third singular value widens: smallest factor of sigma_2/sigma_3"
        ).at_least(1, min(_gap(run.singular[1]) / _gap(run.singular[0]) for run in runs)),
        _FIGURES.says("Test loss stands still until the edge: largest relative change").at_most(
            0.02, max(abs(run.at_crossing / run.plateau - 1) for run in runs)
        ),
        _FIGURES.says("Then it falls, in every run: largest share left at the end").at_most(
            0.8, max(run.end / run.plateau for run in runs)
        ),
        _FIGURES.says("It falls as soon as the sharpness does: steps between a tenth less of both, farthest off").near(
            0,
            max((run.lag for run in runs), key=abs),
            absolute=2 * config.sparse_every,  # the sharpness is known that often
            unit="steps",
        ),
        *(claim if config.small == _PAPERS_SIZE else not_demanded(claim) for claim in (starved, *large)),
        identity(
            _SIZE.says("The matrices of figure 7 have room for all its observations: entries").at_least(
                max(config.large_observed), config.large**2, printed=_PAPERS_SIZE**2
            )
        ),
    ]


def _gap(singular: Array) -> float:
    return float(singular[1] / singular[2])


def _judge_entry(config: Config, look: Arrays) -> list[Claim]:
    ratio = _ratio(config, look)
    crossings = ratio_crossings(ratio)
    crossing = int(look["step"][crossings.upward[0]])
    visible = look["sharpness"][0] * config.rate / 4  # lambda1 h^2/2 at h = sqrt(lr wd/2)
    seen = int(look["step"][np.argmax(look["loss"] > visible)])
    return [
        _FIGURE_11.says("2/lr meets the sharpness at the step predicted from the moment the loss has collapsed").near(
            float(look["expected_crossing"]),
            crossing,
            absolute=3,  # whole steps, a mean over two, and the effect of the remaining loss on the norm
            unit="steps",
        ),
        Source("sharp", "fig. 11, Theorem 4.3", law="stability.eos_delay")
        .says("Steps from there until the oscillation has grown from rounding to its mean size")
        .near(
            float(eos_delay(config.rate)),
            seen - crossing,
            relative=0.1 + config.rate**0.5,  # rounding is known to some powers of e; lowest order in the overshoot
            unit="steps",
        ),
        _FIGURE_11.says("2/lr switches back and forth about the sharpness: crossings within the closer look").at_least(
            3, len(crossings.upward) + len(crossings.downward)
        ),
    ]


def _ratio(config: Config, look: Arrays) -> Array:
    lr = effective_lr(config.lr, config.weight_decay, norm_sq=look["norm"] ** 2)
    ratio: Array = lr * look["sharpness"] / 2
    return ratio


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw figures 1, 6, 7 and 11 of the paper, for the first matrix of every case."""
    others = [(config.small, observed) for observed in config.small_observed if observed != config.closer_look]
    return {
        "figure-1": _figure_1(config, results[key(config.small, config.closer_look, config.seed)]),
        "figure-6": _figure_rows(config, results, others),
        "figure-7": _figure_rows(config, results, [(config.large, observed) for observed in config.large_observed]),
        "figure-11": _figure_11(config, results["entry"]),
    }


def _figure_1(config: Config, run: Arrays) -> Figure:
    figure, (test, sharpness, train, singular) = panels(2, 2, height=2.1)
    test.plot(run["step"], run["risk"], lw=0.9)
    label_panel(test, "a", "test loss", xlabel="step", ylabel="test loss", yscale="log")
    _draw_sharpness(sharpness, config, run)
    label_panel(sharpness, "b", "spherical sharpness")
    lr = effective_lr(config.lr, config.weight_decay, norm_sq=run["norm"] ** 2)
    train.plot(run["step"], run["loss"], lw=0.7)
    train.plot(
        run["step"], config.rate * 2 / lr / 4, color=THEORY, ls="--", lw=0.9, label="$\\eta_{in}/(2\\tilde\\eta_t)$"
    )
    label_panel(train, "c", "training loss", xlabel="step", ylabel="training loss", yscale="log", legend=True)
    _draw_singular(singular, run)
    label_panel(singular, "d", "singular values")
    return figure


def _figure_rows(config: Config, results: TaskResults, cases: Sequence[tuple[int, int]]) -> Figure:
    """Draw a row per number of observations."""
    figure, axes = panels(len(cases), 3, width=2.5, height=1.8)
    for row, (dim, observed) in enumerate(cases):
        run = results[key(dim, observed, config.seed)]
        losses, sharpness, singular = axes[3 * row : 3 * row + 3]
        losses.plot(run["step"], run["loss"], lw=0.6, color=COLOURS[5], label="training")
        losses.plot(run["step"], run["risk"], lw=0.9, color=COLOURS[0], label="test")
        losses.set(xlabel="step", ylabel="loss", yscale="log", ylim=(1e-8, 10))
        losses.locator_params(axis="x", nbins=4)
        label_panel(losses, "abc"[row], f"$d = {dim}$, $N = {observed}$", legend=True)
        _draw_sharpness(sharpness, config, run)
        _draw_singular(singular, run)
    return figure


def _draw_sharpness(axes: Axes, config: Config, run: Arrays) -> None:
    lr = effective_lr(config.lr, config.weight_decay, norm_sq=run["norm"] ** 2)
    after = run["step"] >= run["sparse_step"][1]
    axes.plot(run["step"][after], 2 / lr[after], lw=0.8, color=THEORY, ls="--", label="$2/\\tilde\\eta_t$")
    axes.plot(run["sparse_step"][1:], run["sharpness"][1:], lw=0.9, color=COLOURS[1], label="$\\lambda_1(\\theta_t)$")
    axes.set(xlabel="step", ylabel="spherical sharpness", yscale="log")
    axes.locator_params(axis="x", nbins=4)
    axes.legend()


def _draw_singular(axes: Axes, run: Arrays) -> None:
    for index, colour in enumerate(COLOURS[:3]):
        axes.plot(run["sparse_step"], run["singular"][:, index], lw=0.9, color=colour, label=f"$\\sigma_{index + 1}$")
    axes.set(xlabel="step", ylabel="singular value", ylim=(0, None))
    axes.locator_params(axis="x", nbins=4)
    axes.legend()


def _figure_11(config: Config, look: Arrays) -> Figure:
    figure, (sharpness, loss) = panels(1, 2, height=2.2)
    sharpness.plot(look["step"], look["sharpness"], lw=0.5, color=COLOURS[1], label="$\\lambda_1(\\theta_t)$")
    sharpness.plot(
        look["step"], look["sharpness"] / _ratio(config, look), lw=0.9, color=COLOURS[0], label="$2/\\tilde\\eta_t$"
    )
    loss.plot(look["step"], look["loss"], lw=0.6)
    for axes in (sharpness, loss):
        axes.axvline(float(look["expected_crossing"]), color=THEORY, ls="--", lw=0.8, label="predicted crossing")
        axes.set(xlabel="step")
        axes.legend()
    label_panel(sharpness, "a", "$2/\\tilde\\eta_t$ about the sharpness", ylabel="spherical sharpness")
    label_panel(loss, "b", "training loss", ylabel="training loss", yscale="log")
    return figure


EXPERIMENT = Experiment(
    id="sharp-completion",
    title="Matrix completion with BatchNorm: sharpness falls, the third singular value collapses, test loss follows",
    source="sharp fig. 1, 6, 7, 11",
    scales={
        "smoke": Config(
            small=20,
            small_observed=(140, 200),
            large=30,
            large_observed=(400,),
            closer_look=200,
            matrices=2,
            weight_decay=0.05,
            steps=1500,
            sparse_every=50,
            window=160,
        ),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
