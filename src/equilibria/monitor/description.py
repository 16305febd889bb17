"""The metadata of a run: optimizers, controllers and watched weights with their laws, in values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from equilibria.optimizers.controllers import AngleSchedule, Controller
from equilibria.optimizers.rules import GroupRule, rule_text
from equilibria.tensors.parameters import Watched
from equilibria.theory.identified import Identified
from equilibria.theory.rules import Rule


def describe_optimizer(optimizer: torch.optim.Optimizer, laws: Sequence[GroupRule]) -> dict[str, str]:
    """Class and settings of an optimizer."""
    kind = type(optimizer).__name__
    texts = [kind if law.rule is None else rule_text(law.rule) for law in laws]
    return {"class": kind, "settings": "; ".join(dict.fromkeys(texts))}


def describe_controller(controller: Controller) -> dict[str, Any]:
    """Name and promise of a controller, and the angles that it delivered."""
    described = {"name": type(controller).__name__, "promise": controller.promise}
    return described | ({"delivered": controller.deliveries()} if isinstance(controller, AngleSchedule) else {})


def describe_units(
    layer: Watched, law: GroupRule, rule: dict[str, Any] | None, *, promised_by: str | None = None
) -> Iterator[dict[str, Any]]:
    """A watched tensor, or each of its rows, with its law."""
    # Who turns a weight at constant norm was told that it is scale-invariant.
    labels = layer.invariant or (None if promised_by is None else True,) * layer.units
    for name, invariant in zip(layer.unit_names, labels, strict=True):
        yield {
            "name": name,
            "aliases": list(layer.aliases),
            "shape": list(layer.param.shape),
            "entries": layer.entries,
            "bias": layer.has_bias,
            "how": layer.how,
            "invariant": invariant,
            "dtype": str(layer.weight.dtype).removeprefix("torch."),
            "optimizer": layer.optimizer,
            "group": layer.group,
            "law": None if law.rule is None else type(law.rule).__name__,
            "no_law": law.reason or None,
            "rule": rule,
            "promised_by": promised_by,
        }


def describe_rule(rule: Rule) -> dict[str, Any]:
    """Kind and settings of a rule, as `equilibria.diagnosis.metadata` reads them."""
    if isinstance(rule, Identified):
        return {"kind": type(rule).__name__} | dataclasses.asdict(rule)
    values = ((field.name, getattr(rule, field.name)) for field in dataclasses.fields(rule))
    return {"kind": type(rule).__name__} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in values
    }
