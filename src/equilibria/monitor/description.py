"""What a monitor watches, in words and numbers that JSON can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from equilibria.monitor.hooks import Tap
from equilibria.optimizers.rules import GroupRule, rule_of_group, rule_text
from equilibria.tensors.parameters import Watched
from equilibria.theory.rules import Rule


def describe(
    taps: Sequence[Tap], *, every: int | str, granularity: str, steps_per_epoch: int | None, version: str
) -> dict[str, Any]:
    """The metadata of a run: versions, how it is sampled, optimizers, and every watched weight with its law."""
    laws = [[rule_of_group(tap.optimizer, group) for group in tap.optimizer.param_groups] for tap in taps]
    return {
        "equilibria": version,
        "torch": str(torch.__version__),
        "every": every,
        "granularity": granularity,
        "steps_per_epoch": steps_per_epoch,
        "optimizers": [
            {"class": type(tap.optimizer).__name__, "settings": _settings(tap, own)}
            for tap, own in zip(taps, laws, strict=True)
        ],
        "params": [
            unit
            for tap, own in zip(taps, laws, strict=True)
            for each in tap.watched
            for unit in _units(each, own[each.group])
        ],
    }


def _settings(tap: Tap, laws: Sequence[GroupRule]) -> str:
    texts = [rule_text(law.rule) if law.rule is not None else type(tap.optimizer).__name__ for law in laws]
    return "; ".join(dict.fromkeys(texts))


def _units(each: Watched, law: GroupRule) -> Iterator[dict[str, Any]]:
    told = each.invariant or (None,) * each.units
    for name, invariant in zip(each.unit_names, told, strict=True):
        yield {
            "name": name,
            "aliases": list(each.aliases),
            "shape": list(each.param.shape),
            "entries": each.entries,
            "bias": each.has_bias,
            "how": each.how,
            "invariant": invariant,
            "dtype": str(each.param.dtype).removeprefix("torch."),
            "optimizer": each.optimizer,
            "group": each.group,
            "law": None if law.rule is None else type(law.rule).__name__,
            "no_law": law.reason or None,
            "rule": None if law.rule is None else _rule(law.rule),
        }


def _rule(rule: Rule) -> dict[str, Any]:
    held = {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(rule).items()
    }
    return {"kind": type(rule).__name__, **held}
