"""How far predictions from the measured growth gain hold on small transformers.

Six pre-norm transformers of width 64 are trained for 1,000 steps with warm-up (100 steps) and a cosine to a tenth:
GPTs of four blocks on the bytes of this repository's pages, tied and untied, with and without normalised queries and
keys, and a classifier of image patches (4x4 pixels of the 8x8 digits, four blocks, every attention sees all patches),
with 30 % of the labels drawn at random and with clean labels, which it fits to a loss near 0 well before the end.
AdamW has lr 3e-3, betas (0.9, 0.95) and weight decay 0.1 or 0.5; Muon lr 0.02 and weight decay 0.1 for the matrices of
the blocks, AdamW for the rest. `watch` samples every fifth step. Judged are the matrices that have a measured gain, in
windows of 20 samples from 30 % to 90 % of the run: |ln| of measured over predicted root mean square angle, and of the
norm at the window's last sample. Limits: angle within 2 % in the median and 5 % for 90 % of the windows. Networks,
settings, windows, seeds and limits were fixed before the published run. Trials on the seeds 100 and 101 came first:
they led to recursions that start again, to a mean of u over 5 samples, not 20, and to the run with noisy labels.
Writes benchmarks/gain.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import equilibria as eq
from equilibria.lab.nets import GPT
from publishing import publish

STEPS, WARM_UP, EVERY, WINDOW = 1000, 100, 5, 20
FROM, TO = 0.3, 0.9
MEDIAN, P90 = 0.02, 0.05
RUNS = ("gpt", "gpt-tied", "gpt-qk-norm", "gpt-muon", "patches-noisy", "patches-clean")
DECAYS = {"gpt": 0.1, "gpt-tied": 0.1, "gpt-qk-norm": 0.5, "gpt-muon": 0.1, "patches-noisy": 0.5, "patches-clean": 0.5}
SEEDS = (0, 1)
CONTEXT, BATCH = 64, 8


class Patches(nn.Module):
    """Pre-norm transformer on the four patches of a digit, without a causal mask; the mean token is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
        self.places = nn.Parameter(0.02 * torch.randn(4, 64))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True),
            4,
            enable_nested_tensor=False,
        )

    def forward(self, images: Tensor) -> Tensor:
        rows = images.reshape(-1, 2, 4, 2, 4).transpose(2, 3).reshape(-1, 4, 16)
        scores: Tensor = self.head(self.blocks(self.embedding(rows) + self.places).mean(dim=1))
        return scores


def lr_factor(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


def data(name: str, seed: int) -> Any:
    """Draws batches of inputs and labels."""
    draw = torch.Generator().manual_seed(1000 + seed)
    if name.startswith("patches"):
        from sklearn.datasets import load_digits

        images, digits = load_digits(return_X_y=True)
        inputs, labels = (
            torch.tensor((images - images.mean()) / images.std(), dtype=torch.float32),
            torch.tensor(digits),
        )
        wrong = torch.rand(len(labels), generator=draw) < (0.3 if name == "patches-noisy" else 0.0)
        labels = torch.where(wrong, torch.randint(10, (len(labels),), generator=draw), labels)

        def batch() -> tuple[Tensor, Tensor]:
            rows = torch.randint(len(labels), (64,), generator=draw)
            return inputs[rows], labels[rows]

        return batch
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = torch.tensor(list(b"".join(page.read_bytes() for page in pages)), dtype=torch.int64)

    def tokens() -> tuple[Tensor, Tensor]:
        begins = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw)
        rows = text[begins[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]

    return tokens


def train(name: str, seed: int) -> Any:
    """Trains one network and returns what `watch` saw."""
    torch.manual_seed(seed)
    model: nn.Module = (
        Patches() if name.startswith("patches") else GPT(256, context=CONTEXT, qk_norm=name == "gpt-qk-norm")
    )
    if name == "gpt-tied":
        model.head.weight = model.embedding.weight  # type: ignore[union-attr]
    decay, weights = DECAYS[name], dict(model.named_parameters())
    muon = [w for key, w in weights.items() if name == "gpt-muon" and w.ndim == 2 and key.startswith("blocks")]
    rest = [w for w in weights.values() if not any(w is other for other in muon)]
    groups = [
        {"params": [w for w in rest if w.ndim > 1], "weight_decay": decay},
        {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))]
    optimizers += [torch.optim.Muon(muon, lr=0.02, weight_decay=decay)] if muon else []
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor) for optimizer in optimizers]
    watched, batch = eq.watch(model, optimizers, every=EVERY), data(name, seed)
    for _ in range(STEPS):
        inputs, labels = batch()
        scores = model(inputs)
        loss = functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        watched.log(loss=loss)
    return watched


def errors(samples: Any) -> dict[str, tuple[list[float], list[float]]]:
    """|ln| of measured over predicted angle and norm, by matrix, of every window."""
    names = ("angle", "angle_predicted", "norm", "norm_predicted")
    step, param, law = (np.array(samples[name].to_pylist()) for name in ("step", "param", "law"))
    columns = np.array([samples[name].to_numpy() for name in names])
    inside = (step >= FROM * STEPS) & (step < TO * STEPS)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name in dict.fromkeys(param.tolist()):
        rows = np.flatnonzero(inside & (param == name))
        if not (law[rows] == "measured gain").all():
            continue
        angles, norms = found.setdefault(name, ([], []))
        for begin in range(0, len(rows) - WINDOW + 1, WINDOW):
            angle, angle_predicted, norm, norm_predicted = columns[:, rows[begin : begin + WINDOW]]
            angles.append(abs(math.log((angle**2).mean() / (angle_predicted**2).mean())) / 2)
            norms.append(abs(math.log(norm[-1] / norm_predicted[-1])))
    return found


def line(title: str, layers: list[tuple[list[float], list[float]]]) -> str:
    angles, norms = (np.concatenate([layer[which] for layer in layers]) for which in (0, 1))
    cells = (f"{np.median(angles):.1%}", f"{np.quantile(angles, 0.9):.1%}", f"{angles.max():.1%}")
    norm_cells = (f"{np.median(norms):.1%}", f"{np.quantile(norms, 0.9):.1%}")
    met = "met" if np.median(angles) <= MEDIAN and np.quantile(angles, 0.9) <= P90 else "**missed**"
    return f"| {title} | {len(layers)} | {' | '.join((*cells, *norm_cells))} | {met} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="*", default=RUNS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--keep", type=Path, default=None, help="write samples and tables here, too")
    options = parser.parse_args()
    lines = [
        "# The measured growth gain: how far predictions hold",
        "",
        *(__doc__ or "").strip().splitlines()[2:],
        "",
        "| run | matrices | angle, median | p90 | worst | norm, median | p90 | limits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    everything: list[tuple[list[float], list[float]]] = []
    for name in options.runs:
        for seed in options.seeds:
            watched = train(name, seed)
            found = errors(watched.samples())
            everything += found.values()
            lines.append(line(f"{name}, seed {seed}", list(found.values())))
            print(lines[-1], flush=True)
            if options.keep is not None:
                import pyarrow.parquet

                pyarrow.parquet.write_table(watched.samples(), options.keep / f"{name}-{seed}.parquet")
                (options.keep / f"{name}-{seed}.txt").write_text(f"{watched.table()}\n")
    lines.append(line("all", everything))
    print(lines[-1])
    if (options.runs, options.seeds) == (RUNS, SEEDS):
        publish(Path(__file__).with_name("gain.md"), "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
