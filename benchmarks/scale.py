"""What watching costs when a model is sharded: measured on two processes, computed for 1 B and 100 B parameters.

Measured with FSDP2 on two gloo processes, language models of 1 to 50 M parameters, AdamW and SGD: bytes read per
parameter, collectives and the numbers in them, bytes of the record per row, and the time. The counts per parameter and
per tensor then give the costs of larger models. Writes docs/scale.md.

    python benchmarks/scale.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import equilibria as eq
from equilibria.lab.nets import GPT
from equilibria.monitor.reading import CopyProbe
from equilibria.records import read_record
from equilibria.tensors.inner_products import MovesPass, ProductsPass
from publishing import publish

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
SIZES = {"1 M": (128, 4), "10 M": (384, 6), "50 M": (704, 8)}  # width, layers
VOCABULARY, TOKENS, SENTENCES = 512, 32, 2
ROUNDS, STEPS = 3, 2
RECORDED = 200  # steps of the run whose record is measured
LARGE = {"1 B": (1792, 24, 50_304, 8), "100 B": (10_240, 80, 50_304, 1024)}  # width, layers, vocabulary, processes
BANDWIDTHS = {"A100 80 GB SXM": 2.039e12, "H100 SXM": 3.35e12, "MI300X": 5.3e12}  # bytes per second, data sheets
LAUNCH = 5e-6  # seconds on the host: 2 to 5 are usual for CUDA, more for ROCm
DAY = 86_400
SAMPLE_SECONDS = 10  # between samples, for the size of the record


def _counted() -> tuple[int, int]:
    """Launches of a sampled step with AdamW, from the page of `launches.py`: in all, and per tensor by torch alone."""
    (table,) = json.loads(Path(__file__).with_name("launches.json").read_text(encoding="utf-8"))
    case = {"tensors": 150, "optimizer": "AdamW", "every": 4}
    rows = [row for row in table["rows"] if case.items() <= row.items()]
    most = {row["kernels"]: int(row["launches"].split(",")[1]) for row in rows}
    return most["triton"], round(most["torch's"] / case["tensors"])


OURS, TORCHS = _counted()


# ---- one of the two processes


@dataclass
class Measured:
    """Costs of a sampled step, for one model and optimizer, in one process.

    Attributes:
        parameters: of the whole model.
        tensors: the number of watched tensors.
        watched: parameters in the watched tensors.
        local: those of them in this process.
        read: bytes of weights, gradients, copies and buffers that an isolated sample read or wrote.
        collectives: the size of each all-reduce of a sample.
        added: by name, the number of additional collectives of a sampled step.
        ratios: time of a step when every step is sampled over its time without the hooks, round by round.
    """

    name: str
    optimizer: str
    parameters: int
    tensors: int
    watched: int
    local: int
    read: int
    collectives: list[int]
    added: dict[str, int]
    ratios: list[float]


class Traffic:
    """Counts the bytes that a sample reads and the numbers that it sends, by wrapping the functions that do it."""

    def __init__(self) -> None:
        self.bytes, self.collectives = 0, list[int]()

    @contextmanager
    def counting(self) -> Iterator[None]:
        wrappers = [
            (ProductsPass, "add", self._reader),
            (MovesPass, "add", self._reader),
            (CopyProbe, "remember", self._copier),
            (dist, "all_reduce", self._sender),
        ]
        replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in wrappers]
        for owner, name, wrap in wrappers:
            setattr(owner, name, wrap(getattr(owner, name)))
        yield
        for owner, name, original in replaced:
            setattr(owner, name, original)

    def _reader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add(one_pass: Any, place: int, *tensors: Any, **named: Any) -> Any:
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
            if named.get("refresh"):  # the pass also writes the copy
                self.bytes += tensors[0].numel() * tensors[0].element_size()
            return original(one_pass, place, *tensors, **named)

        return add

    def _copier(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def remember(probe: Any, copies: Any, **named: Any) -> Any:
            before = None if probe._copy is None else len(copies._pairs)
            result = original(probe, copies, **named)
            if before is None or len(copies._pairs) > before:
                self.bytes += 2 * probe._copy.numel() * probe._copy.element_size()
            return result

        return remember

    def _sender(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            self.collectives.append(tensor.numel())
            return original(tensor, *args, **named)

        return all_reduce


def optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    return {
        "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1),
        "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3),
    }


def sharded(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    net = GPT(VOCABULARY, width, layers=layers, heads=4, context=TOKENS)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(VOCABULARY, (SENTENCES, TOKENS + 1))
    optimizer.zero_grad()
    functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def hook_seconds(optimizer: torch.optim.Optimizer) -> list[float]:
    """Seconds of every hook of the optimizer from now on, by the clock: a collective waits for the other process."""
    spent: list[float] = []

    def timed(hook: Callable[..., None]) -> Callable[..., None]:
        def inside(*args: object) -> None:
            begin = time.perf_counter()
            hook(*args)
            spent.append(time.perf_counter() - begin)

        return inside

    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        hooks.update({key: timed(hook) for key, hook in hooks.items()})
    return spent


def one_sample(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Traffic, dict[str, int]]:
    """The traffic of an isolated sample, which is the default (if the next step is sampled too, its copy costs less),
    and the additional collectives of a sampled step, from whatever code.
    """
    traffic = Traffic()
    with eq.watch(net, optimizer, every=2):
        for _ in range(2):
            step(net, optimizer)
        with traffic.counting():
            step(net, optimizer)
        others = collectives_of_step(net, optimizer)
        sampled = collectives_of_step(net, optimizer)
    assert others, "FSDP gathers and scatters at every step; CommDebugMode counted nothing"
    assert set(others) <= set(sampled), (others, sampled)
    return traffic, dict(sampled - others)


def collectives_of_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Counter[str]:
    with CommDebugMode() as collectives:
        step(net, optimizer)
    return Counter({str(name): count for name, count in collectives.get_comm_counts().items()})


def measured(name: str, kind: str) -> Measured:
    net = sharded(*SIZES[name])
    optimizer = optimizers()[kind](net)
    traffic, added = one_sample(net, optimizer)
    with eq.watch(net, optimizer, every=1) as run:
        names = {param["name"] for param in run.metadata["params"]}
        step(net, optimizer)  # copies are made
        spent, ratios = hook_seconds(optimizer), []
        for _ in range(ROUNDS):
            spent.clear()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step(net, optimizer)
            total = time.perf_counter() - begin
            ratios.append(total / (total - sum(spent)))
        assert run.failure is None, run.failure
    tensors = {name: param for name, param in net.named_parameters() if name in names}
    return Measured(
        name,
        kind,
        sum(param.numel() for param in net.parameters()),
        len(tensors),
        sum(param.numel() for param in tensors.values()),
        sum(param.to_local().numel() for param in tensors.values()),
        traffic.bytes,
        traffic.collectives,
        added,
        ratios,
    )


def worker(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [measured(name, kind) for kind in optimizers() for name in SIZES]
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


# ---- the parent


def two_processes() -> list[Measured]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen([sys.executable, __file__, folder], env={**os.environ, **shared, "RANK": str(rank)})
            for rank in range(2)
        ]
        codes = [process.wait() for process in processes]
        assert codes == [0, 0], f"the processes ended with {codes}"
        return [Measured(**row) for row in json.loads(Path(folder, "measured.json").read_text())]


def record_bytes_per_row() -> tuple[float, int]:
    """Bytes in the directory of a real run per row, and its rows."""
    torch.manual_seed(0)
    net = GPT(64, 16, layers=4, heads=2, context=TOKENS)
    optimizer = optimizers()["AdamW"](net)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "run")
        with eq.watch(net, optimizer, every=1, log_dir=directory):
            for _ in range(RECORDED):
                tokens = torch.randint(64, (2, TOKENS + 1))
                optimizer.zero_grad()
                functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
        rows = read_record(directory).samples(["step"]).num_rows
        return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / rows, rows


@dataclass(frozen=True)
class Large:
    """A model that is not run: a transformer of six matrices a layer, embedding and head."""

    name: str
    width: int
    layers: int
    vocabulary: int
    processes: int

    @property
    def tensors(self) -> int:
        return 6 * self.layers + 2

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.width**2 + 2 * self.vocabulary * self.width


def numbers_per_tensor(rows: list[Measured]) -> tuple[float, float]:
    """Slope and intercept of the numbers in the collectives over the number of tensors, from two models."""
    small, large = (pick(rows, key=lambda row: row.tensors) for pick in (min, max))
    slope = (sum(large.collectives) - sum(small.collectives)) / (large.tensors - small.tensors)
    return slope, sum(small.collectives) - slope * small.tensors


def page(rows: list[Measured], per_row: float, recorded: int, load: float) -> str:
    slope, rest = numbers_per_tensor(rows)
    per_parameter = {kind: max(row.read / row.local for row in rows if row.optimizer == kind) for kind in optimizers()}
    lines = [
        "# What watching costs at scale",
        "",
        "On a sampled step each process reads its shard of every watched tensor, the processes add their sums in one "
        "all-reduce of a few numbers per tensor, and one process writes a row per tensor. No tensor is gathered: that "
        "all-reduce is the only additional collective. Other steps cost a few checks.",
        "",
        f"Written by `python benchmarks/scale.py`; torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} "
        f"cores, load at the beginning {load:.1f}.",
        "",
        "## Measured: FSDP2 on two processes",
        "",
        f"Language models on gloo, main memory, float32, one thread each, {SENTENCES} x {TOKENS} tokens per process "
        "and step: far fewer tokens per parameter than in real training, which makes watching look expensive, and slow "
        "collectives, which make it look cheap. The ratio is the time of a step when **every** step is sampled over "
        f"its time without the hooks, by the clock, median and range of {ROUNDS} rounds; by default the monitor "
        "samples as many steps as cost 0.5 %.",
        "",
        "| parameters | optimizer | watched tensors | bytes read and written per local parameter "
        "| collectives per sample | numbers in them | step watched / unwatched |",
        "|---|---|---|---|---|---|---|",
        *(_measured_row(row) for row in rows),
        "",
        "torch's `CommDebugMode` counts the collectives of a whole sampled step and of one that is not sampled. "
        f"They hold {slope:g} numbers (float64) per watched tensor and {rest:g} more. With SGD, a sample reads weight, "
        "gradient and momentum buffer once, before the step: 12 bytes per parameter. With any other optimizer it "
        "copies the weights before the step (read and written), and reads copy, weight and gradient after it: 20 "
        "bytes, and one more copy of the watched weights in memory.",
        "",
        f"A row of the record takes {per_row:.0f} bytes on disk: the size of the directory of a run of {recorded:,} "
        "rows, divided by its rows.",
        "",
        "## Computed: 1 B and 100 B parameters",
        "",
        "From the counts above, for a transformer with six matrices a layer, embedding and head, all of them watched "
        f"as whole tensors, AdamW with float32 weights, and a sample every {SAMPLE_SECONDS} s.",
        "",
        "| | " + " | ".join(LARGE) + " |",
        "|---|" + "---|" * len(LARGE),
        *_computed_rows(per_parameter["AdamW"], slope, rest, per_row),
        "",
        'With `granularity="row"` each row of a tensor has its own numbers and its own row in the record: name a few '
        'tensors, `granularity={"embedding.weight": "row"}`.',
        "Matrices that are stacked in one parameter of three axes, as experts often are, have their own rows "
        'unasked up to 64 of them; `{"*.experts.*": "tensor"}` joins them.',
        "",
        "## Computed: the time on a GPU",
        "",
        "**Nothing here was measured on a GPU: we have none.** The bytes above over the published bandwidth of "
        f"the device's memory, and {OURS} launches of our own kernels ([counted](../benchmarks/launches.md)) at "
        f"{1e6 * LAUNCH:g} µs each: what a sampled step would take if the kernels ran at that bandwidth and "
        f"nothing overlapped. Without triton torch asks for some {TORCHS} launches per tensor, fewer of sharded ones, "
        "whose D(n) is left out. Whole 16-bit weights without masters ask for one launch more, two with step counters "
        "on the device, and send up to 16 kB a tensor to main memory (AdamW), for the update that was intended before "
        "rounding. Left out: the all-reduce, and a few launches of torch that pack its numbers where tensors are "
        "sharded, for which the host waits once per sample. `equilibria bench` measures all of it on your device.",
        "",
        "| | " + " | ".join(LARGE) + " |",
        "|---|" + "---|" * len(LARGE),
        *_gpu_rows(per_parameter["AdamW"]),
        "",
        "## Accuracy",
        "",
        "In main memory products and sums are float64. On a GPU products of float32 are summed in float32, 16 at "
        "most, in 1,024 sums side by side, and these in float64: a sum is off by at most 17 x 2^-24 = 1.0e-6 of "
        "the sum of the absolute values of its terms, however many there are. Numbers below 1e-19 lose digits, and a "
        "product above 3.4e38 is infinite. So squared lengths have six digits, "
        "and cosines are off by at most 1.0e-6. The move is w' - w in float32, exact where the two differ by less "
        "than a factor of 2, and what decay removes is added back with two roundings: its length is known to 1e-6 "
        "of itself and 2^-23 x lr x wd of the weight's. The angle is as accurate where the move is perpendicular to "
        "the weight; of a move along the weight, such as that of a row of one number, up to 2e-3 of the relative "
        "update may be taken for a turn. Tests compare the kernels, in Triton's interpreter, with float64 to that "
        "bound.",
        "",
    ]
    return "\n".join(lines)


def _measured_row(row: Measured) -> str:
    middle = statistics.median(row.ratios)
    return (
        f"| {row.parameters / 1e6:.1f} M | {row.optimizer} | {row.tensors} | {row.read / row.local:.1f} "
        f"| {_named(row.added)} | {sum(row.collectives)} "
        f"| {middle:.3f} [{min(row.ratios):.3f}, {max(row.ratios):.3f}] |"
    )


def _named(added: dict[str, int]) -> str:
    return ", ".join(f"{count} `{name}`" for name, count in added.items()) or "none"


def _computed_rows(per_parameter: float, slope: float, rest: float, per_row: float) -> Iterator[str]:
    models = [Large(name, *shape) for name, shape in LARGE.items()]

    def row(label: str, of: Callable[[Large], str]) -> str:
        return f"| {label} | " + " | ".join(of(model) for model in models) + " |"

    yield row("width, layers, vocabulary", lambda model: f"{model.width}, {model.layers}, {model.vocabulary}")
    yield row("parameters", lambda model: f"{model.parameters / 1e9:.2f} B")
    yield row("processes", lambda model: f"{model.processes}")
    yield row("watched tensors", lambda model: f"{model.tensors}")
    yield row(
        "read and written per sampled step and process",
        lambda model: f"{per_parameter * model.parameters / model.processes / 1e9:.2f} GB",
    )
    yield row(
        "memory for the copy, per process", lambda model: f"{4 * model.parameters / model.processes / 1e9:.2f} GB"
    )
    yield row("numbers in the all-reduce", lambda model: f"{slope * model.tensors + rest:.0f}")
    yield row("the same in kB", lambda model: f"{8 * (slope * model.tensors + rest) / 1e3:.1f}")
    yield row("record per sample", lambda model: f"{per_row * model.tensors / 1e3:.1f} kB")
    yield row("record per day", lambda model: f"{per_row * model.tensors * DAY / SAMPLE_SECONDS / 1e6:.0f} MB")


def _gpu_rows(per_parameter: float) -> Iterator[str]:
    models = [Large(name, *shape) for name, shape in LARGE.items()]
    for gpu, bandwidth in BANDWIDTHS.items():
        read = [per_parameter * model.parameters / model.processes / bandwidth for model in models]
        cells = (f"{1e3 * (seconds + OURS * LAUNCH):.2f} ms" for seconds in read)
        yield f"| {gpu}, {bandwidth / 1e12:g} TB/s: a sampled step | {' | '.join(cells)} |"
    yield f"| of that: our launches | {' | '.join(f'{1e3 * OURS * LAUNCH:.3f} ms' for _ in models)} |"
    torchs = (f"{1e3 * TORCHS * model.tensors * LAUNCH:.0f} ms" for model in models)
    yield f"| torch's launches instead | {' | '.join(torchs)} |"


def main() -> int:
    if "RANK" in os.environ:
        worker(Path(sys.argv[1]))
        return 0
    load = os.getloadavg()[0]
    rows = two_processes()
    per_row, recorded = record_bytes_per_row()
    text = page(rows, per_row, recorded, load)
    print(text)
    publish(PAGE, text)
    goals = {
        "a sample adds one all-reduce and no other collective": all(
            row.added == {"c10d.allreduce_": 1} and len(row.collectives) == 1 for row in rows
        ),
        "at most 20 bytes read and written per local parameter": all(row.read <= 20 * row.local for row in rows),
    }
    for goal, met in goals.items():
        print(f"{'met' if met else 'MISSED'}: {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
