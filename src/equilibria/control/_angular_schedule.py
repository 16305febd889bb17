"""Schedules of the angle per step: the learning rate or the weight decay is set to deliver it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.control._angular_loop import NEAR, RECENT, Aim, GroupLoop, steering_decay, steps_ahead
from equilibria.control._invariance_check import InvarianceCheck
from equilibria.control._optimizer import as_number
from equilibria.control._scheduler import Hooked, closure_of, restoring_settings, set_value, unshare_lr
from equilibria.errors import EquilibriaError, one_of, warn_caller, whole, within
from equilibria.findings import counted
from equilibria.optimizers.rules import rule_of_group
from equilibria.tensors.invariance import Invariant, invariant_tensors
from equilibria.tensors.layout import is_sharded
from equilibria.theory.requested import angle_per_step, decay_for_angle, norm_power, steps_to_fall
from equilibria.theory.rules import AdamL2, Rule
from equilibria.theory.schedules import ScheduleLike, as_schedule, in_epochs

ControlledSetting: TypeAlias = Literal["lr", "weight_decay"]
"""The setting that an angular schedule changes."""

_TRIM = 0.1  # share of the error of a step's squared angle that corrects the next lr: makes the mean right
_LARGEST_TRIM = 1.0  # so that gradients that vanish for a while have no lasting effect
_DECAY_TRIM, _LARGEST_DECAY_TRIM = 0.15, 0.2  # the same for weight decay, in units of the rate at which norms follow
_LARGEST_LOSS = 1e8  # of gain since the first steps: beyond it norms run away, or gradients have vanished
_ON_REQUEST = 1.03  # an angle up to this many times the request is on request
_COMPARED, _FIRST_COMPARED = 100, 150  # steps that `watch` compares with the request, and the first at which it does
_PATIENCE = 50  # steps without a warning at the start, and steps of delay that need none


@dataclass(frozen=True, slots=True)
class Delivered:
    """Requested and delivered angle of a parameter group.

    Attributes:
        group: its index in the optimizer.
        steps: number of steps averaged over.
        requested: root mean square of the requested angles, radians per step.
        delivered: root mean square of the measured angles, over these steps and the group's invariant tensors.
        lr: present learning rate.
        weight_decay: present weight decay.
        behind: least number of steps until the angle has fallen to the request; 0 if it is within 3 % of it, and with
            ``by="lr"``. Weight decay cannot make a norm grow: see `equilibria.theory.requested.steps_to_fall`.
    """

    group: int
    steps: int
    requested: float
    delivered: float
    lr: float
    weight_decay: float
    behind: float = 0.0

    @property
    def ratio(self) -> float:
        """Delivered over requested angle; NaN if the request is 0."""
        return self.delivered / self.requested if self.requested else math.nan


class AngularSchedule(Hooked, LRScheduler):
    """Turns the invariant weights of each parameter group by a scheduled angle per step (root mean square).

    A step turns a weight by ``lr c / ||w||^p``, where c changes slowly: p is 2 for SGD, whose gradients are inversely
    proportional to the norm, and 1 for optimizers that normalise gradients. The controller measures angle and norm of
    every tensor after every step, averages c^2 over the last few steps, and sets ``lr = angle / gain``. The gain is the
    root mean square of c / ||w||^p over the tensors, corrected by the mean angle delivered so far. A change of the
    schedule takes effect at once, whatever the norms are.

    With ``by="weight_decay"`` lr is constant and weight decay is set: that of the equilibrium with this angle, plus a
    term that steers the norm to it (`steering_decay` in control/_angular_loop.py). A rise of the angle is followed
    within the momentum's memory. A fall needs a larger norm, and norms grow no faster than weights turn: at most by
    2 (1+a)/(1-a) per step in 1/angle^2 (SGD with momentum a). A request that falls faster is met later; reports and a
    warning give the number of steps.

    The schedule counts optimizer steps. ``step()`` after an optimizer step learns from it and sets the next one, as for
    torch's schedulers; where it is not called, the same happens right before the next optimizer step. The schedule owns
    the learning rates (or weight decays) of groups with invariant weights, and sets them once more right before every
    step: a learning rate that the training loop sets itself, ``group["lr"] = ...``, is used for the first step only,
    and a warning says so. Other parameters of such a group get its setting too, of which a warning tells; other groups
    are left alone. With ``by="weight_decay"`` lr is the training loop's, and weight decay is computed for the lr that
    the step is taken with.

    Args:
        optimizer: any torch optimizer; its present lr, above 0, is used for the first step.
        angle: radians per step, below pi/2: a number, a schedule of `equilibria.theory.schedules`, a function of the
            step, or a list, whose last value holds after its end.
        model: the network, to look up names.
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`, of which
            ``sym.alone`` is used.
        by: the setting to change, "lr" or "weight_decay".
        steps_per_epoch: if given, ``angle`` is per epoch, below pi/2, and its schedule counts epochs. The angle of one
            step follows from how the optimizer's momentum correlates steps, for gradients that are mostly noise.

    Raises:
        EquilibriaError: bad input, or an optimizer without the law that ``steps_per_epoch`` or ``by`` needs. In the
            first twenty steps of the optimizer, a weight whose gradient shows that it is not scale-invariant (cosine
            with it above 0.05 and three times chance; not checked with closures). Later, from `step` or the
            optimizer's next step, an lr that runs away because weights cannot turn that fast; lr is unchanged then.

    Example:
        >>> w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> optimizer = torch.optim.SGD([w], lr=0.1)
        >>> scheduler = AngularSchedule(optimizer, 0.001, invariant=[w])
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     (w[0] / w.norm()).backward()
        ...     optimizer.step()
        ...     scheduler.step()
        >>> round(scheduler.report(20)[0].ratio, 2)
        1.0
    """

    def __init__(
        self,
        optimizer: Optimizer,
        angle: ScheduleLike,
        *,
        invariant: Invariant,
        model: nn.Module | None = None,
        by: ControlledSetting = "lr",
        steps_per_epoch: int | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise EquilibriaError(
                f"got optimizer of type {type(optimizer).__name__}; expected a torch.optim.Optimizer",
                argument="optimizer",
            )
        self._by = one_of("by", by, get_args(ControlledSetting))
        self._per_epoch = None if steps_per_epoch is None else whole("steps_per_epoch", steps_per_epoch, low=1)
        self._has_warned_behind, self._has_warned_changed = False, False
        self._stepped_lr: dict[int, float] = {}  # by group: lr of the last optimizer step
        self._decay_lr: dict[int, float] = {}  # by group: lr that weight decay was last computed for
        self._is_due = False  # whether the optimizer has stepped since `step`
        _refuse_network(angle)
        self._angle = as_schedule(angle, name="angle")
        if self._per_epoch is not None:
            self._angle = in_epochs(self._angle, steps_per_epoch=self._per_epoch)
        self._weights = invariant_tensors(invariant, optimizer=optimizer, model=model)
        self._invariance = InvarianceCheck()
        self._loops = _loops(optimizer, self._weights)
        self.optimizer = optimizer
        for loop in self._loops:
            self._refuse_no_lr(loop)
            wanted = self._request(loop, 0)
            if by == "weight_decay" and wanted > 0:
                decay_for_angle(self._rule(loop), wanted)  # raises now rather than in the first step
        self._warn_shared(model)
        self._attach()
        super().__init__(optimizer)

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        setting = "lr" if self._by == "lr" else "weight decay"
        return f"sets {setting} so that the angle of {counted(len(self._weights), 'weight')} follows a schedule"

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        before = self.optimizer.register_step_pre_hook(self._before_step)
        return before, self.optimizer.register_step_post_hook(self._after_step)

    def step(self, epoch: int | None = None) -> None:
        """Measure the step that the optimizer took and set the next one; an error leaves all as it was."""
        if self.last_epoch >= 0:
            self._warn_changed()
        before = self.last_epoch, self._step_count, [loop.snapshot() for loop in self._loops]
        try:
            with restoring_settings(self.optimizer):
                measured = [self._measure(loop) for loop in self._loops] if self.last_epoch >= 0 else []
                unshare_lr(self.optimizer)
                super().step(epoch)
                self._set_weight_decays()
        except BaseException:
            self.last_epoch, self._step_count, snapshots = before
            for loop, snapshot in zip(self._loops, snapshots, strict=True):
                loop.restore(snapshot)
            raise
        for loop, pair in zip(self._loops, measured, strict=False):  # empty when torch's constructor calls this
            loop.clear_pending()
            loop.recent.extend([pair] if pair else [])
        self._is_due = False

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates of the next step, one per group."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self._by == "lr":
            for loop in self._loops:
                gain = loop.gain(self._power(loop))
                if gain > 0:
                    wanted = self._request(loop, self.last_epoch) * math.exp(loop.trim)
                    self._refuse_runaway(loop, gain, wanted / gain)
                    rates[loop.group] = _like(rates[loop.group], wanted / gain)
        return rates

    def _refuse_runaway(self, loop: GroupLoop, gain: float, lr: float) -> None:
        """Raise before weights become infinite: for decay of a whole weight per step, or a gain that has vanished."""
        loop.first_gain = loop.first_gain or gain
        takes_all = _takes_all(rule_of_group(self.optimizer, self.optimizer.param_groups[loop.group]).rule, lr)
        if takes_all or gain < loop.first_gain / _LARGEST_LOSS:
            reason = "weight decay would take a whole weight per step" if takes_all else "that runs away"
            raise EquilibriaError(
                f"got an angle of {self._request(loop, self.last_epoch):.3g} radians per step, which takes lr={lr:.3g} "
                f"in parameter group {loop.group} now; a unit of lr turns weights {gain / loop.first_gain:.2g} times "
                f"as far as in the first steps: {reason}; expected a smaller angle, less momentum, or gradients that "
                "have not vanished. lr is unchanged. Rotational keeps norms constant",
                argument="angle",
            )

    def report(self, last: int = RECENT) -> list[Delivered]:
        """Requested and delivered angles by group, over the last so many steps (at most 1000)."""
        count = whole("last", last, low=1)
        return [self._delivered(loop, list(loop.recent)[-count:]) for loop in self._loops]

    def deliveries(self) -> list[dict[str, Any]]:
        """`report` of the last 100 steps for the metadata of a run; without groups that are still in their first 150.

        The lr of the first step is the user's, and the gain is learnt in the steps that follow.
        """
        settled = {one.group for one in self.report() if one.steps >= _FIRST_COMPARED and one.requested > 0}
        return [
            {
                "by": self._by,
                "group": one.group,
                "weights": len(loop.weights),
                "steps": one.steps,
                "requested": one.requested,
                "delivered": one.delivered,
                "behind": one.behind if math.isfinite(one.behind) else None,
            }
            for loop, one in zip(self._loops, self.report(_COMPARED), strict=True)
            if one.group in settled
        ]

    def state_dict(self) -> dict[str, Any]:
        """Checkpoint: numbers only."""
        names = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
        loops = [loop.state_dict() for loop in self._loops]
        return {**{name: getattr(self, name) for name in names}, "loops": loops, "_is_due": self._is_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        if len(state_dict["loops"]) != len(self._loops):
            raise EquilibriaError(
                f"got a checkpoint of {len(state_dict['loops'])} groups with invariant weights; expected "
                f"{len(self._loops)}",
                argument="state_dict",
            )
        for loop, state in zip(self._loops, state_dict["loops"], strict=True):
            loop.load_state_dict(state)
        self._is_due = False  # in checkpoints of earlier versions, which lack it
        self.__dict__.update({name: value for name, value in state_dict.items() if name != "loops"})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn from the last step, unless `step` has; set what something else has set; copy the weights.

        Gradients are checked, unless a closure is to compute them.
        """
        if closure_of(args, kwargs) is None:
            self._invariance.check(self._weights)
        if self._is_due:
            self.step()
        self._overrule()
        for loop in self._loops:
            loop.remember()
            self._stepped_lr[loop.group] = as_number("lr", self.optimizer.param_groups[loop.group]["lr"])

    def _after_step(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._is_due = True

    def _overrule(self) -> None:
        """Set the learning rates once more, or the weight decays if they were computed for another lr."""
        if self._by == "lr":
            self._warn_changed()
            for loop in self._loops:
                group, ours = self.optimizer.param_groups[loop.group], float(self._last_lr[loop.group])
                if loop.is_measured and float(group["lr"]) != ours:
                    set_value(group, "lr", ours)
        elif any(self._lr(loop) != self._decay_lr.get(loop.group, self._lr(loop)) for loop in self._loops):
            self._set_weight_decays()

    def _lr(self, loop: GroupLoop) -> float:
        return as_number("lr", self.optimizer.param_groups[loop.group]["lr"])

    def _refuse_no_lr(self, loop: GroupLoop) -> None:
        if as_number("lr", self.optimizer.param_groups[loop.group]["lr"]) == 0:
            raise EquilibriaError(
                f"got lr=0 in parameter group {loop.group}; expected more, to measure in the first step how far an lr "
                "turns weights: any sensible value will do",
                argument="lr",
            )

    def _warn_shared(self, model: nn.Module | None) -> None:
        """Warn of parameters that get a setting because they share a group with invariant weights."""
        names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
        chosen = {id(weight) for weight in self._weights.values()}
        groups = [self.optimizer.param_groups[loop.group] for loop in self._loops]
        others = [param for group in groups for param in group["params"] if id(param) not in chosen]
        if not others:
            return
        listed = ", ".join(names.get(id(param), f"one of shape {tuple(param.shape)}") for param in others[:3])
        setting, kind, group = "lr" if self._by == "lr" else "weight decay", type(self.optimizer).__name__, groups[0]
        warn_caller(
            f"AngularSchedule sets {setting} for the angle of {counted(len(chosen), 'weight')}, and with it "
            f"that of {counted(len(others), 'other parameter')} in the same group ({listed}"
            f"{', ...' if len(others) > 3 else ''}). To leave them alone, give the invariant weights a group of their "
            f"own: {kind}(eq.split_decay(model, weight_decay={float(group.get('weight_decay', 0.0)):g}, "
            f"invariant=sym).groups, lr={float(group['lr']):g})",
            UserWarning,
        )

    def _warn_changed(self) -> None:
        """Warn once if something else sets the lr, too."""
        for loop in self._loops if self._by == "lr" and not self._has_warned_changed else ():
            ours, present = self._last_lr[loop.group], self.optimizer.param_groups[loop.group]["lr"]
            if loop.is_measured and float(ours) != float(present):
                self._has_warned_changed = True
                warn_caller(
                    f"lr of parameter group {loop.group} is {float(present):.3g}, but AngularSchedule had set it to "
                    f"{float(ours):.3g}: something else sets it, too, and is overruled before every step. Set no lr on "
                    "groups with invariant weights",
                    UserWarning,
                )
                return

    def _measure(self, loop: GroupLoop) -> tuple[float, float] | None:
        """Learn from the last step; returns requested and delivered angle, None if it was skipped or not finite."""
        lr = self._stepped_lr.get(loop.group, self._lr(loop))
        angles = loop.angles()
        if not (angles and lr > 0 and all(math.isfinite(angle) for angle in angles.values())):
            return None
        delivered = math.sqrt(sum(angle**2 for angle in angles.values()) / len(angles))
        requested = self._request(loop, self.last_epoch)
        if loop.is_measured and requested > 0:  # the lr of the first step was the user's
            self._correct(loop, delivered / requested)
        loop.average({index: angle / lr for index, angle in angles.items()}, power=self._power(loop))
        return requested, delivered

    def _correct(self, loop: GroupLoop, ratio: float) -> None:
        """Correct the mean delivered angle; with weight decay only where the norm is, and can be, steered."""
        if self._by == "lr":
            loop.correct(ratio, share=_TRIM, largest=_LARGEST_TRIM)
            return
        aim = self._aim(loop, self.last_epoch)
        near = abs(math.log(aim.rule.lr * loop.gain(self._power(loop)) / aim.wanted)) < NEAR
        if near and (ratio < 1 or aim.rule.weight_decay > 0):
            loop.correct(ratio, share=_DECAY_TRIM * aim.rate, largest=_LARGEST_DECAY_TRIM)

    def _power(self, loop: GroupLoop) -> int:
        """The power of the norm by which the angle at a given lr falls."""
        rule = rule_of_group(self.optimizer, self.optimizer.param_groups[loop.group]).rule
        return 1 if rule is None else norm_power(rule)

    def _request(self, loop: GroupLoop, step: int) -> float:
        """Radians of one step."""
        angle = within("angle (radians)", self._angle(step), low=0, below=math.pi / 2)
        return angle if self._per_epoch is None else angle_per_step(self._rule(loop), angle, steps=self._per_epoch)

    def _rule(self, loop: GroupLoop) -> Rule:
        law = rule_of_group(self.optimizer, self.optimizer.param_groups[loop.group])
        if law.rule is None:
            raise EquilibriaError(
                f"got an optimizer without the law that this needs: {law.reason}; expected by='lr' and an angle per "
                "step, which need none",
                argument="optimizer",
            )
        return law.rule

    def _aim(self, loop: GroupLoop, step: int) -> Aim:
        rule = self._rule(loop)
        return Aim(rule, self._request(loop, step), self._request(loop, step + steps_ahead(rule)))

    def _set_weight_decays(self) -> None:
        if self._by == "weight_decay":
            decays = [self._weight_decay(loop) for loop in self._loops]
            for loop, decay in zip(self._loops, decays, strict=True):
                self.optimizer.param_groups[loop.group]["weight_decay"] = decay
                self._decay_lr[loop.group] = self._lr(loop)

    def _weight_decay(self, loop: GroupLoop) -> float:
        rule = self._rule(loop)
        if rule.lr == 0:  # nothing moves, whatever the weight decay: keep it until lr rises
            return rule.weight_decay
        aim, gain = self._aim(loop, self.last_epoch), loop.gain(self._power(loop))
        if aim.wanted == 0:
            return 0.0
        if gain == 0:
            return decay_for_angle(aim.rule, aim.wanted)
        if self.last_epoch >= _PATIENCE:
            self._warn_behind(loop, aim)
        return steering_decay(aim, aim.rule.lr * gain * math.exp(-loop.trim), drift=loop.drift)

    def _warn_behind(self, loop: GroupLoop, aim: Aim) -> None:
        """Warn once if weight decay cannot deliver the request soon."""
        behind = self._behind(loop)
        if behind > _PATIENCE and not self._has_warned_behind:
            self._has_warned_behind = True
            warn_caller(
                f"parameter group {loop.group} turns by {aim.rule.lr * loop.gain(self._power(loop)):.3g} radians per "
                f"step; weight decay, here 0, needs at least {behind:.0f} steps to reduce it to the requested "
                f"{aim.wanted:.3g}, because norms grow no faster than weights turn. by='lr' does it at once",
                UserWarning,
            )

    def _behind(self, loop: GroupLoop) -> float:
        gain = loop.gain(self._power(loop))
        if self._by == "lr" or gain == 0:
            return 0.0
        rule, wanted = self._rule(loop), self._request(loop, self.last_epoch)
        present = min(rule.lr * gain, 1.0)
        if present <= _ON_REQUEST * wanted:
            return 0.0
        return steps_to_fall(rule, present, end=wanted) if wanted > 0 else math.inf

    def _delivered(self, loop: GroupLoop, recent: list[tuple[float, float]]) -> Delivered:
        group = self.optimizer.param_groups[loop.group]
        requested, delivered = (
            math.sqrt(sum(pair[which] ** 2 for pair in recent) / len(recent)) if recent else math.nan
            for which in (0, 1)
        )
        lr, decay = as_number("lr", group["lr"]), as_number("weight_decay", group.get("weight_decay", 0.0))
        return Delivered(loop.group, len(recent), requested, delivered, lr, decay, self._behind(loop))


def _refuse_network(angle: object) -> None:
    """Raise if a network is passed as the angle: it is callable, too."""
    if isinstance(angle, nn.Module):
        raise EquilibriaError(
            f"got angle={type(angle).__name__}, a network; expected radians per step, or a schedule of them: "
            "AngularSchedule(optimizer, 0.01, model=model, invariant=sym)",
            argument="angle",
        )


def _loops(optimizer: Optimizer, invariant: dict[str, Tensor]) -> list[GroupLoop]:
    sharded = [name for name, weight in invariant.items() if is_sharded(weight)]
    if sharded:
        raise EquilibriaError(
            f"got {sharded[0]} as a DTensor; expected whole tensors: no process sees its angle", argument="invariant"
        )
    chosen = {id(weight) for weight in invariant.values()}
    groups = [[p for p in group["params"] if id(p) in chosen] for group in optimizer.param_groups]
    return [GroupLoop.of(index, weights) for index, weights in enumerate(groups) if weights]


def _takes_all(rule: Rule | None, lr: float) -> bool:
    """Whether weight decay takes a whole weight per step; that of AdamL2 is divided by the gradient's size."""
    return rule is not None and not isinstance(rule, AdamL2) and replace(rule, lr=lr).decay_per_step >= 1


def _like(old: float | Tensor, value: float) -> float | Tensor:
    return torch.full_like(old, value) if isinstance(old, Tensor) else value
