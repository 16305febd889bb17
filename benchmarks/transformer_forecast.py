"""How far forecasts of transformers are off: every decayed matrix, forecast from 30 % and from 50 % of its run.

`TUNED` are the runs that the law of the measured gain was tuned on. `HELD_OUT` was fixed and committed, with its
networks, data, settings, seeds and cuts, before any of these runs was trained; the law was not changed after their
result was seen. Bands of norms under AdamW and Lion were widened later, on other runs. Train (ten minutes on one core)
and judge with `python benchmarks/transformer_forecast.py DIRECTORY`; runs already in the directory are not trained
again. `--tuned` judges the others and publishes nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.forecasting import BASELINES, backtest
from equilibria.forecasting._backtest import rms
from equilibria.lab.data import Batches, load_digits
from equilibria.lab.data.batches import TextBatches, python_documentation
from equilibria.theory._reals import Array
from equilibria.watching import read_run, watch
from publishing import publish

STEPS, WARM_UP, EVERY = 2000, 100, 5
STARTS = (600, 1000)  # 30 % and 50 % of the run
STABLE = 0.75  # share of a run before the decay of "wsd"
CONTEXT, BATCH, HEADS = 48, 8, 4
FLOOR = 0.05  # of the peak lr, at the end
NEAR = 0.1  # median error of a matrix's angle


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        network: "gpt" (RMSNorm before attention and gated MLP), "tied" (the same with one matrix for embedding and
            head), "qk-norm" (with normalised queries and keys), "recurrent" (gated linear recurrences in place of
            attention), "translator" (encoder and decoder with cross-attention) or "vit" (patches of an image).
        data: bytes of "topics" (Python's language reference), "sources" (Python's library) or "names" (of the
            characters of Unicode); images of "digits" (30 % of the labels drawn at random) or "photographs" (crops of
            two photographs, turned by quarters: which photograph, which turn).
        optimizer: "adamw", or "muon" for the matrices of the blocks with AdamW for the rest.
        schedule: "cosine" or "wsd" (warm-up, stable, decay), after a warm-up of 100 steps.
        width: numbers per token.
        lr: peak of AdamW's; Muon's is ten times that.
        decay: weight decay of every matrix.
        seed: of weights and data.
    """

    network: str
    data: str
    optimizer: str
    schedule: str
    width: int
    lr: float
    decay: float
    seed: int

    @property
    def name(self) -> str:
        """Its directory."""
        return f"{self.network}-{self.data}-{self.optimizer}-{self.schedule}-{self.width}-{self.seed}"

    def factor(self, step: int) -> float:
        """The learning rate of a step over its peak."""
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        if self.schedule == "cosine":
            part = (step - WARM_UP) / (STEPS - WARM_UP)
            return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * part)) / 2
        return min(1.0, FLOOR + (1 - FLOOR) * (1 - step / STEPS) / (1 - STABLE))


TUNED = (
    Training("gpt", "topics", "adamw", "cosine", 64, 3e-3, 0.1, 2100),
    Training("tied", "sources", "adamw", "wsd", 96, 2e-3, 0.3, 2101),
    Training("qk-norm", "names", "muon", "cosine", 64, 2e-3, 0.1, 2102),
    Training("vit", "digits", "adamw", "wsd", 64, 2e-3, 0.3, 2103),
    Training("translator", "topics", "muon", "wsd", 64, 2e-3, 0.1, 2104),
    Training("recurrent", "sources", "adamw", "cosine", 96, 2e-3, 0.3, 2105),
)
HELD_OUT = (
    Training("gpt", "sources", "adamw", "wsd", 128, 1.5e-3, 0.2, 3100),
    Training("tied", "names", "muon", "cosine", 64, 2e-3, 0.2, 3101),
    Training("qk-norm", "topics", "adamw", "cosine", 96, 3e-3, 0.2, 3102),
    Training("qk-norm", "sources", "muon", "wsd", 64, 1.5e-3, 0.1, 3103),
    Training("vit", "photographs", "adamw", "cosine", 96, 1.5e-3, 0.2, 3104),
    Training("vit", "photographs", "muon", "wsd", 64, 2e-3, 0.1, 3105),
    Training("translator", "sources", "adamw", "cosine", 64, 2e-3, 0.1, 3106),
    Training("translator", "names", "muon", "wsd", 96, 2e-3, 0.1, 3107),
    Training("recurrent", "topics", "adamw", "wsd", 64, 3e-3, 0.1, 3108),
    Training("tied", "topics", "adamw", "cosine", 192, 1.5e-3, 0.1, 3109),
)


# ---- networks


class Attention(nn.Module):
    """Attention without biases, of tokens to themselves or to other tokens."""

    def __init__(self, width: int, *, causal: bool, qk_norm: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.query_norm, self.key_norm = (nn.RMSNorm(width // HEADS) if qk_norm else nn.Identity() for _ in range(2))
        self.causal = causal

    def forward(self, tokens: Tensor, others: Tensor | None = None) -> Tensor:
        read = tokens if others is None else others
        query, key, value = (
            layer(inputs).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for layer, inputs in ((self.query, tokens), (self.key, read), (self.value, read))
        )
        query, key = self.query_norm(query), self.key_norm(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Recurrence(nn.Module):
    """Every channel is averaged over the past, each with its own memory, and gated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)
        self.memory = nn.Parameter(torch.linspace(0.0, 4.0, width))

    def forward(self, tokens: Tensor) -> Tensor:
        values, gate = self.enter(tokens).chunk(2, dim=-1)
        keep = torch.sigmoid(self.memory)
        steps = torch.arange(tokens.shape[1])
        ago = (steps[:, None] - steps).clamp(min=0)
        weight = torch.tril((1 - keep)[:, None, None] * keep[:, None, None] ** ago)
        mixed = torch.einsum("cts,bsc->btc", weight, values)
        result: Tensor = self.out(mixed * functional.silu(gate))
        return result


class Gated(nn.Module):
    """MLP with a gate, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(tokens)) * self.up(tokens))
        return result


class Block(nn.Module):
    """A mixer of tokens, perhaps cross-attention, and an MLP, each behind an RMSNorm and added to the stream."""

    def __init__(self, width: int, mixer: nn.Module, *, cross: bool = False) -> None:
        super().__init__()
        self.mixer, self.mlp = mixer, Gated(width)
        self.cross = Attention(width, causal=False) if cross else None
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if cross else 2))

    def forward(self, stream: Tensor, others: Tensor | None = None) -> Tensor:
        stream = stream + self.mixer(self.norms[0](stream))
        if self.cross is not None:
            stream = stream + self.cross(self.norms[2](stream), others)
        result: Tensor = stream + self.mlp(self.norms[1](stream))
        return result


class LanguageModel(nn.Module):
    """Embedding, places, blocks, a last norm and the head."""

    def __init__(self, width: int, mixer: Callable[[], nn.Module], *, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, mixer()) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Translator(nn.Module):
    """Reads a text of which half is hidden, and writes all of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(257, width), nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, Attention(width, causal=False)) for _ in range(2))
        self.writers = nn.ModuleList(Block(width, Attention(width, causal=True), cross=True) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = (tokens + torch.arange(tokens.shape[1])) % 2 == 0
        read = self.embedding(torch.where(hidden, 256, tokens)) + self.places
        for block in self.blocks:
            read = block(read)
        stream = self.embedding(tokens) + self.places
        for block in self.writers:
            stream = block(stream, read)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Patches(nn.Module):
    """A classifier of images that are cut into patches."""

    def __init__(self, width: int, *, side: int, patch: int, channels: int, classes: int) -> None:
        super().__init__()
        self.patch = patch
        self.embedding = nn.Linear(channels * patch**2, width)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, Attention(width, causal=False)) for _ in range(3))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        stream = self.embedding(patches) + self.places
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream).mean(dim=1))
        return logits


def network(training: Training) -> nn.Module:
    """The network of a run."""
    width = training.width
    if training.network == "vit":
        sizes = (8, 2, 1, 10) if training.data == "digits" else (16, 4, 3, 8)
        side, patch, channels, classes = sizes
        return Patches(width, side=side, patch=patch, channels=channels, classes=classes)
    if training.network == "translator":
        return Translator(width)
    if training.network == "recurrent":
        return LanguageModel(width, lambda: Recurrence(width))
    qk_norm, blocks = training.network == "qk-norm", 2 if width > 128 else 3
    attention = lambda: Attention(width, causal=True, qk_norm=qk_norm)  # noqa: E731
    return LanguageModel(width, attention, blocks=blocks, tied=training.network == "tied")


# ---- data


def batches(training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of inputs and labels without end."""
    if training.data == "digits":
        digits = load_digits()
        return iter(
            Batches(digits.train_images, digits.train_labels, batch_size=4 * BATCH, label_noise=0.3, seed=training.seed)
        )
    if training.data == "photographs":
        return _photographs(torch.Generator().manual_seed(training.seed))
    return iter(TextBatches(_text(training.data), length=CONTEXT, batch_size=BATCH, seed=training.seed))


def _text(data: str) -> Tensor:
    if data == "topics":
        return python_documentation()
    if data == "sources":
        folder = Path(os.__file__).parent
        content = b"".join(
            (folder / f"{name}.py").read_bytes() for name in ("argparse", "inspect", "tarfile", "turtle")
        )
    else:
        names = [unicodedata.name(chr(number), "") for number in range(0x20, 0x3000)]
        content = "\n".join(np.random.default_rng(0).permutation([name for name in names if name]).tolist()).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def _photographs(draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_sample_images

    pixels = torch.stack([torch.tensor(image) for image in load_sample_images().images]).permute(0, 3, 1, 2)
    pixels = functional.avg_pool2d(pixels.float() / 64 - 2, 2)
    side, count = 16, 4 * BATCH
    while True:
        labels = torch.randint(8, (count,), generator=draw)
        top = torch.randint(pixels.shape[2] - side, (count,), generator=draw)
        left = torch.randint(pixels.shape[3] - side, (count,), generator=draw)
        crops = [
            torch.rot90(pixels[label // 4, :, row : row + side, column : column + side], label % 4, (1, 2))
            for label, row, column in zip(labels.tolist(), top.tolist(), left.tolist(), strict=True)
        ]
        yield torch.stack(crops), labels


# ---- training


def train(training: Training, directory: Path) -> None:
    """Train one run and record every fifth step of it."""
    torch.manual_seed(training.seed)
    torch.set_num_threads(1)
    model = network(training)
    weights = dict(model.named_parameters())
    matrices = {name: weight for name, weight in weights.items() if weight.ndim > 1}
    inner = [
        w for name, w in matrices.items() if training.optimizer == "muon" and name.startswith(("blocks", "writers"))
    ]
    outer = [w for w in matrices.values() if all(w is not other for other in inner)]
    vectors = [w for w in weights.values() if w.ndim < 2]
    groups = [{"params": outer, "weight_decay": training.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=training.lr, betas=(0.9, 0.95))]
    if inner:
        optimizers.append(torch.optim.Muon(inner, lr=10 * training.lr, weight_decay=training.decay))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, training.factor) for optimizer in optimizers]
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    with watch(model, optimizers, log_dir=unfinished, every=EVERY) as monitor:
        for _, (inputs, labels) in zip(range(STEPS), batches(training), strict=False):
            loss = functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            monitor.log(loss=loss)
    unfinished.rename(directory)


# ---- judging


@dataclass(frozen=True)
class Judged:
    """Errors of one run from one cut.

    Attributes:
        angles: |forecast / measured - 1| of the rms angle of 50 samples, one array per matrix.
        norms: the same of the norm.
        covered: shares of the single angles and of the norms inside their 90 % bands, per matrix.
        constant: as ``angles`` for the guess that angles stay proportional to lr.
    """

    angles: list[Array]
    norms: list[Array]
    covered: list[tuple[float, float]]
    constant: list[Array]


def judge(directory: Path, start: int) -> Judged:
    """Forecast one run from a step on, and compare."""
    layers = backtest(read_run(directory), start=start).layers
    return Judged(
        [np.abs(layer.angle_error) for layer in layers],
        [np.abs(layer.norm_error) for layer in layers],
        [(layer.angle_coverage, layer.norm_coverage) for layer in layers],
        [np.abs(rms(layer.guesses[BASELINES[0]]) / layer.rms_angle - 1) for layer in layers],
    )


def row(name: str, runs: Sequence[Judged]) -> str:
    """A row of the table, over all matrices of some runs."""

    def errors(kind: str) -> str:
        values = np.concatenate([matrix for run in runs for matrix in getattr(run, kind)])
        return " / ".join(f"{100 * value:.1f}" for value in np.percentile(values, (50, 90)))

    medians = np.array([np.median(matrix) for run in runs for matrix in run.angles])
    angles, norms = np.mean([pair for run in runs for pair in run.covered], axis=0)
    within = f"{np.count_nonzero(medians <= NEAR)} of {len(medians)}"
    return (
        f"| {name} | {errors('angles')} | {errors('norms')} | {within} | {100 * angles:.0f}, {100 * norms:.0f} "
        f"| {errors('constant')} |"
    )


def table(judged: Mapping[Training, Judged]) -> list[str]:
    """A row per run, per kind of run, and for all."""
    kinds = ("adamw", "muon", "cosine", "wsd", *dict.fromkeys(training.network for training in judged))
    groups = {
        f"**{kind}**": [
            run for training, run in judged.items() if kind in (training.optimizer, training.schedule, training.network)
        ]
        for kind in kinds
    }
    return [
        "| runs | angle | norm | matrices within 10 % | covered | angle ~ lr |",
        "|---|---|---|---|---|---|",
        *(row(training.name, [run]) for training, run in judged.items()),
        *(row(f"{name} ({len(runs)})", runs) for name, runs in groups.items() if runs),
        row(f"**all** ({len(judged)})", list(judged.values())),
    ]


def main() -> int:
    """Train what is missing, judge every run from both cuts, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tuned", action="store_true", help="the runs that the law was tuned on")
    options = parser.parse_args()
    trainings = TUNED if options.tuned else HELD_OUT
    for training in trainings:
        if not (options.directory / training.name).exists():
            train(training, options.directory / training.name)
    lines = [
        "# How far forecasts of transformers are off\n",
        f"{len(trainings)} runs of {STEPS:,} steps, warm-up of {WARM_UP} steps, "
        f"{'which the law was tuned on' if options.tuned else 'that nothing was tuned on'} "
        "(`transformer_forecast.py`). Every decayed matrix is forecast by its measured growth gain (one that looks "
        "scale-invariant under AdamW: by L), and compared at every fifth step. Per cent, median / 90th percentile over "
        "all matrices and samples. Angle: of the "
        "root mean square of 50 samples. Within 10 %: matrices whose median error of the angle is at most that. "
        "Covered: single angles and norms inside their 90 % bands. Angle ~ lr: the error of angles that stay "
        "proportional to lr. The runs were first judged with narrower bands of norms under AdamW, since widened on "
        "other runs: the coverage of norms is no longer that of runs unseen.\n",
    ]
    for start in STARTS:
        judged = {training: judge(options.directory / training.name, start) for training in trainings}
        lines += [f"## From step {start:,}, {100 * start // STEPS} % of the run\n", *table(judged), ""]
    text = "\n".join(lines)
    if not options.tuned:
        publish(Path(__file__).with_suffix(".md"), text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
