"""What a sampled step asks of a GPU: launches, bytes, allocations and waits, with our kernels and without.

No GPU is needed: tensors in main memory are sent the way of those on a device, triton's interpreter runs the kernels,
and a dispatch mode counts what torch does inside the hooks. Views launch nothing and are left out. Bytes are those of
weights, gradients, moments and copies that the products read and write.

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
from equilibria.monitor.monitor import Monitor
from equilibria.tensors import _product_kernels, device_queue, inner_products, subsample
from publishing import publish

TENSORS = (150, 1500)
SIDE = 16  # rows and columns of every tensor: what is counted does not depend on it
STEPS = 12  # the last four of which are counted
VIEWS = ("view", "detach", "as_strided", "slice", "select", "t.", "transpose", "expand", "alias", "reshape", "_to_copy")
WAITS = ("_local_scalar_dense", "is_nonzero", "item")
OPTIMIZERS = {
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
}


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
    launch, gather = _product_kernels.launch, _product_kernels.gather

    def counted_launch(kernel: str, items: Any, sums: Any) -> None:
        counts["launches"] += 1 + (sums is not None)
        counts["allocations"] += 1
        for item in items:
            numbers = sum(x.numel() * x.element_size() for x in item.tensors if x is not None)
            written = item.tensors[0].numel() * item.tensors[0].element_size()
            counts["bytes"] += numbers + (written if item.refresh else 0)
        with _disable_current_modes():
            launch(kernel, items, sums)

    def counted_gather(*args: Any) -> None:
        counts["launches"] += 1
        with _disable_current_modes():
            gather(*args)

    def kernels(_device: torch.device) -> Any:
        return _product_kernels if with_kernels else None

    with ExitStack() as stack:
        for module, name, stand_in in (
            (device_queue, "is_on_device", lambda _tensor: True),
            (inner_products, "kernels_for", kernels),
            (subsample, "kernels_for", kernels),
            (_product_kernels, "launch", counted_launch),
            (_product_kernels, "gather", counted_gather),
            (monitor_module, "_in_main_memory", lambda _products: False),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def counted(make: Any, tensors: int, *, with_kernels: bool) -> Counter[str]:
    """What the hooks ask for in one sampled step, in the mean."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(tensors)])
    optimizer = make(model.parameters())
    counts: Counter[str] = Counter()
    with as_on_a_gpu(counts, with_kernels=with_kernels), Monitor(model, optimizer, every=1) as monitor:
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        for step in range(STEPS):
            for weight in model:
                weight.grad = torch.randn(SIDE, SIDE)
            if step == STEPS - 4:
                counts.clear()
                for of_step in hooks:
                    of_step.update({key: _counting(hook, counts) for key, hook in of_step.items()})
            optimizer.step()
        assert monitor.failure is None, monitor.failure
    return Counter({name: value / 4 for name, value in counts.items()})


def _counting(hook: Any, counts: Counter[str]) -> Any:
    def run(*args: Any) -> None:
        with Operations() as seen:
            hook(*args)
        counts.update(seen.counts)

    return run


def table() -> tuple[list[str], int]:
    """Markdown lines, and how many limits are missed."""
    lines = [
        "# What a sampled step asks of a GPU",
        "",
        "Counted on tensors in main memory that take the way of those on a GPU (`launches.py`), every step sampled; "
        "mean of 4 steps. Launches and allocations are those of the hooks; bytes per parameter are read and written "
        "by our kernels.",
        "",
        "| tensors | optimizer | kernels | launches | allocations | waits for the device | bytes per parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    for tensors in TENSORS:
        for name, make in OPTIMIZERS.items():
            for with_kernels in (False, True):
                found = counted(make, tensors, with_kernels=with_kernels)
                size = f"{found['bytes'] / tensors / SIDE**2:.0f}" if with_kernels else ""
                cells = [
                    tensors,
                    name,
                    "triton" if with_kernels else "torch's",
                    *(f"{found[key]:.0f}" for key in ("launches", "allocations", "waits")),
                    size,
                ]
                lines.append(f"| {' | '.join(map(str, cells))} |")
                print(lines[-1], flush=True)
    return lines, 0


def main() -> int:
    lines, missed = table()
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
