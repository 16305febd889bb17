"""Equilibria of Muon as it is used, shape by shape, against walks of the optimizers themselves.

Torch's Muon and three others that recognition takes for it have a closed law by shape; NorMuon and Dion are measured by
`eq.identify(optimizer, shape=...)`. Each walks on noise orthogonal to the weight, as long as 1 / ||w||, from 1.2 times
the predicted norm for 8 time constants, and is then measured over 24. Target: angle and norm within 3 %.

    python benchmarks/muon_shapes.py     # about three minutes of one core
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equilibria as eq
from equilibria.optimizers.rules import rule_of_group
from equilibria.theory import Equilibrium, Muon
from muon_variants import Dion, OwnMuon
from publishing import publish

SHAPES = ((32, 32), (64, 16), (16, 64))
TARGET = 0.03
RUNS = Path("muon-shapes-runs.jsonl")
PRODUCT = 2e-3  # lr x wd: a time constant of 250 steps
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def muon(**settings: Any) -> Make:
    return lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=PRODUCT / 0.02, **settings)


def own(kind: Any = OwnMuon, **settings: Any) -> Make:
    return lambda params: kind(params, 0.02, weight_decay=PRODUCT / 0.02, **settings)


CASES: dict[str, Make] = {
    "torch Muon": muon(),
    "torch Muon, match_rms_adamw": muon(adjust_lr_fn="match_rms_adamw"),
    "torch Muon, momentum 0.8, plain": muon(momentum=0.8, nesterov=False),
    "Keller Jordan's": own(),
    "Moonshot's factor": own(scale="rms"),
    "sqrt(rows / columns)": own(scale="unit"),
    "NorMuon": own(scale="rms", by_rows=True),
    "Dion, half rank": own(Dion),
}


def predicted(make: Make, shape: tuple[int, int]) -> tuple[str, Equilibrium]:
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = make([weight])
    rule = rule_of_group(optimizer, optimizer.param_groups[0]).rule
    if isinstance(rule, Muon):
        return "closed", rule.equilibrium(shape=shape)
    return "measured", eq.identify(optimizer, shape=shape).equilibrium(unit_grad_sq=1.0, dim=math.prod(shape))


def walked(make: Make, shape: tuple[int, int], start: float) -> tuple[float, float]:
    """Root mean square angle and norm."""
    torch.manual_seed(0)
    rng = np.random.default_rng(5)
    weight = rng.standard_normal(shape)
    param = torch.nn.Parameter(torch.from_numpy(start / np.linalg.norm(weight) * weight))
    optimizer, constant = make([param]), 1 / (2 * PRODUCT)
    burn, steps = round(8 * constant), round(24 * constant)
    squares = turns = 0.0
    for step in range(burn + steps):
        before = param.detach().numpy().copy()
        norm_sq = float((before**2).sum())
        noise = rng.standard_normal(shape)
        noise -= (noise * before).sum() / norm_sq * before
        param.grad = torch.from_numpy(noise / math.sqrt(norm_sq))
        optimizer.step()
        if step >= burn:
            after = param.detach().numpy()
            chord = after / np.linalg.norm(after) - before / math.sqrt(norm_sq)
            squares += norm_sq / steps
            turns += float((chord**2).sum()) / steps
    return 2 * math.asin(math.sqrt(turns) / 2), math.sqrt(squares)


def main() -> None:
    torch.set_num_threads(1)
    known = [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []
    done = {(entry["name"], tuple(entry["shape"])): entry for entry in known}
    for name, make in CASES.items():
        for shape in SHAPES:
            if (name, shape) in done:
                continue
            law, there = predicted(make, shape)
            angle, norm = walked(make, shape, 1.2 * float(there.norm or 1.0))
            entry = {"name": name, "shape": shape, "law": law, "angle": angle, "norm": norm}
            entry |= {"angle_error": float(there.angle) / angle - 1, "norm_error": float(there.norm or 0.0) / norm - 1}
            done[name, shape] = entry
            with RUNS.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(name, shape, law, f"{100 * entry['angle_error']:+.2f} {100 * entry['norm_error']:+.2f}", flush=True)
    lines = ["# Muon as it is used, shape by shape", "", *(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    lines += [
        "| optimizer | shape | law | angle | norm | angle, error | norm, error |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in done.values():
        rows, columns = entry["shape"]
        errors = " | ".join(f"{100 * entry[key]:+.2f} %" for key in ("angle_error", "norm_error"))
        numbers = f"{entry['angle']:.4g} | {entry['norm']:.4g}"
        lines.append(f"| {entry['name']} | {rows}x{columns} | {entry['law']} | {numbers} | {errors} |")
    worst = [max(abs(entry[key]) for entry in done.values()) for key in ("angle_error", "norm_error")]
    met = max(worst) <= TARGET
    lines += [
        "",
        f"Worst: angle {100 * worst[0]:.2f} %, norm {100 * worst[1]:.2f} %; target {'met' if met else 'missed'}.",
    ]
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print(lines[-1])


if __name__ == "__main__":
    main()
