"""What the metadata of a run know about a parameter: its optimizer's rule and its settings."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.theory.identified import Identified, identified_from
from equilibria.theory.rules import RULES, Rule

OPTIMIZER_UNKNOWN = "the optimizer is not known"
"""Why a layer of an imported run has no law: nobody said which optimizer trained it."""

_RULES = {rule.__name__: rule for rule in RULES.values()}


def entries_by_name(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The entry of every parameter in the metadata of a run."""
    return {entry["name"]: entry for entry in metadata.get("params", ())}


def rule_from_metadata(entry: Mapping[str, Any], settings: Mapping[str, float]) -> Rule | None:
    """The rule of a parameter at the settings of one sample, None where there is no law.

    Args:
        entry: the parameter's entry in the metadata; its "rule" holds the kind and what the samples do not.
        settings: lr, weight_decay and momentum (beta1 for Adam and Lion) of the sample.

    Example:
        >>> entry = {"rule": {"kind": "AdamW", "betas": [0.9, 0.95]}}
        >>> rule_from_metadata(entry, {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.8})
        AdamW(lr=0.001, weight_decay=0.1, betas=(0.8, 0.95))
    """
    recorded = entry.get("rule") or {}
    if recorded.get("kind") == Identified.__name__:
        return _identified(json.dumps(recorded), settings["lr"], settings["weight_decay"])
    options = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in recorded.items())
    return _rule(options, settings["lr"], settings["weight_decay"], settings["momentum"])


def rules_from_metadata(
    entries: Iterable[Mapping[str, Any]], settings: Iterable[tuple[float, float, float]]
) -> list[Rule | None]:
    """`rule_from_metadata` of many parameters, each with its lr, weight decay and momentum."""
    rules: dict[tuple[Any, ...], Rule | None] = {}  # a monitor describes the rule of a group in one dict
    listed = []
    for entry, (lr, weight_decay, momentum) in zip(entries, settings, strict=True):
        key = id(entry.get("rule")), lr, weight_decay, momentum
        if key not in rules:
            rules[key] = rule_from_metadata(entry, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        listed.append(rules[key])
    return listed


@lru_cache(maxsize=1024)
def _identified(recorded: str, lr: float, weight_decay: float) -> Rule | None:
    """A measured law; its record is JSON, which can be looked up."""
    try:
        return identified_from(json.loads(recorded) | {"lr": lr, "weight_decay": weight_decay})
    except (EquilibriaError, KeyError, TypeError, ValueError):
        return None


@lru_cache(maxsize=1024)
def _rule(options: tuple[tuple[str, Any], ...], lr: float, weight_decay: float, momentum: float) -> Rule | None:
    """The rule; the layers of a group share one, which is checked once."""
    recorded = dict(options)
    kind = _RULES.get(recorded.pop("kind", ""))
    if kind is None:
        return None
    if math.isfinite(momentum):
        recorded["momentum"] = momentum
    if recorded.get("betas"):
        recorded["betas"] = (recorded.get("momentum", recorded["betas"][0]), recorded["betas"][1])
    fields = {field.name for field in dataclasses.fields(kind)} - {"lr", "weight_decay"}
    known: dict[str, Any] = {name: value for name, value in recorded.items() if name in fields and value is not None}
    try:
        return kind(lr, weight_decay, **known)
    except EquilibriaError:
        return None  # these settings have no law


def settings_text(
    entry: Mapping[str, Any], rule: Rule | None, settings: tuple[float, float, float], metadata: Mapping[str, Any]
) -> str:
    """The optimizer of a parameter with its rule, lr, weight decay and momentum at one sample, as code.

    Example:
        >>> settings_text({}, None, (0.1, 5e-4, 0.9), {"optimizers": [{"class": "SGD"}]})
        'SGD(lr=0.1, wd=5e-4, momentum=0.9)'
    """
    optimizers, position = metadata.get("optimizers", ()), entry.get("optimizer", 0)
    kind = optimizers[position]["class"] if position < len(optimizers) else "optimizer"
    lr, weight_decay, momentum = settings
    return _settings_text(kind, rule, lr, weight_decay, math.nan if entry.get("promised_by") else momentum)


@lru_cache(maxsize=1024)
def _settings_text(kind: str, rule: Rule | None, lr: float, weight_decay: float, momentum: float) -> str:
    words = [f"lr={three_digits(lr)}", f"wd={three_digits(weight_decay)}"]
    betas = getattr(rule, "betas", None)
    if betas:
        words.append(f"betas=({', '.join(map(_momentum, betas))})")
    elif momentum > 0:
        words.append(f"momentum={_momentum(momentum)}")
    if getattr(rule, "nesterov", False):
        words.append("nesterov=True")
    return f"{kind}({', '.join(words)})"


def _momentum(value: float) -> str:
    """A momentum with three significant digits of 1 - momentum, which sets its memory.

    Example:
        >>> _momentum(0.9447189), _momentum(0.99995), _momentum(0.9)
        ('0.9447', '0.99995', '0.9')
    """
    return short(1 - float(f"{1 - value:.3g}")) if value < 1 else short(value)


def three_digits(value: float) -> str:
    """A setting with three significant digits, as a schedule leaves it.

    Example:
        >>> three_digits(0.00669873), three_digits(0.1)
        ('0.0067', '0.1')
    """
    return short(float(f"{value:.3g}"))


def short(value: float) -> str:
    """A setting in its shortest spelling.

    Example:
        >>> short(0.1), short(0.0005), short(0.999), short(float("nan"))
        ('0.1', '5e-4', '0.999', '?')
    """
    if not math.isfinite(value):
        return "?"
    digits, power = f"{value:.6e}".split("e")
    scientific = f"{float(digits):g}e{int(power)}"
    return min(f"{value:.7g}", scientific, key=len)
