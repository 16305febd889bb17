"""What watching costs: the time inside the optimizer's hooks, measured in real training steps, all methods in one run.

A segment trains with one method attached; its ratio is the time of the segment over the same without what the hooks
took, so that a slow moment of the machine cancels out. Segments of all methods alternate, and medians are kept.
`floor` is the time to read weight, gradient and momentum buffer (or the copy of the weight) once, at the bandwidth
measured in the same run. Run it with `make bench`, on an idle machine.

cockpit (`pip install cockpit-for-pytorch "setuptools<81"`) is measured too where it is installed. It works around the
backward pass, not in hooks: its time is that of its steps less that of plain ones.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import importlib.util
import inspect
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import equilibria as eq
from equilibria.lab.nets import BasicBlockResNet
from equilibria.tensors import inner_products
from publishing import publish

ROUNDS = 3
STEPS = {"resnet": 8, "mlp": 32}  # per segment, of which the first few only warm up
WARM_UP = 8
AUTO = 20  # times as many with every="auto", which samples more often at the start of a run


@dataclass
class Bench:
    """A network, its data and its optimizer."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor

    def targets(self) -> Tensor:
        return torch.randint(0, 10, (len(self.inputs),))  # new ones: a net that has learnt them has no gradient

    def step(self) -> None:
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(self.inputs), self.targets()).backward()
        self.optimizer.step()

    @property
    def weights(self) -> list[Tensor]:
        return [param for param in self.model.parameters() if param.ndim >= 2]


def benches() -> Iterator[Bench]:
    for kind in ("sgdm", "adamw"):
        for name in ("resnet", "mlp"):
            torch.manual_seed(0)
            model, inputs = (
                (resnet(), torch.randn(64, 3, 32, 32)) if name == "resnet" else (mlp(), torch.randn(32, 512))
            )
            yield Bench(f"{name}, {kind}", model, optimizer(kind, model), inputs)


def resnet() -> nn.Module:
    return BasicBlockResNet(16, (2, 2, 2, 2), in_channels=3)


def mlp() -> nn.Module:
    sizes = [512, 1900, 1900, 1700, 10]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(sizes[:-1]):
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgdm":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


# ---- the methods


def watched(every: int | str) -> Callable[[Bench], AbstractContextManager[object]]:
    return lambda bench: eq.watch(bench.model, bench.optimizer, every=every)


@contextmanager
def without_numba(bench: Bench) -> Iterator[None]:
    """`watch` as in an environment where numba is not installed: torch forms the products."""
    compiled, inner_products._compiled_loops = inner_products._compiled_loops, lambda: None
    try:
        with eq.watch(bench.model, bench.optimizer, every=1):
            yield
    finally:
        inner_products._compiled_loops = compiled


@contextmanager
def naive(bench: Bench) -> Iterator[None]:
    """What people write by hand: clone, then norms and the angle through a cosine, one number at a time."""
    copies: list[Tensor] = []

    def before(*_: object) -> None:
        copies[:] = [weight.detach().clone() for weight in bench.weights]

    def after(*_: object) -> None:
        for weight, old in zip(bench.weights, copies, strict=True):
            weight.norm().item(), weight.grad.norm().item()
            torch.acos(functional.cosine_similarity(weight.flatten(), old.flatten(), dim=0)).item()

    handles = [bench.optimizer.register_step_pre_hook(before), bench.optimizer.register_step_post_hook(after)]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def norms_and_cosines(bench: Bench) -> Iterator[None]:
    """The metrics of composer's OptimizerMonitor for Adam: norms of gradient, moments and update, and cosines."""

    def after(*_: object) -> None:
        group = bench.optimizer.param_groups[0]
        for weight in bench.weights:
            state, gradient = bench.optimizer.state[weight], weight.grad
            gradient.norm()
            if "exp_avg" in state:
                moment, second = state["exp_avg"], state["exp_avg_sq"].sqrt()
                update = moment / (second + group["eps"]) * group["lr"] + group["weight_decay"] * weight
                for vector in (moment, second, weight, update):
                    vector.norm()
                functional.cosine_similarity(gradient.flatten(), moment.flatten(), dim=0)
                functional.cosine_similarity(update.flatten(), gradient.flatten(), dim=0)

    handle = bench.optimizer.register_step_post_hook(after)
    yield
    handle.remove()


@contextmanager
def cockpit(bench: Bench) -> Iterator[Callable[[], None]]:
    """cockpit's cheapest preset, the only one that takes BatchNorm; at every step."""
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration

    model = extend(copy.deepcopy(bench.model), use_converter=False)
    mean, each = (extend(nn.CrossEntropyLoss(reduction=how)) for how in ("mean", "none"))
    optimizer = type(bench.optimizer)(model.parameters(), lr=bench.optimizer.param_groups[0]["lr"])
    watcher = Cockpit(model.parameters(), quantities=configuration("economy"))
    count = itertools.count()

    def step() -> None:
        optimizer.zero_grad()
        outputs, targets = model(bench.inputs), bench.targets()
        loss, single = mean(outputs, targets), each(outputs, targets)
        info = {"batch_size": len(targets), "individual_losses": single, "loss": loss, "optimizer": optimizer}
        number = next(count)
        with watcher(number, info=info):
            loss.backward(create_graph=watcher.create_graph(number))
        optimizer.step()

    yield step


METHODS: dict[str, Callable[[Bench], AbstractContextManager[object]]] = {
    "plain": lambda _bench: nullcontext(),
    "watch, every=1": watched(1),
    "watch, every=auto": watched("auto"),
    "watch, every=1, without numba": without_numba,
    "naive loop": naive,
    "composer's metrics": norms_and_cosines,
}
if importlib.util.find_spec("cockpit"):
    METHODS["cockpit, economy"] = cockpit


# ---- measuring


class HookTime:
    """Adds up what the hooks of an optimizer take: each of them is timed by itself."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.seconds = 0.0

    @contextmanager
    def around(self, make: Callable[[Bench], AbstractContextManager[object]]) -> Iterator[Callable[[], None]]:
        optimizer = self._bench.optimizer
        with make(self._bench) as made:
            for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
                hooks.update({key: self._timed(hook) for key, hook in hooks.items()})
            yield made if inspect.isfunction(made) else self._bench.step

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            begin = time.perf_counter()
            hook(*args)
            self.seconds += time.perf_counter() - begin

        return timed


@dataclass(frozen=True)
class Segment:
    """Seconds per step of one method: in all, and inside the hooks."""

    step: float
    hooks: float

    @property
    def ratio(self) -> float:
        return self.step / (self.step - self.hooks)


def segment(bench: Bench, make: Callable[[Bench], AbstractContextManager[object]], steps: int) -> Segment:
    timer = HookTime(bench)
    with timer.around(make) as step:
        for _ in range(WARM_UP):
            step()
        timer.seconds, begin = 0.0, time.perf_counter()
        for _ in range(steps):
            step()
        spent = time.perf_counter() - begin
    return Segment(spent / steps, timer.seconds / steps)


def floor(bench: Bench) -> float:
    """Seconds to read three vectors as long as the watched weights, each once: together they do not fit a cache."""
    vectors = [torch.randn(sum(weight.numel() for weight in bench.weights)) for _ in range(3)]
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        for vector in vectors:
            torch.dot(vector, vector)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(bench: Bench) -> dict[str, Segment]:
    """Method -> the segment with the median time inside the hooks."""
    steps = STEPS[bench.name.split(",")[0]]
    # cockpit keeps a gradient per sample: a gigabyte and minutes of time on the MLP.
    methods = {name: make for name, make in METHODS.items() if steps == STEPS["resnet"] or make is not cockpit}
    found: dict[str, list[Segment]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, make in methods.items():
            if make is cockpit and found[name]:  # several times slower than everything else: once is enough
                continue
            found[name].append(segment(bench, make, steps * (AUTO if name.endswith("auto") else 1)))
    middle = {name: sorted(each, key=lambda one: one.ratio)[len(each) // 2] for name, each in found.items()}
    for name, each in middle.items():
        if name.startswith("cockpit"):
            middle[name] = Segment(each.step, each.step - middle["plain"].step)
    return middle


LIMITS = {
    ("resnet", "watch, every=1"): 1.015,
    ("resnet", "watch, every=auto"): 1.01,
    ("mlp", "watch, every=auto"): 1.01,
}
MOST_FLOORS = 2.0  # of watch with every=1 on the network whose weights do not fit into the cache


def table() -> tuple[list[str], int]:
    """Markdown lines, and how many limits are missed."""
    lines = [
        "# What watching costs",
        "",
        f"Median of {ROUNDS} segments; torch {torch.__version__}, one thread.",
        "`ratio` is the step with the method over the same step without; `floors` is the time inside the hooks over "
        "the time to read weight, gradient and buffer once. "
        f"With every=auto: steps {WARM_UP} to {WARM_UP + AUTO * STEPS['resnet']} (resnet) or "
        f"{WARM_UP + AUTO * STEPS['mlp']} (mlp) of a run, whose samples may take a second beyond their budget.",
        "",
        "| network, optimizer | method | step, ms | in hooks, ms | ratio | floors | limit | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    missed = 0
    for bench in benches():
        lowest, kind = floor(bench), bench.name.split(",")[0]
        for name, found in measure(bench).items():
            floors = found.hooks / lowest
            limit = LIMITS.get((kind, name))
            verdict = "" if limit is None else f"ratio {limit:g} | {_verdict(found.ratio <= limit)}"
            if kind == "mlp" and name == "watch, every=1":
                verdict = f"{MOST_FLOORS:g} floors | {_verdict(floors <= MOST_FLOORS)}"
            missed += "missed" in verdict
            numbers = f"{1e3 * found.step:.1f} | {1e3 * found.hooks:.2f} | {found.ratio:.4f} | {floors:.2f}"
            lines.append(f"| {bench.name} | {name} | {numbers} | {verdict or '|'} |")
            print(lines[-1], flush=True)
    return lines, missed


def _verdict(good: bool) -> str:
    return "ok" if good else "**missed**"


def main() -> int:
    torch.set_num_threads(1)
    lines, missed = table()
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
