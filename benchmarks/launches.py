"""What a sampled step asks of a GPU: launches, bytes, allocations and waits, with our kernels and without.

No GPU is needed: tensors in main memory are sent the way of those on a device, triton's interpreter runs the kernels,
and a dispatch mode counts what torch does inside the hooks. Views launch nothing and are left out. Bytes are those of
weights, gradients, moments and copies that the products read and write. Copies move small tables between host and
device: addresses when they changed, results.

Run it with `python benchmarks/launches.py` (needs triton).
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import equilibria.monitor.monitor as monitor_module
from equilibria.monitor import half_precision, reading
from equilibria.monitor.monitor import Monitor
from equilibria.tensors import _product_kernels, device_queue, inner_products, subsample
from publishing import publish

TENSORS = (150, 1500)
SIDE = 16  # rows and columns of every tensor: what is counted does not depend on it
FIRST, LAST = 3, 18  # the steps that are counted: some of them are compared with earlier ones, for D(n)
FIRST_OF_MANY = 15  # of the largest model: the interpreter is slow
VIEWS = ("view", "detach", "as_strided", "slice", "select", "t.", "transpose", "expand", "alias", "reshape")
WAITS = ("_local_scalar_dense", "is_nonzero", "item")
OPTIMIZERS = {
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "AdamW, bf16": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
}
HALF = "AdamW, bf16"  # without masters; its step counters are on the device, as with capturable=True or fused=True


class Operations(TorchDispatchMode):
    """Counts operations that a device would run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        if not name.startswith(VIEWS):
            is_allocation = name.startswith(("empty", "new_empty"))
            self.counts["waits" if name.startswith(WAITS) else "allocations" if is_allocation else "launches"] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu(counts: Counter[str], *, with_kernels: bool) -> Iterator[None]:
    """Send tensors in main memory the way of those on a GPU, and count what our kernels are asked to do."""
    launch, look, send = _product_kernels.launch, _product_kernels.look, _product_kernels.sent_to_device
    collect, step_copies = _product_kernels.collect, half_precision.IntendedUpdates._squares

    def counted_launch(kernel: str, items: Any, sums: Any) -> None:
        counts["launches"] += 1 + (sums is not None)
        counts["allocations"] += sums is not None
        for item in items:
            numbers = sum(x.numel() * x.element_size() for x in item.tensors if x is not None)
            written = item.tensors[0].numel() * item.tensors[0].element_size()
            counts["bytes"] += numbers + (written if item.refresh else 0)
        with _disable_current_modes():
            launch(kernel, items, sums)

    def counted_look(*args: Any) -> None:
        counts["launches"] += 1
        counts["bytes"] += sum(2 * x.tensors[0].numel() * x.tensors[0].element_size() for x in args[-1])
        with _disable_current_modes():
            look(*args)

    def counted_collect(*args: Any) -> None:
        counts["launches"] += 1
        with _disable_current_modes():
            collect(*args)

    def in_main_memory(*args: Any) -> Any:
        with _disable_current_modes():
            return step_copies(*args)

    def counted_to_device(*args: Any) -> torch.Tensor:
        counts["copies"] += 1
        with _disable_current_modes():
            return send(*args)

    def counted_to_host(tensor: torch.Tensor) -> torch.Tensor:
        counts["copies"] += 1
        with _disable_current_modes():
            return tensor.clone()

    def waited(tensor: torch.Tensor) -> torch.Tensor:
        counts["waits"] += 1
        return tensor

    def kernels(_device: torch.device) -> Any:
        return _product_kernels if with_kernels else None

    with ExitStack() as stack:
        for module, name, stand_in in (
            (device_queue, "is_on_device", lambda _tensor: True),
            (half_precision, "is_on_device", lambda _tensor: True),
            (half_precision.IntendedUpdates, "_squares", in_main_memory),
            (inner_products, "kernels_for", kernels),
            (subsample, "kernels_for", kernels),
            (_product_kernels, "launch", counted_launch),
            (_product_kernels, "look", counted_look),
            (_product_kernels, "collect", counted_collect),
            (_product_kernels, "sent_to_device", counted_to_device),
            (subsample, "sent_to_device", counted_to_device),
            (device_queue, "sent_to_host", counted_to_host),
            (reading, "sent_to_host", counted_to_host),
            (torch.Tensor, "cpu", waited),
            (monitor_module, "_in_main_memory", lambda _products: False),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def counted(name: str, tensors: int, *, every: int, with_kernels: bool) -> tuple[list[Counter[str]], Counter[str]]:
    """What the hooks ask for in every sampled step, and in all steps between them."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if name == HALF else torch.float32
    model = nn.ParameterList([nn.Parameter(torch.randn(SIDE, SIDE, dtype=kind)) for _ in range(tensors)])
    optimizer = OPTIMIZERS[name](model.parameters())
    sampled, between, counts = [], Counter[str](), Counter[str]()
    with as_on_a_gpu(counts, with_kernels=with_kernels), Monitor(model, optimizer, every=every) as monitor:
        for of_step in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            of_step.update({key: _counting(hook, counts) for key, hook in of_step.items()})
        begin = FIRST_OF_MANY if tensors > TENSORS[0] else FIRST
        for weight in model:
            weight.grad = torch.randn(SIDE, SIDE, dtype=kind)
        for step in range(LAST + 1):
            counts.clear()
            optimizer.step()
            if step >= begin and step % every:
                between.update(counts)
            elif step >= begin:
                sampled.append(Counter(counts))
        assert monitor.failure is None, monitor.failure
    return sampled, between


def _counting(hook: Any, counts: Counter[str]) -> Any:
    def run(*args: Any) -> None:
        with Operations() as seen:
            hook(*args)
        counts.update(seen.counts)

    return run


MOST_LAUNCHES = 3  # per sampled step with our kernels
MOST_OF_HALF = 5  # one reads what the intended update starts from, one the step counters


def table() -> tuple[list[str], int]:
    """Markdown lines, and how many limits are missed."""
    lines = [
        "# What a sampled step asks of a GPU",
        "",
        f"Counted on tensors in main memory that take the way of those on a GPU (`launches.py`), in steps {FIRST} to "
        f"{LAST} ({FIRST_OF_MANY} to {LAST} with {TENSORS[1]} tensors): the mean of the sampled steps and the most in "
        "one of them. Launches and allocations are those of the hooks; copies are of small tables, which nobody waits "
        "for; bytes per parameter are read and written by our kernels. Gradients keep their memory, and the settings "
        f"are constant. The limit with our kernels is {MOST_LAUNCHES} launches, {MOST_OF_HALF} for 16-bit weights "
        "without masters (their optimizer's step counters are on the device, as with `fused=True`), between samples "
        "one before each, and no memory.",
        "",
        "| tensors | optimizer | every | kernels | launches | allocations | copies | waits for the device "
        "| bytes per parameter | launches, allocations between samples | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    missed = 0
    cases = [(150, name, every, kernels) for name in OPTIMIZERS for every in (1, 4) for kernels in (False, True)]
    cases = [case for case in cases if case[1] != HALF or case[2] == 4]
    for tensors, name, every, with_kernels in (*cases, *((1500, name, 4, True) for name in OPTIMIZERS)):
        sampled, between = counted(name, tensors, every=every, with_kernels=with_kernels)
        of_others = between["launches"], between["allocations"]
        most = max(found["launches"] for found in sampled)
        bytes_read = sum(found["bytes"] for found in sampled) / len(sampled) / tensors / SIDE**2
        limits = (MOST_OF_HALF if name == HALF else MOST_LAUNCHES, len(sampled), 0)
        is_met = all(x <= limit for x, limit in zip((most, *of_others), limits, strict=True))
        verdict = ("ok" if is_met else "**missed**") if with_kernels else ""
        missed += verdict == "**missed**"
        means = (
            f"{sum(found[key] for found in sampled) / len(sampled):.4g}, {max(found[key] for found in sampled)}"
            for key in ("launches", "allocations", "copies", "waits")
        )
        kind, size = ("triton", f"{bytes_read:.0f}") if with_kernels else ("torch's", "")
        lines.append(
            "| "
            + " | ".join(map(str, (tensors, name, every, kind, *means, size, "{}, {}".format(*of_others), verdict)))
            + " |"
        )
        print(lines[-1], flush=True)
    return lines, missed


def main() -> int:
    lines, missed = table()
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
