"""Settings of two runs that differ, and what the records show of clipping, formats and frozen layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from equilibria.diagnosis.metadata import three_digits
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import SETTINGS
from equilibria.findings import joined, plain
from equilibria.theory._reals import Array

_AT_LIMIT, _OFTEN = 0.02, 0.2  # relative distance from the largest gradient, and the share of steps within it
_FEWEST_STEPS = 20
_EQUAL, _BETWEEN = 1e-6, 0.05  # relative: settings at one step, which float32 may round; and between samples
_ROUNDING = ("bfloat16", "float16")
_OF_LAYERS = {"dtype": "number format", "shape": "shape"}
OF_MOMENTUM = ("law", "nesterov", "dampening", "second beta")
_OF_RULE = {"kind", "lr", "weight_decay", "momentum", "shape"}  # told by the optimizer, the samples and the layer
_THEN = " → "


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """One setting that differs.

    Attributes:
        name: of the setting.
        a: its value in A, the earlier run of a history, in words.
        b: its value in B.
        layers: the layers for which it differs; empty for a setting of the whole run.
        of_layers: how many layers both runs have.
        first_step: the first step that both runs sampled at which lr, weight decay or momentum differ; else None.
        factor: B's value over A's, where it is the same at all such steps; else None.
        is_version: whether it is the version of a library, which is no setting of the training.
    """

    name: str
    a: str
    b: str
    layers: tuple[str, ...] = ()
    of_layers: int = 0
    first_step: int | None = None
    factor: float | None = None
    is_version: bool = False

    @property
    def sentence(self) -> str:
        """What differs, A and B by their names."""
        return f"{self.name}{self._where}: {self.a} in A, {self.b} in B{self._since}"

    def __str__(self) -> str:
        joint = f"{self.a} before, {self.b} now" if _THEN in self.a + self.b else f"{self.a} -> {self.b}"
        times, values = f" x {plain(self.factor)}" if self.factor else "", f"{joint}{self._since}"
        return f"{self.name}{self._where}{times} ({values})" if times else f"{self.name}{self._where} {values}"

    @property
    def _where(self) -> str:
        return f" of {joined(self.layers, most=3)}" if 0 < len(self.layers) < self.of_layers else ""

    @property
    def _since(self) -> str:
        return f" from step {self.first_step:,}" if self.first_step else ""


def setting_differences(a: SampledRun, b: SampledRun) -> tuple[SettingDifference, ...]:
    """All recorded settings that differ, those of layers first; the same for every order of the layers."""
    return (*_of_layers(a, b), *_of_run(a, b))


def same_settings(a: SampledRun, b: SampledRun) -> bool:
    """Whether no recorded setting differs but the versions of libraries."""
    differing = chain(_layer_by_layer(a, b), (each for each in _of_run(a, b) if not each.is_version))
    return next(differing, None) is None


def differing_layers(a: SampledRun, b: SampledRun) -> tuple[str, ...]:
    """The layers of A that B has not, and has not frozen either."""
    others = {*b.series.names, *frozen_names(b)}
    return tuple(name for name in a.series.names if name not in others)


def _of_layers(a: SampledRun, b: SampledRun) -> Iterator[SettingDifference]:
    """One difference for each pair of values, with the layers that have it."""
    count = len(set(a.series.names) & set(b.series.names))
    found: dict[tuple[Any, ...], list[str]] = {}
    for layer, *setting in _layer_by_layer(a, b):
        found.setdefault(tuple(setting), []).append(layer)
    rank = {name: place for place, name in enumerate(("lr", "weight decay", "momentum", "optimizer"))}
    for key in sorted(found, key=lambda key: (rank.get(key[0], len(rank)), key[0])):
        name, first, second, step, factor = key
        yield SettingDifference(name, first, second, tuple(found[key]), count, step, factor)


def _layer_by_layer(a: SampledRun, b: SampledRun) -> Iterator[tuple[Any, ...]]:
    """Layer, setting, both values, and of a scheduled one the first step and the factor."""
    others = set(a.series.names)
    for layer in (name for name in b.series.names if name in others):
        for column in SETTINGS:
            if not same_course(a, b, layer, column):
                values = _course(a, layer, column), _course(b, layer, column)
                if all(values):
                    yield layer, column.replace("_", " "), *values, *_apart(a, b, layer, column)
        first, second = _fixed(a, layer), _fixed(b, layer)
        for name in sorted(first.keys() & second.keys()):
            if first[name] != second[name] and first[name] and second[name]:
                yield layer, name, first[name], second[name], None, None


def _apart(a: SampledRun, b: SampledRun, layer: str, column: str) -> tuple[int | None, float | None]:
    """Of the steps that both runs sampled and at which a setting differs: the first one, and the one factor B / A."""
    (steps, first), (others, second) = (_column(run, layer, column) for run in (a, b))
    common, rows, columns = np.intersect1d(steps, others, return_indices=True)
    first, second = first[rows], second[columns]
    differs = ~np.isclose(first, second, rtol=_EQUAL, atol=0)
    if not differs.any():
        return None, None
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = second[differs] / first[differs]
    alike = np.isfinite(factors).all() and (factors > 0).all() and np.ptp(factors) < 1e-3 * factors[0]
    return int(common[differs][0]), float(f"{factors[0]:.4g}") if alike else None


def _fixed(run: SampledRun, layer: str) -> dict[str, str]:
    """What the metadata say about a layer that no sample has, in words; "" for what a run did not record."""
    described = entry(run, layer)
    rule = dict(described.get("rule") or {})
    told = {*_OF_RULE, "betas", "name"}  # dicts are numbers of a measured law, which scatter
    options = {name: str(value) for name, value in rule.items() if name not in told and not isinstance(value, dict)}
    if rule.get("betas"):
        options["second beta"] = three_digits(rule["betas"][1])
    texts = {name: str(described.get(key) or "") for key, name in _OF_LAYERS.items()}
    return {"optimizer": _optimizer(run, layer), "law": str(rule.get("kind") or "none"), **texts, **options}


def momentum_options(run: SampledRun, layer: str) -> tuple[str, ...]:
    """The settings beside the momentum that make other updates of the same gradients, in words."""
    fixed = _fixed(run, layer)
    return tuple(fixed.get(name, "") for name in OF_MOMENTUM)


def _of_run(a: SampledRun, b: SampledRun) -> Iterator[SettingDifference]:
    for name, value in _OF_RUN.items():
        pair = value(a.metadata), value(b.metadata)
        if pair[0] != pair[1]:
            yield SettingDifference(name, pair[0] or "not recorded", pair[1] or "not recorded")
    only = differing_layers(a, b), differing_layers(b, a)
    if any(only):
        left, added = (joined(names) or "none" for names in only)
        yield SettingDifference("layers of one run only", left, added)
    for library in ("torch", "equilibria"):
        versions = [str(run.metadata.get(library) or "not recorded") for run in (a, b)]
        if versions[0] != versions[1]:
            yield SettingDifference(library, versions[0], versions[1], is_version=True)


_OF_RUN: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "batch size": lambda metadata: str(metadata.get("batch_size") or ""),
    "steps per epoch": lambda metadata: str(metadata.get("steps_per_epoch") or ""),
    "controllers": lambda metadata: ", ".join(str(each["name"]) for each in metadata.get("controllers", ())) or "none",
    "frozen parameters": lambda metadata: joined([str(each["name"]) for each in metadata.get("frozen", ())]) or "none",
}


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
    """The kind of law that a layer follows, the optimizer's class where there is none or one of its own."""
    kind = str((entry(run, layer).get("rule") or {}).get("kind") or "")
    return kind if kind not in ("", "Identified") else f"{kind} {_optimizer(run, layer)}"


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


def same_course(a: SampledRun, b: SampledRun, layer: str, column: str) -> bool:
    """Whether lr, weight decay or momentum may be the same at every step, as far as the samples show.

    At steps that both runs sampled the values are equal. At a step that one alone sampled its value lies among those
    of the other's four samples around it, to within 5 %: between two samples a schedule may rise and fall.
    """
    courses = [_column(run, layer, column) for run in (a, b)]
    if all(np.array_equal(*pair) for pair in zip(*courses, strict=True)):
        return True
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
    return _THEN.join(filter(None, (first, turn, last)))


def _optimizer(run: SampledRun, layer: str) -> str:
    listed, position = run.metadata.get("optimizers", ()), entry(run, layer).get("optimizer", 0)
    return str(listed[position]["class"]) if position < len(listed) else ""
