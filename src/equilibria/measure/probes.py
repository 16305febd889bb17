"""What one step does to one tensor, read before and after it.

torch's SGD moves a weight by a known combination of weight, gradient and momentum buffer, so that one look before the
step says all, without a copy (`LinearProbe`). For every other optimizer the weights are copied before the step and
compared after it (`CopyProbe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.measure.dots import Numbers, dots, moved_dots, row_dots
from equilibria.measure.layout import copy_of, densify, flat, local, rows
from equilibria.measure.parameters import Watched

_LARGE = 1 << 18  # entries from which on a tensor is slower to read than its products are to compute
_LIGHT = 0.1  # share of the last turn below which a decay cancels no digits
_LONGEST_CARRY = 16  # steps over which products are carried on, each adding its rounding
_SAMPLE = 64  # numbers that are compared to see whether a copy is still what it was
_SMALLEST, _LARGEST = 1e-30, 1e30  # squared norms between which no float32 product under- or overflows
_RADIAL = 0.99  # cosine^2 with the weight above which float32 products no longer say how far something turns it


@dataclass(frozen=True, slots=True)
class Combination:
    """How an update is combined: w' - w = gradient * g + buffer * v - shrink * w."""

    gradient: float
    buffer: float
    shrink: float


def sgd_combination(group: Mapping[str, Any], *, first: bool) -> Combination:
    """The update of torch's SGD; ``first`` while there is no momentum buffer yet.

    Example:
        >>> group = {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": True,
        ...          "maximize": False}
        >>> sgd_combination(group, first=False)
        Combination(gradient=-0.19, buffer=-0.081..., shrink=0.0019)
    """
    lr, wd = float(group["lr"]), float(group["weight_decay"])
    momentum = float(group["momentum"])
    taken = 1.0 if first else 1.0 - float(group["dampening"])
    own, kept = (taken, momentum) if momentum else (1.0, 0.0)  # without momentum torch ignores dampening
    if group["nesterov"]:
        own, kept = 1.0 + momentum * taken, momentum * momentum
    sign = -1.0 if group["maximize"] else 1.0
    return Combination(-lr * own * sign, -lr * kept, lr * own * wd)


def sgd_buffer(group: Mapping[str, Any], *, first: bool) -> Combination:
    """What torch's SGD makes of the momentum buffer: v' = gradient * g + buffer * v - shrink * w."""
    taken = 1.0 if first else 1.0 - float(group["dampening"])
    sign = -1.0 if group["maximize"] else 1.0
    return Combination(taken * sign, float(group["momentum"]), -taken * float(group["weight_decay"]))


class LinearProbe:
    """Reads weight, gradient and momentum buffer before a step of SGD; nothing is copied.

    From one step to the next the products of weight and buffer follow from those before; of large tensors, where
    reading memory is what costs, only those with the new gradient are then formed.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._is_large = watched.axis is None and watched.param.numel() >= _LARGE
        self._carried: _Carried | None = None

    def read(self, gradient: Tensor, buffer: Tensor | None, *, group: Mapping[str, Any], carry: bool) -> Numbers:
        """ww, wg, gg, wv, gv, vv of weight, gradient and buffer; without a buffer the last three are 0.

        Args:
            gradient: of the weight.
            buffer: of the momentum, None if there is none yet.
            group: the settings of the step.
            carry: whether the step before was read too, and nothing but that step has changed the weight since.
        """
        vectors = [local(each) for each in (self._watched.param, gradient, buffer) if each is not None]
        carried, self._carried = self._carried, None
        if carry and carried is not None and carried.fits(vectors):
            found = self._add_gradient(vectors, carried)
        else:
            found, carried = self._read_all(vectors), None
        kept_up = buffer is None or float(group["momentum"]) > 0  # torch leaves a buffer alone without momentum
        if self._is_large and kept_up and isinstance(found[0], float) and not _is_out_of_range(found[0], found[2]):
            age = 0 if carried is None else carried.age + 1
            self._carried = _Carried.after(found, vectors, group, age=age) if age < _LONGEST_CARRY else None
        return found

    def _add_gradient(self, vectors: list[Tensor], carried: _Carried) -> list[Any]:
        """The products with the gradient, beside those that are known."""
        if len(vectors) == 2:
            wg, gg = products_of(self._watched, vectors, [(0, 1), (1, 1)])
            return [carried.ww, wg, gg, 0.0, 0.0, 0.0]
        wg, gg, gv = products_of(self._watched, vectors, [(0, 1), (1, 1), (1, 2)])
        return [carried.ww, wg, gg, carried.wv, gv, carried.vv]

    def _read_all(self, vectors: list[Tensor]) -> list[Any]:
        if len(vectors) == 2:
            found: Any = products_of(self._watched, vectors, [(0, 0), (0, 1), (1, 1)])
            if _is_out_of_range(found[0], found[2]):
                found = products_of(self._watched, vectors, [(0, 0), (0, 1), (1, 1)], exact=True)
            return [*found, *[0.0 * found[0]] * 3]
        products = [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]
        found = products_of(self._watched, vectors, products)
        # Where decay prevails, the buffer is all but parallel to the weight.
        if _is_radial(found[0], found[3], found[5]) or _is_out_of_range(found[0], found[2]):
            found = products_of(self._watched, vectors, products, exact=True)
        return list(found)


@dataclass(frozen=True, slots=True)
class _Carried:
    """What is known of weight and buffer after a step, from what was read before it.

    Attributes:
        ww: <w, w>.
        wv: <w, v>.
        vv: <v, v>.
        sample: a few entries of the weight.
        age: steps since all products were formed last: rounding adds up.
    """

    ww: float
    wv: float
    vv: float
    sample: Tensor
    age: int

    @classmethod
    def after(cls, found: list[Any], vectors: list[Tensor], group: Mapping[str, Any], *, age: int) -> _Carried:
        """From the products before a step and its settings."""
        ww, wg, gg, wv, gv, vv = found
        gram = np.array([[ww, wg, wv], [wg, gg, gv], [wv, gv, vv]])
        first = len(vectors) == 2
        step, memory = sgd_combination(group, first=first), sgd_buffer(group, first=first)
        weight = np.array([1 - step.shrink, step.gradient, step.buffer])
        buffer = np.array([-memory.shrink, memory.gradient, memory.buffer])
        entries = [_sample(vector, like=vectors[0]) for vector in vectors]
        sample = sum(float(share) * each for share, each in zip(weight, entries, strict=False))
        assert isinstance(sample, Tensor)
        return cls(
            float(weight @ gram @ weight), float(weight @ gram @ buffer), float(buffer @ gram @ buffer), sample, age
        )

    def fits(self, vectors: list[Tensor]) -> bool:
        """Whether the weight still looks like it: changes through ``.data`` are not counted by torch."""
        here = _sample(vectors[0], like=vectors[0])
        return here.shape == self.sample.shape and torch.allclose(here, self.sample, rtol=1e-4, atol=1e-7)


def _sample(vector: Tensor, *, like: Tensor) -> Tensor:
    """A few entries from all over a tensor."""
    held = flat(vector, like=like)
    return held[:: max(1, len(held) // _SAMPLE)]


class CopyProbe:
    """Copies the weight before a step and compares after it: one copy of the weight, made when first needed."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._copy: Tensor | None = None
        self._made_for: tuple[object, ...] = ()
        self._copied_at = -1
        self._seen: list[Any] | None = None
        self._is_radial = True  # nothing is known yet of the steps' direction
        # A decay well below it is put into the products afterwards; a larger one cancels, and is taken off every entry.
        self._least_turn = 0.0
        self._norm_sq: float | None = None  # of the copy, where it follows from the step before
        self._carried_for = 0

    def remember(self, gradient: Tensor | None) -> bool:
        """Make sure that the copy is the weight as it is now.

        Args:
            gradient: given where the step may overwrite it, to be read now instead of after the step.

        Returns:
            False if somebody changed the weight since the last step.
        """
        param = local(self._watched.param)
        if gradient is None:
            self._seen = None
        else:
            self._seen = products_of(self._watched, [param, local(densify(gradient))], [(0, 1), (1, 1)])
        layout = param.shape, param.stride(), param.dtype, param.device
        if self._copy is None or self._made_for != layout:
            self._copy, self._made_for = copy_of(param), layout
            return True
        expected = self._copied_at >= 0
        if expected and self._copied_at == self._watched.param._version and self._looks_the_same(param):
            return True
        self._copy.copy_(param)
        self._norm_sq = None
        return not expected

    def compare(self, gradient: Tensor | None, *, shrink: float, refresh: bool) -> Numbers:
        """ww, wg, gg, we, ee, where the step moved the weight by e - shrink w.

        Args:
            gradient: None if it was read before the step, or if there is none: then wg and gg are NaN.
            shrink: share of the weight that decay took away.
            refresh: whether the next step is compared too, so that the copy is brought up to date on the way.
        """
        assert self._copy is not None  # remember() came before
        param = local(self._watched.param)
        others = [] if gradient is None else [local(densify(gradient))]
        last = len(others) + 1
        known = self._norm_sq if self._carried_for < _LONGEST_CARRY and not self._is_radial else None
        products = [
            (0, last),
            (last, last),
            *([(0, 1), (1, 1)] if others else []),
            *([(0, 0)] if known is None else []),
        ]
        self._copied_at = self._watched.param._version if refresh else -1
        taken_off = 0.0 if shrink < self._least_turn else shrink
        found = self._moved(param, others, shrink=taken_off, products=products, refresh=refresh)
        ww = found.pop() if known is None else known
        we, ee, *with_gradient = found
        if taken_off != shrink:
            we, ee = we + shrink * ww, ee + 2 * shrink * we + shrink * shrink * ww
        self._is_radial = _is_radial(ww, we, ee)
        self._least_turn = _LIGHT * (ee / ww) ** 0.5 if isinstance(ww, float) and ww > 0 and ee > 0 else 0.0
        self._carried_for = 0 if known is None else self._carried_for + 1
        self._norm_sq = (1 - shrink) ** 2 * ww + 2 * (1 - shrink) * we + ee if self._carries(refresh, ww) else None
        if gradient is None:
            with_gradient = self._seen or [ww * float("nan")] * 2
        return [ww, *with_gradient, we, ee]

    def _moved(
        self, param: Tensor, others: list[Tensor], *, shrink: float, products: list[tuple[int, int]], refresh: bool
    ) -> list[Any]:
        copy, axis = self._copy, self._watched.axis
        assert copy is not None
        if axis is None:
            return moved_dots(
                flat(copy, like=param),
                flat(param),
                [flat(other, like=param) for other in others],
                shrink=shrink,
                products=products,
                refresh=refresh,
                exact=self._is_radial,
            )
        before, after = (rows(tensor, axis=axis).double() for tensor in (copy, param))
        move = after - before + shrink * before
        found = row_dots([before, *(rows(other, axis=axis) for other in others), move], products=products)
        if refresh:
            copy.copy_(param)  # only now: in float64 ``before`` is the copy itself
        return found

    def _carries(self, refresh: bool, norm_sq: Any) -> bool:
        """Whether the norm of the refreshed copy is worth computing instead of reading."""
        return refresh and isinstance(norm_sq, float) and self._watched.param.numel() >= _LARGE

    def _looks_the_same(self, param: Tensor) -> bool:
        if param.device.type != "cpu":  # asking would wait for the device
            return False
        return torch.equal(_sample(param, like=param), _sample(self._copy, like=param))  # type: ignore[arg-type]


def products_of(
    watched: Watched, tensors: list[Tensor], products: list[tuple[int, int]], *, exact: bool = False
) -> Numbers:
    """Inner products of local tensors, of the whole or row by row; ``exact`` as for `dots`."""
    if watched.axis is not None:
        return row_dots([rows(tensor, axis=watched.axis) for tensor in tensors], products=products)
    return dots([flat(tensor, like=tensors[0]) for tensor in tensors], products=products, exact=exact)


def _is_radial(ww: Any, wx: Any, xx: Any) -> bool:
    """Whether a vector x is so nearly parallel to w that its tangential part is lost in float32 products.

    Rows are multiplied in float64 anyhow, and to ask about tensors on a device would wait for it.
    """
    return isinstance(ww, float) and (wx * wx > _RADIAL * ww * xx or _is_out_of_range(ww, xx))


def _is_out_of_range(ww: Any, xx: Any) -> bool:
    """Whether float32 may have lost what these squared norms were summed from; a gradient or buffer may be 0."""
    return isinstance(ww, float) and not (_SMALLEST < ww < _LARGEST and (xx == 0 or _SMALLEST < xx < _LARGEST))
