"""The picture of the README: the demo's learning-rate drop, as everybody does it and with the weights rescaled.

equilibria demo && python docs/figures/demo.py    # reads equilibria-demo/, writes docs/demo.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

import equilibria as eq

MEASURED, PREDICTED, GOAL, NAIVE = "#009e73", "#0b4f8a", "#d55e00", "#868e97"
DROP, STRETCH = 1500, 50


def draw(axes: Axes, run: Path) -> None:
    """Every layer's measured angle as dots, over the recursion, the equilibrium and what the lr alone says."""
    samples = eq.read_run(run).samples().to_pydict()
    table = {
        name: np.array(samples[name]) for name in ("step", "param", "angle", "angle_predicted", "angle_equilibrium")
    }
    known = [name for name in dict.fromkeys(samples["param"]) if _is_predicted(table, name)]
    predicted = []
    for name in known:
        own = table["param"] == name
        step = table["step"][own].reshape(-1, STRETCH).mean(1)
        axes.plot(step, _rms(table["angle"][own]), "o", color=MEASURED, ms=3.4, alpha=0.5, mec="none")
        predicted.append(_rms(table["angle_predicted"][own]))
    goal = _rms(table["angle_equilibrium"][table["param"] == known[0]])
    axes.plot(step, goal, "--", color=GOAL, lw=1.6)
    axes.plot(step, np.where(step < DROP, goal[0], goal[0] / 10), ":", color=NAIVE, lw=1.6)
    axes.plot(step, np.median(predicted, axis=0), color=PREDICTED, lw=1.3)
    axes.set_yscale("log")
    axes.set_ylim(0.0017, 0.06)
    axes.set_yticks([0.002, 0.005, 0.01, 0.02, 0.05], ["0.002", "0.005", "0.01", "0.02", "0.05"])
    axes.minorticks_off()
    axes.set_xlim(0, 4500)
    axes.set_xlabel("optimizer step")
    axes.spines[["top", "right"]].set_visible(False)


def _is_predicted(table: dict[str, np.ndarray], name: str) -> bool:
    return bool(np.isfinite(table["angle_predicted"][table["param"] == name].astype(float)).any())


def _rms(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.nanmean(values.astype(float).reshape(-1, STRETCH) ** 2, axis=1))


def steps_back() -> int:
    """From the drop until the angle is within 5 % of its new equilibrium, as `equilibria plan` says."""
    rule = eq.theory.SGD(lr=0.1, weight_decay=5e-3, momentum=0.9)
    drop = eq.plan(rule, lambda step: 0.1 if step < DROP else 0.01, steps=3 * DROP)
    return int(drop.phases[1].settle_steps or 0)


def main(folder: Path) -> None:
    """Draw both runs of a demo."""
    plt.rcParams.update(
        {"font.size": 10.5, "font.family": "sans-serif", "axes.titlesize": 12, "axes.titleweight": "bold"}
    )
    figure, (plain, rescaled) = plt.subplots(1, 2, figsize=(10.4, 3.9), sharey=True, layout="constrained")
    draw(plain, folder / "plain")
    draw(rescaled, folder / "rescaled")
    plain.set_title("You divide the lr by 10", loc="left")
    rescaled.set_title("The same with RescaleOnDecay", loc="left")
    plain.set_ylabel("angle per step, rad (every layer)")
    plain.text(2250, 0.0083, "what lr × wd asks for: ÷ 3.2", color=GOAL)
    plain.text(2450, 0.0019, "what the lr alone says: ÷ 10", color="#6b7280")
    plain.text(
        2600, 0.0037, f"predicted: {steps_back():,} steps\nuntil within 5 %", color=PREDICTED, weight="bold", va="top"
    )
    plain.text(260, 0.0285, "measured, 6 layers", color=MEASURED, weight="bold")
    rescaled.text(1650, 0.0083, "settled at once", color=PREDICTED, weight="bold")
    figure.savefig(Path(__file__).parents[1] / "demo.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "equilibria-demo"))
