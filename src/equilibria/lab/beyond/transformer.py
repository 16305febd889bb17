"""eq-transformer: the growth gain of every matrix of a small GPT, and what it predicts when lr is halved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from equilibria.lab.harness.claim import Claim, Source, demanded_if, identity, mean_interval
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.harness.task import device, train_in_task
from equilibria.theory.gain import growth_gain, measured_gain
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
COLUMNS = ("angle", "norm")
_TEST_SHARE = 0.1
_TEST_BATCHES = 4
_SYMMETRY_BATCHES = 2


@dataclass(frozen=True)
class Config:
    """A small GPT on the documentation of Python, with AdamW, whose lr is halved once.

    All tensors with two axes decay, the scales and shifts of the norms do not. With lr * wd = 3e-3, then 1.5e-3, a norm
    settles within some 170, then 330 steps. Windows and seeds were fixed before these seeds were run.

    Attributes:
        before: first step of the window before the change.
        drop: step at which lr changes.
        factor: of lr from then on.
        after: first step of the window after it, which reaches to the end.
    """

    seeds: tuple[int, ...] = (20, 21, 22, 23, 24, 25, 26, 27)
    lr: float = 3e-3
    weight_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch_size: int = 8
    steps: int = 1000
    before: int = 400
    drop: int = 700
    factor: float = 0.5
    after: int = 800
    watch_every: int = 5
    measure_every: int = 300
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
    arrays, how = trained.arrays(COLUMNS), computed_symmetries(config, model).how
    return {**arrays, "how": np.array([how[str(name)] for name in arrays["names"]])}


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
        schedule=lambda step: config.factor if step >= config.drop else 1.0,
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
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


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
_GAIN = Source("", "beyond the papers", law="gain.equilibrium_from_gain")
_OURS = Source("", "beyond the papers")
# Tolerances were fixed after one trial of seed 100 and before the seeds of `Config` were run. The law of invariant
# weights: twice what watching expects on networks (`ACCURACY` in `diagnosis.layer_summary`). The gain: it changes with
# the angle, about as angle^-0.25 on small transformers, so that halving lr moves the predicted angle by 4 per cent.
_AS_PREDICTED = 0.1
_PERSISTS = 0.9  # Spearman's
_ALONE, _JOINT, _AGAINST = "invariant alone", "invariant together with others", "scaled against others only"
_KINDS = (_ALONE, _JOINT, _AGAINST)


@dataclass(frozen=True)
class WatchedTensor:
    """One tensor before and after lr is halved, a number per seed.

    Attributes:
        name: in the network.
        how: its invariance, from `equilibria.symmetries`.
        kind: the same in short.
        law_ratio: rms angle per step before the change over that of the law of invariant weights.
        gain: growth gain G before the change.
        gain_after: the same after it.
        angle: rms angle after the change over what G and the update size from before it predict.
        norm: the same for the norm.
        angle_as_invariant: as ``angle``, predicted with F of the optimizer in place of G.
    """

    name: str
    how: str
    kind: str
    law_ratio: tuple[float, ...]
    gain: tuple[float, ...]
    gain_after: tuple[float, ...]
    angle: tuple[float, ...]
    norm: tuple[float, ...]
    angle_as_invariant: tuple[float, ...]

    @property
    def as_predicted(self) -> bool:
        """Whether the whole confidence interval of ``angle`` is within the tolerance."""
        _, (low, high) = mean_interval(self.angle)
        return low >= 1 - _AS_PREDICTED and high <= 1 + _AS_PREDICTED


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
    first, by_seed = runs[0], [numbers_of(config, run) for run in runs]
    fields = ("law_ratio", "gain", "gain_after", "angle", "norm", "angle_as_invariant")
    return [
        WatchedTensor(
            str(name),
            str(first["how"][place]),
            kind_of(str(first["how"][place])),
            *(tuple(float(numbers[field][place]) for numbers in by_seed) for field in fields),
        )
        for place, name in enumerate(first["names"])
    ]


def numbers_of(config: Config, run: Arrays) -> dict[str, Array]:
    """The numbers of `WatchedTensor` for all tensors of one run.

    After the change ``y = ||w||^2`` obeys ``y' = -2 eps y + G (lr u)^2`` per step, with the norm at the change and u,
    the length of an update over lr, from before.
    """
    step, angle, norm = run["sampled_step"], run["angle"], run["norm"]
    rule = law(config)
    before, after = (
        (low <= step) & (step < high) for low, high in ((config.before, config.drop), (config.after, config.steps))
    )
    eps = rule.lr * rule.weight_decay
    gain, gain_after = _gain(eps, before, run), _gain(config.factor * eps, after, run)
    size_sq = np.mean((angle[before] * norm[before] / config.lr) ** 2, axis=0)
    lr, eps, start = config.factor * config.lr, config.factor * eps, norm[before][-1] ** 2
    left = np.exp(-2 * eps * (step[after] - config.drop))[:, np.newaxis]

    def predicted(g: Array | float) -> Array:
        return np.asarray(left * start + (1 - left) * g * lr**2 * size_sq / (2 * eps))

    def ratio(g: Array | float) -> Array:
        return _rms(angle[after]) / _rms(lr * np.sqrt(size_sq / predicted(g)))

    return {
        "law_ratio": _rms(angle[before]) / predicted_angle(config),
        "gain": gain,
        "gain_after": gain_after,
        "angle": ratio(gain),
        "norm": _rms(norm[after]) / _rms(np.sqrt(predicted(gain))),
        "angle_as_invariant": ratio(growth_gain(rule)),
    }


def _gain(eps: float, rows: NDArray[np.bool_], run: Arrays) -> Array:
    step, angle, norm = (run[name][rows] for name in ("sampled_step", "angle", "norm"))
    steps = float(step[-1] - step[0])
    growth = 2 * np.log(norm[-1] / norm[0])
    return measured_gain(growth, decay=eps * steps, angle_sq=np.mean(angle**2, axis=0) * steps)


def _rms(values: Array) -> Array:
    return np.asarray(np.sqrt(np.mean(values**2, axis=0)))


def predicted_angle(config: Config) -> float:
    """Radians per step in equilibrium before the change, the same for every scale-invariant tensor."""
    return float(law(config).equilibrium().angle)


def law(config: Config) -> AdamW:
    """The rule of the decayed tensors before the change."""
    return AdamW(config.lr, config.weight_decay, betas=config.betas)


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the table of all tensors."""
    runs = {model: [results[key(model, seed)] for seed in config.seeds] for model in MODELS}
    tables = {model: tensors(config, seeds) for model, seeds in runs.items()}
    measured = [
        *_judge_invariant(tables[QK_NORM]),
        *(each for model in MODELS for each in _judge(model, tables[model])),
    ]
    measured = demanded_if(not config.characters, measured)
    numbers = {
        model: {
            "predicted_angle": predicted_angle(config),
            "invariant_gain": growth_gain(law(config)),
            "tensors": [{**asdict(tensor), "as_predicted": tensor.as_predicted} for tensor in table],
            "test_loss": [float(run["test_loss"][-1]) for run in runs[model]],
        }
        for model, table in tables.items()
    }
    return Outcome([*map(identity, _judge_symmetries(config, tables)), *measured], numbers)


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
    return [
        _LAW.says("normalised queries and keys: rms angle per step over AdamW's law, mean over tensors").near(
            1.0, np.mean([tensor.law_ratio for tensor in alone], axis=0), relative=_AS_PREDICTED
        )
    ]


def _judge(model: str, table: Sequence[WatchedTensor]) -> list[Claim]:
    errors = {
        field: np.mean(np.abs(np.log([getattr(tensor, field) for tensor in table])), axis=0)
        for field in ("angle", "norm", "angle_as_invariant")
    }
    gains = (np.array([getattr(tensor, field) for tensor in table]).T for field in ("gain", "gain_after"))
    orders = [float(spearmanr(*pair).statistic) for pair in zip(*gains, strict=True)]
    predicts = f"{model}: G, update size and norm from before lr is halved predict"
    return [
        _GAIN.says(f"{predicts} the angle after it: mean |ln(measured / predicted)| over all matrices").at_most(
            _AS_PREDICTED, errors["angle"]
        ),
        _GAIN.says(f"{predicts} the norm after it: the same").at_most(_AS_PREDICTED, errors["norm"]),
        _GAIN.says(
            f"{model}: with F of invariant weights in place of G the angle is further off: mean |ln| less that with G"
        ).at_least(0.0, errors["angle_as_invariant"] - errors["angle"]),
        _OURS.says(f"{model}: G belongs to a matrix: rank correlation of G before and after over matrices").at_least(
            _PERSISTS, orders
        ),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Both models: the gain of every tensor, and its angle after the change over its prediction with G and with F."""
    figure, axes = panels(2, 2, width=3.6, height=2.9)
    for row, model in enumerate(MODELS):
        table = tensors(config, [results[key(model, seed)] for seed in config.seeds])
        gains, ratios = axes[2 * row : 2 * row + 2]
        _draw_dots(gains, table, "gain")
        gains.axvline(growth_gain(law(config)), color=THEORY, lw=0.8, ls="--")
        gains.set_xscale("log")
        for place, tensor in enumerate(table):
            ratios.plot(np.mean(tensor.angle_as_invariant), place, "o", mfc="none", color=THEORY, ms=3.5)
        _draw_dots(ratios, table, "angle")
        ratios.axvline(1, color=THEORY, lw=0.8, ls="--")
        label_panel(gains, "ac"[row], f"{model}: growth gain G; dashed: F")
        label_panel(ratios, "bd"[row], "angle after lr / 2 over prediction; rings: with F")
    return {"transformer": figure}


def _draw_dots(axis: Axes, table: Sequence[WatchedTensor], field: str) -> None:
    for place, tensor in enumerate(table):
        values, colour = getattr(tensor, field), COLOURS[_KINDS.index(tensor.kind)]
        axis.plot(values, [place] * len(values), "o", color=colour, ms=2.5, alpha=0.7)
    axis.set_yticks(range(len(table)), [_short(tensor.name) for tensor in table], fontsize=5.5)
    axis.invert_yaxis()


def _short(name: str) -> str:
    return name.removesuffix(".weight").removeprefix("blocks.").replace(".attention", "")


_SMOKE = Config(
    seeds=(20, 21, 22),
    width=8,
    layers=1,
    heads=2,
    context=16,
    batch_size=4,
    steps=36,
    before=8,
    drop=20,
    after=24,
    watch_every=2,
    measure_every=12,
    characters=4000,
)

EXPERIMENT = Experiment(
    id="eq-transformer",
    title="The growth gain of every matrix of a GPT, and what it predicts when lr is halved",
    source="beyond the papers",
    scales={"smoke": _SMOKE, "desk": Config()},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    version=2,
)
