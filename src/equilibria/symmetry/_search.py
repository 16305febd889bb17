"""The search for every scaling symmetry of a loss."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import EquilibriaError, whole
from equilibria.objectives._isolation import preserved_rng
from equilibria.objectives._objective import ModelObjective, Objective, Params
from equilibria.symmetry._algebra import Algebra, rank_of, solve
from equilibria.symmetry._balance import balanced
from equilibria.symmetry._confirmation import FACTORS, FAR, Confirmer, nan_last
from equilibria.symmetry._granularity import confirmed_rows, find_rows
from equilibria.symmetry._integers import IntegerSpace, Vector
from equilibria.symmetry._probes import Material, Probe, Prober, check_determined, generic
from equilibria.symmetry._result import Symmetries

_MARGIN = 8  # probes in a row that find nothing new before the search ends
_BY_ROW = 12  # probes that are kept by rows
_UNCHANGED = 1e-7  # of the spread of outputs, in float64; whatever is not invariant changes them by 1e-3 and more
_CLEAR_GAP = 1e3
_MOST_ROUNDS = 4
_LOSS_BATCHES = 4  # to compare losses on, where there are no outputs
_FEW = 8  # samples on which outputs are compared
_SAME_LOSS = 1e-9  # relative, in float64
_PLAIN_CHANGE = 1e-2  # of the size of outputs: a loss that stays nevertheless is blind to it, not just dull
_MORE_LOSS_BATCHES = 12  # to compare losses on, where outputs change
_NOISE_SIZES = (1.0, 30.0, 1000.0)  # what replaces a tensor without gradient, to see whether it matters anywhere
_ALIKE = 0.99  # cosine between two changes of outputs that have one cause


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """One answer of the algebra, in names."""

    algebra: Algebra
    alone: tuple[str, ...]
    involved: tuple[str, ...]
    space: IntegerSpace
    basis: tuple[dict[str, int], ...]
    jointly: dict[str, dict[str, int]]
    left_out: int


@dataclass(frozen=True, slots=True, eq=False)
class _Verdict:
    """How much each vector of a basis changes outputs, or losses, when it is really scaled."""

    changes: list[float]
    by_loss: list[dict[str, int]]
    refuted: list[tuple[dict[str, int], float]]


def symmetries(
    objective: Objective, batches: Iterable[Any], *, samples: int = 16, seed: int = 0, progress: bool | None = None
) -> Symmetries:
    """Find every scaling symmetry w_i -> c^(a_i) w_i that leaves a loss as it is, numerically.

    The radial derivative d_i = <w_i, dL/dw_i> says how the loss reacts to scaling tensor i. Collected over many batches
    and points, the null space of d holds the exponents of all symmetries. Points are the present weights with every
    tensor scaled at random and zeros filled in, on a copy in float64 whose normalisations have a negligible eps: what
    is found holds for the network, not for its present weights. Every answer is then confirmed by really scaling.
    The model, its statistics and the random numbers stay as they were.

    Args:
        objective: of `equilibria.objective` or `equilibria.Objective`.
        batches: a list of batches or a DataLoader. A few are enough: more are made of them by drawing other samples
            and shuffling targets.
        samples: the largest number of samples to compute with at once.
        seed: of the random points.
        progress: whether to show it on stderr; default: if that is a terminal.

    Returns:
        The symmetries; ``print`` shows them.

    Raises:
        EquilibriaError: if there is too little data, or the loss is random, not differentiable or not finite.

    Example:
        >>> from torch import nn
        >>> from torch.nn import functional
        >>> from equilibria.objectives._objective import objective
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3, bias=False))
        >>> batch = torch.randn(32, 4), torch.randint(3, (32,))
        >>> print(symmetries(objective(net, functional.cross_entropy), [batch]))
        0.weight  rows
        0.bias    no effect
        1.weight  jointly with 1.bias and against 3.weight
        1.bias    jointly with 1.weight and against 3.weight
        3.weight  against 1.weight, 1.bias
        <BLANKLINE>
        3 independent symmetries of 5 tensors; gap ... after ... backward passes
    """
    if not isinstance(objective, Objective):
        raise EquilibriaError(
            f"got objective of type {type(objective).__name__}; expected equilibria.objective(model, loss)"
        )
    empty = [name for name, param in objective.params.items() if param.is_meta]
    if empty:
        raise EquilibriaError(
            f"got parameters on the meta device, such as {empty[0]}, which hold no numbers; expected a model with "
            "weights: model.to_empty(device='cpu'), then initialise or load them"
        )
    samples, seed = whole("samples", samples, low=2), whole("seed", seed)
    with preserved_rng(objective.params.values()):  # a DataLoader that shuffles draws some too
        search = _Search(objective, batches, samples=samples, seed=seed)
        return search.run(_show_progress if progress or (progress is None and sys.stderr.isatty()) else None)


class _Search:
    def __init__(self, objective: Objective, batches: Iterable[Any], *, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        params = objective.params
        self._names = list(params)
        self._elements = {name: param.numel() for name, param in params.items()}
        most = len(params) + _MARGIN
        material = Material(objective, batches, most=most, samples=samples, generator=generator)
        self._present = objective.of_pairs() if isinstance(objective, ModelObjective) else objective
        twin = self._present.double()
        self._batches = [material.draw(0, few=_FEW)]
        if self._present.outputs({}, self._batches[0]) is None:  # then losses are compared, which needs several
            self._batches += [material.draw(index, few=_FEW) for index in range(1, min(_LOSS_BATCHES, len(material)))]
        check_determined(self._present, self._batches[0])
        base = {name: generic(param, generator) for name, param in twin.params.items()}
        start = balanced(twin, base, material.draw(0))
        self._prober = Prober(twin, start.point, material=material, generator=generator)
        self._passes_before = start.passes
        self._probes: list[Probe] = []
        self._generator = generator
        self._twin, self._material = twin, material
        self._confirmer = Confirmer(twin, self._prober.base, self._batches, exact=True)
        self._not_alone: set[str] = set()  # tensors whose own scaling was refuted, in whatever round

    def run(self, show: Callable[[int, int], None] | None) -> Symmetries:
        """Probe until nothing new is found, read off the answer, confirm it; probe further where it is refuted."""
        self._probe_until_settled(show)
        for last in (*[False] * (_MOST_ROUNDS - 1), True):
            found = self._read()
            verdict = self._confirm(found)
            if not verdict.refuted or last:
                break
            self._probe_along([vector for vector, _ in verdict.refuted])
        refuted = verdict.refuted
        while verdict.refuted:  # what stays in the answer is confirmed
            found = _without(found, [vector for vector, _ in verdict.refuted])
            verdict = self._confirm(found)
            refuted = [*refuted, *verdict.refuted]
        if show is not None:
            show(0, 0)
        return self._result(found, verdict, refuted)

    def _confirm(self, found: _Found) -> _Verdict:
        """Scale: outputs must stay, or at least the loss on many batches."""
        changes = self._confirmer.changes(found.basis, enough=_UNCHANGED)
        doubtful = [index for index, change in enumerate(changes) if not change <= _UNCHANGED]
        if not doubtful:
            return _Verdict(changes, [], [])
        plain = [index for index in doubtful if self._confirmer.relative_to_size(changes[index]) > _PLAIN_CHANGE]
        losses = self._loss_confirmer.changes([found.basis[index] for index in plain], enough=_SAME_LOSS)
        by_loss = {index: loss for index, loss in zip(plain, losses, strict=True) if loss <= _SAME_LOSS}
        refuted = [(found.basis[index], changes[index]) for index in doubtful if index not in by_loss]
        self._not_alone |= {name for vector, _ in refuted for name in vector if len(vector) == 1}
        kept = [by_loss.get(index, change) for index, change in enumerate(changes)]
        return _Verdict(kept, [found.basis[index] for index in by_loss], refuted)

    @cached_property
    def _loss_confirmer(self) -> Confirmer:
        return Confirmer(self._twin, self._prober.base, self._loss_batches, exact=True, losses=True)

    @cached_property
    def _loss_batches(self) -> list[Any]:
        return [self._material.draw(index, few=_FEW) for index in range(_MORE_LOSS_BATCHES)]

    def _probe_until_settled(self, show: Callable[[int, int], None] | None) -> None:
        most = len(self._names) + _MARGIN
        rank, since = -1, 0
        while since < _MARGIN or len(self._probes) < _BY_ROW:
            self._probes.append(self._prober.take(by_row=len(self._probes) < _BY_ROW))
            if show is not None:
                show(len(self._probes), most)
            now = rank_of(self._probes) if len(self._probes) > 1 else 0
            rank, since = (now, since + 1) if now <= rank else (now, 0)

    def _probe_along(self, refuted: list[dict[str, int]]) -> None:
        """Further probes on the path on which a supposed symmetry failed: there the derivative is not zero."""
        for vector, factor in itertools.product(refuted, (*FACTORS, FAR, 1 / FAR)):
            shift = {name: math.log(factor) * exponent for name, exponent in vector.items()}
            rank = -1
            with suppress(EquilibriaError):  # so far away the loss may overflow
                while (now := rank_of(self._probes)) > rank:
                    rank = now
                    self._probes.append(self._prober.take(along=shift))

    def _read(self) -> _Found:
        algebra = solve(self._probes)
        loud = [name for name, silent in zip(self._names, algebra.silent, strict=True) if not silent]
        residual = dict(zip(self._names, algebra.residual, strict=True))
        alone = tuple(name for name in loud if residual[name] <= algebra.zero)
        rest = [index for index, name in enumerate(loud) if name not in alone]
        space, involved = _rest_of_space(algebra.null, rest, taken=len(alone))
        return _answer(algebra, alone, tuple(loud[rest[index]] for index in involved), space)

    def _result(self, found: _Found, verdict: _Verdict, refuted: list[tuple[dict[str, int], float]]) -> Symmetries:
        silent = [name for name, still in zip(self._names, found.algebra.silent, strict=True) if still]
        kinds = self._kinds_of_silent(silent)
        free = [name for name, kind in kinds.items() if kind != "undecided"]
        by_row = find_rows(self._probes[:_BY_ROW], zero=found.algebra.zero)
        by_row = {name: rows for name, rows in by_row.items() if name not in {*silent, *self._not_alone}}
        rows = confirmed_rows(by_row, self._prober.base, axes=self._twin.row_axis, stays=partial(self._stays, verdict))
        signs = [name for name, kind in kinds.items() if kind == "alone"]
        return Symmetries(
            elements=self._elements,
            alone=tuple(name for name in self._names if name in found.alone or name in signs),
            basis=(*found.basis, *({name: 1} for name in free)),
            jointly=found.jointly,
            no_effect=tuple(name for name, kind in kinds.items() if kind == "no effect"),
            undecided=tuple(name for name, kind in kinds.items() if kind == "undecided"),
            rows=rows,
            residual={name: float(value) for name, value in zip(self._names, found.algebra.residual, strict=True)},
            singular_values=found.algebra.singular_values,
            gap=found.algebra.gap,
            confirmed=(*verdict.changes, *self._confirmer.changes([{name: 1} for name in free], enough=_UNCHANGED)),
            broken=self._broken(found, verdict),
            probes=self._passes_before + self._prober.taken,
            notes=_notes(found, verdict, refuted, [name for name in by_row if name not in rows]),
            _constraints=found.space.constraints,
            _involved=found.involved,
        )

    def _stays(self, verdict: _Verdict, replaced: Params) -> bool:
        """Whether outputs stay the same with other tensors, or losses do where symmetries are those of the loss."""
        if self._confirmer.change_with(replaced) <= _UNCHANGED:
            return True
        return bool(verdict.by_loss) and self._loss_confirmer.change_with(replaced) <= _SAME_LOSS

    def _kinds_of_silent(self, names: list[str]) -> dict[str, str]:
        """Why tensors have no gradient: what other values of them, and of the others without gradient, change."""
        if not names:
            return {}
        draws = [_times(size, self._noise(names)) for size in _NOISE_SIZES]
        elsewhere = [self._confirmer.at(_times(sign, draw)) for draw in draws for sign in (1.0, -1.0)]
        return self._kinds_among(names, [each for each in elsewhere if each.can_tell])

    def _kinds_among(self, names: list[str], elsewhere: list[Confirmer]) -> dict[str, str]:
        """All at once where nothing depends on any of them, neither here nor elsewhere, else in halves."""
        noise = self._noise(names)
        changes = [self._confirmer.change_with(_times(size, noise)) for size in _NOISE_SIZES]
        changes += [place.change_with(noise) for place in elsewhere]
        if max(changes, key=nan_last) <= _UNCHANGED:
            kind = "no effect" if self._confirmer.sharp and not self._faintly_matters(noise) else "undecided"
            if kind == "no effect" or len(names) == 1:
                return dict.fromkeys(names, kind)
        if len(names) == 1:
            return {names[0]: self._kind_of_active(names[0], elsewhere)}
        middle = len(names) // 2
        return self._kinds_among(names[:middle], elsewhere) | self._kinds_among(names[middle:], elsewhere)

    def _kind_of_active(self, name: str, elsewhere: list[Confirmer]) -> str:
        """Of a tensor without gradient that matters elsewhere: its signs alone may, or units are dead here."""
        changes = [place.change({name: 1}) for place in (self._confirmer, *elsewhere)]
        return "alone" if max(changes, key=nan_last) <= _UNCHANGED and self._confirmer.sharp else "undecided"

    def _noise(self, names: list[str]) -> Params:
        return {name: self._noise_for(self._prober.base[name]) for name in names}

    def _noise_for(self, base: Tensor) -> Tensor:
        noise = torch.randn(base.shape, generator=self._generator, dtype=torch.float64).to(base.device).to(base.dtype)
        return max(float(base.abs().max()), _usual_size(base)) * noise

    def _faintly_matters(self, noise: Params) -> bool:
        """Whether a change too small to count is an effect all the same: rounding would not be alike for two sizes."""
        return self._confirmer.likeness(_times(30.0, noise), _times(33.0, noise)) > _ALIKE

    def _broken(self, found: _Found, verdict: _Verdict) -> dict[str, float]:
        present: Params = self._present.params
        batches = self._loss_batches if verdict.by_loss else self._batches
        confirmer = Confirmer(self._present, present, batches, exact=False, losses=bool(verdict.by_loss))
        together: dict[str, Mapping[str, int]] = {name: {name: 1} for name in found.alone}
        together |= {name: vector for name, vector in found.jointly.items() if min(vector.values()) > 0}
        changes: dict[frozenset[str], float] = {}
        for vector in together.values():
            key = frozenset(vector)
            changes[key] = changes[key] if key in changes else confirmer.change(vector)
        return {name: changes[frozenset(vector)] for name, vector in together.items()}


def _answer(algebra: Algebra, alone: tuple[str, ...], names: tuple[str, ...], space: IntegerSpace) -> _Found:
    joint = [space.smallest_with(index, negative=False) for index in range(len(names))]
    mixed = [space.smallest_with(index, negative=True) for index in range(len(names))]
    basis = space.sparse_basis([vector for vector in (*joint, *mixed) if vector is not None])
    jointly = {
        name: _named(vector, names)
        for name, vector in zip(names, (a or b for a, b in zip(joint, mixed, strict=True)), strict=True)
        if vector is not None
    }
    vectors = (*({name: 1} for name in alone), *(_named(vector, names) for vector in basis))
    return _Found(algebra, alone, names, space, vectors, jointly, space.left_out)


def _without(found: _Found, refuted: list[dict[str, int]]) -> _Found:
    """The same answer with the vectors that were not refuted, and with what these span."""
    alone = tuple(name for name in found.alone if {name: 1} not in refuted)
    kept = [vector for vector in found.basis[len(found.alone) :] if vector not in refuted]
    spanning = np.array([[vector.get(name, 0) for vector in kept] for name in found.involved], dtype=float)
    space = IntegerSpace(spanning.reshape(len(found.involved), len(kept)))
    return replace(_answer(found.algebra, alone, found.involved, space), left_out=found.left_out)


def _rest_of_space(null: np.ndarray, rest: list[int], *, taken: int) -> tuple[IntegerSpace, list[int]]:
    """The symmetries of the tensors that are not invariant alone, and which of these tensors take part."""
    kept = null[rest]
    left, _, _ = np.linalg.svd(kept, full_matrices=False) if kept.size else (kept, None, None)
    spanning = left[:, : null.shape[1] - taken]
    involved = [index for index in range(len(rest)) if np.abs(spanning[index]).max(initial=0.0) > 1e-6]
    return IntegerSpace(spanning[involved]), involved


def _named(vector: Vector, names: tuple[str, ...]) -> dict[str, int]:
    return {name: exponent for name, exponent in zip(names, vector, strict=True) if exponent}


def _times(size: float, noise: Params) -> Params:
    return {name: size * entries for name, entries in noise.items()}


def _usual_size(param: Tensor) -> float:
    """Of the entries of a tensor of this shape, as networks are initialised."""
    return float(max(param[0].numel(), 1)) ** -0.5 if param.ndim >= 2 and len(param) else 0.1


def _notes(
    found: _Found, verdict: _Verdict, refuted: list[tuple[dict[str, int], float]], rows: list[str]
) -> tuple[str, ...]:
    notes = []
    if found.algebra.gap < _CLEAR_GAP:
        notes.append(f"no clear gap between singular values ({found.algebra.gap:.0f}x): do not rely on this answer")
    elif found.left_out:  # without a gap, exponents are of no account
        notes.append(f"symmetries whose exponents are no small fractions are left out: {found.left_out}")
    if verdict.by_loss:
        notes.append(
            f"symmetries of the loss, not of the outputs: {len(verdict.by_loss)}, such as {verdict.by_loss[0]}"
        )
    for vector, change in refuted:
        notes.append(f"left out, not confirmed by scaling: {vector} changes outputs by {change:.1e} of their spread")
    notes += [f"rows of {name} look invariant one by one, but scaling does not confirm it" for name in rows]
    return tuple(notes)


def _show_progress(done: int, most: int) -> None:
    text = f"symmetries: {done} backward passes (at most about {most})" if most else ""
    sys.stderr.write(f"\r{text:60}" if most else f"\r{'':60}\r")
    sys.stderr.flush()
