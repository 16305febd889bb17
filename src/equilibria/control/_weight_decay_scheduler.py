"""Schedules of weight decay, which torch lacks, and weight decay that follows the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.control._folded_weight_decay import FoldedWeightDecay
from equilibria.control._rescale_on_decay import RescaleOnDecay
from equilibria.control._scheduler import (
    Hooked,
    SchedulerWrapper,
    restoring_scheduler,
    resumed,
)
from equilibria.errors import EquilibriaError, one_of, whole
from equilibria.optimizers.rules import rule_of_group
from equilibria.theory.requested import HOLDS, Hold, holding_weight_decay
from equilibria.theory.rules import Rule
from equilibria.theory.schedules import ScheduleLike, as_schedule


class WeightDecayScheduler(Hooked, SchedulerWrapper):
    """Sets weight decay at every scheduler step: from a schedule, or so that an equilibrium is held while lr moves.

    Groups without weight decay (biases, norms) are left alone. It takes the place of the learning-rate scheduler it
    wraps: ``step()`` steps that one first. With ``hold`` it also acts right before every optimizer step, so that an lr
    that the training loop sets itself, ``group["lr"] = ...``, is held from that step on.

    Args:
        scheduler: any torch scheduler, or an optimizer whose learning rate stays constant or is set by the training
            loop. `RescaleOnDecay` and `FoldedWeightDecay` wrap this scheduler, not the other way round.
        schedule: weight decay as a function of the scheduler's steps: a number, one value per step, a
            `equilibria.theory.schedules.Schedule`, or any function.
        hold: instead of a schedule: "angle" keeps the equilibrium angle per step, "time_constant" the number of steps
            in which layers settle, "norm" the equilibrium norm, all of the lr and weight decay that the optimizer was
            made with. OneCycleLR and CyclicLR replace that lr, so their max_lr is used, with the momentum they have
            there. The first two mean lr * weight_decay = const as long as momentum is constant; where it moves
            (OneCycleLR), they differ. "norm" means weight_decay / lr = const: decay per step falls as lr², weights keep
            their norm and gradients do not grow at the end of training (AdamC, ScionC). At lr 0 weight decay keeps its
            value.
        groups: the parameter groups to act on, by index; by default all with weight decay.

    Raises:
        EquilibriaError: neither or both of ``schedule`` and ``hold``, a scheduler that must be outside, a group without
            weight decay, an optimizer without a law to hold.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=5e-4)
        >>> drop = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        >>> scheduler = WeightDecayScheduler(drop, hold="time_constant")
        >>> optimizer.step()
        >>> scheduler.step()
        >>> [round(decay, 6) for decay in scheduler.get_last_weight_decay()]
        [0.005]
    """

    def __init__(
        self,
        scheduler: LRScheduler | Optimizer,
        schedule: ScheduleLike | None = None,
        *,
        hold: Hold | None = None,
        groups: Iterable[int] | None = None,
    ) -> None:
        if (schedule is None) == (hold is None):
            raise EquilibriaError(
                f"got schedule={schedule!r} and hold={hold!r}; expected one of the two: a schedule of weight decay, or "
                f"hold= one of {', '.join(HOLDS)}"
            )
        self._schedule = None if schedule is None else as_schedule(schedule)
        if hold is not None:
            one_of("hold", hold, HOLDS)
        self._hold = hold
        self._last_held: dict[int, tuple[Any, ...]] = {}  # settings that weight decay was last set for, by group
        _refuse_inside(scheduler)
        super().__init__(scheduler)
        self._groups = self._chosen(groups)
        if self._hold is not None:
            self._references = {index: self._reference(index) for index in self._groups}
        self._set(self._values())
        self._attach()

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        what = "follows a schedule" if self._hold is None else f"holds the equilibrium's {self._hold.replace('_', ' ')}"
        return f"sets weight decay, which {what}"

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        return () if self._hold is None else (self.optimizer.register_step_pre_hook(self._before_step),)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Set weight decay again if the settings that it is held against changed since it was set."""
        if any(self._held_against(index) != self._last_held.get(index) for index in self._groups):
            self._set(self._values())

    def get_last_weight_decay(self) -> list[float]:
        """The present weight decay, one per parameter group."""
        return [float(group["weight_decay"]) for group in self.optimizer.param_groups]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler, then set weight decay; an error in either leaves all as it was."""
        with restoring_scheduler(self.scheduler):
            super().step(*args, **kwargs)
            self._set(self._values())

    def typed_settings(self, index: int) -> dict[str, Any]:
        """The settings of a parameter group that a user typed; its weight decay is that of the equilibrium held."""
        held = {} if self._hold is None else self._references
        typed = super().typed_settings(index)
        return {**typed, "weight_decay": held[index].weight_decay} if index in held else typed

    def state_dict(self) -> dict[str, Any]:
        """Checkpoint: the settings whose equilibrium is held. A schedule is not stored: pass it again."""
        rules = {} if self._hold is None else {i: dataclasses.asdict(rule) for i, rule in self._references.items()}
        return {**super().state_dict(), "held": rules}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; load the optimizer's as well."""
        super().load_state_dict(state_dict)
        for index, settings in state_dict.get("held", {}).items():  # JSON makes keys text
            self._references[int(index)] = resumed(self._references[int(index)], settings)

    def _chosen(self, groups: Iterable[int] | None) -> list[int]:
        every = self.optimizer.param_groups
        decaying = [index for index, group in enumerate(every) if float(group.get("weight_decay", 0.0)) > 0]
        if groups is None:
            levels = {float(every[index]["weight_decay"]) for index in decaying}
            if not decaying or (self._schedule is not None and len(levels) > 1):
                raise EquilibriaError(
                    f"got parameter groups with weight decay {sorted(levels) or 'nowhere'}; expected one level for one "
                    "schedule, above 0: choose its groups with groups=[...], and wrap once more for the others",
                    argument="groups",
                )
            return decaying
        chosen = [whole("group", index) for index in groups]
        if any(index >= len(every) for index in chosen):
            raise EquilibriaError(
                f"got groups={chosen}; expected indices of the optimizer's parameter groups, of which there are "
                f"{len(every)}: {', '.join(map(str, range(len(every))))}",
                argument="groups",
            )
        if not chosen or any("weight_decay" not in every[index] for index in chosen):
            raise EquilibriaError(
                f"got groups={chosen}; expected groups of an optimizer that has weight decay", argument="groups"
            )
        return chosen

    def _values(self) -> dict[int, float]:
        """The weight decay of each chosen group; all are computed, and so checked, before any is set."""
        if self._schedule is not None:
            return dict.fromkeys(self._groups, self._schedule(max(self.last_epoch, 0)))
        return {index: self._holding(index) for index in self._groups}

    def _holding(self, index: int) -> float:
        group = self.optimizer.param_groups[index]
        if float(group["lr"]) == 0:
            return float(group["weight_decay"])
        assert self._hold is not None
        return holding_weight_decay(self._references[index], self._rule(index), hold=self._hold)

    def _reference(self, index: int) -> Rule:
        """The rule of the settings typed in, whose equilibrium is held: a warm-up may have changed lr already."""
        rule = self._rule(index, **super().typed_settings(index))
        if rule.decay_per_step == 0:
            raise EquilibriaError(
                f"got lr={rule.lr:g}, weight_decay={rule.weight_decay:g} in parameter group {index}; expected both "
                "above 0: otherwise there is no equilibrium to hold",
                argument="hold",
            )
        return rule

    def _rule(self, index: int, **instead: Any) -> Rule:
        law = rule_of_group(self.optimizer, {**self.optimizer.param_groups[index], **instead}, measure=True)
        if law.rule is None:
            raise EquilibriaError(
                f"got parameter group {index} without a law to hold ({law.reason}); use a schedule", argument="hold"
            )
        return law.rule

    def _set(self, values: dict[int, float]) -> None:
        for index, value in values.items():
            self.optimizer.param_groups[index]["weight_decay"] = value
            self._last_held[index] = self._held_against(index)

    def _held_against(self, index: int) -> tuple[Any, ...]:
        """The settings that decide which weight decay holds the equilibrium."""
        group = self.optimizer.param_groups[index]
        return float(group["lr"]), group.get("momentum"), group.get("betas")


def _refuse_inside(scheduler: Any) -> None:
    """Raise for controllers that act on what their scheduler changes: they would miss the weight decay set here."""
    if isinstance(scheduler, RescaleOnDecay | FoldedWeightDecay):
        name = type(scheduler).__name__
        raise EquilibriaError(
            f"got a {name} inside WeightDecayScheduler, which would not see the weight decay set here; expected the "
            f"other way round: {name}(WeightDecayScheduler(...), model=model, invariant=...)",
            argument="scheduler",
        )
