"""Samples as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.integrations.scalars import METRICS, MOST_LAYERS, ScalarSink, require

__all__ = ["TensorBoardSink"]


class TensorBoardSink(ScalarSink):
    """Shows a watched run in TensorBoard, over the watched optimizer steps.

    Args:
        where: a folder for event files, or your ``SummaryWriter``, which stays open.
        metrics: columns of the sample table, or "angle_vs_predicted".
        layers: how many layers get separate tags, at most.

    Raises:
        EquilibriaError: if TensorBoard is not installed, or ``where`` is neither.
    """

    def __init__(self, where: str | Path | Any, *, metrics: Iterable[str] = METRICS, layers: int = MOST_LAYERS) -> None:
        super().__init__(metrics=metrics, layers=layers)
        self._folder = where if isinstance(where, str | Path) else None
        if self._folder is not None:
            require("tensorboard", extra="tensorboard")
        elif not hasattr(where, "add_scalar"):
            raise EquilibriaError(
                f"got where of type {type(where).__name__}; expected a folder or a SummaryWriter", argument="where"
            )
        self._writer: Any = None if self._folder is not None else where

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars by tag."""
        if self._writer is None:
            # Not earlier: in a distributed training only the first process gets here.
            self._writer = require("torch.utils.tensorboard", extra="tensorboard").SummaryWriter(str(self._folder))
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)

    def finish(self) -> None:
        """Write the last scalars; close the writer, unless it is yours."""
        if self._writer is None:
            return
        self._writer.flush()
        if self._folder is not None:
            self._writer.close()
            self._writer = None
