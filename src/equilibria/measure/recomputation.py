"""Gradient checkpointing switched off: it saves memory by computing activations anew when the backward pass runs.

By then a module called with other parameters has its own ones back, so that what is computed anew is something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils import checkpoint as torch_checkpoint


class _PlainCall:
    """In place of the function of torch that computes anew, for ``use_reentrant=True``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _no_hook(frame: object) -> AbstractContextManager[None]:
    """In place of what forgets activations, for ``use_reentrant=False``."""
    return nullcontext()


_PLAIN: dict[str, Any] = {"CheckpointFunction": _PlainCall, "_checkpoint_hook": _no_hook}


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint`` is a plain call, by whatever name a model has imported it."""
    before = {name: getattr(torch_checkpoint, name) for name in _PLAIN}  # plain already, if this is inside another
    try:
        _replace(_PLAIN)
        yield
    finally:
        _replace(before)


def _replace(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(torch_checkpoint, name, function)
