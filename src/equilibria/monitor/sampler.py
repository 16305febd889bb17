"""Which steps are sampled, within a time budget, until the first error."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Literal, TypeAlias, TypeVar

from equilibria.errors import WatchWarning, warn_in_training
from equilibria.optimizers.budget import Cadence

Every: TypeAlias = int | Literal["auto"]
"""Steps from one sample to the next; "auto" keeps the cost below one per cent of the training time."""

Result = TypeVar("Result")


class Sampler:
    """Numbers the steps of several optimizers and decides which of them are sampled.

    With a fixed ``every``, each optimizer is sampled at every so many of its own steps. With "auto", samples come in
    rounds: when the budget allows a sample, the next step of every optimizer is sampled, so that the samples of all
    layers are of the same time. A jump of lr or weight decay starts a round at once, so that it shows where it happens.

    Args:
        every: steps from one sample to the next, or "auto".
        optimizers: how many there are.
        leaders: the optimizers whose steps may start a round: all, or those whose tensors are sharded, because all
            processes must start it at the same step.

    Attributes:
        latest: number of the latest step of any optimizer.
        failure: the error that stopped the sampling, or None.
    """

    def __init__(self, every: Every, *, optimizers: int, leaders: Collection[int]) -> None:
        self._cadence = Cadence(every)
        self._optimizers, self._leaders = optimizers, leaders
        self._owed: set[int] = set()  # optimizers whose next step completes the present round
        self._leader: int | None = None  # the optimizer whose step started it
        self.latest = 0
        self.failure: str | None = None

    @property
    def automatic(self) -> bool:
        """Whether the sampler chooses the pace."""
        return self._cadence.automatic

    @property
    def every(self) -> int:
        """Steps from one sample to the next at present."""
        return self._cadence.every

    def is_due(self, optimizer: int, *, count: int, step: int, jumps: bool) -> bool:
        """Whether the step that an optimizer begins is sampled; call it once per step.

        Args:
            optimizer: its index.
            count: steps that it has taken so far.
            step: number of the step.
            jumps: whether its settings jump at this step.
        """
        if not self._cadence.automatic:
            self._leader = optimizer
            return self._cadence.is_due(count)
        if (self._cadence.is_due(step) or jumps) and optimizer in self._leaders:
            self._owed, self._leader = set(range(self._optimizers)), optimizer
        return optimizer in self._owed

    def wish(self, optimizer: int, step: int) -> float:
        """Steps until the next sample that this process's time budget asks for, after a sample of an optimizer."""
        self._owed.discard(optimizer)
        return self._cadence.wish(step) if optimizer == self._leader else float(self._cadence.every)

    def plan_next(self, optimizer: int, step: int, wish: float) -> None:
        """Schedule the next sample; processes that sample together pass the same ``wish``."""
        if optimizer == self._leader:
            self._cadence.plan_next(step, wish)

    def resume(self, step: int) -> None:
        """Continue from a checkpoint that was written before ``step``."""
        self.latest = max(0, step - 1)
        self._owed.clear()
        self._cadence.resume(step)

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """Do some work within the budget; None after an error, which stops the sampling, and from then on.

        Training must never break: every exception ends here, as one warning. Interrupts pass.
        """
        if self.failure is not None:
            return None
        begun = time.perf_counter()
        try:
            return work()
        except Exception as error:
            self.fail(error)
            return None
        finally:
            self._cadence.spent(time.perf_counter() - begun)

    def fail(self, error: Exception) -> None:
        """Stop, with one warning. The hooks stay on the optimizer: torch may be iterating over them."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"
            warn_in_training(f"watching has stopped: {self.failure}; training goes on", WatchWarning)
