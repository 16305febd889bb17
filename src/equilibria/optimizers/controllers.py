"""The controllers that act on an optimizer, and what they did to its weights: they announce it, the monitor reads it.

The log is an attribute of the optimizer. Torch's optimizers neither copy nor pickle it; a copied controller announces
itself again on the optimizer that was copied with it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

CONTROL_LOG = "equilibria_control"
"""The attribute of an optimizer that holds the log."""


class Controller(Protocol):
    """Acts on the settings of an optimizer, or on its weights: then ``follows_settings`` is true."""

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""


@runtime_checkable
class AngleController(Controller, Protocol):
    """An optimizer that turns some of its weights by an angle of its own, and leaves the others to a plain one."""

    plain: Any

    def promised_angle(self, weight: Any, group: dict[str, Any], *, by_row: bool) -> float | None:
        """Radians by which the next step turns a weight, or each of its rows; None if the plain optimizer steps it.

        NaN if it turns the weight but does not say by how much.
        """


@runtime_checkable
class AngleSchedule(Controller, Protocol):
    """Sets lr or weight decay so that some weights turn by a requested angle, and measures whether they do."""

    def deliveries(self) -> list[dict[str, Any]]:
        """By parameter group, the requested and the delivered angle of the last steps, in values for JSON."""


@dataclass(frozen=True, slots=True)
class StandsFor:
    """The run that the stored weights w~ and momentum buffers v~ of a parameter group stand for.

    Its weights are ``w = w~ / scale`` and its buffers ``v = scale v~ + share w``.

    Attributes:
        lr: of that run.
        weight_decay: of that run.
        scale: stored weight over the weight that it stands for, before the step.
        share: of that weight in its momentum buffer, which the stored buffer lacks, before the step.
        kept: the scale before the present step over the one after it; 1 between steps.
    """

    lr: float
    weight_decay: float
    scale: float
    share: float
    kept: float = 1.0


@runtime_checkable
class StandIn(Controller, Protocol):
    """Trains weights that stand for those of another run, the same network."""

    def stands_for(self) -> dict[int, StandsFor]:
        """By parameter group, what its weights stand for."""


@dataclass(frozen=True, slots=True)
class Rescaled:
    """All that controllers did to one weight so far.

    Attributes:
        log_scale: logarithm of the factor by which they multiplied it.
        log_change: logarithm of the factor by which that changed the weight that it stands for (`StandsFor`), or
            itself if it stands for no other.
        changes: number of in-place changes, as torch counts them.
    """

    log_scale: float = 0.0
    log_change: float = 0.0
    changes: int = 0


class ControlLog:
    """What the controllers of one optimizer announced.

    Attributes:
        controllers: those that act on it.
        count: rescalings so far, of any weight.
        equilibrium_lr: the learning rate for which `start_in_equilibrium` rescaled a weight, by its id.
    """

    def __init__(self) -> None:
        self.controllers: list[Controller] = []
        self.count = 0
        self.equilibrium_lr: dict[int, float] = {}
        self._rescaled: dict[int, Rescaled] = {}

    def note_rescaling(self, weight: object, factor: float, *, changes: int = 1, stands_for_same: bool = False) -> None:
        """Announce that a weight was multiplied by a factor, first moments by 1/factor and second ones by its square.

        Args:
            weight: the tensor.
            factor: what it was multiplied by, above 0.
            changes: in-place changes that this took.
            stands_for_same: whether the weight and its state stand for the same as before (`StandsFor`).
        """
        self.count += 1
        known, log_factor = self.of(weight), math.log(factor)
        self._rescaled[id(weight)] = Rescaled(
            known.log_scale + log_factor,
            known.log_change + (0.0 if stands_for_same else log_factor),
            known.changes + changes,
        )

    def of(self, weight: object) -> Rescaled:
        """All that was announced about a weight."""
        return self._rescaled.get(id(weight), Rescaled())


def control_log(optimizer: Any) -> ControlLog:
    """The log of an optimizer; an empty one is put there first if it has none.

    Example:
        >>> from types import SimpleNamespace
        >>> optimizer, weight = SimpleNamespace(), object()
        >>> control_log(optimizer).note_rescaling(weight, 0.5)
        >>> control_log(optimizer).of(weight).changes
        1
    """
    log: ControlLog = vars(optimizer).setdefault(CONTROL_LOG, ControlLog())
    return log


def announce(optimizer: Any, controller: Controller) -> None:
    """Add a controller to the log of its optimizer, once, and let its hooks act in their turn."""
    log = control_log(optimizer)
    if not any(other is controller for other in log.controllers):
        log.controllers.append(controller)
    order_hooks(optimizer)


def withdraw(optimizer: Any, controller: Controller) -> None:
    """Remove a controller from the log of its optimizer."""
    log = control_log(optimizer)
    log.controllers = [other for other in log.controllers if other is not controller]


def order_hooks(optimizer: Any) -> None:
    """Let controllers act before all other hooks that precede a step, and after all others that follow it.

    Hooks then see the settings and weights that a step is taken with, and the weights that it leaves, in whatever order
    they were registered. Controllers that follow the settings (``follows_settings``) act after those that make them;
    otherwise controllers keep their own order: one that wraps another acts after it.
    """
    controllers = control_log(optimizer).controllers
    own = {id(controller) for controller in controllers}
    following = {id(controller) for controller in controllers if getattr(controller, "follows_settings", False)}
    before: OrderedDict[int, Any] = optimizer._optimizer_step_pre_hooks
    after: OrderedDict[int, Any] = optimizer._optimizer_step_post_hooks
    owners = {key: id(getattr(hook, "__self__", None)) for key, hook in before.items()}
    foreign = [key for key, owner in owners.items() if owner not in own]
    for key in [*(key for key, owner in owners.items() if owner in following), *foreign]:
        before.move_to_end(key)
    for key, hook in list(after.items()):
        if id(getattr(hook, "__self__", None)) in own:
            after.move_to_end(key)
