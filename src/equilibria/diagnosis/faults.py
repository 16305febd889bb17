"""Findings about faults in training or measuring: NaN, skipped steps, missing gradients, laws or samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from equilibria.diagnosis.identities import IdentityCheck
from equilibria.diagnosis.layer_summary import JUDGED, LEAST_WINDOW
from equilibria.diagnosis.layers import Layer, which_layers
from equilibria.diagnosis.metadata import OPTIMIZER_UNKNOWN
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import Array, Series, without_gradient_since, zero_gradient_since
from equilibria.diagnosis.siblings import is_row_kind, kind_of
from equilibria.findings import Finding, counted, percent
from equilibria.records.tables import NO_GRADIENT, NOT_FINITE, NOTES, REMOVED, SKIPPED

_LOST = "no_longer_finite"
OVER = ("diverged", _LOST)
"""Kinds of findings after which a run is over."""

_MANY_STEPS = 100  # in a shorter run few samples are no fault
_OF_TORCH = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)  # by name: recorded runs are read without torch
_AS_REQUESTED = 0.05  # relative error of a delivered angle that needs no finding
_TO_BEGIN_WITH = 10  # steps that a scaler may skip until its scale fits
_LOGGED = 10  # logged values whose median stands for the loss before and now
_OFTEN = 0.01  # share of the steps: gradient scaling probes its largest scale more rarely


def _steps_with(series: Series, note: str) -> tuple[int, int, int]:
    """Sampled steps with this note, all sampled steps, and the last step with it."""
    steps = series.columns["step"]
    noted = np.unique(steps[series.columns["note"] == NOTES.index(note)])
    return len(noted), len(np.unique(steps)), int(noted[-1]) if len(noted) else -1


def _share(count: int, total: int) -> str:
    return f"{count:,} of {total:,} sampled steps ({percent(count / total)})"


def _names(names: Sequence[str], total: int) -> str:
    return names[0] if len(names) == 1 else f"{len(names):,} of {total:,} parameters ({names[0]}, ...)"


def not_finite(series: Series) -> Iterator[Finding]:
    """Gradients or weights that are NaN or infinite: from the first sample on, later, or now and then."""
    count, total, last = _steps_with(series, NOT_FINITE)
    if not count:
        return
    bad = series.columns["note"] == NOTES.index(NOT_FINITE)
    first = int(series.columns["step"][bad].min())
    lost = [series.names[i] for i in np.flatnonzero((series.counts > 0) & ~np.isfinite(series.last("norm")))]
    at_start = (series.columns["step"] == series.columns["step"].min()) & bad
    initial = series.sums((at_start & ~np.isfinite(series.columns["norm"])).astype(np.float64)) > 0
    if initial.any():
        names = [series.names[i] for i in np.flatnonzero(initial)]
        yield Finding(
            "warning",
            f"{_names(names, len(series.names))} {'was' if len(names) == 1 else 'were'} not finite before the first "
            f"sampled step, {first:,}",
            f"the norm of {names[0]} is NaN or infinite there; {_share(count, total)} had a gradient with NaN or "
            "infinity",
            "look at the weights that training starts from (initialisation, a loaded file): print([name for name, "
            "param in model.named_parameters() if not param.isfinite().all()])",
            "",
        )
        return
    if at_start.any():
        names = [series.names[i] for i in np.flatnonzero(series.sums(at_start.astype(np.float64)) > 0)]
        yield Finding(
            "warning",
            f"the gradient of {_names(names, len(series.names))} was not finite at the first sampled step, {first:,}",
            f"the watched weights were finite there; {_share(count, total)} had a gradient with NaN or infinity, the "
            f"last at step {last:,}",
            "look at the data and the loss of the first batch, and at the parameters that are not watched: print([name "
            "for name, param in model.named_parameters() if not param.isfinite().all()])",
            "",
        )
        return
    evidence = (
        f"{_share(count, total)} had a gradient with NaN or infinity, the first at step {first:,}, the last at step "
        f"{last:,}"
    )
    if lost:
        yield Finding(
            "warning",
            f"{_names(lost, len(series.names))} {'is' if len(lost) == 1 else 'are'} no longer finite",
            evidence,
            f"go back to a checkpoint from before step {first:,}; to stop before such a step is taken: "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True) before optimizer.step()",
            "",
            kind=_LOST,
        )
        return
    yield Finding(
        "warning" if count > _OFTEN * total else "note",
        "gradients were not finite",
        evidence,
        "nothing needs doing if gradient scaling skips such steps and they stay rare; to find the operation where they "
        "begin: torch.autograd.set_detect_anomaly(True)",
        "",
    )


def lr_is_zero(series: Series) -> Iterator[Finding]:
    """A learning rate of 0 at every sampled step."""
    steps, lr = series.columns["step"], series.columns["lr"]
    if len(np.unique(steps)) < 2 or not np.all(lr == 0):
        return
    yield Finding(
        "warning",
        "lr is 0 at every sampled step: nothing is trained",
        f"{counted(len(np.unique(steps)), 'sampled step')}, {int(steps.min()):,}-{int(steps.max()):,}",
        "look at the learning rate that the schedule sets: print([group['lr'] for group in optimizer.param_groups])",
        "",
    )


def loss_not_finite(run: SampledRun) -> Iterator[Finding]:
    """A logged training loss that is NaN or infinite: since some step, or now and then."""
    if run.logged_loss is None:
        return
    steps, values = run.logged_loss
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return
    anomaly = "to find the operation: torch.autograd.set_detect_anomaly(True)"
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) and finite[-1] == len(values) - 1:
        when = f"at step {int(steps[bad[0]]):,}"
        if len(bad) > 1:
            when = f"{len(bad):,} times, first at step {int(steps[bad[0]]):,}, last at step {int(steps[bad[-1]]):,}"
        yield Finding(
            "warning" if len(bad) > _OFTEN * len(values) and len(bad) > 1 else "note",
            f"the logged loss was not finite {when}",
            f"{counted(len(bad), 'logged value')} of {len(values):,} {'is' if len(bad) == 1 else 'are'} NaN or "
            f"infinite; the last one, at step {int(steps[-1]):,}, is finite",
            f"nothing needs doing if such steps are left out; {anomaly}",
            "",
        )
        return
    last = len(values) - (int(finite[-1]) + 1 if len(finite) else 0)
    since = int(steps[-last])
    yield Finding(
        "warning",
        f"the logged loss is not finite since step {since:,}",
        f"{counted(last, 'logged value')} up to step {int(steps[-1]):,} {'is' if last == 1 else 'are'} NaN or infinite",
        f"go back to a checkpoint from before step {since:,}; {anomaly}"
        if since > int(steps[0])
        else f"look at the data and the loss of the first batch; {anomaly}",
        "",
    )


def skipped(run: SampledRun) -> Iterator[Finding]:
    """Optimizer steps that a GradScaler skipped: those that a fused optimizer was called for, and those it was not."""
    ahead = "a schedule that counts skipped steps is that far ahead of the weights"
    remedy = (
        "to keep the schedule in step with the weights, call it only after steps that were taken: if "
        "scaler.get_scale() >= scale_before: scheduler.step(). To skip none: torch.autocast('cuda', torch.bfloat16), "
        "without a scaler"
    )
    count, total, last = _steps_with(run.series, SKIPPED)
    if count:
        yield Finding(
            "warning" if count > _OFTEN * total else "note",
            "optimizer steps were skipped",
            f"{_share(count, total)}, the last at step {last:,}; {ahead}",
            remedy,
            "",
        )
    for optimizer in run.metadata.get("skipped", ()):
        steps, total = optimizer["steps"], optimizer["steps"] + optimizer["taken"]
        yield Finding(
            "warning" if steps > max(_OFTEN * total, _TO_BEGIN_WITH) else "note",
            f"the GradScaler skipped {steps:,} of {counted(total, 'step')}: no update",
            f"the last before step {optimizer['before']:,} of these samples, which number only the steps that were "
            f"taken; {ahead}",
            remedy,
            "",
        )


def without_gradient(series: Series) -> Iterator[Finding]:
    """Parameters that got no gradient."""
    rows = series.columns["note"] == NOTES.index(NO_GRADIENT)
    missing = series.sums(rows.astype(np.float64))
    always = [series.names[i] for i in np.flatnonzero((missing > 0) & (missing == series.counts))]
    since = without_gradient_since(series)
    partly = (missing > 0) & (missing < series.counts)
    at_times = [series.names[i] for i in np.flatnonzero(partly & ~np.isfinite(since))]
    stopped: dict[int, list[str]] = {}
    for position in np.flatnonzero(partly & np.isfinite(since)).tolist():
        stopped.setdefault(int(since[position]), []).append(series.names[position])
    if not always and not at_times and not stopped:
        return
    total = len(series.names)
    kinds = [(always, "never got a gradient")]
    kinds += [(names, f"got none since step {step:,}") for step, names in stopped.items()]
    kinds += [(at_times, "got none at some steps")]
    yield Finding(
        "note",
        "parameters without a gradient",
        "; ".join(f"{_names(names, total)} {what}" for names, what in kinds if names),
        "nothing needs doing if this is intended: torch neither moves nor decays a parameter without a gradient",
        "",
    )


def zero_gradient(run: SampledRun) -> Iterator[Finding]:
    """Layers whose gradient became exactly 0, or all layers that get one; single rows are often without."""
    series = run.series
    layers = np.array([not is_row_kind(kind_of(name)) for name in series.names])
    zero = zero_gradient_since(series)
    dead = layers & np.isfinite(zero)
    if not np.array_equal(dead, layers & ~np.isfinite(without_gradient_since(series))):
        dead &= series.sums((series.columns["grad_norm"] > 0).astype(np.float64)) > 0
    if not dead.any():
        return
    since, last = int(zero[dead].max()), int(series.last("step")[dead].min())
    steps = np.unique(series.columns["step"][np.repeat(dead, series.counts)])
    count, total, samples = int(dead.sum()), int(layers.sum()), int(((steps >= since) & (steps <= last)).sum())
    first = series.names[int(np.flatnonzero(dead)[0])]
    later = since > int(series.columns["step"].min())
    again = f"go back to a checkpoint from before step {since:,}, and go on" if later else "start again"
    yield Finding(
        "warning",
        f"the gradients of {count:,} of {counted(total, 'layer')} are exactly 0 since step {since:,}",
        f"{'' if total == 1 else f'{first}: ' if count == 1 else f'{first}, ...: '}"
        f"{counted(samples, 'sampled step')}, {since:,}-{last:,}{_loss_since(run.loss, since)}",
        f"{again} with a lower lr if ReLUs died: they pass no gradient back. Otherwise look for a factor of 0 or a "
        "constant loss; nothing needs doing if the loss is at its lowest or these layers are meant to wait",
        "",
    )


def _loss_since(loss: tuple[Array, Array] | None, since: int) -> str:
    """The loss before a step and now, each the median of 10 values at most; empty if none was logged since."""
    if loss is None:
        return ""
    steps, values = loss
    before, now = values[steps < since][-_LOGGED:], values[steps >= since][-_LOGGED:]
    if not len(now):
        return ""
    known = [
        f"{verb} {np.median(some):.3g} {when} ({f'median of {len(some)} values' if len(some) > 1 else 'one value'})"
        for some, verb, when in ((before, "was", "before"), (now, "is", "now"))
        if len(some)
    ]
    return f"; the logged loss {' and '.join(known)}"


def removed(series: Series) -> Iterator[Finding]:
    """Parameters that were taken out of the optimizer."""
    rows = series.columns["note"] == NOTES.index(REMOVED)
    names = [series.names[i] for i in np.flatnonzero(series.sums(rows.astype(np.float64)) > 0)]
    if names:
        yield Finding(
            "note",
            f"{_names(names, len(series.names))} {'is' if len(names) == 1 else 'are'} no longer in the optimizer",
            f"first seen at step {int(series.columns['step'][rows].min()):,}; the optimizer neither moves nor decays "
            f"{'it' if len(names) == 1 else 'them'}",
            "nothing needs doing if that is intended, as for freezing",
            "",
        )


def too_few_samples(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Too few samples at the present settings to compare an angle with its prediction."""
    predictable = [layer for layer in layers if layer.predictable and layer.summary.angle_vs_predicted is not None]
    few = [layer for layer in predictable if layer.few and layer.length >= _MANY_STEPS]
    if not few:
        return
    worst = min(few, key=lambda layer: layer.summary.samples)
    samples, error = worst.summary.samples, worst.summary.angle_error
    steps = worst.summary.last_step - (worst.summary.first_step or 0) + 1
    if error is None:
        needed, known = LEAST_WINDOW, f"{LEAST_WINDOW} samples would show how far its angle scatters"
    else:
        needed = math.ceil(samples * (error / JUDGED) ** 2)
        known = f"measured / predicted scatters, and is known to {percent(error)} only"
    denser = f"eq.watch(model, optimizer, every={max(steps // needed, 1)})"
    yield Finding(
        "note",
        f"{counted(samples, 'sample')} {worst.summary.steps}: too few to judge",
        f"the angle of {which_layers(few, predictable, worst)} cannot be compared with its prediction yet; of "
        f"{worst.name}, {known}",
        f"nothing needs doing: {counted(max(needed, samples + 1), 'sample')} at about these settings would be enough"
        + (f". For denser samples in the next run: {denser}" if steps >= needed > samples else ""),
        "",
    )


def without_law(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Optimizers that are measured but have no law."""
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        if layer.summary.no_law is not None:
            reasons.setdefault(layer.summary.no_law, []).append(layer.name)
    for reason, names in reasons.items():
        yield Finding(
            "note",
            reason,
            f"{_names(names, len(layers))} {'is' if len(names) == 1 else 'are'} measured, but there is nothing to "
            "compare with",
            _without_law_remedy(reason),
            "",
        )


def _without_law_remedy(reason: str) -> str:
    """Suggest a method for an optimizer that the user wrote: not for torch's, nor for one that has the method."""
    if reason == OPTIMIZER_UNKNOWN:
        call = "eq.import_run(source, log_dir=..., optimizer=..., lr=..., weight_decay=...)"
        return f"import again with the optimizer: {call}"
    measured = "nothing needs doing: angles and norms are measured; no prediction is made"
    name = reason.removeprefix("no law for ").split(" ")[0].rstrip(":")
    if "with these settings" in reason or name in _OF_TORCH or _names_motion(reason):
        return measured
    return (
        "for a prediction, give the optimizer a method equilibria_rule(group) that returns the rule of "
        "equilibria.theory it follows"
    )


def _names_motion(reason: str) -> bool:
    """Whether an experiment showed why there is no equilibrium, as in "no law for NAdam (own clock): ..."."""
    return " (" in reason.partition(":")[0] and "(not identified)" not in reason


def failed_identities(checks: Sequence[IdentityCheck], layers: Sequence[Layer]) -> Iterator[Finding]:
    """Identities that hold for any gradients and fail here, unless another finding explains it."""
    by_name = {layer.name: layer for layer in layers}
    finite = [check for check in checks if math.isfinite(check.relative_error) and math.isfinite(check.tolerance)]
    failed = [check for check in finite if not check.holds and not by_name[check.param].explained]
    if not failed:
        return
    worst = max(failed, key=lambda check: check.relative_error / check.tolerance)
    names = list(dict.fromkeys(check.param for check in failed))
    yield Finding(
        "note",
        f"the measurement of {_names(names, len(layers))} does not balance",
        f"over {worst.steps:,} steps from step {worst.first_step:,}, {worst.param} measured {worst.left:.4g} where its "
        f"norm, lr and weight decay imply {worst.right:.4g}: {percent(worst.relative_error)} apart, of which "
        f"{percent(worst.tolerance)} can be rounding",
        "nothing needs doing for training; do not trust the predictions for these layers: something other than the "
        "optimizer's rule moves the weights, or settings change between samples",
        worst.law,
    )


def angle_not_delivered(run: SampledRun) -> Iterator[Finding]:
    """Groups of weights that turn by another angle than a controller was asked for."""
    for controller in run.metadata.get("controllers", ()):
        for group in controller.get("delivered", ()):
            ratio = group["delivered"] / group["requested"] if group["requested"] else 1.0
            if abs(ratio - 1) <= _AS_REQUESTED:
                continue
            name, behind = controller["name"], group.get("behind")
            late = f"; weight decay needs at least {counted(math.ceil(behind), 'more step')}" if behind else ""
            yield Finding(
                "note" if group["by"] == "weight_decay" else "warning",  # which cannot make a norm grow
                f"{name} delivers {ratio:.2g} of the requested angle in parameter group {group['group']}",
                f"its {counted(group['weights'], 'scale-invariant weight')} turned {group['delivered']:.3g} rad per "
                f"step in its last {counted(group['steps'], 'step')} (root mean square); {group['requested']:.3g} was "
                f"requested{late}",
                f"to follow the request at once, by lr: {name}(optimizer, angle, model=model, invariant=sym)"
                if group["by"] == "weight_decay"
                else "for the same angle at every single step: Rotational(optimizer, model=model, invariant=sym)",
                "",
            )
