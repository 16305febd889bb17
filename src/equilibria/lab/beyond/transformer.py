"""eq-transformer: which tensors of a small GPT turn at the rate of AdamW's law, which do not, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from equilibria.lab.harness.claim import Claim, Source, demanded_if, identity, mean_interval
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels, rms
from equilibria.lab.harness.task import device, train_in_task
from equilibria.theory.rules import AdamW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data.batches import TextBatches
    from equilibria.lab.nets import GPT
    from equilibria.lab.training import Recipe, Training
    from equilibria.symmetry._result import Symmetries


PLAIN, QK_NORM = "plain", "qk-norm"
MODELS = (PLAIN, QK_NORM)
COLUMNS = ("angle", "norm", "update_norm", "cosine")
_TEST_SHARE = 0.1
_TEST_BATCHES = 4
_SYMMETRY_BATCHES = 2


@dataclass(frozen=True)
class Config:
    """A small GPT on the documentation of Python, with AdamW at a constant learning rate.

    All tensors with two axes decay, the scales and shifts of the norms do not. With lr * wd = 1.5e-3 a norm
    forgets its start within some 1,000 steps; the window is the last third, fixed before these seeds were run.
    """

    seeds: tuple[int, ...] = (10, 11, 12)
    lr: float = 3e-3
    weight_decay: float = 0.5
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch_size: int = 16
    steps: int = 3000
    window: tuple[int, int] = (2000, 3000)
    watch_every: int = 5
    measure_every: int = 200
    characters: int = 0


def key(model: str, seed: int) -> str:
    """Key of a task."""
    return f"{model}-{seed}"


def tasks(config: Config) -> dict[str, tuple[str, int]]:
    """Model and seed; for one seed both models have the same text in the same order."""
    return {key(model, seed): (model, seed) for model in MODELS for seed in config.seeds}


def run_task(config: Config, task: tuple[str, int]) -> Arrays:
    """Train a model, watched, and find how every tensor is invariant."""
    model, seed = task
    trained = train_in_task(recipe(config, model, seed=seed))
    arrays = trained.arrays(COLUMNS)
    names = [str(name) for name in arrays["names"]]
    how, tensors = computed_symmetries(config, model).how, dict(trained.model.named_parameters())
    return {
        **arrays,
        "how": np.array([how[name] for name in names]),
        "entries": np.array([tensors[name].numel() for name in names]),
    }


def recipe(config: Config, model: str, *, seed: int) -> Recipe:
    """The training of a model."""
    from equilibria.lab.data.batches import TextBatches
    from equilibria.lab.training import Recipe

    train, test = _texts(config)
    return Recipe(
        model=lambda: network(config, model),
        optimizer=lambda net: optimizer(config, net),  # type: ignore[arg-type]
        data=TextBatches(train, length=config.context, batch_size=config.batch_size, seed=seed),
        steps=config.steps,
        seed=seed,
        loss=next_character_loss,
        measures={"test": _TestLoss(TextBatches(test, length=config.context, batch_size=config.batch_size))},
        measure_every=config.measure_every,
        watch_every=config.watch_every,
        device=device(),
    )


def network(config: Config, model: str) -> GPT:
    """The network, with first weights as in GPT-2."""
    from equilibria.lab.data.batches import CHARACTERS
    from equilibria.lab.nets import GPT

    return GPT(
        CHARACTERS,
        config.width,
        layers=config.layers,
        heads=config.heads,
        context=config.context,
        qk_norm=model == QK_NORM,
    )


def optimizer(config: Config, net: GPT) -> Optimizer:
    """AdamW with weight decay on matrices alone."""
    import torch

    matrices = [param for param in net.parameters() if param.ndim >= 2]
    others = [param for param in net.parameters() if param.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr)


def next_character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, nats per character."""
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def computed_symmetries(config: Config, model: str) -> Symmetries:
    """The symmetries of the network, computed at its first weights."""
    import torch

    from equilibria.lab.data.batches import TextBatches
    from equilibria.objectives._isolation import preserved_rng
    from equilibria.objectives._objective import objective
    from equilibria.symmetry import symmetries

    with preserved_rng():
        torch.manual_seed(0)
        net = network(config, model)
    batches = TextBatches(_texts(config)[0], length=config.context, batch_size=config.batch_size)
    return symmetries(objective(net, next_character_loss), [batches.batch(step) for step in range(_SYMMETRY_BATCHES)])


def _texts(config: Config) -> tuple[Tensor, Tensor]:
    """The training text, and the end of the text for tests."""
    from equilibria.lab.data.batches import python_documentation

    text = python_documentation()[: config.characters or None]
    cut = len(text) - int(_TEST_SHARE * len(text))
    return text[:cut], text[cut:]


class _TestLoss:
    """A `Measure`: mean loss on a few fixed batches."""

    def __init__(self, batches: TextBatches) -> None:
        self._batches = batches

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        import torch

        with torch.no_grad():
            losses = [
                float(next_character_loss(training.model(inputs), targets))
                for inputs, targets in (training.placed(self._batches.batch(step)) for step in range(_TEST_BATCHES))
            ]
        return {"test_loss": float(np.mean(losses))}


Array = NDArray[np.float64]
_LAW = Source("", "beyond the papers", law="rules.AdamW")
_OURS = Source("", "beyond the papers")
# The law takes every entry's update to be of size 1 and gradients of different steps to be independent. Watching
# expects 5 per cent on networks (`diagnosis.summary.ACCURACY`); this is twice that.
_AS_PREDICTED = 0.1
_PULLS = {("smaller", "faster"), ("larger", "slower")}
_STREAM = ("embedding.weight", "positions.weight", ".out.weight", ".down.weight")
_ALONE, _JOINT, _AGAINST = "invariant alone", "invariant together with others", "scaled against others only"
_KINDS = (_ALONE, _JOINT, _AGAINST)


@dataclass(frozen=True)
class WatchedTensor:
    """Angle and radial gradient of one tensor in the window, a number per seed.

    Attributes:
        name: in the network.
        how: its invariance, from `equilibria.symmetries`.
        kind: the same in short.
        ratio: rms angle per step over the law's.
        radial: mean cosine of weight and gradient, times the square root of the entries: 1 for a random direction, 0
            for a scale-invariant weight. If it is positive, a gradient step makes the weight smaller.
    """

    name: str
    how: str
    kind: str
    ratio: tuple[float, ...]
    radial: tuple[float, ...]

    @property
    def as_predicted(self) -> bool:
        """Whether the whole confidence interval is within the tolerance."""
        _, (low, high) = mean_interval(self.ratio)
        return low >= 1 - _AS_PREDICTED and high <= 1 + _AS_PREDICTED

    @property
    def why(self) -> str:
        """Why the tensor follows the law or not, as far as the radial gradient explains it."""
        if self.kind == _ALONE:
            return "its norm does not matter: weight decay and the steps themselves set it"
        if self.as_predicted:
            return "near the law although its norm matters"
        _, (low, high) = mean_interval(self.ratio)
        if low <= 1 <= high:
            return "seeds differ too much to tell"
        size = "smaller" if float(np.mean(self.radial)) > 0 else "larger"
        speed = "faster" if low > 1 else "slower"
        if (size, speed) in _PULLS:
            return f"the loss makes it {size}, so it turns {speed}"
        return f"not explained: the loss makes it {size}, and yet it turns {speed}"


def kind_of(how: str) -> str:
    """The invariance of a tensor in short.

    Example:
        >>> kind_of("groups of 16 rows"), kind_of("against head.weight")
        ('invariant alone', 'scaled against others only')
    """
    if how in ("alone", "rows") or how.startswith("groups"):
        return _ALONE
    return _JOINT if how.startswith("jointly") else _AGAINST


def tensors(config: Config, runs: Sequence[Arrays]) -> list[WatchedTensor]:
    """Every tensor of a model, over its seeds."""
    law, first = predicted_angle(config), runs[0]
    names = [str(name) for name in first["names"]]

    def by_seed(number: Callable[[Arrays, int], float], place: int) -> tuple[float, ...]:
        return tuple(number(run, place) for run in runs)

    return [
        WatchedTensor(
            name=name,
            how=str(first["how"][place]),
            kind=kind_of(str(first["how"][place])),
            ratio=by_seed(lambda run, place: rms(_window(config, run, "angle")[:, place]) / law, place),
            radial=by_seed(
                lambda run, place: (
                    float(_window(config, run, "cosine")[:, place].mean()) * float(np.sqrt(run["entries"][place]))
                ),
                place,
            ),
        )
        for place, name in enumerate(names)
    ]


def stream_ratio(config: Config, run: Arrays) -> float:
    """Angle of all weights that write into the stream, as one vector, over the law's.

    Its squared chord is the sum of those of its parts, because their norms change far less in a step than they turn.
    """
    chosen = [str(name).endswith(_STREAM) for name in run["names"]]
    norms, angles = (_window(config, run, what)[:, chosen] for what in ("norm", "angle"))
    squared = np.sum(norms**2 * angles**2, axis=1) / np.sum(norms**2, axis=1)
    return float(np.sqrt(squared.mean())) / predicted_angle(config)


def predicted_angle(config: Config) -> float:
    """Radians per step in equilibrium, the same for every scale-invariant tensor."""
    return float(AdamW(config.lr, config.weight_decay).equilibrium().angle)


def _window(config: Config, run: Arrays, column: str) -> Array:
    step = run["sampled_step"]
    values: Array = run[column][(config.window[0] <= step) & (step < config.window[1])]
    return values


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the table of all tensors."""
    runs = {model: [results[key(model, seed)] for seed in config.seeds] for model in MODELS}
    tables = {model: tensors(config, seeds) for model, seeds in runs.items()}
    measured = [
        *_judge_invariant(tables[QK_NORM]),
        *(claim for model in MODELS for claim in _judge_reasons(config, model, tables[model], runs[model])),
    ]
    measured = demanded_if(not config.characters, measured)
    numbers = {
        model: {
            "predicted_angle": predicted_angle(config),
            "tensors": [_row(tensor) for tensor in table],
            "stream_angle_over_law": [stream_ratio(config, run) for run in runs[model]],
            "test_loss": [float(run["test_loss"][-1]) for run in runs[model]],
        }
        for model, table in tables.items()
    }
    return Outcome([*map(identity, _judge_symmetries(config, tables)), *measured], numbers)


def _row(tensor: WatchedTensor) -> dict[str, object]:
    return {
        "tensor": tensor.name,
        "how": tensor.how,
        "angle_over_law": tensor.ratio,
        "radial_gradient": tensor.radial,
        "as_predicted": tensor.as_predicted,
        "why": tensor.why,
    }


def _judge_symmetries(config: Config, tables: dict[str, list[WatchedTensor]]) -> list[Claim]:
    alone = {model: [tensor for tensor in table if tensor.kind == _ALONE] for model, table in tables.items()}
    return [
        _OURS.says("matrices that are scale-invariant alone, in a GPT without normalised queries and keys").near(
            0, len(alone[PLAIN]), absolute=0
        ),
        _OURS.says("the same where queries and keys are normalised: those of every layer").near(
            2 * config.layers,
            len([tensor for tensor in alone[QK_NORM] if tensor.name.endswith(("query.weight", "key.weight"))]),
            absolute=0,
        ),
    ]


def _judge_invariant(table: Sequence[WatchedTensor]) -> list[Claim]:
    alone = [tensor for tensor in table if tensor.kind == _ALONE]
    others = [tensor for tensor in table if tensor.kind != _ALONE]
    return [
        _LAW.says("normalised queries and keys: rms angle per step over AdamW's law, mean over tensors").near(
            1.0, np.mean([tensor.ratio for tensor in alone], axis=0), relative=_AS_PREDICTED
        ),
        _LAW.says(
            "all other matrices are farther from it: mean |ln(angle / law)| less that of queries and keys"
        ).at_least(0.0, _distance(others) - _distance(alone)),
    ]


def _distance(table: Sequence[WatchedTensor]) -> Array:
    """Mean over tensors, a number per seed."""
    distance: Array = np.mean(np.abs(np.log([tensor.ratio for tensor in table])), axis=0)
    return distance


def _judge_reasons(config: Config, model: str, table: Sequence[WatchedTensor], runs: Sequence[Arrays]) -> list[Claim]:
    others = [tensor for tensor in table if tensor.kind != _ALONE]
    radial, ratio = (np.array([getattr(tensor, what) for tensor in others]).T for what in ("radial", "ratio"))
    return [
        _OURS.says(
            f"{model}: what the loss pulls inwards turns faster than the law: rank correlation of pull and angle over "
            "matrices that are not invariant alone"
        ).at_least(0.0, [float(spearmanr(*pair).statistic) for pair in zip(radial, ratio, strict=True)]),
        _LAW.says(
            f"{model}: all that writes into the stream, as one vector, which is invariant as a whole and whose entries "
            "AdamW treats alike: rms angle per step over its law"
        ).near(1.0, [stream_ratio(config, run) for run in runs], relative=_AS_PREDICTED),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Both models: every tensor's angle over the law's, and the same against its radial gradient."""
    figure, axes = panels(2, 2, width=3.6, height=2.9)
    for row, model in enumerate(MODELS):
        runs = [results[key(model, seed)] for seed in config.seeds]
        table = tensors(config, runs)
        bars, scatter = axes[2 * row : 2 * row + 2]
        _draw_table(bars, table)
        _draw_reasons(scatter, table)
        label_panel(bars, "ac"[row], model, ylabel="", xlabel="angle per step / law")
        label_panel(scatter, "bd"[row], "and the gradient along the weight")
    axes[1].legend()
    return {"transformer": figure}


def _draw_table(axis: Axes, table: Sequence[WatchedTensor]) -> None:
    for place, tensor in enumerate(table):
        colour = COLOURS[_KINDS.index(tensor.kind)]
        axis.plot(tensor.ratio, [place] * len(tensor.ratio), "o", color=colour, alpha=0.7)
    axis.axvline(1, color=THEORY, lw=0.8, ls="--")
    axis.set_yticks(range(len(table)), [_short(tensor.name) for tensor in table], fontsize=5.5)
    axis.invert_yaxis()


def _draw_reasons(axis: Axes, table: Sequence[WatchedTensor]) -> None:
    for colour, kind in zip(COLOURS, _KINDS, strict=False):
        some = [tensor for tensor in table if tensor.kind == kind]
        radial = [np.mean(tensor.radial) for tensor in some]
        axis.plot(radial, [np.mean(tensor.ratio) for tensor in some], "o", color=colour, label=kind)
    axis.axhline(1, color=THEORY, lw=0.8, ls="--")
    axis.axvline(0, color=THEORY, lw=0.4)
    axis.set(xlabel=r"mean cos(weight, gradient) $\times$ $\sqrt{\mathrm{entries}}$", ylabel="angle per step / law")


def _short(name: str) -> str:
    return name.removesuffix(".weight").removeprefix("blocks.").replace(".attention", "")


_SMOKE = Config(
    width=8,
    layers=1,
    heads=2,
    context=16,
    batch_size=4,
    steps=24,
    window=(8, 24),
    watch_every=2,
    measure_every=12,
    characters=4000,
)

EXPERIMENT = Experiment(
    id="eq-transformer",
    title="Which tensors of a GPT turn as AdamW's law predicts, and which do not",
    source="beyond the papers",
    scales={"smoke": _SMOKE, "desk": Config()},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
)
