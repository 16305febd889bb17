"""Settings of two runs that differ, and what the records show of clipping, formats and frozen layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equilibria.diagnosis.metadata import three_digits
from equilibria.diagnosis.run import SampledRun
from equilibria.findings import joined
from equilibria.theory._reals import Array

_AT_LIMIT, _OFTEN = 0.02, 0.2  # relative distance from the largest gradient, and the share of steps within it
_FEWEST_STEPS = 20
_EQUAL, _BETWEEN = 1e-6, 0.05  # relative: settings at one step, which float32 may round; and between samples
_ROUNDING = ("bfloat16", "float16")
_RECORDED = {"lr": "lr", "weight_decay": "weight decay", "momentum": "momentum"}
_OF_RULE = {"nesterov", "dampening", "betas", "kind", "lr", "weight_decay", "momentum"}


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """One setting that differs.

    Attributes:
        name: of the setting.
        a: its value in A, in words.
        b: its value in B.
        layers: the layers for which it differs; empty for a setting of the whole run.
    """

    name: str
    a: str
    b: str
    layers: tuple[str, ...] = ()

    def sentence(self, count: int) -> str:
        """What differs, of ``count`` common layers."""
        where = "" if len(self.layers) in (0, count) else f" ({joined(self.layers)})"
        return f"{self.name}: {self.a} in A, {self.b} in B{where}"


def setting_differences(a: SampledRun, b: SampledRun, names: Sequence[str]) -> tuple[SettingDifference, ...]:
    """All recorded settings that differ, those of layers first."""
    found: list[SettingDifference] = []
    for column, name in _RECORDED.items():
        differ = [layer for layer in names if not same_course(a, b, layer, column)]
        found += _of_layers(name, differ, lambda run, layer, column=column: _course(run, layer, column), a, b)
    found += _of_layers("optimizer", names, _optimizer, a, b)
    for key in sorted(_options(a, names) | _options(b, names)):
        found += _of_layers(key, names, lambda run, layer, key=key: _option(run, layer, key), a, b)
    found += _of_layers("number format", names, lambda run, layer: str(entry(run, layer).get("dtype", "")), a, b)
    found += _of_layers("shape", names, lambda run, layer: str(entry(run, layer).get("shape", "")), a, b)
    for name, value in _OF_RUN.items():
        pair = value(a), value(b)
        if pair[0] != pair[1]:
            found.append(SettingDifference(name, pair[0] or "not recorded", pair[1] or "not recorded"))
    return tuple(each for each in found if each.a and each.b)


def entry(run: SampledRun, layer: str) -> Mapping[str, Any]:
    """What the metadata say about a layer."""
    return run.entries[run.series.names.index(layer)]


def looks_invariant(run: SampledRun, layer: str) -> bool:
    """Whether a layer is scale-invariant by its label, or looks so."""
    return bool(run.invariant[run.series.names.index(layer)])


def frozen_names(run: SampledRun) -> tuple[str, ...]:
    """The parameters that would have been watched, but require no gradient."""
    return tuple(str(each["name"]) for each in run.metadata.get("frozen", ()))


def rounds(run: SampledRun, layer: str) -> bool:
    """Whether a layer's weights are stored in a format that rounds small updates away."""
    return entry(run, layer).get("dtype") in _ROUNDING


def optimizer_kind(run: SampledRun, layer: str) -> str:
    """The kind of law that a layer follows, the optimizer's class where there is none."""
    return str((entry(run, layer).get("rule") or {}).get("kind") or _optimizer(run, layer))


def clipped_at(run: SampledRun) -> float | None:
    """The length at which all gradients together look clipped; None if they do not.

    Gradients of different batches differ in length; clipped ones have one length, which none of them exceeds. They look
    clipped if at least a fifth of the sampled steps are within 2 % of the largest.
    """
    step, length = run.taken.columns["step"], run.taken.columns["grad_norm"]
    if not len(step) or not np.isfinite(length).any():
        return None
    values, where = np.unique(step, return_inverse=True)
    total, count = np.bincount(where, np.nan_to_num(length) ** 2), np.bincount(where)
    total = np.sqrt(total[count == count.max()])
    if len(values) < _FEWEST_STEPS or len(total) < _FEWEST_STEPS:
        return None
    largest = float(total.max())
    often = float(np.mean(total >= (1 - _AT_LIMIT) * largest)) >= _OFTEN
    return largest if often and largest > 0 else None


def _of_layers(
    name: str, names: Sequence[str], value: Callable[..., str], a: SampledRun, b: SampledRun
) -> Iterable[SettingDifference]:
    """One difference for each pair of values, with the layers that have it."""
    layers: dict[tuple[str, str], list[str]] = {}
    for layer in names:
        pair = value(a, layer), value(b, layer)
        if pair[0] != pair[1]:
            layers.setdefault(pair, []).append(layer)
    return [SettingDifference(name, *pair, tuple(members)) for pair, members in layers.items()]


def same_course(a: SampledRun, b: SampledRun, layer: str, column: str) -> bool:
    """Whether lr, weight decay or momentum may be the same at every step, as far as the samples show.

    At steps that both runs sampled the values are equal. At a step that one alone sampled its value lies among those
    of the other's four samples around it, to within 5 %: between two samples a schedule may rise and fall.
    """
    courses = [_column(run, layer, column) for run in (a, b)]
    if not all(len(step) for step, _ in courses):
        return not any(len(step) for step, _ in courses)
    return all(_among(courses[one], courses[1 - one]) for one in (0, 1))


def _among(course: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    (step, values), (steps, around) = course, other
    inside = (step >= steps[0]) & (step <= steps[-1])
    step, values = step[inside], values[inside]
    place = np.searchsorted(steps, step)
    near = around[np.clip(place[:, np.newaxis] + np.arange(-2, 2), 0, len(steps) - 1)]
    low, high = (near.min(axis=1) / (1 + _BETWEEN), near.max(axis=1) * (1 + _BETWEEN))
    common = steps[np.minimum(place, len(steps) - 1)] == step
    same = np.isclose(values, around[np.minimum(place, len(steps) - 1)], rtol=_EQUAL, atol=0)
    return bool(np.where(common, same, (values >= low) & (values <= high)).all())


def _column(run: SampledRun, layer: str, name: str) -> tuple[Array, Array]:
    """Steps and values."""
    columns = run.series.of(run.series.names.index(layer))
    known = np.isfinite(columns[name])
    return np.asarray(columns["step"][known]), np.asarray(columns[name][known])


def _course(run: SampledRun, layer: str, column: str) -> str:
    """A setting over the run: one number, or its first, largest and last one."""
    _, values = _column(run, layer, column)
    if not len(values):
        return ""
    first, last, most, least = (
        three_digits(float(each)) for each in (values[0], values[-1], values.max(), values.min())
    )
    if most == least:
        return first
    turn = most if most not in (first, last) else least if least not in (first, last) else ""
    return f"{first} → {turn} → {last}" if turn else f"{first} → {last}"


def _optimizer(run: SampledRun, layer: str) -> str:
    listed, position = run.metadata.get("optimizers", ()), entry(run, layer).get("optimizer", 0)
    return str(listed[position]["class"]) if position < len(listed) else ""


def _options(run: SampledRun, names: Sequence[str]) -> set[str]:
    known = {key for layer in names for key in entry(run, layer).get("rule") or {}}
    return {key for key in known if key in ("nesterov", "dampening") or key not in _OF_RULE} | {"second beta"}


def _option(run: SampledRun, layer: str, key: str) -> str:
    rule = entry(run, layer).get("rule") or {}
    if key == "second beta":
        return three_digits(rule["betas"][1]) if rule.get("betas") else ""
    return str(rule.get(key, ""))


_OF_RUN: dict[str, Callable[[SampledRun], str]] = {
    "batch size": lambda run: str(run.metadata.get("batch_size") or ""),
    "controllers": lambda run: ", ".join(str(each["name"]) for each in run.metadata.get("controllers", ())) or "none",
    "frozen parameters": lambda run: joined(frozen_names(run)) or "none",
}
