"""The picture of the README: the demo's learning-rate drop in three arms, angle above and test accuracy below.

equilibria demo && python docs/figures/demo.py    # reads equilibria-demo/, writes docs/demo.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

import equilibria as eq

MEASURED, PREDICTED, EQUILIBRIUM, NAIVE, ACCURACY = "#009e73", "#0b4f8a", "#d55e00", "#868e97", "#5b3a8c"
STRETCH = 50  # steps per point
TITLES = {
    "plain": "You divide the lr by {drop:g}",
    "rescaled": "The same with RescaleOnDecay",
    "less_decay": "The same with weight decay / {drop:g}",
}


def draw_angles(axes: Axes, run: Path, settings: dict[str, Any]) -> None:
    """Every layer's measured angle as dots, over the prediction, the equilibrium and the angle by the lr alone."""
    samples = eq.read_run(run).samples().to_pydict()
    names = ("step", "param", "angle", "angle_predicted", "angle_equilibrium")
    table = {name: np.array(samples[name]) for name in names}
    layers = [name for name in dict.fromkeys(samples["param"]) if _is_predicted(table, name)]
    predicted = []
    for name in layers:
        own = table["param"] == name
        step = table["step"][own].reshape(-1, STRETCH).mean(1)
        axes.plot(step, _rms(table["angle"][own]), "o", color=MEASURED, ms=3.0, alpha=0.5, mec="none")
        predicted.append(_rms(table["angle_predicted"][own]))
    equilibrium = _rms(table["angle_equilibrium"][table["param"] == layers[0]])
    after = step >= settings["steps_before"]
    axes.plot(step, equilibrium, "--", color=EQUILIBRIUM, lw=1.6)
    axes.plot(step, np.where(after, equilibrium[0] / settings["drop"], equilibrium[0]), ":", color=NAIVE, lw=1.6)
    axes.plot(step, np.median(predicted, axis=0), color=PREDICTED, lw=1.3)
    axes.set_yscale("log")
    axes.set_ylim(0.0015, 0.06)
    axes.set_yticks([0.002, 0.005, 0.01, 0.02, 0.05], ["0.002", "0.005", "0.01", "0.02", "0.05"])
    axes.minorticks_off()


def _is_predicted(table: dict[str, np.ndarray], name: str) -> bool:
    return bool(np.isfinite(table["angle_predicted"][table["param"] == name].astype(float)).any())


def _rms(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.nanmean(values.astype(float).reshape(-1, STRETCH) ** 2, axis=1))


def draw_accuracy(axes: Axes, arm: dict[str, Any], settings: dict[str, Any]) -> None:
    """Test accuracy at every measurement, and its mean over the last steps."""
    steps, accuracies = np.array(arm["accuracy_steps"]), 100 * np.array(arm["accuracies"])
    axes.plot(steps[1:], accuracies[1:], color=ACCURACY, lw=1.2)
    last = steps > steps[-1] - settings["steady_window"]
    mean = accuracies[last].mean()
    axes.plot(steps[last], np.full(last.sum(), mean), color=ACCURACY, lw=3, alpha=0.4)
    axes.text(steps[-1], mean - 1.2, f"{mean:.1f} %", color=ACCURACY, weight="bold", ha="right", va="top")
    axes.set_xlabel("optimizer step")


def steps_back(settings: dict[str, Any]) -> int:
    """Steps from the drop until the angle is within 5 % of its new equilibrium, as `equilibria plan` predicts."""
    lr, drop, at = settings["lr"], settings["drop"], settings["steps_before"]
    rule = eq.theory.SGD(lr=lr, weight_decay=settings["weight_decay"], momentum=settings["momentum"])
    plan = eq.plan(rule, lambda step: lr if step < at else lr / drop, steps=at + 2 * settings["steps_after"])
    return int(plan.phases[1].settle_steps or 0)


def main(folder: Path) -> None:
    """Draw all arms of a demo."""
    demo = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    settings = demo["settings"]
    drop, steps = settings["steps_before"], settings["steps_before"] + settings["steps_after"]
    plt.rcParams.update(
        {"font.size": 10.5, "font.family": "sans-serif", "axes.titlesize": 12, "axes.titleweight": "bold"}
    )
    figure, rows = plt.subplots(
        2, 3, figsize=(12.6, 5.6), sharex=True, sharey="row", layout="constrained", height_ratios=[3, 2]
    )
    for angle, accuracy, (arm, title) in zip(*rows, TITLES.items(), strict=True):
        draw_angles(angle, folder / arm, settings)
        draw_accuracy(accuracy, demo[arm], settings)
        angle.set_title(title.format(**settings), loc="left")
        for axes in (angle, accuracy):
            axes.set_xlim(0, steps)
            axes.axvline(drop, color="#d5d9de", lw=0.8, zorder=0)
            axes.spines[["top", "right"]].set_visible(False)
    (plain, rescaled, less_decay), (plain_accuracy, *_) = rows
    plain.set_ylabel("angle per step, rad")
    plain_accuracy.set_ylabel("test accuracy, %")
    plain_accuracy.set_ylim(92, 100)
    root = settings["drop"] ** 0.5
    plain.text(drop + 150, 0.0083, f"equilibrium, sqrt(lr × wd): ÷ {root:.1f}", color=EQUILIBRIUM)
    plain.text(drop + 400, 0.0017, f"the lr alone: ÷ {settings['drop']:g}", color="#6b7280")
    back = f"predicted: {steps_back(settings):,} steps\nuntil within 5 %"
    plain.text(drop + 900, 0.0037, back, color=PREDICTED, weight="bold", va="top")
    plain.text(150, 0.0295, "measured, 6 layers", color=MEASURED, weight="bold")
    rescaled.text(drop + 150, 0.0083, "settled at once, ÷ 3.2", color=PREDICTED, weight="bold")
    less_decay.text(drop + 150, 0.0034, "settled at once, ÷ 10", color=PREDICTED, weight="bold")
    figure.savefig(Path(__file__).parents[1] / "demo.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "equilibria-demo"))
