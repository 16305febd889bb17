"""Every experiment, by its id. A module below one of the folders here that has an ``EXPERIMENT`` is one."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.experiment import KINDS, Experiment
from equilibria.lab.harness.results import Result

FOLDERS = ("papers.smd", "papers.nrq", "papers.explr", "papers.sharp", "beyond")  # in the order of the list
ALL = "all"
GROUPS = (ALL, *KINDS)
"""Words that stand for several experiments."""


@cache
def experiments() -> dict[str, Experiment[Any]]:
    """All experiments by id; the papers in order, and in each by id."""
    return {experiment.id: experiment for folder in FOLDERS for experiment in _below(folder)}


def find(ids: Sequence[str]) -> list[Experiment[Any]]:
    """The experiments with these ids, each once and in the order of the list.

    "all" is every one, "synthetic" those of small worlds, "networks" those that train networks.

    Raises:
        EquilibriaError: an id is unknown; the message suggests the nearest.
    """
    known = experiments()
    for name in ids:
        if name not in GROUPS and name not in known:
            near = get_close_matches(name, [*known, *GROUPS], n=1)
            advice = f"did you mean {near[0]}?" if near else "`equilibria reproduce --list` shows them"
            raise EquilibriaError(f"got the experiment {name!r}, which is unknown; {advice}")
    return [each for each in known.values() if {ALL, each.kind, each.id} & set(ids)]


def is_stale(result: Result) -> bool:
    """Whether its experiment has another version or other settings by now; an unknown one is never stale."""
    known = experiments().get(result.id)
    if known is None or result.scale not in known.scales:
        return False
    return result.fingerprint != known.fingerprint(known.scales[result.scale])


def _below(folder: str) -> list[Experiment[Any]]:
    package = f"equilibria.lab.{folder}"
    try:
        path = importlib.import_module(package).__path__
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return []
    names = [f"{package}.{module.name}" for module in pkgutil.iter_modules(path)]
    found = [importlib.import_module(name).EXPERIMENT for name in names if _has_experiment(name)]
    return sorted(found, key=lambda experiment: str(experiment.id))


def _has_experiment(module: str) -> bool:
    """Whether it has one, by its text: some of the others import torch, which takes seconds."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None and "\nEXPERIMENT = " in Path(spec.origin).read_text("utf-8")
