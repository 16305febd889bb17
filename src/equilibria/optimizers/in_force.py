"""Whether the settings that an optimizer declares are in force: declared against measured, on a copy.

Twins that start at w and (1 + d) w and get the same gradients (`equilibria.optimizers.walks`) show the decay; walks
with one setting changed show whether it has any effect; successive steps show whether momentum remembers. A finding
says both numbers. An optimizer whose decay is of a kind not known here gets no finding.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from equilibria.findings import Finding
from equilibria.optimizers.copies import (
    CannotCopyError,
    Group,
    copies_of,
    decay_of,
    isolated,
    many_processes,
    probe_shape,
    step_function,
)
from equilibria.optimizers.walks import Conditions, Walk

_SHAPE = (32, 16)
_RMS, _GRADIENT = 0.1, 0.01  # root mean square entries of weight and gradient
_BURN, _STEPS = 200, 100
_FEW, _MANY = 40, 600  # steps in which a setting shows whether it has any effect; later ones, to be sure
_ROUNDING = 1e-13  # of a decay per step
_NEAR = 0.02  # relative difference up to which two numbers agree
_PART = 0.1  # relative difference up to which a decay consists of one part
_DEPENDS = 0.2  # change of ln decay from which on it depends on the gradient
_NO_MEMORY = 0.05  # correlation of successive steps below which momentum does not remember
_DIFFERENCE_STEPS = 64


def not_in_force(optimizer: Any, groups: Iterable[Group]) -> tuple[Finding, ...]:
    """The findings of some groups of an optimizer, each once; of torch's own optimizers only those about precision.

    Args:
        optimizer: any torch optimizer; it is not changed.
        groups: its groups.
    """
    is_known = type(optimizer).__module__.startswith(("torch.optim", "equilibria."))
    findings: dict[Finding, None] = {}
    for group in groups:
        found = () if is_known else settings_in_force(optimizer, group)
        findings |= dict.fromkeys(found)
        if (swallowed := decay_in_low_precision(optimizer, group)) is not None:
            findings[swallowed] = None
    return tuple(findings)


def settings_in_force(optimizer: Any, group: Group) -> tuple[Finding, ...]:
    """Compare the declared settings of a parameter group with what a copy of the optimizer does.

    Args:
        optimizer: any torch optimizer; it is not changed.
        group: one of its parameter groups.

    Returns:
        One finding per setting that is not in force; none where a copy of the optimizer cannot be tried.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(8, 8))], weight_decay=0.1)
        >>> settings_in_force(optimizer, optimizer.param_groups[0])
        ()
    """
    if many_processes() or not float(group.get("lr", 0.0)) > 0:
        return ()
    try:
        with isolated():
            return tuple(_Declared(optimizer, group).findings())
    except CannotCopyError:
        return ()
    except Exception:  # the optimizer is foreign code
        return ()


class _Declared:
    """The declared settings of a group, and walks that show what they do."""

    def __init__(self, optimizer: Any, group: Group) -> None:
        self._name, self._group = type(optimizer).__name__, group
        self._make = copies_of(optimizer, group)
        self._optimizer = optimizer
        lr, decay = float(group["lr"]), decay_of(group)
        norm = _RMS * math.sqrt(math.prod(_SHAPE))
        self._at = Conditions(lr, decay, norm, _GRADIENT * math.sqrt(math.prod(_SHAPE)) * norm, _SHAPE)

    def findings(self) -> Iterator[Finding]:
        """All of them."""
        ignored = [name for name, changed in self._changes() if self._is_ignored(changed)]
        remembers, without = "momentum" not in ignored, set(ignored)
        for name in {"lr", "momentum"} & set(ignored):
            # It may keep its momentum in .grad, which a walk replaces.
            if self._is_in_reserve(name) or (name == "momentum" and self._overwrites_gradient()):
                ignored.remove(name)
        for name in ignored:
            yield self._without_effect(name)
        if self._at.weight_decay and not {"lr", "weight_decay"} & without:
            yield from self._decay()
        if remembers and not self._overwrites_gradient():
            yield from self._memory()
        if "muon" in self._name.lower():
            yield from self._shapes()

    def _finding(self, severity: Any, subject: str, evidence: str, remedy: str) -> Finding:
        measured = f"{evidence} (measured on a copy of {self._name})"
        return Finding(severity, subject, measured, remedy, "", kind="not_in_force")

    # ---- settings without effect

    def _changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every setting that should matter, with another value."""
        group = self._group
        for name, value in (("lr", self._at.lr), ("weight_decay", self._at.weight_decay)):
            if value:
                yield name, {name: value / 2}
        betas, momentum = group.get("betas"), group.get("momentum")
        if group.get("maximize") is True:
            yield "maximize", {"maximize": False}
        if any("betas" in key for key in group) and (momentum is not None or "mu" in group):
            return  # groups of a hybrid have the settings of two rules
        if isinstance(momentum, float) and momentum > 0:
            yield "momentum", {"momentum": momentum / 2}
            if group.get("nesterov") is True:
                yield "nesterov", {"nesterov": False}
            if isinstance(group.get("dampening"), float) and group["dampening"]:
                yield "dampening", {"dampening": group["dampening"] / 2}
        if isinstance(betas, tuple | list) and len(betas) == 2:
            for index, name in enumerate(("beta1", "beta2")):
                if isinstance(betas[index], float) and 0 < betas[index] < 1:
                    other = [betas[0], betas[1]]
                    other[index] = betas[index] / 2
                    yield name, {"betas": tuple(other)}

    def _is_ignored(self, changed: dict[str, Any]) -> bool:
        """Whether the same walk with another value of a setting is the same to the last bit, then and much later."""
        walks = [
            Walk(functools.partial(self._with, settings), self._at, twins=False).advance(_FEW)
            for settings in ({}, changed)
        ]
        if not _end_alike(walks):
            return False
        for walk in walks:
            walk.put_clock_forward()
            walk.advance(_MANY)
        return _end_alike(walks)

    def _is_in_reserve(self, name: str) -> bool:
        """Whether a setting acts once a flag of the group is the other way."""
        group = self._group
        others = [{flag: not value} for flag, value in group.items() if isinstance(value, bool)]
        return any(self._acts({**other, name: group[name] / 2}, {**other, name: group[name]}) for other in others)

    def _acts(self, *settings: dict[str, Any]) -> bool:
        try:
            walks = [Walk(functools.partial(self._with, one), self._at, twins=False).advance(_FEW) for one in settings]
        except Exception:  # flags that cannot be the other way
            return False
        return not _end_alike(walks)

    def _with(self, changed: dict[str, Any], params: list[Any], settings: dict[str, Any]) -> Any:
        return self._make(params, settings | changed)

    def _overwrites_gradient(self) -> bool:
        walk = Walk(self._make, self._at, twins=False).advance(1)
        gradient = walk.param.grad
        return gradient is None or not np.array_equal(gradient.numpy(), walk.gradient)

    def _without_effect(self, name: str) -> Finding:
        at, evidence = self._at, f"{_FEW} steps, and {_MANY} much later, are the same to the last bit with "
        if name == "weight_decay":
            share = self._share(at)
            does = f"decays by {share:.3g} per step" if share > _ROUNDING else "decays by 0 per step"
            product = f" (lr x wd = {at.lr * at.weight_decay:.3g})" if share > _ROUNDING else ""
            evidence = f"it declares weight_decay={at.weight_decay:g}{product}, and {does}, with half of it as well"
        elif name in ("nesterov", "maximize"):
            evidence = f"it declares {name}=True, and {evidence}{name}=False"
        else:
            value = self._group["betas"] if name.startswith("beta") else self._group[name]
            setting = "betas" if name.startswith("beta") else name
            evidence = f"it declares {setting}={value}, and {evidence}half of {name}"
        return self._finding(
            "warning",
            f"the {name} of {self._name} has no effect",
            evidence,
            f"look for {name} in the step() of {self._name}, or leave the setting out",
        )

    # ---- decay

    def _share(self, at: Conditions) -> float:
        return Walk(self._make, at).advance(_BURN + _STEPS).measure(burn=_BURN).share

    def _decay(self) -> Iterator[Finding]:
        at, expected = self._at, self._at.lr * self._at.weight_decay
        share, strong = self._share(at), self._share(replace(at, unit_grad=10 * at.unit_grad))
        if abs(share / expected + 1) < _NEAR:
            yield self._finding(
                "warning", f"the weight decay of {self._name} has the wrong sign",
                f"it declares weight_decay={at.weight_decay:g} (lr x wd = {expected:.3g}), and grows by {-share:.3g} "
                "per step",
                "decay is p.mul_(1 - lr * weight_decay)",
            )  # fmt: skip
        if expected > 0.1:
            return
        declared = f"it declares weight_decay={at.weight_decay:g}"
        if not abs(share) > _ROUNDING:  # of twins: the signs of their gradients are the same
            yield from self._decay_by_gradient(declared, expected)
            return
        if not (0 < share < 0.5 and strong > 0):
            return
        if abs(math.log(strong / share)) > _DEPENDS:
            yield from self._decay_by_gradient(declared, expected)
            return
        slow = self._share(replace(at, lr=at.lr / 2))
        power = math.log2(share / slow) if slow > 0 else math.nan
        ratio = share / expected
        half = f"{declared}, and decays by {share:.3g} per step at lr={at.lr:g}, by {slow:.3g} at half of it"
        if abs(power - 2) < 0.1:
            yield self._finding(
                "note", f"the decay of {self._name} goes as the square of lr", half,
                "if that is not meant, multiply lr into the decay once: p.mul_(1 - lr * weight_decay)",
            )  # fmt: skip
        elif abs(power) < 0.1 and not self._group.get("fixed_decay"):
            yield self._finding(
                "note", f"the decay of {self._name} does not depend on lr", half,
                "if that is not meant, multiply lr into the decay: p.mul_(1 - lr * weight_decay)",
            )  # fmt: skip
        elif abs(power - 1) < 0.1:
            first = Walk(self._make, at).advance(2).measure(burn=0).share / expected
            evidence = f"{declared} (lr x wd = {expected:.3g}), and decays by {share:.3g} per step"
            yield from self._factor(ratio, first, evidence)

    def _decay_by_gradient(self, declared: str, expected: float) -> Iterator[Finding]:
        """What a decay that gradients reduce consists of: a part that those of the entry divide, and one they do not.

        The gradients are far larger than weight_decay times the weight, so that they alone are the divisor. A decay
        that one number for all entries divides is a design, as of AdamS.
        """
        torch: Any = sys.modules["torch"]
        size = max(1.0, 10 * self._at.weight_decay * _RMS)
        quiet, loud = _decays_by_difference(self._optimizer, self._group, torch.float64, size, 10 * size)
        constant = (10 * loud - quiet) / 9
        evidence = f"decays by {quiet:.3g} per step, by {loud:.3g} where gradients are ten times as large"
        if not (loud > 0 and quiet / loud > 1 + _DEPENDS):
            return
        if abs(constant / expected - 1) < _PART:
            yield self._finding(
                "warning", f"{self._name} applies its weight decay twice",
                f"{declared} (lr x wd = {expected:.3g}), and {evidence}",
                "apply it once: to the gradient or to the weight",
            )  # fmt: skip
        elif self._is_declared_decoupled() and abs(constant) < _PART * quiet:
            yield self._coupled(f"{declared}, decoupled, and {evidence}")

    def _factor(self, ratio: float, first: float, evidence: str) -> Iterator[Finding]:
        """What the decay over lr x wd says, in the long run and in the first two steps."""
        usual = self._usual_factors()
        if abs(ratio - 1) < _NEAR:
            return
        if any(abs(ratio / factor - 1) < _NEAR for factor in usual):
            if self._is_declared_decoupled():
                yield self._coupled(f"{evidence}, {ratio:.3g} times as much: it passes through the momentum")
            return
        times = round(first)
        if 1 < times < 4 and any(
            abs(ratio / many - 1) < _NEAR for one in usual for many in (times * one, times - 1 + one)
        ):
            word = "twice" if times == 2 else f"{times} times"
            yield self._finding(
                "warning", f"{self._name} applies its weight decay {word}", f"{evidence}, {ratio:.3g} times as much",
                "apply it once: to the gradient or to the weight",
            )  # fmt: skip

    def _coupled(self, evidence: str) -> Finding:
        return self._finding(
            "warning", f"the weight decay of {self._name} is coupled, not decoupled as declared", evidence,
            "apply it to the weight, p.mul_(1 - lr * weight_decay), not to the gradient",
        )  # fmt: skip

    def _usual_factors(self) -> list[float]:
        """Decay per step over lr x wd: 1 if decoupled, more where coupled decay passes through momentum."""
        group = self._group
        betas, momentum = group.get("betas"), group.get("momentum")
        rates = [momentum] if isinstance(momentum, float) else []
        if isinstance(betas, tuple | list):
            rates += [beta for beta in betas if isinstance(beta, float)]
        factors, pull = [1.0], self._at.lr * self._at.weight_decay
        for rate in rates:
            if 0 < rate < 1:
                kept = 1 - float(group.get("dampening") or 0.0)
                factors += [
                    _through_momentum(rate, pull),
                    kept * _through_momentum(rate, kept * pull),
                    1 + rate,
                    1 - rate,
                ]
        return factors

    def _is_declared_decoupled(self) -> bool:
        flags = [self._group.get(name) for name in ("decoupled_weight_decay", "weight_decouple", "decoupled")]
        known = [bool(flag) for flag in flags if flag is not None]
        return known[0] if known else self._name.endswith("W")

    # ---- momentum

    def _memory(self) -> Iterator[Finding]:
        rate = self._group.get("momentum")
        if not isinstance(rate, float) or not 0.5 <= rate < 1:
            return
        walk = Walk(self._make, self._at).advance(_BURN + _STEPS)
        if not np.diff(walk.norms).all():  # it accumulates gradients, and most steps do nothing
            return
        correlation = walk.measure(burn=_BURN).correlation
        if abs(correlation) < _NO_MEMORY:
            yield self._finding(
                "warning",
                f"{self._name} has momentum without memory",
                f"it declares momentum={rate:g}, and successive steps correlate by {correlation:.2f}",
                f"keep the buffer of {self._name} in self.state[p] between steps",
            )

    # ---- Muon's factor

    def _shapes(self) -> Iterator[Finding]:
        lengths = []
        for shape in ((64, 32), (32, 64), (32, 32)):
            walk = Walk(self._make, replace(self._at, shape=shape), twins=False).advance(24)
            lengths.append(math.sqrt(walk.measure(burn=12, share=0.0).step_sq))
        wide, square = lengths[0] / lengths[1], lengths[0] / lengths[2]
        if not (0.9 < wide < 2.2 and 0.9 < square < 1.7):
            yield self._finding(
                "note",
                f"the steps of {self._name} have an unusual factor for the shape",
                f"a step of a 64x32 matrix is {wide:.2f} times as long as one of a 32x64 matrix, {square:.2f} times as "
                "one of a 32x32 matrix; the usual factors, sqrt(max(1, rows/columns)), sqrt(rows/columns), "
                "0.2 sqrt(max(rows, columns)), make it 1 to 2 and 1 to 1.4 times",
                "compare rows and columns in its factor: a torch Linear weight has the shape (outputs, inputs)",
            )


def _end_alike(walks: list[Walk]) -> bool:
    """Whether two walks have the same weight, to the last bit."""
    first, second = (walk.param.detach().numpy() for walk in walks)
    return bool(np.array_equal(first, second))


def _through_momentum(rate: float, pull: float) -> float:
    """Long-run decay of heavy ball over lr x wd = ``pull``, about 1 / (1 - rate): a root of d^2 - (1 - a + e) d + e."""
    middle = 1 - rate + pull
    inside = middle * middle - 4 * pull
    return 2 / (middle + math.sqrt(inside)) if inside > 0 else math.nan


def decay_in_low_precision(optimizer: Any, group: Group) -> Finding | None:
    """A finding if the weights of a group are of 16 bits and rounding swallows their decay.

    Two copies in the type of the weights take the same gradients, one without weight decay; their difference is the
    decay. Optimizers that round at random or keep a compensation pass.

    Args:
        optimizer: any torch optimizer; it is not changed.
        group: one of its parameter groups.
    """
    torch: Any = sys.modules["torch"]
    types = {param.dtype for param in group.get("params", ())} & {torch.bfloat16, torch.float16}
    lr, decay = float(group.get("lr", 0.0)), decay_of(group)
    if not types or not lr * decay or many_processes():
        return None
    (dtype, *_) = types
    try:
        with isolated():
            (removed,) = _decays_by_difference(optimizer, group, dtype, _GRADIENT)
    except Exception:  # the optimizer is foreign code
        return None
    expected = lr * decay
    if removed > 0.5 * expected:
        return None
    name = type(optimizer).__name__
    return Finding(
        "warning",
        f"{str(dtype).removeprefix('torch.')} swallows the weight decay of {name}",
        f"it declares weight_decay={decay:g} (lr x wd = {expected:.3g}), and decays by {max(removed, 0.0):.2g} per "
        f"step in this type (measured on a copy of {name} over {_DIFFERENCE_STEPS} steps)",
        "keep the weights in float32 and compute in 16 bits (torch.autocast), or round at random",
        "",
        kind="rounded_away",
    )


def _decays_by_difference(optimizer: Any, group: Group, dtype: Any, *sizes: float) -> list[float]:
    """Decay per step of blocks of rows with gradients of these sizes: how far a copy without decay gets ahead."""
    torch: Any = sys.modules["torch"]
    generator = torch.Generator().manual_seed(0)
    shape = probe_shape(_SHAPE)
    start = (_RMS * torch.randn(shape, generator=generator)).to(dtype)
    gradients = torch.randn((_DIFFERENCE_STEPS, *shape), generator=generator)
    for size, block in zip(sizes, gradients.chunk(len(sizes), dim=1), strict=True):
        block *= size
    make, ends = copies_of(optimizer, group), []
    for settings in ({}, {"weight_decay": 0.0}):
        param = torch.nn.Parameter(start.clone())
        double = make([param], settings)
        for gradient in gradients.to(dtype):
            param.grad = gradient.clone()
            step_function(type(double))(double)
        ends.append(param.detach().double())
    ahead, start = ends[1] - ends[0], start.double()
    kept = [
        1 - float((behind * old).sum() / old.square().sum())
        for behind, old in zip(ahead.chunk(len(sizes)), start.chunk(len(sizes)), strict=True)
    ]
    return [1 - math.pow(max(one, 0.0), 1 / _DIFFERENCE_STEPS) for one in kept]
