"""Which steps are sampled, within a time budget, until the first error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from equilibria.errors import WatchWarning, described, warn_in_training
from equilibria.optimizers.budget import Every, TimeBudget

_SHARE = 0.005  # of the training time for the samples of every="auto": with what the hooks cost, below 1 %
_LONGEST_INTERVAL = 1000  # steps between samples, however cheap the steps are
_START_STEPS, _START_SECONDS = 1000, 1.0  # at the start of a run: so many seconds of samples beyond that share
_START_INTERVAL, _START_RATIO = 4, 1 / 32  # steps between samples there: 4, from step 128 on this of the steps so far

Result = TypeVar("Result")


class Sampler:
    """Numbers the steps of several optimizers and decides which of them are sampled.

    With a fixed ``every``, each optimizer is sampled at every so many of its own steps. With "auto", samples come in
    rounds: when the budget allows a sample, the next step of every optimizer is sampled, so that the samples of all
    layers are of the same time. A jump of lr or weight decay starts a round at once, so that it shows where it happens.
    In the first 1000 steps, samples of about one second in all may exceed the budget: a prediction needs 25 samples,
    and a run of 400 steps had 13.

    Args:
        every: steps from one sample to the next, or "auto".
        optimizers: how many there are.
        leaders: the optimizers whose steps may start a round: all, or those whose tensors are sharded, because all
            processes must start it at the same step.

    Attributes:
        automatic: whether the interval follows the measured times.
        every: steps from one sample to the next at present.
        latest: number of the latest step of any optimizer.
        failure: the error that stopped the sampling, or None.

    Example:
        >>> sampler = Sampler(3)
        >>> [step for step in range(8) if sampler.is_due(0, count=step, step=step, jumps=False)]
        [0, 3, 6]
    """

    def __init__(self, every: Every, *, optimizers: int = 1, leaders: Collection[int] = (0,)) -> None:
        self._budget = TimeBudget(every, share=_SHARE, longest=_LONGEST_INTERVAL)
        self.automatic, self.every = self._budget.automatic, self._budget.fixed or 1
        self._optimizers, self._leaders = optimizers, leaders
        self._owed: set[int] = set()  # optimizers whose next step completes the present round
        self._leader: int | None = None  # the optimizer whose step started it
        self._next = 0  # the step that starts the next round
        self._start_left = _START_SECONDS
        self._spent = 0.0  # seconds of sampling, including the bookkeeping at steps without a sample
        self._last: tuple[int, float, float] | None = None  # step, time and seconds spent at the last sample
        self.latest = 0
        self.failure: str | None = None

    def is_due(self, optimizer: int, *, count: int, step: int, jumps: bool) -> bool:
        """Whether the step that an optimizer begins is sampled; call it once per step.

        Args:
            optimizer: its index.
            count: steps that it has taken so far.
            step: number of the step.
            jumps: whether its settings jump at this step.
        """
        if not self.automatic:
            self._leader = optimizer
            return count % self.every == 0
        if (step >= self._next or jumps) and optimizer in self._leaders:
            self._owed, self._leader = set(range(self._optimizers)), optimizer
        return optimizer in self._owed

    def expects(self, optimizer: int, *, count: int, step: int) -> bool:
        """Whether the step after the present one will be sampled, unless its settings jump; arguments as `is_due`."""
        if not self.automatic:
            return (count + 1) % self.every == 0
        return step + 1 >= self._next or optimizer in self._owed

    def wish(self, optimizer: int, step: int) -> float:
        """Steps until the next sample that this process asks for, after a sample of an optimizer."""
        self._owed.discard(optimizer)
        if optimizer != self._leader:
            return float(self.every)
        now = time.perf_counter()
        if self._last is not None and step > self._last[0]:
            last_step, then, spent = self._last
            cost, loads = self._spent - spent, not self._budget.cost
            self._budget.add_cost(cost)
            self._budget.add_step(max(now - then - cost, 1e-9) / (step - last_step))
            self._start_left -= 0 if loads else self._budget.cost
        if self._last is None or step > self._last[0]:
            self._last = step, now, self._spent
        interval = self._budget.interval()
        if step >= _START_STEPS or self._start_left <= 0:
            return interval
        # Divided by the share of the second that is left: an interval that grew at once would look like a gap.
        return min(interval, max(_START_INTERVAL, _START_RATIO * step) * _START_SECONDS / self._start_left)

    def plan_next(self, optimizer: int, step: int, wish: float) -> None:
        """Schedule the next sample; processes that sample together pass the same ``wish``.

        With "auto" the step number doubles at most from one sample to the next: a short run, or one whose first costs
        were those of a busy machine, has some samples of its beginning.
        """
        if optimizer == self._leader:
            self.every = math.ceil(min(wish, max(step, 1))) if self.automatic else self.every
            self._next = step + self.every

    def resume(self, step: int) -> None:
        """Continue from a checkpoint that was written before ``step``."""
        self.latest = max(0, step - 1)
        self._owed.clear()
        self._next, self._last = step, None

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
            self._spent += time.perf_counter() - begun

    def add_cost(self, seconds: float) -> None:
        """Count time that a device spent on a sample: `attempt` measures what the host spends."""
        self._spent += seconds

    def fail(self, error: Exception) -> None:
        """Stop, with one warning. The hooks stay on the optimizer: torch may be iterating over them."""
        if self.failure is None:
            self.failure = described(error)
            warn_in_training(f"watching has stopped: {self.failure}; training goes on", WatchWarning)
