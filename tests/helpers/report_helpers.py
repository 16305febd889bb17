"""Runs that were never trained: SGD's norm recursion with scattered angles, and layers that misbehave on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records.tables import NUMBERS, SAMPLE_FIELDS

LR, WD, MOMENTUM = 0.1, 5e-3, 0.9
EPOCH = 100
THEORY = [name for name in NUMBERS if any(word in name for word in ("predicted", "equilibrium", "settle"))]


def run(
    count: int, *, steps: int = 6000, every: int = 10, outlier: int | None = None, lawless: int | None = None
) -> tuple[pa.Table, dict[str, Any]]:
    """Samples and metadata of ``count`` layers whose lr falls tenfold at 60 % of the run.

    Args:
        count: layers.
        steps: steps of training.
        every: steps from sample to sample.
        outlier: a layer that turns 1.6 times as fast as predicted.
        lawless: a layer without law.
    """
    random = np.random.default_rng(0)
    at = np.arange(0, steps, every)
    lr = np.where(at < 0.6 * steps, LR, LR / 10)
    columns = _columns(lr, every, random.uniform(0.5, 2, count), sizes(count) / 50)
    columns["angle"] = columns["angle_predicted"] * np.exp(random.normal(0, 0.12, (len(at), count)))
    columns["norm"] = columns["norm"] * np.exp(np.cumsum(random.normal(0, 1e-3, (len(at), count)), axis=0))
    if outlier is not None:
        columns["angle"][:, outlier] *= 1.6
    if lawless is not None:
        for name in THEORY:
            columns[name][:, lawless] = np.nan
    names = layer_names(count)
    return table(at, names, columns), metadata(names, lawless)


KINDS = {"attn.c_attn": 0.004, "attn.c_proj": 0.006, "mlp.c_fc": 0.003, "mlp.c_proj": 0.005}  # angle per step


def transformer_run(blocks: int, *, fast: dict[int, float] | None = None, steps: int = 400) -> tuple[pa.Table, dict]:
    """Samples and metadata of a pre-norm transformer, whose matrices are not scale-invariant.

    The angles of a kind scatter by 5 % in time and are alike in all blocks, the norms grow evenly by 20 %.

    Args:
        blocks: of four matrices each, after two embeddings.
        fast: factors of the angles of some blocks.
        steps: of training, every tenth of which is sampled.
    """
    random = np.random.default_rng(0)
    steps_sampled = np.arange(0, steps, 10)
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    names += [f"transformer.h.{block}.{kind}.weight" for block in range(blocks) for kind in KINDS]
    middles = [0.001, 0.002]
    middles += [angle * (fast or {}).get(block, 1.0) for block in range(blocks) for angle in KINDS.values()]
    shape = len(steps_sampled), len(names)
    columns = {
        "lr": np.full(shape, 1e-3),
        "weight_decay": np.full(shape, 0.1),
        "momentum": np.full(shape, 0.9),
        "cosine": np.full(shape, 0.3),
        "angle": np.array(middles) * np.exp(random.normal(0, 0.05, shape)),
        "norm": np.linspace(10, 12, len(steps_sampled))[:, None] * np.ones(shape),
        **{name: np.full(shape, np.nan) for name in THEORY},
    }
    described = metadata(names)
    for entry in described["params"]:
        entry.update(invariant=False, shape=[64, 64], entries=4096)
    return table(steps_sampled, names, columns), {**described, "steps_per_epoch": None}


def table(at: np.ndarray, names: list[str], columns: dict[str, np.ndarray]) -> pa.Table:
    """The sample table of (steps, layers) arrays; NaN becomes null, and so do columns that are not given."""
    count = len(names)
    empty = np.full((len(at), count), np.nan)
    arrays = [pa.array(np.repeat(at, count)), pa.array(np.tile(names, len(at)), pa.string()).dictionary_encode()]
    arrays += [pa.array(columns.get(name, empty).ravel(), from_pandas=True) for name in NUMBERS]
    states = _states(columns) if "lr" in columns else np.full(empty.shape, "none")
    arrays += [pa.array(states.ravel(), pa.string()).dictionary_encode(), *[pa.nulls(empty.size, pa.string())] * 2]
    return pa.table(dict(zip(SAMPLE_FIELDS.names, arrays, strict=True))).cast(SAMPLE_FIELDS)


def _states(columns: dict[str, np.ndarray]) -> np.ndarray:
    ratio = columns["angle_predicted"] / columns["angle_equilibrium"]
    moving = np.where(columns["lr"] < LR, "disturbed", "settling")
    return np.where(np.isnan(ratio), "none", np.where(np.abs(ratio - 1) < 0.05, "settled", moving))


def layer_names(count: int) -> list[str]:
    parts = [f"layer{i // 6 + 1}.{i % 6 // 2}.conv{i % 2 + 1}.weight" for i in range(count - 1)]
    return ["conv1.weight", *parts][:count]


def metadata(names: list[str], lawless: int | None = None) -> dict[str, Any]:
    """What a monitor says about a run of SGD."""
    rule = {"kind": "SGD", "momentum": MOMENTUM, "nesterov": False, "dampening": 0.0}
    why = "it is not scale-invariant: no normalisation follows"
    params = [
        {
            "name": name,
            "aliases": [],
            "shape": [size],
            "entries": size,
            "dtype": "float32",
            "optimizer": 0,
            "group": 0,
            "law": None if place == lawless else "SGD",
            "rule": None if place == lawless else rule,
            "no_law": why if place == lawless else None,
        }
        for place, (name, size) in enumerate(zip(names, sizes(len(names)).tolist(), strict=True))
    ]
    settings = f"SGD(lr={LR}, weight_decay={WD}, momentum={MOMENTUM})"
    return {
        "equilibria": "0",
        "torch": "0",
        "every": 10,
        "granularity": "tensor",
        "steps_per_epoch": EPOCH,
        "optimizers": [{"class": "SGD", "settings": settings}],
        "params": params,
    }


def sizes(count: int) -> np.ndarray:
    return 432 * 2 ** (np.arange(count) % 7)


def _columns(lr: np.ndarray, every: int, starts: np.ndarray, unit_grad_sq: np.ndarray) -> dict[str, np.ndarray]:
    """Norm and angle of SGD without momentum, but with the lr that momentum makes of it."""
    pull = lr[:, None] / (1 - MOMENTUM)
    target = (pull * unit_grad_sq / (2 * WD)) ** 0.25
    square, squares = (starts * target[0]) ** 2, []
    for now in pull[:, 0]:
        squares.append(square)
        for _ in range(every):
            square = square * (1 - now * WD) ** 2 + now**2 * unit_grad_sq / square
    norm = np.sqrt(squares)
    angle = pull * np.sqrt(unit_grad_sq) / norm**2
    wait = np.maximum(0, np.log(np.abs(norm**4 / target**4 - 1) / 0.1 + 1e-9) / (4 * pull * WD))
    found = {
        "lr": lr[:, None],
        "weight_decay": WD,
        "momentum": MOMENTUM,
        "norm": norm,
        "grad_norm": np.sqrt(unit_grad_sq) / norm,
        "cosine": 1e-4,
        "update_norm": norm * angle,
        "relative_update": angle,
        "effective_lr": lr[:, None] / norm**2,
        "unit_grad_sq": unit_grad_sq,
        "momentum_unit_grad_sq": unit_grad_sq,
        "angle_equilibrium": np.sqrt(2 * pull * WD),
        "norm_equilibrium": target,
        "angle_predicted": angle,
        "norm_predicted": norm,
        "steps_to_settle": wait,
        "epochs_to_settle": wait / EPOCH,
    }
    return {name: np.broadcast_to(values, norm.shape).copy() for name, values in found.items()}
