"""The later values of a torch scheduler, from a copy of it that steps by itself; torch is not imported for it."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, described


class _Groups:
    """Stands for an optimizer: its parameter groups without the parameters."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.defaults = dict(getattr(optimizer, "defaults", {}))
        self.state: dict[Any, Any] = {}
        self._opt_called = True  # no warning that the scheduler steps before its optimizer

    def step(self) -> None:
        """Do nothing; schedulers look for this method."""


class SteppedCopy:
    """The learning rates that a torch scheduler will set, one per call of its ``step()``, from its present one on.

    Args:
        scheduler: any torch scheduler whose ``step()`` needs no argument. It is not changed.
        name: of the argument, for error messages.

    Attributes:
        group: the parameter group: the first one with weight decay, or the first.

    Raises:
        EquilibriaError: if it cannot be copied, or its later values depend on numbers of the training.
    """

    def __init__(self, scheduler: Any, *, name: str) -> None:
        self._name, self._kind = name, type(scheduler).__name__
        parameters = list(inspect.signature(scheduler.step).parameters.values())
        if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters):
            raise self._refused("later values depend on numbers of the training")
        self._groups = _Groups(scheduler.optimizer)
        decayed = [index for index, group in enumerate(self._groups.param_groups) if group.get("weight_decay")]
        self.group = decayed[0] if decayed else 0
        try:
            self._scheduler = copy.deepcopy(scheduler, {id(scheduler.optimizer): self._groups})
        except Exception as error:
            raise self._refused(f"it cannot be copied ({described(error)})") from None
        self._values = [self._lr()]

    def values(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """The learning rates after so many calls of ``step()``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while len(steps) and len(self._values) <= steps[-1]:
                try:
                    self._scheduler.step()
                except Exception as error:  # OneCycleLR raises beyond its last step
                    after = f"after {len(self._values) - 1:,} further steps it raises {described(error)}"
                    raise self._refused(after) from None
                self._values.append(self._lr())
        return np.array(self._values)[steps]

    def _lr(self) -> float:
        return float(self._groups.param_groups[self.group]["lr"])

    def _refused(self, reason: str) -> EquilibriaError:
        return EquilibriaError(
            f"got {self._name}: a torch scheduler ({self._kind}): {reason}; expected a schedule of "
            "equilibria.theory.schedules, a list with one value per step, or a function of the step",
            argument=self._name,
        )
