"""Where a training runs: the CPU, or a GPU of torch's."""

from __future__ import annotations

import torch

from equilibria.errors import EquilibriaError

_KINDS = ("cpu", "cuda")  # sums are kept in float64, which others lack


def named_device(name: str) -> torch.device:
    """The device of that name, wherever it may be.

    Raises:
        EquilibriaError: a name of nothing that trainings run on.

    Example:
        >>> named_device("cuda:1")
        device(type='cuda', index=1)
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in _KINDS:
        raise EquilibriaError(f"got device={name!r}; expected 'cpu', 'cuda', or one of several such as 'cuda:1'")
    return device


def present_device(name: str) -> torch.device:
    """The device of that name, which torch has here.

    Raises:
        EquilibriaError: it has not, or there is no such name.
    """
    device = named_device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise EquilibriaError(
                f"got device={name!r}, but torch {torch.__version__} finds {count or 'no'} GPU{'s'[: count != 1]} "
                "here; expected one that is there, or 'cpu'"
            )
    return device
