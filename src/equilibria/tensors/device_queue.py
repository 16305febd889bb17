"""Work that waits in a GPU's queue: copies to main memory that nobody waits for, and the time that some work took.

On any other device there is no queue to speak of: copies are made at once, and no time is measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def has_queue(device: torch.device) -> bool:
    """Whether work on a device goes on after the call that asked for it: CUDA and ROCm."""
    return device.type == "cuda"


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are elsewhere than in main memory."""
    return not tensor.is_cpu


def is_capturing() -> bool:
    """Whether the present stream records work into a CUDA graph instead of doing it: nothing may be read or awaited."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def mark(device: torch.device) -> Any:
    """A mark in the device's queue, None where there is none; `seconds_between` measures from one to another."""
    if not has_queue(device):
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds that the device took from one mark to a later one that it has passed; 0 without marks."""
    return 0.0 if begin is None or end is None else float(begin.elapsed_time(end)) / 1e3


def sent_to_host(tensor: Tensor) -> Tensor:
    """A copy in main memory that holds the numbers once the device has passed a mark made after this call.

    Where there is no queue it holds them at once; of a tensor in main memory it is the tensor itself.
    """
    if not has_queue(tensor.device):
        return tensor if tensor.is_cpu else tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def sent_to_device(table: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy in the device's memory, for which nobody waits."""
    numbers = torch.from_numpy(np.ascontiguousarray(table))
    return numbers.pin_memory().to(device, non_blocking=True) if has_queue(device) else numbers.to(device)


class Sent:
    """Numbers on their way to main memory, for which nobody waits until they are read."""

    def __init__(self, numbers: NDArray[np.float64] | Tensor) -> None:
        self._numbers, self._arrival = numbers, None
        if isinstance(numbers, Tensor):
            self._numbers, self._arrival = sent_to_host(numbers), mark(numbers.device)

    def has_arrived(self) -> bool:
        """Whether they can be read without waiting."""
        return self._arrival is None or bool(self._arrival.query())

    def read(self) -> NDArray[np.float64]:
        """The numbers; waits for the device if it has not sent them yet."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers if isinstance(self._numbers, np.ndarray) else self._numbers.numpy()
