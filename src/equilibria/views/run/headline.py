"""A run in words: how fast its blocks and layers turn, how many turn as predicted, and which one is furthest off."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from equilibria.diagnosis.faults import OVER
from equilibria.diagnosis.layer_summary import LEAST_WINDOW, LayerSummary
from equilibria.diagnosis.metadata import three_digits
from equilibria.diagnosis.siblings import (
    FEW_LAYERS,
    LEAST_SIBLINGS,
    UNLIKE,
    Siblings,
    block_of,
    blocks_of,
    far_from_median,
    folded,
    short_names,
    siblings,
)
from equilibria.findings import Finding, counted, joined, percent, plain, rounded
from equilibria.records.tables import DISTURBED, NO_EQUILIBRIUM, SETTLED, SETTLING
from equilibria.views.words import full_stop, sentence_case

TOLERANCE = 0.05
"""How far measured / predicted may be from 1 to count as predicted."""

STATE_MARKS = {SETTLED: "✓", SETTLING: "→", DISTURBED: "!", NO_EQUILIBRIUM: "–"}
"""A sign for every state, for readers who do not see its colour."""

_NO_ANGLE = "{} has no angle in any sampled step", "{} have no angle in any sampled step"
_REASONS = 3  # why there is no prediction, at most
_SLIGHT = 0.005  # change of ln ||w||^2 per 100 steps that needs no reason
_SHORT = 1 / 3  # of the steps so far: norms that settle sooner follow lr x wd
_COLLAPSED = 0.1  # times the norm at the first sample: in most layers, that is the news of a run
_DENSE = 5, 1  # values of ``every`` to try where samples are too few
_ONE_NUMBER = 1.25  # kinds of layers whose angles are within this factor of each other share one number


def worst_first(layers: Sequence[LayerSummary]) -> list[LayerSummary]:
    """Layers sorted by the error of their prediction; those without one last, in their own order."""
    return sorted(layers, key=lambda layer: -1.0 if layer.how_wrong is None else layer.how_wrong, reverse=True)


def most_telling_first(layers: Sequence[LayerSummary]) -> list[LayerSummary]:
    """Layers sorted by the error of their prediction; then those unlike their siblings, the first of each kind, others.

    For places with room for a few layers only.
    """
    kinds = siblings(layers)
    unlike = {name: abs(math.log(max(factor, 1e-9))) for kind in kinds for name, factor in kind.unlike("angle").items()}
    first = {kind.members[0].name for kind in kinds}

    def rank(layer: LayerSummary) -> tuple[int, float]:
        if layer.how_wrong is not None:
            return 0, -layer.how_wrong
        return (1, -unlike[layer.name]) if layer.name in unlike else (2 + (layer.name not in first), 0.0)

    return sorted(layers, key=rank)


def has_verdict(layer: LayerSummary) -> bool:
    """Whether its prediction can be judged: that of invariant weights not while it is undecided whether it is one."""
    return layer.angle_vs_predicted is not None and (layer.invariant is not None or layer.by_gain)


def as_predicted(layer: LayerSummary) -> bool | None:
    """Whether the measured angle is the predicted one; None if unsure.

    Unsure is a layer without a prediction, with too few samples, or off by more than the tolerance but not by more than
    chance.
    """
    if not has_verdict(layer) or layer.few:
        return None
    return False if layer.surely_off else True if _is_near(layer) else None


def _is_near(layer: LayerSummary) -> bool:
    return layer.angle_vs_predicted is not None and layer.is_near


def run_headline(layers: Sequence[LayerSummary]) -> str:
    """How fast the blocks of the network turn, or how many layers turn as predicted; without a full stop.

    Example:
        >>> run_headline([])
        'Nothing was measured yet'
    """
    if not layers:
        return "Nothing was measured yet"
    moving = [layer for layer in layers if layer.angle is not None]
    if not moving:
        return "No angle was measured in any sampled step"
    turning, verdicts = _blocks(moving), [as_predicted(layer) for layer in layers if has_verdict(layer)]
    collapsed = _norms_collapsed(moving)
    if verdicts and 2 * verdicts.count(None) <= len(verdicts):
        return "; ".join(filter(None, [collapsed, turning or _verdict(layers)]))
    if not turning:
        latest, earlier = _by_time(moving, _window(max(moving, key=lambda layer: layer.last_step)))
        turning = "; ".join([f"{_the(len(latest))} {_turn(latest)}", *_turned(earlier)])
    return "; ".join(filter(None, [collapsed, turning, "" if collapsed else _norms_changed(moving)]))


def run_details(layers: Sequence[LayerSummary], *, short: bool = False) -> str:
    """The sentences after `run_headline`: the verdict and the layer furthest off, or why there is no prediction.

    Args:
        layers: the layers.
        short: name the layer furthest off, but not its numbers, which a page shows elsewhere.
    """
    if not layers:
        return "The run has no samples: train a few steps with the monitor on, then make the report again."
    if not any(map(has_verdict, layers)):
        return " ".join(filter(None, [_over_run(layers), _without_prediction(layers)]))
    compared, verdict = list(filter(has_verdict, layers)), _verdict(layers)
    judged = [layer for layer in compared if not layer.few]
    lead = "" if run_headline(layers).endswith(verdict) else f"{verdict}."
    if not judged:
        return " ".join(filter(None, [lead, _how_to_judge(compared), _over_run(layers)]))
    first = worst_first(judged)[0]
    if len(layers) == 1:
        furthest = first.sentence
    elif short:
        furthest = f"Furthest off: {first.name}, {_distance(first.angle_vs_predicted or 0.0)}."
    else:
        furthest = f"Furthest off: {first.sentence}"
    change = "" if short else _norm_change(layers)
    return " ".join(filter(None, [lead, furthest, _laws(layers), change, _time_to_settle(layers)]))


def _how_to_judge(layers: Sequence[LayerSummary]) -> str:
    """What a verdict takes that these layers have not, and how to get it."""
    most = max(layers, key=lambda layer: layer.samples)
    spacing = (most.last_step - (most.first_step or 0)) / (most.samples - 1) if most.samples > 1 else math.inf
    every = next((every for every in _DENSE if every < spacing), None)
    denser = f", or sample more often: eq.watch(..., every={every})" if every else ""
    return (
        f"A verdict takes {LEAST_WINDOW} samples of a layer, or more where its angles scatter; these steps have "
        f"{most.samples:,}{' at most' if any(layer.samples < most.samples for layer in layers) else ''}. Train "
        f"longer{denser}."
    )


# ---- the measured gain


def _laws(layers: Sequence[LayerSummary]) -> str:
    """How many predictions come from a measured gain, unless none does."""
    predicted = list(filter(has_verdict, layers))
    gains = sum(layer.by_gain for layer in predicted)
    if not gains:
        return ""
    if gains == len(predicted):
        return f"{'The prediction comes' if gains == 1 else 'All predictions come'} from a measured growth gain G."
    return (
        f"{gains:,} of {len(predicted):,} predictions {'comes' if gains == 1 else 'come'} from a measured growth gain "
        "G, the rest from the law of scale-invariant weights."
    )


def _norm_change(layers: Sequence[LayerSummary]) -> str:
    """Why the norm of the layer with a measured gain that changes fastest changes."""
    gains = [layer for layer in layers if layer.by_gain and layer.budget is not None]
    gains, _ = _by_time(gains, _window(max(gains, key=lambda layer: layer.last_step))) if gains else ([], [])
    if not gains:
        return ""
    growth, place = max((abs(layer.budget.growth), place) for place, layer in enumerate(gains) if layer.budget)
    budget = gains[place].budget
    return "" if budget is None or growth < _SLIGHT else f"{gains[place].name} {budget.sentence}."


def _time_to_settle(layers: Sequence[LayerSummary]) -> str:
    """The longest time in which norms settle, each at its largest lr x wd, where it exceeds a third of the samples."""
    waits = [
        (layer.budget.settling, layer.last_step + 1 - (layer.recorded_from or 0), layer.budget.formula)
        for layer in layers
        if layer.by_gain and layer.budget is not None and layer.budget.settling is not None
    ]
    if not waits:
        return ""
    wait, _, formula = max(waits)
    steps = max(steps for _, steps, _ in waits)
    if wait < _SHORT * steps:
        return ""
    needed = f"{formula} = {plain(wait)} steps"
    which = "Norms" if min(waits)[0] == wait else "The slowest norms"
    return f"{which} need {needed} to settle at their largest lr x wd; the samples span {steps:,} steps."


def headline_and_details(layers: Sequence[LayerSummary], findings: Sequence[Finding]) -> tuple[str, str]:
    """`run_headline`, short `run_details`; if the run is over, diverged or not finite, the headline says so first."""
    headline, details = run_headline(layers), run_details(layers, short=True)
    over = next((finding for finding in findings if finding.kind in OVER), None)
    return (headline, details) if over is None else (sentence_case(over.subject), f"{headline}. {details}")


def in_short(layers: Sequence[LayerSummary], findings: Sequence[Finding]) -> str:
    """What is true of the network, and whether a check found something wrong."""
    headline, _ = headline_and_details(layers, findings)
    warnings = [finding for finding in findings if finding.severity == "warning"]
    if any(finding.kind in OVER for finding in findings) or all(layer.angle is None for layer in layers):
        return full_stop(headline)
    if warnings:
        first = "Warning" if len(warnings) == 1 else f"{len(warnings):,} warnings, the first"
        return f"{headline}. {first}: {warnings[0].subject}."
    notes = f"No warnings, {counted(len(findings), 'note')} below" if findings else "No check found a fault"
    return f"{headline}. {notes}."


# ---- how fast blocks and layers turn


def _blocks(layers: Sequence[LayerSummary]) -> str:
    """How fast the blocks of a network turn, and which of them are unlike the others; empty if it has no blocks.

    A block is compared with the others kind by kind, over the window that most of their layers share: its factor is the
    median over its layers of the angle over the median angle of their siblings. Blocks turn alike if each kind of
    layers does, up to those that are named.
    """
    if len(layers) <= FEW_LAYERS:
        return ""
    rows = [row for row in folded(layers) if len(row.members) > 1 and block_of(row.members[0].name)]
    own = blocks_of(rows)
    usual = Counter(_window(member) for row in rows for member in row.members).most_common(1)
    kinds = _only(rows, lambda member: (_window(member), member.angle is not None) == (usual[0][0], True))
    factors = defaultdict(list)
    for kind in kinds:
        middle = median(kind.values("angle"))
        for member in kind.members:
            if middle > 0 and member.angle is not None:
                factors[own[member.name]].append(member.angle / middle)
    blocks = {block: median(values) for block, values in factors.items()}
    if len(blocks) < LEAST_SIBLINGS:
        return ""
    unlike, count = far_from_median(blocks), len(set(own.values()))
    single = {
        name: factor for kind in kinds for name, factor in kind.unlike("angle").items() if own[name] not in unlike
    }
    others = blocks.keys() - unlike - {own[name] for name in single}
    usual_kinds = _only(kinds, lambda member: own[member.name] in others)
    spread = max(map(_spread, usual_kinds), default=math.inf)
    members = [layer for kind in kinds for layer in kind.members]
    noun = "blocks" if any(len(values) > 1 for values in factors.values()) else "layers of a kind"
    if spread <= UNLIKE and 2 * len(others) >= count:
        which = f"All {count:,}" if len(others) == count else f"{len(others):,} of {count:,}"
        within = f"{max(math.ceil(10 * spread - 0.01), 11) / 10}x"
        first = f"{which} {noun} turn alike, within {within}: {_by_kind(usual_kinds)}{_steps(members)}"
        widest = ""
    else:
        first, widest = f"{count:,} {noun} {_turn(members)}", _widest(kinds)
    names = {layer.name for layer in members}
    return "; ".join(
        filter(
            None,
            [
                first,
                widest,
                _unlike_blocks({block: factors[block] for block in unlike}, list(blocks)),
                _unlike_layers(single),
                _unlike_norms(kinds, own),
                _others([layer for layer in layers if layer.name not in names], _window(members[0])),
            ],
        )
    )


def _only(kinds: Sequence[Siblings], which: Callable[[LayerSummary], bool]) -> list[Siblings]:
    """The kinds with some of their members, those that keep several."""
    kept = [Siblings(kind.kind, tuple(filter(which, kind.members))) for kind in kinds]
    return [kind for kind in kept if len(kind.members) > 1]


def _window(layer: LayerSummary) -> tuple[int | None, int]:
    return layer.first_step, layer.last_step


def _spread(kind: Siblings) -> float:
    """The largest angle of some siblings over the smallest."""
    angles = kind.values("angle")
    return max(angles) / min(angles) if min(angles) > 0 else math.inf


def _widest(kinds: Sequence[Siblings]) -> str:
    """The siblings that differ most; empty where one does not turn."""
    kind = max(kinds, key=_spread)
    if not (spread := _spread(kind)) < math.inf:
        return ""
    slow, *_, fast = sorted(kind.members, key=lambda member: member.angle or 0.0)
    return f"siblings differ by up to {plain(spread)}x ({fast.name} against {slow.name})"


def _others(layers: Sequence[LayerSummary], window: tuple[int | None, int]) -> str:
    """The layers that a sentence about blocks leaves out, with their steps unless they are those of the blocks."""
    if not layers:
        return ""
    near, apart = _by_time(layers, window)
    which = "the other layer" if len(near) == 1 else f"the {len(near):,} other layers"
    own = "" if all(_window(layer) == window for layer in near) else _steps(near)
    turn = [f"{which} {'turns' if len(near) == 1 else 'turn'} {_angles(near)} per step{own}"] if near else []
    return "; ".join([*turn, *_turned(apart)])


def _by_time(
    layers: Sequence[LayerSummary], window: tuple[int | None, int]
) -> tuple[list[LayerSummary], list[LayerSummary]]:
    """The layers whose samples overlap with a window, and those whose samples are of other steps."""
    first, last = window
    near = [layer for layer in layers if layer.last_step >= (first or 0) and (layer.first_step or 0) <= last]
    names = {layer.name for layer in near}
    return near, [layer for layer in layers if layer.name not in names]


def _turned(layers: Sequence[LayerSummary]) -> list[str]:
    """The layers that were sampled at other steps, with their own."""
    which = layers[0].name if len(layers) == 1 else f"{len(layers):,} layers, sampled at other steps,"
    return [f"{which} turned {_angles(layers)} per step{_steps(layers)}"] if layers else []


def _by_kind(kinds: Sequence[Siblings]) -> str:
    """The angle per step, or its range over the kinds of layers; each kind by its median."""
    middles = [median(kind.values("angle")) for kind in kinds]
    if max(middles) <= _ONE_NUMBER * min(middles):
        return f"{_radians([median(middles)])} per step"
    return f"{_radians(middles)} per step by kind of layer"


def _unlike_blocks(unlike: dict[str, list[float]], blocks: Sequence[str]) -> str:
    """The blocks that are unlike the others, with their factor: the range over their kinds of layers."""
    names = short_names(blocks)
    phrases = defaultdict(list)
    for block, factors in unlike.items():
        phrases[f"{_factors(factors)}x as fast"].append(names[block])
    return ", ".join(f"{joined(which)} {phrase}" for phrase, which in list(phrases.items())[:3])


def _unlike_layers(unlike: Mapping[str, float]) -> str:
    """Single layers that are unlike their siblings."""
    names = [f"{name} {factor:.2g}x" for name, factor in unlike.items()]
    return f"unlike {'its' if len(names) == 1 else 'their'} siblings: {joined(names, most=2)}" if names else ""


def _unlike_norms(kinds: Sequence[Siblings], own: Mapping[str, str]) -> str:
    """The blocks most of whose layers have a norm unlike that of their siblings."""
    sizes = Counter(own[member.name] for kind in kinds for member in kind.members)
    unlike = defaultdict(list)
    for kind in kinds:
        for name, factor in kind.unlike("norm").items():
            unlike[own[name]].append(factor)
    names = short_names(list(sizes))
    which = [
        f"{len(factors)} of {sizes[block]} in {names[block]} {_factors(factors)}x"
        for block, factors in unlike.items()
        if 2 * len(factors) > sizes[block] > 1
    ]
    return f"norms unlike their siblings': {joined(which, most=2)}" if which else ""


def _factors(factors: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{factor:.2g}" for factor in (min(factors), max(factors))))


def _turn(layers: Sequence[LayerSummary]) -> str:
    rounds = ", no more than rounding makes" if all(layer.turns_by_rounding for layer in layers) else ""
    return f"{'turns' if len(layers) == 1 else 'turn'} {_angles(layers)} per step{_steps(layers)}{rounds}"


def _angles(layers: Sequence[LayerSummary]) -> str:
    return _radians([layer.angle for layer in layers if layer.angle is not None])


def _radians(angles: Sequence[float]) -> str:
    """The range of some angles, in the unit of the table.

    Example:
        >>> _radians([0.0042, 0.0042]), _radians([0.00134, 0.0089])
        ('0.0042 rad', '0.0013 to 0.0089 rad')
    """
    ends = dict.fromkeys(rounded(angle, digits=2) for angle in (min(angles), max(angles)))
    return f"{' to '.join(ends)} rad"


def _steps(layers: Sequence[LayerSummary]) -> str:
    """The steps that the angles were measured in, with the range of lr where it moved and is the same for all."""
    first = min(layer.last_step if layer.first_step is None else layer.first_step for layer in layers)
    last = max(layer.last_step for layer in layers)
    ranges = {layer.lr_range for layer in layers}
    lr_range = ranges.pop() if len(ranges) == 1 else None
    low, high = map(three_digits, lr_range or (0.0, 0.0))
    lrs = "" if low == high else f", lr {low} to {high}"
    return f" (steps {first:,} to {last:,}{lrs})" if last > first else f" (step {last:,})"


def _norms_collapsed(layers: Sequence[LayerSummary]) -> str:
    """How many norms fell below a tenth since the first sample of the run; empty unless most of several did."""
    known = [(layer.norm / layer.first_norm, layer) for layer in layers if layer.norm is not None and layer.first_norm]
    fallen = [(factor, layer.name) for factor, layer in known if factor < _COLLAPSED]
    if len(known) < 2 or 2 * len(fallen) <= len(known):
        return ""
    least, name = min(fallen)
    which = f"All {len(known):,}" if len(fallen) == len(known) else f"{len(fallen):,} of {len(known):,}"
    return f"{which} norms fell to less than a tenth since the first sample, that of {name} to {_times(least)}"


def _norms_changed(layers: Sequence[LayerSummary]) -> str:
    """How the norms changed from the first to the last sample of the run; empty if there is one sample only."""
    later = [layer for layer in layers if layer.recorded_from is not None and layer.recorded_from < layer.last_step]
    changes = [layer.norm / layer.first_norm - 1 for layer in later if layer.norm is not None and layer.first_norm]
    if not changes:
        return ""
    low, high = min(changes), max(changes)
    first = {layer.recorded_from for layer in later}
    start = f"step {first.pop():,}" if len(first) == 1 else "their first samples"
    since = f"since {start}"
    norms = "the norm" if len(changes) == 1 else "norms"
    if low > -0.005 and high < 0.005:
        return f"{norms} changed by less than 0.5 % {since}"
    if high >= 1 or low <= -0.9:
        factors = dict.fromkeys(_times(1 + change) for change in (low, high))
        return f"{norms} {'is' if len(changes) == 1 else 'are'} {' to '.join(factors)} as long as at {start}"
    if low >= 0 or high <= 0:
        return f"{norms} {'grew' if low >= 0 else 'shrank'} by {_between([abs(low), abs(high)])} {since}"
    return f"{norms} changed by -{_fine(-low)} to +{_fine(high)} {since}"


def _times(factor: float) -> str:
    return f"{plain(factor)}x"


def _over_run(layers: Sequence[LayerSummary]) -> str:
    """The angle over all samples, where the headline is of the last ones."""
    known = [layer for layer in layers if layer.angle_over_run is not None and layer.recorded_from is not None]
    if not known or all(layer.recorded_from == layer.first_step for layer in known):
        return ""
    first = min(layer.recorded_from or 0 for layer in known)
    angles = _radians([layer.angle_over_run for layer in known if layer.angle_over_run is not None])
    return f"Over the whole run, from step {first:,} on, the angle was {angles} per step (root mean square)."


def _between(shares: Sequence[float]) -> str:
    """The range of some shares of 1, in per cent.

    Example:
        >>> _between([0.0042, 0.0042]), _between([0.0013, 0.0089]), _between([0.004, 1.3])
        ('0.42 %', '0.13 to 0.89 %', '0.4 to 130 %')
    """
    low, high = _fine(min(shares)), _fine(max(shares))
    return high if low == high else f"{low.removesuffix(' %')} to {high}"


def _fine(share: float) -> str:
    """A share of 1 in per cent, with two significant digits.

    Example:
        >>> _fine(0.0042), _fine(0.0142), _fine(0.42), _fine(0.0)
        ('0.42 %', '1.4 %', '42 %', '0 %')
    """
    return f"{plain(100 * share)} %"


# ---- how many turn as predicted


def _verdict(layers: Sequence[LayerSummary]) -> str:
    compared = list(filter(has_verdict, layers))
    verdicts = _verdicts(compared)
    if len(compared) < len(layers):
        verb = "has" if len(compared) == 1 else "have"
        lead = f"{len(compared):,} of {counted(len(layers), 'layer')} {verb} a prediction"
        return f"{lead}; {', '.join(_clause(group, phrase, len(compared)) for group, phrase in verdicts)}"
    (first, phrase), *others = verdicts
    which = _all(len(compared)) if not others else f"{len(first):,} of {len(compared):,} layers"
    rest = [f"{len(group):,} {phrase(group)}" for group, phrase in others]
    verdict = phrase(first) if phrase is not _agree else f"{'turns' if len(first) == 1 else 'turn'} as predicted"
    return "; ".join([f"{which} {verdict}", *rest])


Phrase = Callable[[Sequence[LayerSummary]], str]


def _verdicts(compared: Sequence[LayerSummary]) -> list[tuple[list[LayerSummary], Phrase]]:
    """The layers by verdict, each with a phrase that follows their number; verdicts without layers are left out."""
    few = [layer for layer in compared if layer.few]
    unsure = [layer for layer in compared if as_predicted(layer) is None and not layer.few]
    verdicts: list[tuple[list[LayerSummary], Phrase]] = [
        ([layer for layer in compared if as_predicted(layer)], _agree),
        ([layer for layer in compared if as_predicted(layer) is False], _off),
        (unsure, _maybe_off),
        (few, lambda layers: f"{'has' if len(layers) == 1 else 'have'} too few samples to judge"),
    ]
    return [(layers, phrase) for layers, phrase in verdicts if layers]


def _agree(layers: Sequence[LayerSummary]) -> str:
    return "agrees" if len(layers) == 1 else "agree"


def _off(layers: Sequence[LayerSummary]) -> str:
    distance = _distance(worst_first(layers)[0].angle_vs_predicted or 0.0)
    return f"is {distance}" if len(layers) == 1 else f"are off their prediction (worst: {distance})"


def _maybe_off(layers: Sequence[LayerSummary]) -> str:
    off, why = _off(layers), "too few samples to be sure"
    return f"{off[:-1]}; {why})".replace("are off", "may be off", 1) if len(layers) > 1 else f"{off} ({why})"


def _distance(ratio: float) -> str:
    """How far measured / predicted is from 1.

    Example:
        >>> _distance(1.12), _distance(0.8), _distance(2.5), _distance(0.01), _distance(0.0)
        ('12 % fast', '20 % slow', '2.5x as fast', '100x slower', 'not turning')
    """
    if ratio == 0:
        return "not turning"
    if 0.5 < ratio < 2:
        return f"{percent(abs(ratio - 1))} {'fast' if ratio > 1 else 'slow'}"
    return f"{ratio:.3g}x as fast" if ratio > 1 else f"{1 / ratio:.3g}x slower"


def _clause(group: Sequence[LayerSummary], phrase: Phrase, compared: int) -> str:
    """One verdict after the number of layers with a prediction."""
    if len(group) < compared:
        return f"{len(group):,} {phrase(group)}"
    which = {1: "it", 2: "both"}.get(compared, "all")
    return f"{which} {phrase(group)}"


def _all(count: int) -> str:
    return {1: "The layer", 2: "Both layers"}.get(count, f"All {count:,} layers")


def _the(count: int) -> str:
    return {1: "The layer", 2: "Both layers"}.get(count, f"The {count:,} layers")


def _without_prediction(layers: Sequence[LayerSummary]) -> str:
    """Why no layer has a prediction; "" where the headline says that no angle was measured."""
    if all(_why_not_compared(layer) == _NO_ANGLE for layer in layers):
        return ""
    reasons = Counter(map(_why_not_compared, layers))
    provisional = any(layer.invariant is None and layer.angle_predicted is not None for layer in layers)
    prediction = "prediction to judge it by" if provisional else "prediction"
    if len(layers) == 1:
        return f"The layer has no {prediction}: {_reason(layers[0], 1)}."
    first = {_why_not_compared(layer): layer for layer in reversed(layers)}
    parts = [_reason(first[why], count, of_all=count == len(layers)) for why, count in reasons.most_common(_REASONS)]
    return f"No layer has a {prediction}: {'; '.join(parts)}."


def _reason(layer: LayerSummary, count: int, *, of_all: bool = True) -> str:
    """Why some layers have no prediction, with their number unless it is all of them."""
    why = _why_not_compared(layer)
    if isinstance(why, str):
        return why if of_all else f"{why} ({counted(count, 'layer')})"
    return why[count != 1].format(("it" if count == 1 else "they") if of_all else f"{count:,}")


def no_findings(layers: Sequence[LayerSummary]) -> tuple[str, str]:
    """Title and sentence of a report without findings: what was compared, and nothing else."""
    compared = list(filter(has_verdict, layers))
    judged = [layer for layer in compared if not layer.few]
    near, few = sum(map(_is_near, judged)), len(compared) - len(judged)
    too_few = f"; {few:,} {'has' if few == 1 else 'have'} too few samples to judge" if few else ""
    if not compared and all(layer.angle is None for layer in layers):
        return "No findings", "No angle of a single step is known; no other check found a fault."
    if not compared:
        return "No findings", "There is no prediction to judge the angles by; no other check found a fault."
    if not judged:
        return (
            "Too early to judge",
            f"{_all(len(compared))} that {'has' if len(compared) == 1 else 'have'} a prediction "
            f"{'has' if len(compared) == 1 else 'have'} too few samples; no other check found a fault.",
        )
    if gains := sum(layer.by_gain and layer.surely_off for layer in compared):
        return "No findings", (
            f"{counted(gains, 'layer')} of {len(compared):,} {'turns' if gains == 1 else 'turn'} faster or slower than "
            "measured gain and recent updates predict: the updates change in size. No check found a fault."
        )
    if off := len(judged) - near:
        return "Nothing is clearly wrong", (
            f"{counted(off, 'layer')} of {len(compared):,} {'is' if off == 1 else 'are'} more than "
            f"{percent(TOLERANCE)} off the prediction, which so few samples do not make certain{too_few}."
        )
    if few:
        return "No findings", (
            f"{near:,} of {len(compared):,} layers that have a prediction {'turns' if near == 1 else 'turn'} within "
            f"{percent(TOLERANCE)} of it{too_few}; no check found a fault."
        )
    which = "The layer that has a prediction turns" if near == 1 else f"{_all(near)} that have a prediction turn"
    return "No findings", f"{which} within {percent(TOLERANCE)} of it, and no check found a fault."


def _why_not_compared(layer: LayerSummary) -> str | tuple[str, str]:
    """The reason of a layer without a verdict: why it has no law, or a clause about one layer and one about several."""
    if layer.no_law is not None:
        return layer.no_law
    if layer.idle is not None:
        return layer.idle
    if layer.angle is None:
        return _NO_ANGLE
    if layer.no_gain is not None:
        return layer.no_gain
    if layer.invariant is None and layer.mean_cosine is not None:
        return "it is undecided whether {} is scale-invariant", "it is undecided whether {} are scale-invariant"
    return "{} has no prediction in these samples", "{} have no prediction in these samples"
