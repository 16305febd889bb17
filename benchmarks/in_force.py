"""Does `equilibria doctor` find settings that are not in force, and only those?

Twelve optimizers with one bug each, as they are written by accident, and sixty healthy ones: torch's and
pytorch_optimizer's with their defaults and with decay. Both lists were committed before they were run. The first run
found 8 of 12, and one finding on a healthy one: Adafactor's lr has no effect, which is true under relative_step, and
meant. The checks were mended on these lists; the first of them took AdamS, whose decay one number divides, for
coupled. So six more bugs and forty-five more healthy optimizers, "again" below, were listed after that. Their run
found 6 of 6, and one on a healthy one: the decay of pytorch_optimizer's Adafactor does not depend on lr, true for the
same reason; nothing is said of the decay any more where lr has no effect.

    pip install --no-deps pytorch_optimizer==4.1.0
    python benchmarks/in_force.py     # some minutes of one core
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import inspect
import time
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor, nn

from equilibria.optimizers.in_force import decay_in_low_precision, settings_in_force
from muon_variants import orthogonalised
from publishing import publish


class Base(torch.optim.Optimizer):
    """An optimizer of one line, whose settings are the arguments of its constructor."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.move(param, param.grad, group, self.state[param])

    def move(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


def adam(g: Tensor, betas: tuple[float, float], state: dict[str, Any]) -> Tensor:
    """Adam's update."""
    state["step"] = state.get("step", 0) + 1
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * g * g
    first, second = (1 - beta ** state["step"] for beta in betas)
    update: Tensor = state["m"] / first / ((state["v"] / second).sqrt() + 1e-10)
    return update


def heavy(g: Tensor, rate: float, state: dict[str, Any]) -> Tensor:
    """Heavy ball's buffer."""
    state["buffer"] = rate * state.get("buffer", 0.0) + g
    buffer: Tensor = state["buffer"]
    return buffer


class DecaysVectorsAlone(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        if p.ndim < 2:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * adam(g, group["betas"], state))


class AdamDecaysTwice(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        g = g + group["weight_decay"] * p
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * adam(g, group["betas"], state))


class DecaysBeforeAndAfter(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (g + group["momentum"] * heavy(g, group["momentum"], state)))
        p.mul_(1 - group["lr"] * group["weight_decay"])


class RMSpropW(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        g = g + group["weight_decay"] * p
        state["v"] = group["alpha"] * state.get("v", 0.0) + (1 - group["alpha"]) * g * g
        p.sub_(group["lr"] * g / (state["v"].sqrt() + 1e-10))


class LionW(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        g = g + group["weight_decay"] * p
        first, second = group["betas"]
        p.sub_(group["lr"] * (first * state.get("m", 0.0) + (1 - first) * g).sign())
        state["m"] = second * state.get("m", 0.0) + (1 - second) * g


class LionSquaresLr(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        first, second = group["betas"]
        update = group["lr"] * (first * state.get("m", 0.0) + (1 - first) * g).sign()
        state["m"] = second * state.get("m", 0.0) + (1 - second) * g
        p.sub_(update + group["lr"] * (group["lr"] * group["weight_decay"]) * p)


class DecaysWithoutLr(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["weight_decay"])
        p.sub_(group["lr"] * heavy(g, group["momentum"], state))


class DropsItsBuffer(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        buffer = group["momentum"] * state.get("buffer", torch.zeros_like(p)) + g  # never stored
        p.sub_(group["lr"] * (g + group["momentum"] * buffer))


class FixedBetas(Base):
    BETAS = (0.9, 0.95)

    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * adam(g, self.BETAS, state))


class MuonWithoutRoot(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        update = orthogonalised(heavy(g, group["momentum"], state))
        p.sub_(group["lr"] * max(1.0, p.shape[0] / p.shape[1]) * update)


class ReadsLrFromDefaults(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        lr = self.defaults["lr"]
        p.mul_(1 - lr * group["weight_decay"])
        p.sub_(lr * adam(g, group["betas"], state))


class LionInBfloat16(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        first, second = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (first * state.get("m", 0.0) + (1 - first) * g).sign())
        state["m"] = second * state.get("m", 0.0) + (1 - second) * g


class AdamaxDecaysTwice(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * adamax(g + group["weight_decay"] * p, group["betas"], state))


class AdamaxW(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.sub_(group["lr"] * adamax(g + group["weight_decay"] * p, group["betas"], state))


class SignumW(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.sub_(group["lr"] * heavy(g + group["weight_decay"] * p, group["momentum"], state).sign())


class LionDecaysTwice(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        g = g + group["weight_decay"] * p
        first, second = group["betas"]
        p.sub_(group["lr"] * (first * state.get("m", 0.0) + (1 - first) * g).sign())
        state["m"] = second * state.get("m", 0.0) + (1 - second) * g


class MuonByTheRatio(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        update = orthogonalised(heavy(g, group["momentum"], state))
        p.sub_(group["lr"] * p.shape[0] / p.shape[1] * update)


class ReadsDecayFromDefaults(Base):
    def move(self, p, g, group, state):  # type: ignore[no-untyped-def]
        p.mul_(1 - group["lr"] * self.defaults["weight_decay"])
        p.sub_(group["lr"] * heavy(g, group["momentum"], state))


def adamax(g: Tensor, betas: tuple[float, float], state: dict[str, Any]) -> Tensor:
    """Adamax's update, without its first steps' correction."""
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    state["u"] = torch.maximum(betas[1] * state.get("u", torch.zeros_like(g)), g.abs() + 1e-10)
    update: Tensor = state["m"] / state["u"]
    return update


_ADAM = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.98)}
_LION = {"lr": 1e-3, "weight_decay": 1.0, "betas": (0.9, 0.99)}
_HEAVY = {"lr": 0.05, "weight_decay": 0.02, "momentum": 0.85}
PLANTED: dict[str, tuple[type[Base], dict[str, Any], str]] = {
    "decay of vectors alone": (DecaysVectorsAlone, _ADAM, "weight_decay"),
    "Adam: L2 and decoupled": (AdamDecaysTwice, _ADAM, "decay twice"),
    "decay before and after the step": (DecaysBeforeAndAfter, _HEAVY, "decay twice"),
    "RMSpropW with L2": (RMSpropW, {"lr": 3e-3, "weight_decay": 0.1, "alpha": 0.98}, "coupled"),
    "LionW with L2": (LionW, _LION, "coupled"),
    "Lion: lr squared": (LionSquaresLr, _LION, "square of lr"),
    "decay without lr": (DecaysWithoutLr, {**_HEAVY, "weight_decay": 1e-3}, "does not depend on lr"),
    "a buffer that is never stored": (DropsItsBuffer, _HEAVY, "without memory"),
    "betas are constants": (FixedBetas, _ADAM, "beta1"),
    "Muon's factor without its root": (MuonWithoutRoot, {**_HEAVY, "lr": 0.02}, "unusual factor"),
    "lr is the constructor's": (ReadsLrFromDefaults, _ADAM, "lr"),
    "decay below an ulp of bfloat16": (LionInBfloat16, {**_LION, "weight_decay": 0.1}, "swallows"),
}
AGAIN: dict[str, tuple[type[Base], dict[str, Any], str]] = {
    "Adamax: L2 and decoupled": (AdamaxDecaysTwice, _ADAM, "decay twice"),
    "AdamaxW with L2": (AdamaxW, _ADAM, "coupled"),
    "SignumW with L2": (SignumW, {"lr": 1e-3, "weight_decay": 0.5, "momentum": 0.9}, "coupled"),
    "Lion: L2 and decoupled": (LionDecaysTwice, _LION, "decay twice"),
    "Muon's factor rows / columns": (MuonByTheRatio, {**_HEAVY, "lr": 0.02}, "unusual factor"),
    "decay is the constructor's": (ReadsDecayFromDefaults, _HEAVY, "weight_decay"),
}

TORCH = (  # noqa: SIM905
    "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD Adafactor Muon"
).split()
DEFAULTS = (  # noqa: SIM905
    "a2grad adadelta adafactor adagc adago adalite adammini adamuon adan adanorm adatam alice apollo bcos conda "
    "exadam flashadamw grokfastadamw kate lamb mars"
).split()
WITH_DECAY = (  # noqa: SIM905
    "adabelief adai adams adopt aggmo came diffgrad fadam grams laprop lion nero novograd padam qhm ranger sgdw "
    "signsgd soap splus stableadamw tiger yogi ademamix adamc pnm"
).split()
AGAIN_WITH_DECAY = (  # noqa: SIM905
    "adabound adadelta adafactor adalite adamg adamod adamp adanorm adatam adasmooth aida amos apollo asgd avagrad "
    "bcos conda dadaptadam exadam fira fromage galore gravity lamb lars madgrad muon normuon adamuon pid qhadam radam "
    "scion schedulefreeadamw sgdp"
).split()


def healthy_again() -> dict[str, tuple[type, dict[str, Any]]]:
    """Those listed after the checks were mended."""
    found: dict[str, tuple[type, dict[str, Any]]] = {}
    for name in TORCH:
        if name not in ("Rprop", "Muon", "Adafactor"):
            found[f"torch {name}, decay"] = getattr(torch.optim, name), {"weight_decay": 0.03}
    for name in AGAIN_WITH_DECAY:
        found[f"po {name}, decay"] = with_decay(name, 0.03)
    return found


def with_decay(name: str, decay: float) -> tuple[type, dict[str, Any]]:
    kind = pytorch_optimizer.load_optimizer(name)
    known = "weight_decay" in inspect.signature(kind.__init__).parameters
    return kind, {"weight_decay": decay} if known else {}


def healthy() -> dict[str, tuple[type, dict[str, Any]]]:
    """Name, class and settings of the first sixty."""
    found: dict[str, tuple[type, dict[str, Any]]] = {}
    for name in TORCH:
        found[f"torch {name}"] = getattr(torch.optim, name), {}
    for name in DEFAULTS:
        found[f"po {name}"] = pytorch_optimizer.load_optimizer(name), {}
    for name in WITH_DECAY:
        found[f"po {name}, decay"] = with_decay(name, 0.05)
    return found


def made(kind: type, settings: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    weight = nn.Parameter((0.1 * torch.randn(48, 32)).to(dtype))
    parameters = inspect.signature(kind.__init__).parameters
    if kind.__name__ == "AdamMini":
        return kind(nn.ParameterList([weight]), **settings)
    if parameters.get("lr") is not None and parameters["lr"].default is inspect.Parameter.empty:
        settings = {"lr": 1e-3, **settings}
    try:
        return kind([weight], **settings)
    except Exception:  # groups of a hybrid
        return kind([{"params": [weight], "use_muon": True}], **settings)


def findings(optimizer: torch.optim.Optimizer) -> list[Any]:
    group = optimizer.param_groups[0]
    swallowed = decay_in_low_precision(optimizer, group)
    return [*settings_in_force(optimizer, group), *([swallowed] if swallowed is not None else [])]


def main() -> None:
    torch.set_num_threads(1)
    lines = ["# Settings that are not in force", "", " ".join((__doc__ or "").split("\n\n")[1].split())]
    for title, planted, others in (("First", PLANTED, healthy()), ("Again", AGAIN, healthy_again())):
        lines += ["", f"## {title}", "", *examined(planted, others)]
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


def examined(
    planted: dict[str, tuple[type[Base], dict[str, Any], str]], others: dict[str, tuple[type, dict[str, Any]]]
) -> list[str]:
    """What was found on planted bugs and on healthy optimizers, as lines of the page."""
    rows, alarms, seconds = [], [], []
    for name, (kind, settings, words) in planted.items():
        dtype = torch.bfloat16 if kind is LionInBfloat16 else torch.float32
        said = findings(made(kind, settings, dtype=dtype))
        hit = "yes" if any(words in one.subject for one in said) else "no"
        rows.append((name, hit, "; ".join(f"{one.subject}: {one.evidence}" for one in said)))
    for name, (kind, settings) in others.items():
        optimizer, begin = made(kind, settings), time.process_time()
        alarms += [(name, f"{one.subject}: {one.evidence}") for one in findings(optimizer)]
        seconds.append(time.process_time() - begin)
    found = sum(row[1] == "yes" for row in rows)
    lines = [
        f"Found {found} of {len(planted)} planted bugs; {len(alarms)} findings on {len(others)} healthy optimizers. "
        f"At most {max(seconds):.1f} s of CPU an optimizer.",
        "",
        "| planted | found | findings |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    if alarms:
        lines += ["", "| healthy | finding |", "|---|---|", *(f"| {' | '.join(alarm)} |" for alarm in alarms)]
    return [*lines, "", f"Healthy: {', '.join(others)}."]


if __name__ == "__main__":
    main()
