"""`equilibria translate`: settings with the same dynamics elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import (
    NUMBER,
    PATH,
    build_rule,
    example,
    flag,
    json_option,
    named,
    numbers,
    parsed_shape,
    rule_or_run_options,
    scale_options,
)
from equilibria.cli._output import jsonable, print_json
from equilibria.errors import EquilibriaError, one_of, positive
from equilibria.findings import counted, percent
from equilibria.views.terminal import table, wrap

if TYPE_CHECKING:
    from equilibria.forecasting import BatchScaling, LayerScaling
    from equilibria.theory import Rule
    from equilibria.theory.translation import Translation

_TARGETS = ("sgd", "sgdw", "adamw", "lion", "muon")
_USED_BY = {
    "match": _TARGETS,
    "to_momentum": ("sgd", "sgdw", "muon"),
    "to_betas": ("adamw", "lion"),
    "to_adjust_lr_fn": ("muon",),
    "unit_grad_sq": _TARGETS,
    "dim": _TARGETS,
    "shape": _TARGETS,
}
_MOST_LAYERS = 12
_LOST = 0.1  # as in `LayerScaling.breaks_at`
_SURE = 0.025  # standard error of a ratio that is within 5 % in 19 of 20 cases
_WITH_RUN = ("run", "scale_batch", "as_json")
_ARGUMENTS = {"scale_init": "scale", "scale_batch": "batch", "hold_angle_at_wd": "weight_decay", "to": "to"}


@click.command(
    "translate",
    epilog=example(
        "translate --optimizer adamw --lr 1e-3 --wd 0.1 --to lion --to-betas 0.9,0.99",
        "translate --optimizer adamw --lr 3e-4 --wd 0.1 --to muon --shape 768,768 --shape 3072,768",
        "translate --run runs/a --scale-batch 8",
    ),
)
@rule_or_run_options
@click.option("--run", type=PATH, help="with --scale-batch: a recorded run, in place of --optimizer and its settings.")
@click.option("--scale-init", type=NUMBER, help="Factor of the initial weights.")
@click.option("--scale-batch", type=NUMBER, help="Factor of the batch size.")
@click.option("--hold-angle-at-wd", type=NUMBER, help="Another weight decay, at the same angle.")
@click.option("--to", help="Another optimizer: sgd, sgdw, adamw, lion or muon.")
@click.option("--match", help="with --to: angle (default), diffusion or time_constant.")
@click.option("--to-momentum", type=NUMBER, help="with --to sgd, sgdw, muon: its momentum.")
@click.option("--to-betas", help="with --to adamw, lion: its betas.")
@click.option("--to-adjust-lr-fn", help="with --to muon: original, match_rms_adamw, spectral_norm or none.")
@click.option("--shape", multiple=True, help="from and to muon: rows,columns of a matrix; once per shape.")
@scale_options
@json_option
def command(**options: Any) -> None:
    """Translate settings to another initial scale, batch size, weight decay or optimizer with the same dynamics.

    With --run and --scale-batch the settings are those of a recorded run, and the output says how far they can be
    scaled on its network.
    """
    options["shape"] = options["shape"] or None
    if options["run"] is not None:
        _translate_run(options)
        return
    if options["optimizer"] is None:
        raise EquilibriaError("--optimizer is missing; expected one, such as --optimizer sgd, or --run RUN")
    rule = build_rule(options)
    if options["to"] is not None:
        options["to"] = one_of("--to", options["to"].lower(), _TARGETS)
    target = {name: options[option] for option, name in _ARGUMENTS.items() if options[option] is not None}
    if len(target) != 1:
        typed = [flag(option) for option in _ARGUMENTS if options[option] is not None]
        raise EquilibriaError(
            f"got {' and '.join(typed) or 'none of them'}; expected exactly one of --scale-init, --scale-batch, "
            "--hold-angle-at-wd and --to"
        )
    _check_target(options)
    shapes = [parsed_shape(text) for text in options["shape"] or ()]
    results = [_translated(rule, target, options, shape) for shape in shapes]
    results = results or [_translated(rule, target, options, None)]
    if options["as_json"]:
        shown = [{**jsonable(result), "optimizer": type(result.rule).__name__} for result in results]
        print_json(shown[0] if len(shown) == 1 else shown)
    elif len(results) == 1:
        _show(rule, results[0])
    else:
        _show_shapes(rule, shapes, results)


def _translated(
    rule: Rule, target: dict[str, Any], options: dict[str, Any], shape: tuple[int, int] | None
) -> Translation:
    from equilibria.forecasting import translate

    extra = {
        "match": options["match"],
        "momentum": options["to_momentum"],
        "betas": _to_betas(options["to_betas"]),
        "adjust_lr_fn": options["to_adjust_lr_fn"],
        "unit_grad_sq": options["unit_grad_sq"],
        "dim": options["dim"],
        "shape": shape,
    }
    flags = {"momentum": "--to-momentum", "betas": "--to-betas", "adjust_lr_fn": "--to-adjust-lr-fn"}
    with named(flags):
        return translate(rule, **target, **{name: value for name, value in extra.items() if value is not None})


def _translate_run(options: dict[str, Any]) -> None:
    """Print how far the batch of a recorded run can be scaled."""
    from equilibria.forecasting import BatchScaling, translate

    typed = [flag(name) for name, value in options.items() if name not in _WITH_RUN and value not in (None, False)]
    if typed or options["scale_batch"] is None:
        raise EquilibriaError(
            f"got --run {'with ' + typed[0] if typed else 'without --scale-batch'}; expected --run and --scale-batch "
            "alone: a run has its own settings"
        )
    with named({"batch": "--scale-batch"}):
        result = translate(run=options["run"], batch=options["scale_batch"])
    assert isinstance(result, BatchScaling)
    assert result.present is not None
    if options["as_json"]:
        print_json({**jsonable(result), "optimizer": type(result.rule).__name__})
        return
    _show(result.present, result)
    _show_layers(result)


def _check_target(options: dict[str, Any]) -> None:
    """Raise for a factor that is not positive, and for an option that the target does not use."""
    if options["to"] is None:
        name = next(name for name in _ARGUMENTS if options[name] is not None)
        positive(flag(name), options[name])
    for name, targets in _USED_BY.items():
        if options[name] is not None and options["to"] not in targets:
            raise EquilibriaError(
                f"got {flag(name)}; expected it only with --to: {', '.join(targets)}", argument=flag(name)
            )


def _to_betas(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(numbers("--to-betas", text, example="0.9,0.999"))


def _show(old: Rule, new: Translation) -> None:
    rows = [["", type(old).__name__, type(new.rule).__name__]]
    names = [field.name for field in fields(old)] + [field.name for field in fields(new.rule)]
    rows += [[n, _text(getattr(old, n, "")), _text(getattr(new.rule, n, ""))] for n in dict.fromkeys(names)]
    if new.weight != 1:
        rows.append(["initial weights", "1", f"x {new.weight:g}"])
    print()
    print(table(rows, left=1))
    print("\n  Kept")
    for line in new.kept:
        print(wrap(line, indent="    = ", hang="      "))
    print("  Not kept")
    for line in new.changed:
        print(wrap(line, indent="    ~ ", hang="      "))
    if new.alternative:
        print("  Alternative")
        print(wrap(new.alternative, indent="    ? ", hang="      "))
    print()


def _show_shapes(old: Rule, shapes: Sequence[tuple[int, int]], results: Sequence[Translation]) -> None:
    """One row per shape, and the quantities that are kept and changed for each."""
    rows = [["shape", "lr", "weight_decay", "angle per step", "norm"]]
    for (first, second), result in zip(shapes, results, strict=True):
        new: Any = result.rule
        scale = {"shape": (first, second)} if type(new).__name__ == "Muon" else {"dim": first * second}
        there = new.equilibrium(**scale)
        norm = "" if there.norm is None else f"{float(there.norm):.4g}"
        numbers_shown = [_text(new.lr), _text(new.weight_decay), f"{float(there.angle):.4g}", norm]
        rows.append([f"{first}x{second}", *numbers_shown])
    print(f"\n  {old}\n  to {type(results[0].rule).__name__}\n")
    print(table(rows, left=1))
    print("\n" + wrap(f"Kept for every shape: {', '.join(results[0].kept)}", hang="    "))
    for row, result in zip(rows[1:], results, strict=True):
        print(wrap(f"Not kept, {row[0]}: {'; '.join(result.changed)}", hang="    "))
    print()


def _show_layers(scaling: BatchScaling) -> None:
    """How far scaling holds on the network of the run: the median and the range over layers, and the first rows."""
    layers, n = scaling.layers, scaling.batch
    kept = [layer.kept for layer in layers]
    print("  On this network")
    for line in (
        f"of steps {scaling.first:,} to {scaling.last:,}, the later half of those with the present lr, weight decay "
        f"and momentum; turning was measured over up to {scaling.longest:,} steps, on {counted(len(layers), 'layer')}",
        f"{n} steps as now turn a layer by {_spread([layer.now for layer in layers])} rad (measured), one step of the "
        f"scaled settings, with as many samples, by {_spread([layer.scaled for layer in layers])} rad (predicted)",
        f"the ratio is {_spread(kept)} of that of independent gradients{_reading(kept)}",
        _known(scaling),
        _breaking(scaling),
    ):
        print(wrap(line, indent="    - ", hang="      "))
    rows = [["layer", "now, rad", "scaled, rad", "ratio", "independent", "kept", "±", "10 % less at (90 %)"]]
    for layer in sorted(layers, key=lambda layer: layer.kept)[:_MOST_LAYERS]:
        numbers_shown = (layer.now, layer.scaled, layer.now / layer.scaled, layer.independent, layer.kept)
        error = f"{layer.error:.2g}" if layer.error == layer.error else ""
        rows.append([layer.name, *(f"{value:.3g}" for value in numbers_shown), error, _breaks(layer)])
    print()
    print(table(rows, left=1))
    more = len(layers) - _MOST_LAYERS
    notes = [f"{counted(more, 'more layer')} in --json"] if more > 0 else []
    notes += (
        [f"no prediction for {counted(len(scaling.refused), 'parameter')}; --json says why"] if scaling.refused else []
    )
    if notes:
        print(wrap("; ".join(notes)))
    print()


def _spread(values: Sequence[float]) -> str:
    """The median, and the range if there is one."""
    shown = [f"{value:.3g}" for value in (median(values), min(values), max(values))]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _reading(kept: Sequence[float]) -> str:
    lost = 1 - median(kept)
    return f": later steps take back {percent(lost)} of the angle" if lost >= 0.005 else ""


def _known(scaling: BatchScaling) -> str:
    """How well the ratio is known, and what would make it known to 5 % in 19 of 20 cases."""
    errors = [layer.error / layer.kept for layer in scaling.layers if layer.error == layer.error]
    if not errors:
        return "how well the ratio is known cannot be told from single pairs of weights: watch longer at these settings"
    typical, pairs = median(errors), _spread([layer.pairs for layer in scaling.layers])
    known = f"the ratio is known to ±{percent(typical)} (one standard error, {pairs} pairs of weights a layer)"
    if typical <= _SURE:
        return known
    return (
        f"{known}: for ±{100 * _SURE:g} % watch about {math.ceil((typical / _SURE) ** 2)} times as many steps at these "
        "settings, or, if fewer were sampled, every fourth: eq.watch(..., every=4)"
    )


def _breaking(scaling: BatchScaling) -> str:
    """The factor of the batch size at which a tenth of the angle is lost."""
    known = [layer.breaks_at for layer in scaling.layers if layer.breaks_at is not None]
    intervals = [layer.breaks_between for layer in scaling.layers if layer.breaks_between]
    lows = [low for low, _ in intervals if low is not None]
    less = f"{percent(_LOST)} less, against the scaled step that replaces them, than independent gradients would"
    if not known:
        held = f"up to a batch x {2 * scaling.longest:,}, the present steps turn no layer {less}"
        begin = (
            f"; 90 % intervals of {counted(len(lows), 'layer')} begin before, from x {min(lows):,} on" if lows else ""
        )
        return held + begin
    of = "" if len(known) == len(scaling.layers) else f", for {len(known)} of {len(scaling.layers)} layers"
    ends = [high for low, high in intervals if low is not None]
    end = f"x {max(filter(None, ends)):,}" if all(ends) and ends else "beyond what was measured"
    between = f"; 90 % intervals of single layers reach from x {min(lows):,} to {end}" if lows else ""
    return (
        f"from a batch x {_spread(known)} on{of}, the present steps turn a layer {less}: per sample, the larger batch "
        f"turns it more{between}"
    )


def _breaks(layer: LayerScaling) -> str:
    """The factor of the batch size at which a tenth of a layer's angle is lost, with its 90 % interval."""
    low, high = layer.breaks_between or (None, None)
    at = "" if layer.breaks_at is None else f"x {layer.breaks_at:,}"
    if low is None:
        return at
    return f"{at} ({low:,} to {high:,})" if high is not None else f"{at} ({low:,} or more)".strip()


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" for item in value)
    return f"{value:.6g}" if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
