"""`identify`: the measured law of an optimizer, and where measured laws are kept.

An experiment (`equilibria.optimizers.experiment`) takes a second or a few. Its outcome depends only on the optimizer's
class, settings and shape, so it is kept in memory for each optimizer and on disk for the next process, in the user's
cache folder (the environment variable EQUILIBRIA_CACHE names another): one small file per class and settings. A file
that is damaged, or that another version of the optimizer's source, of torch or of this package wrote, is not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from equilibria._version import __version__
from equilibria.errors import EquilibriaError, whole
from equilibria.optimizers.copies import (
    FOREIGN_KEYS,
    Group,
    decay_key,
    decay_of,
    reference_lr,
    rule_groups,
    settings_outside_groups,
    tried_shape,
)
from equilibria.optimizers.experiment import Identification, identify_group
from equilibria.theory.identified import identified_from

_EXPERIMENT = 3  # raise it when a change of the experiment changes a number
_LR_AND_DECAY = frozenset(("lr", "weight_decay", "wd"))  # a measured law has their powers
_KEPT: WeakKeyDictionary[Any, dict[str, Identification]] = WeakKeyDictionary()


class _Optimizer(Protocol):
    @property
    def param_groups(self) -> Sequence[Any]: ...


def identify(
    optimizer: _Optimizer,
    *,
    group: int | None = None,
    shape: tuple[int, ...] | None = None,
    progress: bool | None = None,
) -> Identification:
    """Find out by experiment how an optimizer moves a scale-invariant weight.

    A throw-away copy of the optimizer walks on random gradients, about a second for AdamW and four for Muon; nothing of
    the optimizer, its model or the random number generators changes. ``plan`` and ``watch`` do this by themselves for
    optimizers without a law in closed form. With s the decay per step, S the sum of the correlations of a step with all
    others, and l the length of a step, the weight settles at ``||w||^2 = l^2 S / (s (2-s))`` and turns by about
    ``sqrt(2 s / S)`` per step.

    Args:
        optimizer: any torch optimizer.
        group: index of the parameter group; by default the first with weight decay, else the first.
        shape: of the weight; by default that of the group's largest tensor. Muon and its relatives move square matrices
            otherwise than long ones.
        progress: whether to say on stderr that an experiment begins; default: if that is a terminal.

    Returns:
        The law, as a rule that `plan` and the theory take, or the class of an optimizer without an equilibrium.

    Raises:
        EquilibriaError: not an optimizer, or no such group.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.randn(64, 32))
        >>> found = identify(torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=1e-3))
        >>> found.motion, round(found.equilibrium().angle, 4)  # sqrt(2 lr wd / (1 + momentum)) = 0.01026
        ('equilibrium', 0.0103)
    """
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(optimizer, type) or not isinstance(groups, list) or not groups or not hasattr(optimizer, "state"):
        raise EquilibriaError(f"got optimizer={optimizer!r}; expected a torch optimizer", argument="optimizer")
    groups = rule_groups(optimizer)
    if group is None:
        chosen = next((one for one in groups if decay_of(one)), groups[0])
    else:
        index = whole("group", group)
        if index >= len(groups):
            raise EquilibriaError(f"got group={index}; expected 0 to {len(groups) - 1}", argument="group")
        chosen = groups[index]
    sides = None if shape is None else tuple(whole("shape", side, low=1) for side in shape)
    return measured_law(optimizer, chosen, shape=sides, progress=progress)


def measured_law(
    optimizer: Any, group: Group, *, shape: tuple[int, ...] | None = None, progress: bool | None = None
) -> Identification:
    """The measured law of a parameter group with its present settings: looked up, or found by an experiment.

    Args:
        optimizer: any torch optimizer.
        group: one of its parameter groups.
        shape: as in `identify`.
        progress: as in `identify`.
    """
    shape = tried_shape(group, shape)
    kept, settings = _KEPT.setdefault(optimizer, {}), _settings(group, shape)
    if settings not in kept:
        kept[settings] = _found(optimizer, group, settings, shape=shape, progress=progress)
    found = kept[settings]
    if found.rule is None:
        return found
    rule = dataclasses.replace(found.rule, lr=float(group["lr"]), weight_decay=decay_of(group))
    return dataclasses.replace(found, rule=rule)


def _settings(group: Group, shape: tuple[int, ...]) -> str:
    """What an experiment depends on, but for lr and weight decay."""
    own = [(key, repr(group[key])) for key in sorted(group) if key not in FOREIGN_KEYS | _LR_AND_DECAY]
    decays = bool(decay_of(group)), decay_key(group) in group
    return repr((own, decays, shape))


def _found(
    optimizer: Any, group: Group, settings: str, *, shape: tuple[int, ...], progress: bool | None
) -> Identification:
    path = _path(optimizer, group, settings)
    found = None if path is None else _read(path)
    if found is None:
        if progress or (progress is None and sys.stderr.isatty()):
            name = type(optimizer).__name__
            sys.stderr.write(f"equilibria: measuring how {name} moves, on a copy: a few seconds, once\n")
        found = identify_group(optimizer, group, shape=shape)
        if path is not None and found.repeatable:
            _write(path, found)
    return found


# ---- on disk


def cache_folder() -> Path:
    """The folder of measured laws: below EQUILIBRIA_CACHE if that is set, else below the platform's cache folder."""
    if chosen := os.environ.get("EQUILIBRIA_CACHE"):
        return Path(chosen).expanduser() / "identified"
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "equilibria" / "identified"


def _path(optimizer: Any, group: Group, settings: str) -> Path | None:
    """The file of a law; None if another process could not know the same optimizer by it.

    The source may be unknown; a class made in a function, and an attribute that is one, depend on more than it.
    """
    kind, torch = type(optimizer), sys.modules["torch"]
    try:
        sources = [inspect.getsource(sys.modules[base.__module__]) for base in kind.__mro__[:-1]]
        folder = cache_folder()
    except (OSError, TypeError, KeyError, RuntimeError):
        return None
    attributes = sorted(settings_outside_groups(optimizer).items())
    if "<locals>" in kind.__qualname__ or " at 0x" in f"{settings} {attributes}":
        return None
    versions = (_EXPERIMENT, __version__, str(torch.__version__))
    used = (reference_lr(group), decay_of(group))
    content = repr((versions, kind.__module__, kind.__qualname__, settings, used, attributes, sources))
    return folder / f"{kind.__name__}-{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> Identification | None:
    """A kept law; None if there is none, or its file is damaged."""
    try:
        content = json.loads(path.read_bytes())
        law = content["rule"]
        rule = None if law is None else identified_from(law)
        return Identification(str(content["name"]), content["motion"], str(content["reason"]), rule)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, found: Identification) -> None:
    from equilibria.records._files import write_whole  # its package imports pyarrow, which a plan does not need

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(found), indent=1).encode())
    except OSError:  # a full or read-only disk: the next process experiments again
        return
