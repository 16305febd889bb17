"""Which law of the theory a torch optimizer follows, read from its class and its parameter group."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from equilibria.errors import EquilibriaError
from equilibria.theory.rules import SGD, AdamL2, AdamW, Muon, Rule


@dataclass(frozen=True, slots=True)
class Law:
    """A rule of the theory, or the reason why there is none.

    Attributes:
        rule: the rule with the settings of the group at this moment, or None.
        reason: why there is no rule, "" if there is one.
    """

    rule: Rule | None
    reason: str = ""


def law_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Law:
    """The law that governs a parameter group at this moment.

    An optimizer of your own takes part by a method ``equilibria_rule(group)`` that returns a rule of
    `equilibria.theory`. Coupled and decoupled decay are told apart by the group, not by the name of the class.

    Args:
        optimizer: any torch optimizer.
        group: one of its parameter groups.

    Returns:
        The law.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(3)], lr=0.1, momentum=0.9, weight_decay=5e-4)
        >>> law_of(optimizer, optimizer.param_groups[0]).rule
        SGD(lr=0.1, weight_decay=0.0005, momentum=0.9, dampening=0.0, nesterov=False)
        >>> law_of(torch.optim.RMSprop([torch.zeros(3)]), {"lr": 0.1}).reason
        'no law for RMSprop'
    """
    own = getattr(optimizer, "equilibria_rule", None)
    name = type(optimizer).__name__
    build = own if own is not None else _builder(type(optimizer))
    if build is None:
        return Law(None, f"no law for {name}")
    if group.get("amsgrad"):
        return Law(None, f"no law for {name} with amsgrad")
    try:
        rule = build(group)
    except Exception as error:  # an optimizer of somebody else's: whatever it raises must not end the watching
        what = str(error) if isinstance(error, EquilibriaError) else f"{type(error).__name__}: {error}"
        return Law(None, f"no law for {name} with these settings: {what}")
    if not isinstance(rule, Rule):
        return Law(None, f"no law for {name}: got {rule!r} from its equilibria_rule; expected a rule of the theory")
    return Law(rule)


def setting(value: object) -> float:
    """A setting of a group as a number; a learning rate may be a tensor."""
    return float(value)  # type: ignore[arg-type]


def follows(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the optimizer steps as ``kind`` does: of this class, or of a subclass that leaves ``step`` alone."""
    return _step_of(type(optimizer)) is _step_of(kind)


def _step_of(kind: type) -> object:
    return inspect.unwrap(kind.step)  # type: ignore[attr-defined]  # torch wraps step for its hooks


def _sgd(group: Mapping[str, Any]) -> Rule:
    return SGD(
        setting(group["lr"]),
        setting(group["weight_decay"]),
        momentum=setting(group["momentum"]),
        dampening=setting(group["dampening"]),
        nesterov=bool(group["nesterov"]),
    )


def _adam(group: Mapping[str, Any], *, decoupled: bool) -> Rule:
    kind = AdamW if group.get("decoupled_weight_decay", decoupled) else AdamL2
    first, second = (setting(beta) for beta in group["betas"])
    return kind(setting(group["lr"]), setting(group["weight_decay"]), betas=(first, second))


def _muon(group: Mapping[str, Any]) -> Rule:
    return Muon(
        setting(group["lr"]),
        setting(group["weight_decay"]),
        momentum=setting(group["momentum"]),
        nesterov=bool(group["nesterov"]),
        adjust_lr_fn=group.get("adjust_lr_fn") or "original",
    )


def _builder(kind: type[torch.optim.Optimizer]) -> Callable[[Mapping[str, Any]], Rule] | None:
    return _RULES.get(_step_of(kind))


_RULES: dict[object, Callable[[Mapping[str, Any]], Rule]] = {
    _step_of(torch.optim.SGD): _sgd,
    _step_of(torch.optim.AdamW): lambda group: _adam(group, decoupled=True),
    _step_of(torch.optim.Adam): lambda group: _adam(group, decoupled=False),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    _RULES[_step_of(torch.optim.Muon)] = _muon


def rule_text(rule: Rule) -> str:
    """A rule as people write it: only what is not the default.

    Example:
        >>> from equilibria.theory import SGD
        >>> rule_text(SGD(0.1, 5e-4, momentum=0.9))
        'SGD(lr=0.1, wd=0.0005, momentum=0.9)'
    """
    shown = [f"lr={rule.lr:g}", f"wd={rule.weight_decay:g}"]
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.name not in ("lr", "weight_decay") and value != field.default:
            shown.append(f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}")
    return f"{type(rule).__name__}({', '.join(shown)})"
