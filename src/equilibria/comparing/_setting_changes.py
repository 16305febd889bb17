"""The settings in which two recorded runs differ, from their metadata and the lr and weight decay of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import SETTINGS, Array
from equilibria.findings import joined, plain, rounded

_SAME = 1e-6  # relative: settings pass through float32 in some optimizers
_NAMES = {"lr": "lr", "weight_decay": "weight decay", "momentum": "momentum"}
_OF_THE_RUN = {"batch_size": "batch size", "steps_per_epoch": "steps per epoch"}
_VERSIONS = ("torch", "equilibria")


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that differs between two runs.

    Attributes:
        name: the setting.
        before: its value in the first run, as text.
        after: its value in the second run.
        layers: the layers it belongs to; empty for a setting of the whole run.
        of_layers: how many layers both runs have.
        first_step: the first common sampled step at which lr, weight decay or momentum differ; None for other settings.
        factor: the second run's value over the first's, where it is the same at all common sampled steps at which they
            differ; None otherwise.
        is_version: whether it is the version of a library, which is no setting of the training.
    """

    name: str
    before: str
    after: str
    layers: tuple[str, ...] = ()
    of_layers: int = 0
    first_step: int | None = None
    factor: float | None = None
    is_version: bool = False

    def __str__(self) -> str:
        where = f" of {joined(self.layers, most=3)}" if self.layers and len(self.layers) < self.of_layers else ""
        since = f" from step {self.first_step:,}" if self.first_step else ""
        values = f"{self.before} -> {self.after}{since}"
        return (
            f"{self.name}{where} {values}"
            if self.factor is None
            else f"{self.name}{where} x {plain(self.factor)} ({values})"
        )


def setting_changes(before: SampledRun, after: SampledRun) -> tuple[SettingChange, ...]:
    """The settings in which the second run differs from the first; the same for every order of their layers."""
    both = [name for name in after.series.names if name in set(before.series.names)]
    return (
        *_of_run(before, after),
        *_of_layers(before, after, both),
        *_scheduled(before, after, both),
        *_versions(before.metadata, after.metadata),
    )


def _of_run(before: SampledRun, after: SampledRun) -> Iterator[SettingChange]:
    old, new = before.metadata, after.metadata
    pairs = [(name, str(old.get(key)), str(new.get(key))) for key, name in _OF_THE_RUN.items()]
    pairs.append(("optimizer", _listed(old, "optimizers", "class"), _listed(new, "optimizers", "class")))
    pairs.append(("controllers", _listed(old, "controllers", "name"), _listed(new, "controllers", "name")))
    for word, one, other in (("layers left out", before, after), ("layers added", after, before)):
        only = [name for name in one.series.names if name not in set(other.series.names)]
        if only:
            pairs.append((word, "", joined(only)))
    yield from (SettingChange(name, was or "none", now or "none") for name, was, now in pairs if was != now)


def _listed(metadata: Mapping[str, Any], key: str, field: str) -> str:
    return ", ".join(str(entry.get(field)) for entry in metadata.get(key) or ())


def _of_layers(before: SampledRun, after: SampledRun, both: Sequence[str]) -> Iterator[SettingChange]:
    """Settings that the metadata hold for every layer: data type, shape and those of the rule that no sample has."""
    old, new = (dict(zip(run.series.names, run.entries, strict=True)) for run in (before, after))
    changed: dict[tuple[str, str, str], list[str]] = {}
    for layer in both:
        was, now = _fixed(old[layer]), _fixed(new[layer])
        for name in dict.fromkeys([*was, *now]):
            if was.get(name) != now.get(name):
                changed.setdefault((name, str(was.get(name)), str(now.get(name))), []).append(layer)
    yield from (SettingChange(*key, layers=tuple(layers), of_layers=len(both)) for key, layers in changed.items())


def _fixed(entry: Mapping[str, Any]) -> dict[str, Any]:
    rule = {name: value for name, value in (entry.get("rule") or {}).items() if name not in SETTINGS}
    return {"dtype": entry.get("dtype"), "shape": entry.get("shape"), "law": rule.pop("kind", None)} | rule


def _scheduled(before: SampledRun, after: SampledRun, both: Sequence[str]) -> Iterator[SettingChange]:
    """lr, weight decay and momentum, compared at the steps that both runs sampled."""
    rows = {layer: _common_rows(before, after, layer) for layer in both}
    for setting in SETTINGS:
        changed: dict[tuple[str, str, int, float | None], list[str]] = {}
        for layer, (steps, old, new) in rows.items():
            differs = ~np.isclose(old[setting], new[setting], rtol=_SAME, atol=0, equal_nan=True)
            if differs.any():
                was, now = old[setting][differs], new[setting][differs]
                key = rounded(float(was[0])), rounded(float(now[0])), int(steps[differs][0]), _factor(was, now)
                changed.setdefault(key, []).append(layer)
        for (was_text, now_text, step, factor), layers in changed.items():
            name = _NAMES[setting]
            yield SettingChange(name, was_text, now_text, tuple(layers), len(both), step, factor)


def _common_rows(before: SampledRun, after: SampledRun, layer: str) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """The steps at which both runs sampled a layer, and its settings there."""
    was, now = (run.series.of(run.series.names.index(layer)) for run in (before, after))
    steps, old, new = np.intersect1d(was["step"], now["step"], return_indices=True)
    return steps, {name: was[name][old] for name in SETTINGS}, {name: now[name][new] for name in SETTINGS}


def _factor(was: Array, now: Array) -> float | None:
    """The one factor between two series, to a thousandth; None if there is none."""
    if not (was > 0).all() or not (now > 0).all():
        return None
    factors = now / was
    return float(f"{factors[0]:.4g}") if np.ptp(factors) < 1e-3 * factors[0] else None


def _versions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[SettingChange]:
    for library in _VERSIONS:
        was, now = str(before.get(library)), str(after.get(library))
        if was != now:
            yield SettingChange(library, was, now, is_version=True)
