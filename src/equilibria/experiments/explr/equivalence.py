"""explr-equivalence: weight decay is an exponentially growing learning rate, exactly (theorems 2.1 and 2.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from equilibria.experiments.claim import Claim, Source, at_least, at_most, near, to_rounding
from equilibria.experiments.experiment import Arrays, Experiment, Findings, Outcome
from equilibria.experiments.explr.folded_runs import SCHEDULES, Config, run_task, tasks
from equilibria.experiments.figures import COLOURS, THEORY, panels, title
from equilibria.theory.exponential import constant_schedule, decay_roots, overflow_horizon
from equilibria.theory.folding import fold

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EXACT = Source(
    "explr",
    "Theorem 2.5",
    corrected="indices, and the sign of the starting velocity; our recursion has no division by lr and allows lr = 0",
    law="folding.fold",
)
_POWER = Source(
    "explr",
    "Theorem 2.1",
    corrected="from an empty buffer the lr is not a pure power alpha^(-2t-1); that needs the buffer w_0 (1-1/alpha)/lr",
    law="exponential.power_schedule",
)
_EPOCH = Source("explr", "Section 2.1, PreResNet32", law="exponential.decay_roots")
_FLOAT32 = Source("", "explr Theorem 2.5, beyond", law="switching.renormalisation")
_FEW = 10  # deviations of two runs that differ by rounding alone have no sharper law than their order of magnitude


def collect(config: Config, found: Findings) -> Outcome:
    """The same network function under every schedule, to rounding; the pure power; the long run."""
    rounding = max(float(found[name]["rounded"].max()) for name in SCHEDULES)
    claims = [
        *(_judge_schedule(name, found[name]) for name in SCHEDULES),
        *_judge_power(config, found["power"], rounding),
        *_judge_long(config, found["float32"]),
    ]
    numbers = {
        name: {
            "largest_deviation_in_train_mode": float(found[name]["train"].max()),
            "largest_deviation_in_eval_mode": float(found[name]["eval"].max()),
            "the_same_of_one_more_rounding": float(found[name]["rounded"].max()),
            "last_folded_lr": float(found[name]["folded_lr"][-1]),
        }
        for name in SCHEDULES
    }
    return Outcome(claims, numbers)


def _judge_schedule(name: str, run: Arrays) -> Claim:
    return at_most(
        f"{SCHEDULES[name].capitalize()}: largest relative deviation of the logits, train and eval mode, "
        f"within {_FEW} times what one more rounding of the weights per step does",
        _EXACT,
        bound=_FEW * float(run["rounded"].max()),
        measured=max(float(run["train"].max()), float(run["eval"].max())),
    )


def _judge_power(config: Config, power: Arrays, rounding: float) -> list[Claim]:
    steps = np.arange(config.steps)
    closed = constant_schedule(config.lr, config.weight_decay, step=steps, momentum=config.momentum)
    recursion = fold(np.full(config.steps, config.lr), weight_decay=config.weight_decay, momentum=config.momentum)
    growth = float(decay_roots(0.1, 5e-4, momentum=0.9).z1) ** (-2 * 391)
    return [
        at_most(
            "lr growing by one factor, with the buffer it needs: largest deviation of the logits",
            _POWER,
            bound=_FEW * rounding,
            measured=float(power["with_buffer"].max()),
        ),
        at_least(
            "lr growing by one factor from an empty buffer: another run: largest deviation of the logits",
            _POWER,
            bound=1e6 * rounding,
            measured=float(power["without_buffer"].max()),
        ),
        to_rounding(
            "Constant lr: closed form of the folded lr against the recursion, largest relative difference",
            Source("explr", "Theorem 2.1", law="exponential.constant_schedule"),
            error=float(np.max(np.abs(closed.lr / recursion.lr - 1))),
            operations=10 * config.steps,
        ),
        near(
            "PreResNet32 (lr 0.1, weight decay 5e-4, momentum 0.9, 391 steps): growth of the lr per epoch",
            _EPOCH,
            expected=1.481,
            measured=growth,
            absolute=0.0005,
        ),
    ]


def _judge_long(config: Config, run: Arrays) -> list[Claim]:
    horizon = overflow_horizon(config.lr, config.long_decay, momentum=config.long_momentum)
    assert horizon.lr is not None
    clean = int(run["clean"])
    plain, folded = run["losses"][:, run["losses"].shape[1] // 4 :]
    error = math.hypot(plain.std(ddof=1), folded.std(ddof=1)) / math.sqrt(len(plain)) / plain.mean()
    return [
        near(
            "float32 without renormalisation: steps until the lr is too large for the type",
            Source("", "explr Theorem 2.1, beyond", law="exponential.overflow_horizon"),
            expected=horizon.lr,
            measured=float(run["broken"]),
            absolute=1,
            unit="steps",
        ),
        at_most(
            f"float32 with powers of two divided out: steps whose logits differ in any bit, of the first {clean:,}, "
            "after which a variance overflows without",
            _FLOAT32,
            bound=0,
            measured=float(run["different"]),
            unit="steps",
        ),
        at_least(
            "float32: by the end the weights would have grown by, as a power of ten",
            _FLOAT32,
            bound=math.log10(float(np.finfo(np.float32).max)),
            measured=float(run["log_scale"][-1]) / math.log(10) if run["finite"] else math.nan,
        ),
        near(
            "float32: mean loss of the folded run over that of the run with weight decay, after the first quarter",
            _FLOAT32,
            expected=1.0,
            measured=float(folded.mean() / plain.mean()),
            absolute=4 * error,
        ),
    ]


def draw(config: Config, found: Findings) -> Mapping[str, Figure]:
    """Deviations, folded lrs, the long run's numbers and its loss."""
    figure, (apart, rates, scales, losses) = panels(2, 2)
    for (name, label), colour in zip(SCHEDULES.items(), COLOURS, strict=False):
        run = found[name]
        steps = np.arange(len(run["lr"]))
        apart.plot(steps, run["train"], color=colour, lw=0.7)
        rates.plot(steps, np.where(run["folded_lr"] > 0, run["folded_lr"], np.nan), color=colour, label=label)
    rounding = np.max([found[name]["rounded"] for name in SCHEDULES], axis=0)
    apart.plot(rounding, color=THEORY, ls="--", lw=0.9, label="one more rounding per step (largest)")
    apart.plot(found["power"]["without_buffer"], color=COLOURS[6], lw=0.9, label="pure power, empty buffer")
    apart.set(yscale="log", xlabel="step", ylabel="relative deviation of the logits", ylim=(1e-17, 1e6))
    apart.legend(loc="upper right")
    title(apart, "a", "with weight decay against without, float64")
    closed = constant_schedule(config.lr, config.weight_decay, step=np.arange(config.steps), momentum=config.momentum)
    rates.plot(closed.lr, color=THEORY, ls="--", lw=0.9, label="closed form, constant")
    rates.set(yscale="log", xlabel="step", ylabel="lr without weight decay", ylim=(1e-6, 1e6))
    rates.legend(loc="upper left", ncols=2)
    title(rates, "b", "the lr that replaces weight decay")
    _draw_long(scales, losses, config, found["float32"])
    return {"theorem-2-5": figure}


def _draw_long(scales: Axes, losses: Axes, config: Config, run: Arrays) -> None:
    steps = (np.arange(len(run["norm"])) + 1) * config.long_steps / len(run["norm"])
    scales.plot(steps, run["log_scale"] / math.log(10), color=COLOURS[1], label="growth $P$ (never stored)")
    scales.plot(steps, np.log10(run["norm"]), color=COLOURS[0], label="norm of the stored weights")
    scales.axhline(math.log10(np.finfo(np.float32).max), color=THEORY, lw=0.8, ls=":", label="largest float32")
    scales.axvline(float(run["broken"]), color=COLOURS[2], lw=0.9, ls="--", label="breaks without renormalisation")
    scales.set(xlabel="step", ylabel="$\\log_{10}$", ylim=(None, 1.6 * float(run["log_scale"][-1]) / math.log(10)))
    scales.legend(loc="upper left")
    title(scales, "c", "float32, for long")
    for values, colour, label in zip(run["losses"], COLOURS, ("with weight decay", "folded"), strict=False):
        losses.plot(steps, values, color=colour, lw=0.8, alpha=0.8, label=label)
    losses.set(xlabel="step", ylabel="training loss, mean of 100 steps")
    losses.margins(y=0.25)
    losses.legend(loc="upper right", ncols=2)
    title(losses, "d", "float32: the two runs")


EXPERIMENT = Experiment(
    id="explr-equivalence",
    title="Weight decay is a growing learning rate, exactly and for any schedule",
    source="explr thm. 2.1, 2.5",
    scales={
        "smoke": Config(steps=60, power_steps=60, long_decay=0.5, long_momentum=0.5, long_steps=800),
        "desk": Config(),
        "paper": Config(),
    },
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
)
