"""The search for every scaling symmetry of a loss.

1. Probe: collect radial derivatives at random points until their rank stops growing (`_probes`).
2. Solve: their null space holds the exponents of all symmetries, as small integers (`_null_space`).
3. Confirm: really scale the tensors; outputs, or at least losses, must stay the same (`_confirmation`). Where they do
   not, probe along the refuted direction and solve again.
4. Classify the tensors without gradient, find invariant rows (`_rows`), and build the result (`_result`).
"""

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
from equilibria.symmetry._confirmation import FACTORS, FAR, Confirmer, nan_last
from equilibria.symmetry._null_space import IntegerSpace, NullSpace, Vector, null_space, rank_of
from equilibria.symmetry._precise import PRECISIONS, Precision
from equilibria.symmetry._probes import Probe, ProbeBatches, Prober, check_determined, generic, probing_point
from equilibria.symmetry._result import Symmetries
from equilibria.symmetry._rows import confirmed_rows, find_rows

_MARGIN = 8  # probes in a row that do not raise the rank before probing ends
_BY_ROW = 12  # probes that are kept by rows
_CLEAR_GAP = 1e3
_MOST_ROUNDS = 4
_LOSS_BATCHES = 4  # to compare losses on, if there are no outputs
_FEW = 8  # samples on which outputs are compared
_PLAIN_CHANGE = 1e-2  # of the size of outputs: a loss that stays the same all the same ignores it, not just damps it
_MORE_LOSS_BATCHES = 12  # to compare losses on, if outputs change
_NOISE_SIZES = (1.0, 30.0, 1000.0)  # of the noise that replaces a tensor without gradient, to see whether it matters
_ALIKE = 0.99  # cosine between two changes of outputs that have one cause


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """Symmetries as the null space gives them, in names, before confirmation."""

    null: NullSpace
    alone: tuple[str, ...]
    involved: tuple[str, ...]  # tensors that take part in symmetries but are not invariant alone
    space: IntegerSpace  # of their exponents
    basis: tuple[dict[str, int], ...]
    jointly: dict[str, dict[str, int]]
    left_out: int  # dimensions without small integers


@dataclass(frozen=True, slots=True, eq=False)
class _Verdict:
    """How much each vector of a basis changes outputs, or losses, when its tensors are really scaled."""

    changes: list[float]
    by_loss: list[dict[str, int]]  # vectors that change outputs but not the loss
    refuted: list[tuple[dict[str, int], float]]  # vectors that are no symmetries, with the change of outputs


def symmetries(
    objective: Objective,
    batches: Iterable[Any],
    *,
    samples: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    progress: bool | None = None,
) -> Symmetries:
    """Find every scaling symmetry w_i -> c^(a_i) w_i of a loss numerically.

    The radial derivative d_i = <w_i, dL/dw_i> says how the loss reacts to scaling tensor i. Collected over many batches
    and points, the null space of d holds the exponents of all symmetries. Points are the present weights with every
    tensor scaled at random and zeros filled in, on a copy in float64 whose normalisations have a negligible eps, so
    that the answer holds for the network, not just for its present weights. Scaling the tensors then confirms every
    symmetry. The model, its statistics and the random numbers stay as they were.

    Args:
        objective: from `equilibria.objective`, or an `equilibria.Objective`.
        batches: a list of batches or a DataLoader. A few are enough: the search mixes new ones from their samples and
            shuffles targets.
        samples: the largest number of samples in one evaluation.
        dtype: the type to compute in. ``torch.float32`` for models that insist on it; the thresholds are then those of
            float32, and the gap is smaller.
        seed: of the random points.
        progress: whether to show progress on stderr; default: if that is a terminal.

    Returns:
        The symmetries; ``print`` shows them.

    Raises:
        EquilibriaError: if there is too little data, or the loss is random, not differentiable or not finite.

    Example:
        >>> from torch import nn
        >>> from torch.nn import functional
        >>> from equilibria.objectives import objective
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
            f"got objective of type {type(objective).__name__}; expected equilibria.objective(model, loss), or "
            "equilibria.objective(model) if the model returns its loss",
            argument="objective",
        )
    on_meta = [name for name, param in objective.params.items() if param.is_meta]
    if on_meta:
        raise EquilibriaError(
            f"got parameters on the meta device, such as {on_meta[0]}, which hold no numbers; expected a model with "
            "weights: model.to_empty(device='cpu'), then initialise or load them",
            argument="objective",
        )
    if dtype not in PRECISIONS:
        raise EquilibriaError(f"got dtype={dtype}; expected torch.float64 or torch.float32", argument="dtype")
    samples, seed = whole("samples", samples, low=2), whole("seed", seed)
    with preserved_rng(objective.params.values()):  # a DataLoader that shuffles draws random numbers too
        search = _SymmetrySearch(objective, batches, precision=PRECISIONS[dtype], samples=samples, seed=seed)
        return search.run(_show_progress if progress or (progress is None and sys.stderr.isatty()) else None)


class _SymmetrySearch:
    def __init__(
        self, objective: Objective, batches: Iterable[Any], *, precision: Precision, samples: int, seed: int
    ) -> None:
        self._precision = precision
        self._generator = torch.Generator().manual_seed(seed)
        params = objective.params
        self._names = list(params)
        self._elements = {name: param.numel() for name, param in params.items()}
        self._data = ProbeBatches(
            objective, batches, most=len(params) + _MARGIN, samples=samples, generator=self._generator
        )
        self._present = objective.of_pairs() if isinstance(objective, ModelObjective) else objective
        self._twin = self._present.to(precision.dtype)
        self._batches = [self._data.draw(0, few=_FEW)]  # that outputs are compared on
        check_determined(self._present, self._batches[0])
        if self._present.outputs({}, self._batches[0]) is None:  # losses are compared instead, on several batches
            more = range(1, min(_LOSS_BATCHES, len(self._data)))
            self._batches += [self._data.draw(index, few=_FEW) for index in more]
        base = {name: generic(param, self._generator) for name, param in self._twin.params.items()}
        try:
            point, self._passes_before = probing_point(self._twin, base, self._data.draw(0))
        except EquilibriaError:
            raise
        except Exception as error:  # of the model, which has just computed the same in its own type
            other = torch.float32 if precision.dtype == torch.float64 else torch.float64
            first_line = (str(error).splitlines() or [""])[0]
            raise EquilibriaError(
                f"got a model that fails in {precision.dtype} ({type(error).__name__}: {first_line}), not in its own "
                f"type; expected one that computes in any: pass dtype={other} if it insists on that type",
                argument="dtype",
            ) from error
        self._prober = Prober(self._twin, point, batches=self._data, generator=self._generator)
        self._probes: list[Probe] = []
        self._confirmer = Confirmer(self._twin, point, self._batches, exact=True)
        self._not_alone: set[str] = set()  # tensors whose own scaling was refuted, in any round

    def run(self, show: Callable[[int, int], None] | None) -> Symmetries:
        """Probe until the rank stops growing, solve, confirm; probe further where scaling refutes a candidate."""
        self._probe_until_settled(show)
        # A refuted candidate means that the probes missed a reaction of the loss: an activation that clips only far
        # away, for example. Probes along the refuted direction see it, and the null space shrinks.
        for last in (*[False] * (_MOST_ROUNDS - 1), True):
            candidates = self._solve()
            verdict = self._confirm(candidates)
            if not verdict.refuted or last:
                break
            self._probe_along([vector for vector, _ in verdict.refuted])
        refuted = verdict.refuted
        # The probes may not settle it. Drop refuted vectors until scaling confirms the whole rest: without them the
        # remaining space has another sparse basis, whose vectors have not been scaled yet.
        while verdict.refuted:
            candidates = _without(candidates, [vector for vector, _ in verdict.refuted])
            verdict = self._confirm(candidates)
            refuted = [*refuted, *verdict.refuted]
        if show is not None:
            show(0, 0)
        return self._result(candidates, verdict, refuted)

    # ---- probing

    def _probe_until_settled(self, show: Callable[[int, int], None] | None) -> None:
        """Every generic probe raises the rank until it is full; after several in a row that do not, it is."""
        most = len(self._names) + _MARGIN
        rank, without_news = -1, 0
        while without_news < _MARGIN or len(self._probes) < _BY_ROW:
            self._probes.append(self._prober.take(by_row=len(self._probes) < _BY_ROW))
            if show is not None:
                show(len(self._probes), most)
            now = rank_of(self._probes) if len(self._probes) > 1 else 0
            rank, without_news = (now, without_news + 1) if now <= rank else (now, 0)

    def _probe_along(self, refuted: list[dict[str, int]]) -> None:
        """Probe further on the path on which a supposed symmetry failed: there the derivative is not zero."""
        for vector, factor in itertools.product(refuted, (*FACTORS, FAR, 1 / FAR)):
            shift = {name: math.log(factor) * exponent for name, exponent in vector.items()}
            rank = -1
            with suppress(EquilibriaError):  # so far away the loss may overflow
                while (now := rank_of(self._probes)) > rank:
                    rank = now
                    self._probes.append(self._prober.take(along=shift))

    # ---- solving

    def _solve(self) -> _Candidates:
        """Tensors whose own radial derivative is zero are invariant alone; the rest of the null space is joint."""
        null = null_space(self._probes)
        loud = [name for name, silent in zip(self._names, null.silent, strict=True) if not silent]
        residual = dict(zip(self._names, null.residual, strict=True))
        alone = tuple(name for name in loud if residual[name] <= null.zero)
        rest = [index for index, name in enumerate(loud) if name not in alone]
        space, involved = _joint_space(null, rest, alone=len(alone), sizes=[self._elements[loud[i]] for i in rest])
        return _candidates(null, alone, tuple(loud[rest[index]] for index in involved), space)

    # ---- confirming

    def _confirm(self, candidates: _Candidates) -> _Verdict:
        """Scale the tensors: outputs must stay the same, or at least the loss on many batches."""
        basis = candidates.basis
        unchanged, same_loss = self._precision.unchanged, self._precision.same_loss
        changes = self._confirmer.changes(basis, enough=unchanged)
        changed = [index for index, change in enumerate(changes) if not change <= unchanged]
        if not changed:
            return _Verdict(changes, [], [])
        # A loss such as a cosine ignores changes of outputs. It counts only if outputs change plainly: a small change
        # of outputs need not show in the loss at all.
        plain = [index for index in changed if self._confirmer.relative_to_size(changes[index]) > _PLAIN_CHANGE]
        losses = self._loss_confirmer.changes([basis[index] for index in plain], enough=same_loss)
        by_loss = {index: loss for index, loss in zip(plain, losses, strict=True) if loss <= same_loss}
        refuted = [(basis[index], changes[index]) for index in changed if index not in by_loss]
        self._not_alone |= {name for vector, _ in refuted for name in vector if len(vector) == 1}
        measured = [by_loss.get(index, change) for index, change in enumerate(changes)]
        return _Verdict(measured, [basis[index] for index in by_loss], refuted)

    @cached_property
    def _loss_confirmer(self) -> Confirmer:
        return Confirmer(self._twin, self._prober.base, self._loss_batches, exact=True, losses=True)

    @cached_property
    def _loss_batches(self) -> list[Any]:
        return [self._data.draw(index, few=_FEW) for index in range(_MORE_LOSS_BATCHES)]

    def _stays(self, verdict: _Verdict, replaced: Params) -> bool:
        """Whether outputs stay the same with other tensors, or losses do if some symmetries are those of the loss."""
        if self._confirmer.change_with(replaced) <= self._precision.unchanged:
            return True
        return bool(verdict.by_loss) and self._loss_confirmer.change_with(replaced) <= self._precision.same_loss

    # ---- tensors without gradient

    def _kinds_of_silent(self, names: list[str]) -> dict[str, str]:
        """Classify tensors without gradient: replace them by noise, here and where the other silent ones differ.

        A tensor may be silent only because of another silent one (a dead unit behind it), so each is also tried where
        all of them have other values.
        """
        if not names:
            return {}
        draws = [_times(size, self._noise(names)) for size in _NOISE_SIZES]
        elsewhere = [self._confirmer.with_replaced(_times(sign, draw)) for draw in draws for sign in (1.0, -1.0)]
        return self._kinds_among(names, [place for place in elsewhere if place.can_tell])

    def _kinds_among(self, names: list[str], elsewhere: list[Confirmer]) -> dict[str, str]:
        """Try all at once; if something depends on one of them, here or elsewhere, bisect."""
        noise = self._noise(names)
        changes = [self._confirmer.change_with(_times(size, noise)) for size in _NOISE_SIZES]
        changes += [place.change_with(noise) for place in elsewhere]
        if max(changes, key=nan_last) <= self._precision.unchanged:
            kind = "no effect" if self._confirmer.sharp and not self._faintly_matters(noise) else "undecided"
            if kind == "no effect" or len(names) == 1:
                return dict.fromkeys(names, kind)
        if len(names) == 1:
            return {names[0]: self._kind_of_active(names[0], elsewhere)}
        middle = len(names) // 2
        return self._kinds_among(names[:middle], elsewhere) | self._kinds_among(names[middle:], elsewhere)

    def _kind_of_active(self, name: str, elsewhere: list[Confirmer]) -> str:
        """Classify a tensor without gradient that matters elsewhere: only its signs may, or units are dead here."""
        changes = [place.change({name: 1}) for place in (self._confirmer, *elsewhere)]
        unchanged = max(changes, key=nan_last) <= self._precision.unchanged
        return "alone" if unchanged and self._confirmer.sharp else "undecided"

    def _noise(self, names: list[str]) -> Params:
        return {name: self._noise_like(self._prober.base[name]) for name in names}

    def _noise_like(self, base: Tensor) -> Tensor:
        noise = torch.randn(base.shape, generator=self._generator, dtype=torch.float64).to(base.device).to(base.dtype)
        return max(float(base.abs().max()), _usual_size(base)) * noise

    def _faintly_matters(self, noise: Params) -> bool:
        """Whether a change too small to count is an effect: rounding would not be alike for two sizes of noise."""
        return self._confirmer.likeness(_times(30.0, noise), _times(33.0, noise)) > _ALIKE

    # ---- the result

    def _result(
        self, candidates: _Candidates, verdict: _Verdict, refuted: list[tuple[dict[str, int], float]]
    ) -> Symmetries:
        null = candidates.null
        silent = [name for name, is_silent in zip(self._names, null.silent, strict=True) if is_silent]
        kinds = self._kinds_of_silent(silent)
        free = [name for name, kind in kinds.items() if kind != "undecided"]
        by_row = find_rows(self._probes[:_BY_ROW], zero=null.zero)
        by_row = {name: rows for name, rows in by_row.items() if name not in {*silent, *self._not_alone}}
        rows = confirmed_rows(by_row, self._prober.base, axes=self._twin.row_axis, stays=partial(self._stays, verdict))
        signs = [name for name, kind in kinds.items() if kind == "alone"]
        return Symmetries(
            elements=self._elements,
            alone=tuple(name for name in self._names if name in candidates.alone or name in signs),
            basis=(*candidates.basis, *({name: 1} for name in free)),
            jointly=candidates.jointly,
            no_effect=tuple(name for name, kind in kinds.items() if kind == "no effect"),
            undecided=tuple(name for name, kind in kinds.items() if kind == "undecided"),
            rows=rows,
            residual={name: float(value) for name, value in zip(self._names, null.residual, strict=True)},
            singular_values=null.singular_values,
            gap=null.gap,
            confirmed=(*verdict.changes, *self._changes_alone(free)),
            broken=self._broken(candidates, verdict),
            probes=self._passes_before + self._prober.taken,
            notes=_notes(candidates, verdict, refuted, [name for name in by_row if name not in rows]),
            _constraints=candidates.space.constraints,
            _involved=candidates.involved,
        )

    def _changes_alone(self, names: list[str]) -> list[float]:
        return self._confirmer.changes([{name: 1} for name in names], enough=self._precision.unchanged)

    def _broken(self, candidates: _Candidates, verdict: _Verdict) -> dict[str, float]:
        """How far the real eps and the real type break each invariance at the present weights."""
        batches = self._loss_batches if verdict.by_loss else self._batches
        confirmer = Confirmer(self._present, self._present.params, batches, exact=False, losses=bool(verdict.by_loss))
        together: dict[str, Mapping[str, int]] = {name: {name: 1} for name in candidates.alone}
        together |= {name: vector for name, vector in candidates.jointly.items() if min(vector.values()) > 0}
        changes: dict[frozenset[str], float] = {}  # tensors that are jointly invariant share one measurement
        for vector in together.values():
            key = frozenset(vector)
            changes[key] = changes[key] if key in changes else confirmer.change(vector)
        return {name: changes[frozenset(vector)] for name, vector in together.items()}


def _candidates(null: NullSpace, alone: tuple[str, ...], names: tuple[str, ...], space: IntegerSpace) -> _Candidates:
    """Name the vectors: the sparsest for every tensor, without negative exponents if possible, and a basis of all."""
    joint = [space.smallest_with(index, negative=False) for index in range(len(names))]
    mixed = [space.smallest_with(index, negative=True) for index in range(len(names))]
    basis = space.sparse_basis([vector for vector in (*joint, *mixed) if vector is not None])
    jointly = {
        name: _named(vector, names)
        for name, vector in zip(names, (a or b for a, b in zip(joint, mixed, strict=True)), strict=True)
        if vector is not None
    }
    vectors = (*({name: 1} for name in alone), *(_named(vector, names) for vector in basis))
    return _Candidates(null, alone, names, space, vectors, jointly, space.left_out)


def _without(candidates: _Candidates, refuted: list[dict[str, int]]) -> _Candidates:
    """The candidates in the span of the vectors that were not refuted."""
    alone = tuple(name for name in candidates.alone if {name: 1} not in refuted)
    kept = [vector for vector in candidates.basis[len(candidates.alone) :] if vector not in refuted]
    spanning = np.array([[vector.get(name, 0) for vector in kept] for name in candidates.involved], dtype=float)
    space = IntegerSpace(spanning.reshape(len(candidates.involved), len(kept)), sizes=candidates.space.sizes)
    remaining = _candidates(candidates.null, alone, candidates.involved, space)
    return replace(remaining, left_out=candidates.left_out)


def _joint_space(null: NullSpace, rest: list[int], *, alone: int, sizes: list[int]) -> tuple[IntegerSpace, list[int]]:
    """The symmetries of the tensors that are not invariant alone, and which of these tensors take part.

    Args:
        null: the whole null space.
        rest: rows of its basis that belong to tensors that are not invariant alone.
        alone: number of the others, each of which adds one dimension.
        sizes: number of elements of the tensors of ``rest``.
    """
    kept, rounding = null.basis[rest], null.precision.fraction
    left, _, _ = np.linalg.svd(kept, full_matrices=False) if kept.size else (kept, None, None)
    spanning = left[:, : null.basis.shape[1] - alone]
    takes_part = np.abs(spanning).max(axis=1, initial=0.0) > 0.1 * rounding
    involved = np.flatnonzero(takes_part).tolist()
    sizes = [sizes[index] for index in involved]
    return IntegerSpace(spanning[involved], sizes=sizes, rounding=rounding), involved


def _named(vector: Vector, names: tuple[str, ...]) -> dict[str, int]:
    return {name: exponent for name, exponent in zip(names, vector, strict=True) if exponent}


def _times(size: float, noise: Params) -> Params:
    return {name: size * entries for name, entries in noise.items()}


def _usual_size(param: Tensor) -> float:
    """Typical size of the entries of a tensor of this shape at initialisation."""
    return float(max(param[0].numel(), 1)) ** -0.5 if param.ndim >= 2 and len(param) else 0.1


def _notes(
    candidates: _Candidates, verdict: _Verdict, refuted: list[tuple[dict[str, int], float]], rows: list[str]
) -> tuple[str, ...]:
    notes = []
    gap = candidates.null.gap
    if gap < _CLEAR_GAP:
        notes.append(f"no clear gap between singular values ({gap:.0f}x): do not rely on this answer")
    elif candidates.left_out:  # without a gap, exponents mean nothing
        notes.append(f"symmetries whose exponents are no small fractions are left out: {candidates.left_out}")
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
