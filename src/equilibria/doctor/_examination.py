"""Examines a training set-up: for every parameter its role, invariance, decay, equilibrium and problems."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from equilibria.control._split_decay import decay_reason, is_scale_invariant
from equilibria.diagnosis.siblings import is_plain_sequence, kind_key, kind_of, unusual_settings
from equilibria.doctor._setup import TrainingSetup, input_and_target
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, Severity, joined, warnings_first
from equilibria.objectives._objective import objective, unwrap_model
from equilibria.optimizers.copies import decay_of, rule_groups
from equilibria.optimizers.in_force import not_in_force
from equilibria.optimizers.rules import rule_of_group
from equilibria.symmetry import Symmetries, symmetries
from equilibria.tensors.parameters import names_of, roles_of, unwrap_optimizers
from equilibria.theory.identified import Identified
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import SGD, AdamL2, Rule


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter.

    Attributes:
        name: its name in the model.
        role: such as "Conv weight" or "BatchNorm scale".
        shape: its shape.
        invariant: how it is scale-invariant, as in `Symmetries.how`.
        group: index of its parameter group; None if the optimizer does not hold it.
        lr: learning rate of the group.
        weight_decay: of the group.
        decay_per_step: the share of its norm that decay takes per step in the long run, at the present momentum; None
            where it depends on the gradient (Adam with coupled decay) or the optimizer is unknown.
        angle: equilibrium angle in radians per step, of a parameter that is invariant alone; None for others. Of
            parameters that are invariant together, only the vector of all of them has an equilibrium angle.
        time_constant: steps in which a deviation of the norm from equilibrium falls to 1/e, of a decayed matrix; of
            one that is not invariant alone 1/(2 eps), under SGD 1/(4 eps), with eps the decay per step.
        severity: "warning", "note", or "" if nothing is wrong.
        problem: what is wrong.
        remedy: what to do.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    invariant: str
    group: int | None
    lr: float | None
    weight_decay: float | None
    decay_per_step: float | None
    angle: float | None
    time_constant: float | None
    severity: Severity | Literal[""]
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True, eq=False)
class Examination:
    """The result of an examination.

    Attributes:
        rows: one per parameter, in the order of the model.
        findings: the problems, one finding per kind, and settings that a copy of the optimizer does not obey.
        fix: code that builds the right parameter groups; "" if they are right.
        symmetries: the scaling symmetries of the model.
    """

    rows: tuple[ParameterRow, ...]
    findings: tuple[Finding, ...]
    fix: str
    symmetries: Symmetries


@dataclass(frozen=True, slots=True, eq=False)
class _Settings:
    """The settings of the group that trains a parameter."""

    index: int
    lr: float
    weight_decay: float
    rule: Rule | None
    reason: str


def examine(setup: TrainingSetup, *, progress: bool | None = None) -> Examination:
    """Find the symmetries of a model and compare them with what its optimizer does to every parameter.

    Args:
        setup: model, optimizer, batches and loss; nothing is trained, and the model stays as it is.
        progress: whether to show progress on stderr; by default only on a terminal.

    Raises:
        EquilibriaError: if the optimizer has none of the model's parameters.
    """
    model = unwrap_model(setup.model)
    unpack = None if setup.loss is None else input_and_target
    sym = symmetries(objective(model, setup.loss, unpack=unpack), setup.batches, progress=progress)
    names, roles = names_of(model), roles_of(model)
    optimizers = unwrap_optimizers(setup.optimizer)
    owned = [(optimizer, group) for optimizer in optimizers for group in rule_groups(optimizer)]
    groups = dict(_groups(owned))
    trained = [param for param in model.parameters() if param.requires_grad]
    if not any(id(param) in groups for param in trained):
        raise EquilibriaError(
            "got an optimizer with none of the model's parameters; expected the one that trains it",
            argument="optimizer",
        )
    by_name = {names[id(param)][0]: param for param in trained}
    settings = {name: groups.get(id(param)) for name, param in by_name.items()}
    rows = tuple(_row(name, param, roles[name], settings, sym) for name, param in by_name.items())
    used = {row.group for row in rows if row.group is not None}
    declared, fixes = list[Finding](), list[str]()
    for place, optimizer in enumerate(optimizers):
        own = {index for index, (owner, _) in enumerate(owned) if owner is optimizer}
        declared += not_in_force(optimizer, [owned[index][1] for index in sorted(own & used)])
        name = "optimizer" if len(optimizers) == 1 else f"optimizers[{place}]"
        fixes.append(_fix([row for row in rows if row.group in own], by_name, sym, name=name))
    findings = (*dict.fromkeys(declared), *_findings(rows), *_without_law(settings))
    return Examination(rows, warnings_first(findings), "\n".join(filter(None, fixes)), sym)


def _groups(owned: Iterable[tuple[torch.optim.Optimizer, Mapping[str, Any]]]) -> Iterator[tuple[int, _Settings]]:
    for index, (optimizer, group) in enumerate(owned):
        found = rule_of_group(optimizer, group, measure=True)
        settings = _Settings(index, float(group["lr"]), decay_of(group), found.rule, found.reason)
        yield from ((id(param), settings) for param in group["params"])


def _row(
    name: str, param: Tensor, role: str, settings: Mapping[str, _Settings | None], sym: Symmetries
) -> ParameterRow:
    group = settings[name]
    partners = () if name in sym.alone else sym.jointly.get(name, ())
    alike = all(_same_law(group, settings[other]) for other in partners)
    equilibrium = _equilibrium(group, param, is_invariant=name in sym.alone) if group else {}
    none_decays = all((held := settings[other]) is None or not held.weight_decay for other in partners)
    severity, problem, remedy = _problem(name, param, role, group, sym, none_decays=none_decays)
    if not problem and not alike and is_scale_invariant(name, sym):
        severity, problem = "note", "jointly invariant with parameters of another lr or weight decay: no common law"
        remedy = "nothing needs doing in training; one law for all of them needs one lr and weight decay"
    return ParameterRow(
        name=name,
        role=role,
        shape=tuple(param.shape),
        invariant=sym.how[name],
        group=group.index if group else None,
        lr=group.lr if group else None,
        weight_decay=group.weight_decay if group else None,
        decay_per_step=long_run_decay(group.rule) if group and group.rule else None,
        angle=equilibrium.get("angle"),
        time_constant=equilibrium.get("time_constant"),
        severity=severity,
        problem=problem,
        remedy=remedy,
    )


def _same_law(one: _Settings | None, other: _Settings | None) -> bool:
    return one is not None and other is not None and (one.lr, one.weight_decay) == (other.lr, other.weight_decay)


def _equilibrium(group: _Settings, param: Tensor, *, is_invariant: bool) -> dict[str, float]:
    """Angle and time constant of an invariant weight; of another matrix the time constant alone."""
    if group.rule is None or group.weight_decay == 0:
        return {}
    rule: Any = group.rule
    if not is_invariant:
        decay = long_run_decay(rule) if param.ndim >= 2 else None
        return {"time_constant": 1 / (2 * norm_power(rule) * decay)} if decay and decay > 0 else {}
    shaped = {"shape": (param.shape[0], param[0].numel())} if "Muon" in type(rule).__name__ and param.ndim >= 2 else {}
    try:
        result = rule.equilibrium(**shaped)
    except EquilibriaError:  # the rule needs numbers that are unknown before training
        return {}
    return {"angle": float(result.angle), "time_constant": float(result.time_constant)}


def _problem(
    name: str, param: Tensor, role: str, group: _Settings | None, sym: Symmetries, *, none_decays: bool
) -> tuple[Severity | Literal[""], str, str]:
    """Severity, problem and remedy; empty where nothing is wrong."""
    if name in sym.no_effect:
        why = "a later operation (a normalisation, a softmax) removes it, or it is unused"
        return "note", f"{role} without effect: {why}", "leave it out (bias=False)"
    if group is None:
        return "warning", "in no parameter group: never trained", "pass it to the optimizer, or freeze it"
    if name in sym.undecided:
        return "note", "hardly any gradient here (dead units?): its invariance is undecided", "check its inputs"
    should_decay, _ = decay_reason(name, param, role, sym)
    if group.weight_decay > 0 and not should_decay:
        return (
            "warning",
            f"decays {role}, which is not invariant: the gradient holds its size, decay shifts it",
            "weight_decay=0",
        )
    if group.weight_decay > 0 and _rounded_away(group, param):
        return (
            "warning",
            f"lr x wd = {group.lr * group.weight_decay:.1e} is rounded away in {param.dtype}: decay has no effect",
            "keep a float32 copy of the weights, or a larger lr x wd",
        )
    if group.weight_decay == 0 and none_decays and is_scale_invariant(name, sym):
        return (
            "warning" if param.ndim >= 2 else "note",
            "invariant but not decayed: its norm grows and its effective lr falls like t^-1/2",
            "let it decay",
        )
    return "", "", ""


def _rounded_away(group: _Settings, param: Tensor) -> bool:
    """Whether w (1 - lr wd) rounds to w in the parameter's type: always so if lr wd is below a quarter of eps."""
    decoupled = group.rule is not None and not isinstance(group.rule, SGD | AdamL2 | Identified)
    return decoupled and 0 < group.lr * group.weight_decay < torch.finfo(param.dtype).eps / 4


def _findings(rows: tuple[ParameterRow, ...]) -> tuple[Finding, ...]:
    """One finding for all rows with the same problem, warnings first."""
    by_problem: dict[tuple[Severity, str, str], list[str]] = {}
    for row in rows:
        if row.severity:
            by_problem.setdefault((row.severity, row.problem, row.remedy), []).append(row.name)
    ordered = sorted(by_problem.items(), key=lambda item: item[0][0] != "warning")
    return (
        *(
            Finding(severity, joined(names), problem, remedy, "heavy_ball")
            for (severity, problem, remedy), names in ordered
        ),
        *_unlike_siblings(rows),
    )


def _without_law(settings: Mapping[str, _Settings | None]) -> Iterator[Finding]:
    """Parameters that decay under an optimizer without a law."""
    by_reason: dict[str, list[str]] = {}
    for name, group in settings.items():
        if group is not None and group.rule is None and group.weight_decay:
            by_reason.setdefault(group.reason, []).append(name)
    for reason, names in by_reason.items():
        problem = f"no angle and no time to settle are stated: {reason}"
        yield Finding("note", joined(names), problem, "watch measures the angles", "")


def _unlike_siblings(rows: tuple[ParameterRow, ...]) -> Iterator[Finding]:
    """Tensors whose lr or weight decay differs from what their siblings in other blocks share."""
    kinds: dict[tuple[object, ...], list[ParameterRow]] = {}
    for row in rows:
        if row.group is not None and not is_plain_sequence(kind_of(row.name)):
            kinds.setdefault(kind_key(row.name, row.shape), []).append(row)
    for members in kinds.values():
        for field, what in (("lr", "lr"), ("weight_decay", "weight decay")):
            values = {row.name: float(getattr(row, field)) for row in members}
            usual, names = unusual_settings(values) or (0.0, [])
            if names:
                shown = ", ".join(dict.fromkeys(f"{values[name]:g}" for name in names))
                problem = f"{what} {shown}, but {usual:g} for the other {len(members) - len(names)} of its kind"
                remedy = "nothing needs doing if that is intended; otherwise move it to the group of the others"
                yield Finding("note", joined(names), problem, remedy, "")


def _fix(rows: Sequence[ParameterRow], params: Mapping[str, Tensor], sym: Symmetries, *, name: str) -> str:
    """Code that changes the weight decay of parameters that have the wrong one; undecided ones keep theirs."""
    changes = {
        row.name: 0.0
        for row in rows
        if row.name not in sym.undecided
        and row.weight_decay
        and not decay_reason(row.name, params[row.name], row.role, sym)[0]
    }
    decays = [row.weight_decay for row in rows if row.weight_decay]
    usual = max(set(decays), key=decays.count) if decays else 5e-4
    changes |= {row.name: usual for row in rows if row.weight_decay == 0 and row.severity == "warning"}
    if not changes:
        return ""
    lines = [f"    {json.dumps(name)}: {value:g}," for name, value in changes.items()]
    return "\n".join(
        [
            "from equilibria.control import regroup",
            f"groups = regroup({name}, model=model, weight_decay={{",
            *lines,
            "})",
            f"# {name} = type({name})(groups)  # in place of the old one, before a scheduler is made",
        ]
    )


# ---- the decay of a norm


def long_run_decay(rule: Rule) -> float | None:
    """The share of a weight's norm that decay alone takes per step in the long run; negative where the norm grows.

    None if it depends on the gradient (Adam with L2, measured laws like it). With momentum it differs from lr times
    weight decay.

    Example:
        >>> long_run_decay(SGD(lr=0.1, weight_decay=5e-4, momentum=0.9))
        0.00050...
        >>> long_run_decay(SGD(lr=1.0, weight_decay=5e-3, momentum=0.99))  # the weight swings, in a shrinking envelope
        0.0050...
    """
    if isinstance(rule, SGD):  # coupled: decay passes through the momentum buffer, as the gradient does
        return _of_momentum(rule)
    coupled = isinstance(rule, AdamL2) or (isinstance(rule, Identified) and rule.is_coupled)
    return None if coupled and rule.weight_decay else rule.decay_per_step


def _of_momentum(rule: SGD) -> float:
    """The long-run decay of coupled SGD, from the roots 1 - d of the recursion of weight and buffer.

    With mu the momentum and e = lr * weight_decay * (1 - dampening), without a gradient,

        b' = mu b + e w,    w' = w - b'                (heavy ball)
                            w' = w - e w - mu b'       (Nesterov)

    have the characteristic polynomials l^2 - (1 + mu - e) l + mu and l^2 - (1 + mu)(1 - e) l + mu (1 - e). In d = 1 - l
    both are d^2 - p d + e, so that a slow rate is not a difference of numbers near one.
    """
    mu, e = rule.momentum, rule.decay_per_step
    p, product = (1 - mu + e * (1 + mu), mu * (1 - e)) if rule.nesterov else (1 - mu + e, mu)
    discriminant = p * p - 4 * e
    if discriminant < 0:  # a pair of complex roots, whose squared size is the product
        return 1 - math.sqrt(product)
    large = (p + math.sqrt(discriminant)) / 2
    return min(min(d, 2 - d) for d in (e / large, large))  # 1 - |1 - d|
