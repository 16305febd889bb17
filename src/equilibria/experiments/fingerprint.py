"""By what a later run knows that there is nothing to do: a hash of the settings and of the code."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from equilibria._version import __version__
from equilibria.experiments import registry
from equilibria.experiments.code_version import code_version
from equilibria.experiments.experiment import Experiment, settings
from equilibria.experiments.results import Result


def result_fingerprint(experiment: Experiment[Any], config: Any) -> str:
    """Of what computes, judges and draws a result."""
    functions = (experiment.tasks, experiment.run_task, experiment.collect, experiment.draw)
    return _hash(config, code_version(*sorted({function.__module__ for function in functions})))


def task_fingerprint(experiment: Experiment[Any], config: Any, *, data: str = "") -> str:
    """Of what computes the tasks alone, and from which data: a word on a figure is no reason to train again."""
    return _hash(config, code_version(experiment.run_task.__module__, tasks_only=True) + data)


def is_stale(result: Result) -> bool:
    """Whether settings or code have changed since; what this version does not know is not judged."""
    known = registry.experiments().get(result.id)
    if known is None or result.scale not in known.scales:
        return False
    return result.fingerprint != result_fingerprint(known, known.scales[result.scale])


def _hash(config: Any, code: str) -> str:
    content = json.dumps([settings(config), __version__, code], sort_keys=True, allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
