"""A table of every parameter: what it is, how it is invariant, how it decays, where it settles, what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.control._split_decay import decay_reason, is_scale_invariant
from equilibria.doctor._factory import Patient, usual_pair
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding
from equilibria.objectives._objective import objective, unwrap_model
from equilibria.optimizers.rules import rule_of_group, setting
from equilibria.symmetry import Symmetries, symmetries
from equilibria.tensors.parameters import names_of, roles_of
from equilibria.theory.rules import SGD, AdamL2, Rule


def long_run_decay(rule: Rule) -> float | None:
    """1 minus the factor per step; negative where the norm grows. None if it depends on the gradient (Adam with L2).

    Example:
        >>> long_run_decay(SGD(lr=0.1, weight_decay=5e-4, momentum=0.9))
        0.00050...
        >>> long_run_decay(SGD(lr=1.0, weight_decay=5e-3, momentum=0.99))  # the weight swings, in a shrinking envelope
        0.0050...
    """
    if isinstance(rule, SGD):  # coupled: decay passes through the momentum buffer, as the gradient does
        return _of_momentum(rule)
    return None if isinstance(rule, AdamL2) and rule.weight_decay else rule.decay_per_step


def _of_momentum(rule: SGD) -> float:
    """From the roots 1 - d of the recursion of weight and buffer.

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


_FIX = """\
no_decay = {no_decay}
decay = {decay}
names = {{id(p): n for n, p in model.named_parameters()}}
groups = []
for group in optimizer.param_groups:
    now, split = group.get("weight_decay", 0.0), {{}}
    for p in group["params"]:
        name = names.get(id(p))
        value = 0.0 if name in no_decay else (now or {value}) if name in decay else now
        split.setdefault(value, []).append(p)
    options = {{key: value for key, value in group.items() if key != "param_names"}}
    groups += [{{**options, "params": params, "weight_decay": value}} for value, params in split.items()]
# optimizer = type(optimizer)(groups)  # in place of the old one, before a scheduler is made"""


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter.

    Attributes:
        name: its name in the model.
        role: such as "Conv weight" or "BatchNorm scale".
        shape: its shape.
        invariant: how it is scale-invariant, in words of `Symmetries.how`.
        group: index of its parameter group; None if the optimizer does not hold it.
        lr: learning rate of the group.
        weight_decay: of the group.
        decay_per_step: the share of its norm that decay takes per step in the long run, with momentum as it is; None
            where that depends on the gradient (Adam with coupled decay) or the optimizer is unknown.
        angle: radians per step in equilibrium, of a parameter that is invariant alone; None for others: of parameters
            that are invariant together only the vector of all of them has such an angle.
        time_constant: steps in which a deviation from equilibrium falls to 1/e.
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
    severity: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True, eq=False)
class Examination:
    """What the doctor found.

    Attributes:
        rows: one per parameter, in the order of the model.
        findings: the problems, those of one kind together.
        fix: code that makes the parameter groups as they should be; "" if they are.
        symmetries: what the invariances rest on.
    """

    rows: tuple[ParameterRow, ...]
    findings: tuple[Finding, ...]
    fix: str
    symmetries: Symmetries


@dataclass(frozen=True, slots=True, eq=False)
class _Settings:
    """The group that trains a parameter."""

    index: int
    lr: float
    weight_decay: float
    rule: Rule | None


def examine(patient: Patient, *, progress: bool | None = None) -> Examination:
    """Find the symmetries of the model, and hold what the optimizer does to every parameter against them.

    Args:
        patient: model, optimizer, batches and loss.
        progress: whether to show it on stderr; default: if that is a terminal.
    """
    model = unwrap_model(patient.model)
    loss = objective(model, patient.loss, unpack=usual_pair)
    found = symmetries(loss, patient.batches, progress=progress)
    names, roles = names_of(model), roles_of(model)
    groups = dict(_groups(patient.optimizer))
    trained = [param for param in model.parameters() if param.requires_grad]
    if not any(id(param) in groups for param in trained):
        raise EquilibriaError("got an optimizer that holds none of the model's parameters; expected the one it trains")
    by_name = {names[id(param)][0]: param for param in trained}
    settings = {name: groups.get(id(param)) for name, param in by_name.items()}
    rows = tuple(_row(name, param, roles[name], settings, found) for name, param in by_name.items())
    typed = {id(param): name for name, param in patient.model.named_parameters()}  # names as the code needs them
    needed = {names[key][0]: name for key, name in typed.items()}
    return Examination(rows, _findings(rows), _fix(rows, by_name, needed, found), found)


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, _Settings]]:
    for index, group in enumerate(optimizer.param_groups):
        decay = setting(group.get("weight_decay", 0.0))
        settings = _Settings(index, setting(group["lr"]), decay, rule_of_group(optimizer, group).rule)
        yield from ((id(param), settings) for param in group["params"])


def _row(
    name: str, param: Tensor, role: str, settings: Mapping[str, _Settings | None], found: Symmetries
) -> ParameterRow:
    group = settings[name]
    partners = () if name in found.alone else found.jointly.get(name, ())
    alike = all(_same_law(group, settings[other]) for other in partners)
    settles = _equilibrium(group, param) if group and name in found.alone else {}
    severity, problem, remedy = _problem(name, param, role, group, found)
    if not problem and not alike and is_scale_invariant(name, found):
        severity, problem = "note", "jointly invariant with parameters of another lr or weight decay: no common law"
        remedy = "one lr and weight decay for what is invariant together"
    return ParameterRow(
        name=name,
        role=role,
        shape=tuple(param.shape),
        invariant=found.how[name],
        group=group.index if group else None,
        lr=group.lr if group else None,
        weight_decay=group.weight_decay if group else None,
        decay_per_step=long_run_decay(group.rule) if group and group.rule else None,
        angle=settles.get("angle"),
        time_constant=settles.get("time_constant"),
        severity=severity,
        problem=problem,
        remedy=remedy,
    )


def _same_law(one: _Settings | None, other: _Settings | None) -> bool:
    return one is not None and other is not None and (one.lr, one.weight_decay) == (other.lr, other.weight_decay)


def _equilibrium(group: _Settings, param: Tensor) -> dict[str, float]:
    if group.rule is None or group.weight_decay == 0:
        return {}
    rule: Any = group.rule
    shaped = {"shape": (param.shape[0], param[0].numel())} if "Muon" in type(rule).__name__ and param.ndim >= 2 else {}
    try:
        result = rule.equilibrium(**shaped)
    except EquilibriaError:  # a rule that needs more than can be known before training
        return {}
    return {"angle": float(result.angle), "time_constant": float(result.time_constant)}


def _problem(name: str, param: Tensor, role: str, group: _Settings | None, found: Symmetries) -> tuple[str, str, str]:
    """Severity, what is wrong and what to do; empty where nothing is."""
    if name in found.no_effect:
        why = "what follows takes it out (a normalisation, a softmax), or it is unused"
        return "note", f"{role} without effect: {why}", "leave it out (bias=False)"
    if group is None:
        return "warning", "in no parameter group: never trained", "give it to the optimizer, or freeze it"
    if name in found.undecided:
        return "note", "hardly any gradient here (dead units?): its invariance cannot be told", "check its inputs"
    should, _ = decay_reason(name, param, role, found)
    if group.weight_decay > 0 and not should:
        return "warning", f"decays {role}, which is not invariant: shrinks what the network computes", "weight_decay=0"
    if group.weight_decay > 0 and _rounded_away(group, param):
        return (
            "warning",
            f"lr x wd = {group.lr * group.weight_decay:.1e} is rounded away in {param.dtype}: decay has no effect",
            "keep a float32 copy of the weights, or a larger lr x wd",
        )
    if group.weight_decay == 0 and should and is_scale_invariant(name, found):
        severity = "warning" if param.ndim >= 2 else "note"
        return (
            severity,
            "invariant but not decayed: its norm grows and its effective lr falls like t^-1/2",
            "let it decay",
        )
    return "", "", ""


def _rounded_away(group: _Settings, param: Tensor) -> bool:
    """Whether w (1 - lr wd) is w again in the parameter's type: below a quarter of eps, wherever w is in its binade."""
    decoupled = group.rule is not None and not isinstance(group.rule, SGD | AdamL2)
    return decoupled and 0 < group.lr * group.weight_decay < torch.finfo(param.dtype).eps / 4


def _findings(rows: tuple[ParameterRow, ...]) -> tuple[Finding, ...]:
    """Rows with the same problem as one finding, the worst first."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.problem:
            together.setdefault((row.severity, row.problem, row.remedy), []).append(row.name)
    ordered = sorted(together.items(), key=lambda item: item[0][0] != "warning")
    return tuple(
        Finding(severity, _listed(names), problem, remedy, "heavy_ball")
        for (severity, problem, remedy), names in ordered
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _fix(
    rows: tuple[ParameterRow, ...], params: Mapping[str, Tensor], needed: Mapping[str, str], found: Symmetries
) -> str:
    """Code for the groups, if decay is to change: every group keeps its lr and whatever else it has."""
    known = [row for row in rows if row.name not in found.undecided]  # the others keep what they have
    should = {row.name: decay_reason(row.name, params[row.name], row.role, found)[0] for row in known}
    wrong = [row for row in known if row.group is not None and (row.weight_decay or 0.0) > 0 and not should[row.name]]
    missing = [row for row in rows if row.weight_decay == 0 and row.severity == "warning"]
    if not wrong and not missing:
        return ""
    decays = [row.weight_decay for row in rows if row.weight_decay]
    value = max(set(decays), key=decays.count) if decays else 5e-4
    kept = [needed[name] for name, decay in should.items() if not decay]
    return _FIX.format(no_decay=_as_set(kept), decay=_as_set([needed[row.name] for row in missing]), value=f"{value:g}")


def _as_set(names: list[str]) -> str:
    return "\n".join(["{", *(f'    "{name}",' for name in names), "}"]) if names else "set()"
