"""Findings about tensors unlike their siblings: other settings, other steps, another start, at rest, or not trained.

Siblings are tensors of one kind in different blocks, the matrices of one stack, or the rows of one tensor. What counts
here was tried on planted faults and on healthy runs (`benchmarks/siblings.md`). Angle, norm and growth gain of siblings
are no findings by themselves: in healthy networks the first block differs by factors of three. The report draws them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.metadata import three_digits
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import flagged_since
from equilibria.diagnosis.siblings import (
    LEAST_SIBLINGS,
    Siblings,
    block_of,
    far_from_median,
    is_minority,
    is_plain_sequence,
    is_row_kind,
    kind_key,
    kind_of,
    siblings,
    unusual_settings,
)
from equilibria.findings import Finding, counted, joined, plain
from equilibria.theory.requested import norm_power

_STEPS = 2.0  # factor between the updates of a tensor and its siblings, per entry
_START = 2.0  # factor between their norms per entry before the first step
_ALIKE = math.log(1.1)  # median distance of those norms: only initial values that agree show one that does not
_FEWEST = 10  # samples of a tensor that is judged
_ROUNDING = 8  # units of eps: weight decay alone turns a weight by rounding
_EPS = {"float64": 2**-52, "float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}
_MOST_ROWS = 6  # that are listed


def outliers(run: SampledRun, summaries: Sequence[LayerSummary]) -> Iterator[Finding]:
    """All findings of this module, about the members of every kind with at least three."""
    kinds = [
        kind
        for kind in siblings(summaries)
        if len(kind.members) >= LEAST_SIBLINGS and not is_plain_sequence(kind_of(kind.members[0].name))
    ]
    resting = _at_rest(run, summaries)
    yield from _rest(run, kinds, resting)
    across = [kind for kind in kinds if not is_row_kind(kind.kind)]
    other_lr = yield from _settings(run, across, "lr")
    yield from _settings(run, across, "weight_decay")
    equal = [Siblings(kind.kind, _of_usual_shape(kind)) for kind in across]
    yield from _steps(run, equal, known={*resting, *other_lr})
    yield from _starts(run, equal)
    yield from _frozen(run, across)


def _of_usual_shape(kind: Siblings) -> tuple[LayerSummary, ...]:
    """The members with the most frequent shape: initial values, and the steps of Muon, depend on the shape."""
    ((usual, _),) = Counter(member.shape for member in kind.members).most_common(1)
    return tuple(member for member in kind.members if member.shape == usual)


# ---- settings


def _settings(run: SampledRun, kinds: Sequence[Siblings], field: str) -> Generator[Finding, None, set[str]]:
    """Tensors whose lr or weight decay differs from what their siblings share; returns their names."""
    last = dict(zip(run.series.names, run.series.last(field).tolist(), strict=True))
    found: dict[tuple[float, float], list[tuple[LayerSummary, Siblings]]] = {}
    for kind in kinds:
        usual, others = unusual_settings({member.name: last[member.name] for member in kind.members}) or (0.0, [])
        for member in kind.members:
            if member.name in others:
                found.setdefault((last[member.name], usual), []).append((member, kind))
    what = "lr" if field == "lr" else "weight decay"
    for (own, usual), members in found.items():
        first, kind = members[0]
        names = [member.name for member, _ in members]
        it, its, whose = ("it", "its", "") if len(names) == 1 else ("them", "their", f"{first.name} ")
        yield Finding(
            "note",
            f"{joined(names)} {'has' if len(names) == 1 else 'have'} {what} {three_digits(own)}, "
            f"{its} siblings {three_digits(usual)}",
            f"at step {int(run.series.columns['step'].max()):,}, {whose}against {_others(kind)}"
            + (_speed_against(first, kind) if field == "lr" else ""),
            f"nothing needs doing if that is intended. Otherwise move {it} to the parameter group of {its} siblings; "
            f"to see the groups: print([(group[{field!r}], len(group['params'])) for group in optimizer.param_groups])",
            "",
            kind=f"other {what}",
        )
    return {member.name for members in found.values() for member, _ in members}


def _others(kind: Siblings) -> str:
    return f"{len(kind.members) - 1:,} other {kind.kind}"


def _speed_against(layer: LayerSummary, kind: Siblings) -> str:
    """How the steps, the norm and the angle of a tensor compare with the median of its siblings."""
    factors = {
        words: factor
        for field, words in (("update_per_entry", "steps per entry"), ("norm", "norm"), ("angle", "angle"))
        if (factor := _factor(layer, kind, field)) is not None
    }
    if not factors:
        return ""
    return f"; {layer.when}, " + ", ".join(f"its {words} {plain(factor)}x theirs" for words, factor in factors.items())


def _factor(layer: LayerSummary, kind: Siblings, field: str) -> float | None:
    if layer not in kind.of_one_window:
        return None
    others = [getattr(member, field) for member in kind.of_one_window if member is not layer]
    known = [value for value in others if value is not None]
    own = getattr(layer, field)
    return None if own is None or not known or median(known) <= 0 else own / median(known)


# ---- steps


def _steps(run: SampledRun, kinds: Sequence[Siblings], *, known: set[str]) -> Iterator[Finding]:
    """Updates of another size than the siblings', where the optimizer fixes their length: not under SGD."""
    rules = dict(zip(run.series.names, run.rules, strict=True))
    found: list[tuple[LayerSummary, Siblings, float]] = []
    for kind in kinds:
        judged = {
            member.name: member.update_per_entry
            for member in kind.of_one_window
            if member.samples >= _FEWEST
            and member.update_per_entry is not None
            and (rule := rules[member.name]) is not None
            and norm_power(rule) == 1
        }
        unlike = far_from_median(judged)
        found += [
            (member, kind, unlike[member.name])
            for member in kind.members
            if member.name not in known and not 1 / _STEPS < unlike.get(member.name, 1.0) < _STEPS
        ]
    if not found:
        return
    layer, kind, _ = max(found, key=lambda item: abs(math.log(max(item[2], 1e-9))))
    names = [member.name for member, _, _ in found]
    yield Finding(
        "note",
        f"{joined(names)} {'takes' if len(names) == 1 else 'take'} steps unlike {'its' if len(names) == 1 else 'their'}"
        " siblings', at the same lr",
        f"{layer.name} against the median of {_others(kind)}{_speed_against(layer, kind)}",
        "look at its gradient: one that is 0 at most steps, or below the eps of Adam, makes small steps; a hook or a "
        f"wrapper that scales it, large ones: print(model.get_parameter({layer.name!r}).grad.abs().mean())",
        "",
        kind="other steps",
    )


# ---- start


def _starts(run: SampledRun, kinds: Sequence[Siblings]) -> Iterator[Finding]:
    """Norms before the first step unlike the siblings', whose own are alike: initial values of another size."""
    entries = dict(zip(run.series.names, (float(entry.get("entries", 0)) for entry in run.entries), strict=True))
    found: list[tuple[LayerSummary, Siblings, float]] = []
    for kind in kinds:
        sizes = {
            member.name: member.first_norm / math.sqrt(entries[member.name])
            for member in kind.members
            if member.recorded_from == 0 and member.first_norm and entries[member.name]
        }
        middle = median(sizes.values()) if len(sizes) >= LEAST_SIBLINGS else 0.0
        if not middle or median(abs(math.log(size / middle)) for size in sizes.values()) > _ALIKE:
            continue
        factors = {name: size / middle for name, size in sizes.items()}
        found += [
            (member, kind, factors[member.name])
            for member in kind.members
            if not 1 / _START < factors.get(member.name, 1.0) < _START
        ]
    if not found:
        return
    layer, kind, factor = max(found, key=lambda item: abs(math.log(item[2])))
    names = [member.name for member, _, _ in found]
    yield Finding(
        "note",
        f"{joined(names)} started with another norm than {'its' if len(names) == 1 else 'their'} siblings",
        f"{layer.name} had {plain(factor)}x the median norm per entry of {len(kind.members):,} {kind.kind} before step "
        f"0{_speed_against(layer, kind)}",
        "nothing needs doing if that is intended; otherwise look at how it is initialised. A norm that is too large "
        "turns more slowly at the same lr, and weight decay takes about 1/(lr wd) steps to shrink it",
        "",
        kind="other start",
    )


# ---- at rest


class _Rest(NamedTuple):
    """The last steps of a tensor, at whose samples it did not turn."""

    since: int
    until: int
    samples: int


def _at_rest(run: SampledRun, summaries: Sequence[LayerSummary]) -> dict[str, _Rest]:
    """The tensors at rest for ten samples or more, up to the last: all of their window, of rows all of the run."""
    taken = run.taken
    limits = np.array([_ROUNDING * _EPS.get(str(entry.get("dtype")), 0.0) for entry in run.entries])
    angle, gradient = taken.columns["angle"], taken.columns["grad_norm"]
    still = (angle == 0) | ((gradient == 0) & (angle < np.repeat(limits, taken.counts)))
    since = flagged_since(taken, still, moved=np.zeros_like(still))
    samples = taken.sums((taken.columns["step"] >= np.repeat(since, taken.counts)).astype(np.float64))
    begins = [
        0 if is_row_kind(kind_of(summary.name)) or summary.first_step is None else summary.first_step
        for summary in summaries
    ]
    return {
        summary.name: _Rest(int(begin), int(last), int(count))
        for summary, allowed, begin, last, count in zip(
            summaries, begins, since.tolist(), taken.last("step").tolist(), samples.tolist(), strict=True
        )
        if begin <= max(allowed, summary.recorded_from or 0)
    }


def _rest(run: SampledRun, kinds: Sequence[Siblings], resting: Mapping[str, _Rest]) -> Iterator[Finding]:
    for kind in kinds:
        still = [member for member in kind.members if member.name in resting]
        if not still or len(still) == len(kind.members):
            continue
        if is_row_kind(kind.kind):
            yield _rows_at_rest(run, kind, still, resting)
        elif is_minority(len(still), len(kind.members)):
            yield from (_layer_at_rest(member, kind, resting[member.name]) for member in still)


def _layer_at_rest(layer: LayerSummary, kind: Siblings, rest: _Rest) -> Finding:
    angles = [member.angle for member in kind.members if member is not layer and member.angle is not None]
    return Finding(
        "warning",
        f"{layer.name} does not turn, its siblings do",
        f"at none of {counted(rest.samples, 'sample')} over steps {rest.since:,}-{rest.until:,}"
        f"{'; weight decay alone moves it' if layer.weight_decay else ''}; the median of {_others(kind)} turns "
        f"{median(angles):.3g} rad per step {layer.when}",
        "look at what its outputs feed: an activation that is always 0, a gate or residual scale of 0, an unused "
        f"branch: print(model.get_parameter({layer.name!r}).grad.abs().max())",
        "",
        kind="at rest",
    )


def _rows_at_rest(
    run: SampledRun, kind: Siblings, still: Sequence[LayerSummary], resting: Mapping[str, _Rest]
) -> Finding:
    """Rows or matrices of one tensor that had no gradient at any sample."""
    name = kind.kind.partition("[")[0]
    is_stack = len(still[0].shape or ()) > 2
    noun = ("matrix", "matrices") if is_stack else ("row", None)
    numbers = [member.name.removeprefix(name) for member in still]
    steps = run.taken.columns["step"]
    samples = min(resting[member.name].samples for member in still)
    router = "if these are experts, look at the router: no token came to them at these steps"
    tokens = "nothing needs doing if these tokens or classes are not in the data"
    if any(member.weight_decay for member in still):
        tokens += f". To keep such rows as they are: put {name} into a parameter group with weight_decay=0"
    return Finding(
        "warning" if is_stack else "note",
        f"{len(still):,} of {counted(len(kind.members), *noun)} of {name} did not turn at any sample",
        f"{joined(numbers, most=_MOST_ROWS)}, at {counted(samples, 'sample')} "
        f"over steps {int(steps.min()):,}-{int(steps.max()):,}{_shrunk(still)}",
        router if is_stack else tokens,
        "",
        kind=f"rows at rest {name}",
    )


def _shrunk(layers: Sequence[LayerSummary]) -> str:
    """What decay alone did to the norms of tensors at rest."""
    ratios = [layer.norm / layer.first_norm for layer in layers if layer.norm is not None and layer.first_norm]
    if not ratios or not any(layer.weight_decay for layer in layers):
        return ""
    whose = "its norm is" if len(layers) == 1 else "their norms are"
    return (
        f"; weight decay alone moves {'it' if len(layers) == 1 else 'them'}: {whose} {median(ratios):.3g} of the first"
    )


# ---- not trained


def _frozen(run: SampledRun, kinds: Sequence[Siblings]) -> Iterator[Finding]:
    """Tensors that require no gradient in blocks whose other tensors are trained, while most of their kind is."""
    trained = {kind_key(kind.members[0].name, kind.members[0].shape): kind for kind in kinds}
    blocks = {block_of(name) for name in run.series.names}
    left_out: dict[tuple[object, ...], list[str]] = {}
    for entry in run.metadata.get("frozen", ()):
        if block_of(entry["name"]) in blocks:
            left_out.setdefault(kind_key(entry["name"], tuple(entry["shape"])), []).append(entry["name"])
    for key, names in left_out.items():
        kind = trained.get(key)
        if kind is None or not is_minority(len(names), len(kind.members) + len(names)):
            continue
        yield Finding(
            "note",
            f"{joined(names)} {'is' if len(names) == 1 else 'are'} frozen, {'its' if len(names) == 1 else 'their'} "
            f"{len(kind.members):,} siblings are trained",
            f"{'it required' if len(names) == 1 else 'they required'} no gradient when watching began, in "
            f"{'a block' if len(names) == 1 else 'blocks'} whose other tensors are trained",
            f"nothing needs doing if that is intended. To train: model.get_parameter({names[0]!r}).requires_grad_() "
            "before the optimizer is made",
            "",
            kind="frozen",
        )
