"""The theory rule that a torch optimizer's parameter group follows, read from the optimizer's class and the group.

No module here imports torch: an optimizer object exists only after torch was imported, so torch's classes are looked up
in ``sys.modules``. That keeps this package usable by `equilibria.planning`, which must start without torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from equilibria.errors import EquilibriaError
from equilibria.optimizers.copies import decay_of, rule_groups
from equilibria.optimizers.identification import measured_law
from equilibria.optimizers.recognition import RuleReader, recognise
from equilibria.theory.identified import Identified
from equilibria.theory.muon import NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS
from equilibria.theory.rules import SGD, AdamL2, AdamW, Muon, Rule


class TorchOptimizer(Protocol):
    """What this module uses of a `torch.optim.Optimizer`."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The parameter groups with their settings."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """The rule of a parameter group, or the reason why there is none.

    Attributes:
        rule: the rule with the group's present settings, or None.
        reason: why there is no rule; "" if there is one.
        overwrites_gradient: whether a step is known to leave something else in ``.grad``.
    """

    rule: Rule | None
    reason: str = ""
    overwrites_gradient: bool = False


def rule_of_group(
    optimizer: TorchOptimizer,
    group: Mapping[str, Any],
    *,
    measure: bool = False,
    shape: tuple[int, int] | None = None,
) -> GroupRule:
    """The theory rule that a parameter group follows with its present settings.

    A custom optimizer takes part by a method ``equilibria_rule(group)`` that returns a rule of `equilibria.theory`;
    without one it is recognised by trial if it moves as one of these rules does (`equilibria.optimizers.recognition`).
    The group, not the name of the class, decides whether weight decay is coupled or decoupled.

    Args:
        optimizer: any torch optimizer.
        group: one of its parameter groups.
        measure: whether to find the law of an optimizer without a closed one by an experiment of some seconds
            (`equilibria.identify`); its outcome is kept.
        shape: of the weight that is measured; by default that of the group's largest tensor.

    Returns:
        The rule, or the reason why there is none.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(3)], lr=0.1, momentum=0.9, weight_decay=5e-4)
        >>> rule_of_group(optimizer, optimizer.param_groups[0]).rule
        SGD(lr=0.1, weight_decay=0.0005, momentum=0.9, dampening=0.0, nesterov=False)
        >>> rule_of_group(torch.optim.RMSprop([torch.zeros(3)]), {"lr": 0.1}).reason
        'no law for RMSprop'
    """
    law = _closed_law(optimizer, group)
    if law.rule is not None or not measure or hasattr(optimizer, "equilibria_rule") or not _is_optimizer(optimizer):
        return law
    try:
        found = measured_law(optimizer, group, shape=shape)
    except Exception:  # groups of foreign optimizers hold anything; it must not stop the user's training
        return law
    if found.rule is None:
        return GroupRule(None, f"no law for {found.name} ({found.motion}): {found.reason}")
    return GroupRule(found.rule, overwrites_gradient=True)  # a step of somebody else's may do so


def _closed_law(optimizer: TorchOptimizer, group: Mapping[str, Any]) -> GroupRule:
    name = type(optimizer).__name__
    build: _Builder | None = getattr(optimizer, "equilibria_rule", None) or _torch_builder(type(optimizer))
    overwrites_gradient = False
    if build is None and _can_be_tried(optimizer):
        recognition = recognise(optimizer, group)
        if recognition.reader is None:
            return GroupRule(None, f"no law for {name}: {recognition.reason}")
        build, overwrites_gradient = _builder(recognition.reader), recognition.overwrites_gradient
    if build is None:
        return GroupRule(None, f"no law for {name}")
    if group.get("amsgrad"):
        return GroupRule(None, f"no law for {name} with amsgrad")
    try:
        rule = build(group)
    except Exception as error:  # equilibria_rule is foreign code: an error in it must not stop the user's training
        what = str(error) if isinstance(error, EquilibriaError) else f"{type(error).__name__}: {error}"
        return GroupRule(None, f"no law for {name} with these settings: {what}")
    if not isinstance(rule, Rule):
        reason = f"no law for {name}: got {rule!r} from its equilibria_rule; expected a rule of the theory"
        return GroupRule(None, reason)
    return GroupRule(rule, overwrites_gradient=overwrites_gradient)


def rule_of_optimizer(
    optimizer: TorchOptimizer, *, scheduled: Sequence[str] = ("lr",), shape: tuple[int, int] | None = None
) -> Rule:
    """The one rule of an optimizer: that of its first parameter group with weight decay, else of its first group.

    Groups without weight decay (gains, biases) have no equilibrium and do not count if another group decays.

    Args:
        optimizer: a torch optimizer.
        scheduled: settings that a schedule replaces; groups may differ in them.
        shape: of the weight, if its law has to be measured.

    Raises:
        EquilibriaError: a group that counts has no rule, or two of them follow different rules.

    Example:
        >>> import torch
        >>> groups = [{"params": [torch.ones(3)], "weight_decay": 0.0}, {"params": [torch.ones(3, 3)]}]
        >>> rule_of_optimizer(torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1))
        AdamW(lr=0.001, weight_decay=0.1, betas=(0.9, 0.999))
    """
    rules: dict[int, Rule] = {}
    groups = list(enumerate(rule_groups(optimizer)))
    for index, group in [pair for pair in groups if decay_of(pair[1])] or groups:
        law = rule_of_group(optimizer, group, measure=True, shape=shape)
        if law.rule is None:
            raise EquilibriaError(
                f"got optimizer={type(optimizer).__name__} ({law.reason}); expected one with an equilibrium, one with "
                "a method equilibria_rule(group), or a rule of equilibria.theory such as SGD(lr, weight_decay)",
                argument="optimizer",
            )
        rules[index] = law.rule
    first = next(iter(rules.values()))
    settings = {name: getattr(first, name) for name in scheduled}
    for index, rule in rules.items():
        if type(rule) is not type(first) or dataclasses.replace(rule, **settings) != first:
            listed = "; ".join(f"group {number}: {rule_text(other)}" for number, other in rules.items())
            raise EquilibriaError(
                f"got optimizer={type(optimizer).__name__}, whose parameter groups follow different rules ({listed}); "
                f"expected one rule: pass that of one group, such as {rule!r} for group {index}",
                argument="optimizer",
            )
    return first


def follows(optimizer: object, kind: type) -> bool:
    """Whether the optimizer steps as ``kind`` does: of this class, or of a subclass that leaves ``step`` alone."""
    return _step_of(type(optimizer)) is _step_of(kind)


def rule_text(rule: Rule) -> str:
    """A rule as people write it, without the settings that have their default.

    Example:
        >>> from equilibria.theory import SGD
        >>> rule_text(SGD(0.1, 5e-4, momentum=0.9))
        'SGD(lr=0.1, wd=0.0005, momentum=0.9)'
    """
    shown = [f"lr={rule.lr:g}", f"wd={rule.weight_decay:g}"]
    if isinstance(rule, Identified):
        return f"{rule.name}({', '.join(shown)})"
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.name not in ("lr", "weight_decay") and value != field.default:
            shown.append(f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}")
    return f"{type(rule).__name__}({', '.join(shown)})"


# ---- the rules of torch's own optimizers

_Builder = Callable[[Mapping[str, Any]], Rule]


@functools.lru_cache(maxsize=1024)
def _rule(kind: type[Any], **settings: Any) -> Rule:
    """A rule; equal settings share one, which is checked once and not at every sampled step."""
    rule: Rule = kind(**settings)
    return rule


def _sgd(group: Mapping[str, Any]) -> Rule:
    return _rule(
        SGD,
        lr=float(group["lr"]),  # a learning rate may be a tensor
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
    )


def _adam(group: Mapping[str, Any], *, decoupled: bool) -> Rule:
    kind = AdamW if group.get("decoupled_weight_decay", decoupled) else AdamL2
    first, second = (float(beta) for beta in group["betas"])
    return _rule(kind, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]), betas=(first, second))


def _muon(group: Mapping[str, Any]) -> Rule:
    steps, coefficients = group.get("ns_steps", 5), tuple(group.get("ns_coefficients", NEWTON_SCHULZ))
    if (steps, coefficients) != (NEWTON_SCHULZ_STEPS, NEWTON_SCHULZ):
        raise EquilibriaError(
            f"got ns_coefficients={coefficients}, ns_steps={steps}; its law is for {NEWTON_SCHULZ} and "
            f"{NEWTON_SCHULZ_STEPS}"
        )
    return _rule(
        Muon,
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        nesterov=bool(group["nesterov"]),
        adjust_lr_fn=group.get("adjust_lr_fn") or "original",
    )


def _builder(reader: RuleReader) -> _Builder:
    kind: Any = reader.kind
    return lambda group: _rule(kind, **reader.settings(group))


def _can_be_tried(optimizer: object) -> bool:
    """Whether an optimizer is one of somebody else's: those of torch that are not below have no law."""
    return _is_optimizer(optimizer) and not type(optimizer).__module__.startswith("torch.optim")


def _is_optimizer(optimizer: object) -> bool:
    optim = sys.modules.get("torch.optim")
    return optim is not None and isinstance(optimizer, optim.Optimizer)


_BUILDERS: dict[str, _Builder] = {
    "SGD": _sgd,
    "AdamW": functools.partial(_adam, decoupled=True),
    "Adam": functools.partial(_adam, decoupled=False),
    "Muon": _muon,  # since torch 2.9
}


def _torch_builder(kind: type) -> _Builder | None:
    optim = sys.modules.get("torch.optim")
    return None if optim is None else _builders_by_step(optim).get(_step_of(kind))


@functools.cache
def _builders_by_step(optim: ModuleType) -> dict[object, _Builder]:
    """The builders by the ``step`` function of the class: a subclass with its own step follows another rule."""
    kinds = {name: getattr(optim, name, None) for name in _BUILDERS}
    return {_step_of(kind): _BUILDERS[name] for name, kind in kinds.items() if kind is not None}


def _step_of(kind: type) -> object:
    return inspect.unwrap(getattr(kind, "step", None))  # type: ignore[arg-type]  # torch wraps step for its hooks
