"""What does watching cost? Every watcher trains a network of its own, and they take turns, segment by segment.

Not step by step: the default of `watch` chooses its pace by the time between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from peers import failure
from peers.bench import Bench, Step, Watcher, resnet_bench

SEGMENTS, WARM_UP, STEPS = 4, 4, 10  # the sum over a segment's steps is compared, for not every step is sampled
SLOW_STEPS = 3  # of what takes several times as long as training


@dataclass
class Watched:
    """Mean CPU seconds of a step of one watcher, segment by segment: in all, and inside the optimizer's hooks."""

    name: str
    steps: list[float] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)
    failure: str = ""

    def ratios(self, plain: Watched) -> list[float]:
        """Of the step to the plain one beside it, segment by segment."""
        return [mine / other for mine, other in zip(self.steps, plain.steps, strict=True)]

    @property
    def by_hooks(self) -> list[float]:
        """Step over step without the hooks, segment by segment: both of the same steps. Empty without hooks."""
        if not any(self.hooks):
            return []
        return [step / (step - inside) for step, inside in zip(self.steps, self.hooks, strict=True)]

    def factors(self, plain: Watched) -> list[float]:
        """The better known of the two."""
        return self.by_hooks or self.ratios(plain)


class _Runner:
    """One watcher at work."""

    def __init__(self, row: Watched, attach: Watcher, optimizer: str, stack: ExitStack) -> None:
        self.row, self._inside = row, 0.0
        bench = resnet_bench(optimizer)
        self._step: Step = stack.enter_context(attach(bench))
        self._time_hooks(bench)

    def _time_hooks(self, bench: Bench) -> None:
        optimizer = bench.optimizer
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            hooks.update({key: self._timed(hook) for key, hook in hooks.items()})

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            begin = time.process_time()
            hook(*args)
            self._inside += time.process_time() - begin

        return timed

    def segment(self) -> None:
        """Some steps one after the other, their mean kept."""
        steps = self._steps
        self._train(WARM_UP if steps == STEPS else 1)
        begin, self._inside = time.process_time(), 0.0
        self._train(steps)
        self.row.steps.append((time.process_time() - begin) / steps)
        self.row.hooks.append(self._inside / steps)

    @property
    def _steps(self) -> int:
        return SLOW_STEPS if "cockpit" in self.row.name else STEPS

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._step()


def measure(watchers: dict[str, Watcher], optimizer: str) -> list[Watched]:
    """The first one is the plain training."""
    rows = [Watched(name) for name in watchers]
    with ExitStack() as stack:
        runners: dict[str, _Runner] = {}
        for _ in range(SEGMENTS):
            for row, attach in zip(rows, watchers.values(), strict=True):
                if not row.failure:
                    _segment(runners, row, attach, optimizer, stack)
    return rows


def _segment(runners: dict[str, _Runner], row: Watched, attach: Watcher, optimizer: str, stack: ExitStack) -> None:
    try:
        if row.name not in runners:
            runners[row.name] = _Runner(row, attach, optimizer, stack)
        runners[row.name].segment()
    except Exception as error:
        row.failure = failure.in_a_line(error)
