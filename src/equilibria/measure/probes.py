"""What one step does to one tensor, read before and after it.

torch's SGD moves a weight by a known combination of weight, gradient and momentum buffer, so that one look before the
step says all, without a copy (`LinearProbe`). For every other optimizer the weights are copied before the step and
compared after it (`CopyProbe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.measure.dots import Numbers, dots, moved_dots, row_dots
from equilibria.measure.layout import copy_of, densify, flat, local, rows
from equilibria.measure.parameters import Watched

_SAMPLE = 64  # numbers that are compared to see whether a copy is still what it was
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


class LinearProbe:
    """Reads weight, gradient and momentum buffer before a step of SGD; nothing is copied."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def read(self, gradient: Tensor, buffer: Tensor | None) -> Numbers:
        """ww, wg, gg, wv, gv, vv of weight, gradient and buffer; without a buffer the last three are 0."""
        vectors = [local(self._watched.param), local(gradient)]
        if buffer is None:
            found: Any = products_of(self._watched, vectors, [(0, 0), (0, 1), (1, 1)])
            return [*found, *[0.0 * found[0]] * 3]
        vectors.append(local(buffer))
        products = [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]
        found = products_of(self._watched, vectors, products)
        # Where decay prevails, the buffer is all but parallel to the weight.
        if _is_radial(found[0], found[3], found[5]):
            found = products_of(self._watched, vectors, products, exact=True)
        return found  # type: ignore[no-any-return]


class CopyProbe:
    """Copies the weight before a step and compares after it: one copy of the weight, made when first needed."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._copy: Tensor | None = None
        self._made_for: tuple[object, ...] = ()
        self._copied_at = -1
        self._seen: list[Any] | None = None
        self._is_radial = True  # nothing is known yet of the steps' direction

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
        products = [(0, 0), (0, last), (last, last), *([(0, 1), (1, 1)] if others else [])]
        self._copied_at = self._watched.param._version if refresh else -1
        ww, we, ee, *with_gradient = self._moved(param, others, shrink=shrink, products=products, refresh=refresh)
        self._is_radial = _is_radial(ww, we, ee)
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
        if refresh:
            copy.copy_(param)
        return row_dots([before, *(rows(other, axis=axis) for other in others), move], products=products)

    def _looks_the_same(self, param: Tensor) -> bool:
        if param.device.type != "cpu":  # asking would wait for the device
            return False
        here, there = flat(param), flat(self._copy, like=param)  # type: ignore[arg-type]
        every = max(1, len(here) // _SAMPLE)
        return torch.equal(here[::every], there[::every])


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
    return isinstance(ww, float) and wx * wx > _RADIAL * ww * xx
