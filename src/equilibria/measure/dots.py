"""Inner products of tensors: float32 speed, sums that keep their digits, every number read from memory once.

A float32 dot product over a short stretch is accurate to about 1e-7; the stretches are added in float64. A stretch of
all vectors fits into the processor's cache, so that forming six products reads memory hardly more than forming one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

_STRETCH = 1 << 16  # elements; three stretches of float32 are 768 kB

Numbers: TypeAlias = list[float] | list[Tensor]


Products = Sequence[tuple[int, int]]
"""Which vectors to multiply with which, by their places."""


def dots(vectors: Sequence[Tensor], *, products: Products, exact: bool = False) -> Numbers:
    """Inner products of flat vectors of one length.

    Args:
        vectors: one-dimensional tensors on one device.
        products: the pairs to form.
        exact: multiply in float64 too, for differences of products that cancel.

    Returns:
        Floats for tensors in main memory; elsewhere scalar tensors, so that nothing waits for the device.

    Example:
        >>> dots([torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])], products=[(0, 0), (0, 1)])
        [25.0, 3.0]
    """
    kind = _summing_type(vectors, exact=exact)
    if vectors[0].device.type != "cpu":
        return _on_device([vector.to(kind) for vector in vectors], products)
    totals = [0.0] * len(products)
    for parts in zip(*(_stretches(vector) for vector in vectors), strict=True):
        _add(totals, [part.to(kind) for part in parts], products)
    return totals


def moved_dots(
    before: Tensor,
    after: Tensor,
    others: Sequence[Tensor],
    *,
    shrink: float,
    products: Products,
    refresh: bool,
    exact: bool = False,
) -> Numbers:
    """Inner products of ``before``, of the ``others``, and of the move e = after - (1 - shrink) before.

    Args:
        before: the weight before the step, flat.
        after: the weight after it.
        others: further vectors, such as the gradient.
        shrink: share of the weight that decay took away.
        products: pairs of places in before, the others, e.
        refresh: whether ``before`` becomes ``after`` on the way, while both are in the cache.
        exact: as for `dots`.

    Returns:
        As for `dots`.

    Example:
        >>> w = torch.tensor([1.0, 0.0])
        >>> moved_dots(w, torch.tensor([0.5, 0.5]), [], shrink=0.5, products=[(0, 1), (1, 1)], refresh=True), w
        ([0.0, 0.25], tensor([0.5000, 0.5000]))
    """
    kind = _summing_type((before, after, *others), exact=exact)
    if before.device.type != "cpu":
        whole = [vector.to(kind) for vector in (before, *others)]
        numbers = _on_device([*whole, _move(whole[0], after.to(kind), shrink)], products)
        if refresh:
            before.copy_(after)
        return numbers
    totals = [0.0] * len(products)
    for old, new, *rest in zip(*(_stretches(vector) for vector in (before, after, *others)), strict=True):
        held = [part.to(kind) for part in (old, *rest)]
        _add(totals, [*held, _move(held[0], new.to(kind), shrink)], products)
        if refresh:
            old.copy_(new)
    return totals


def row_dots(matrices: Sequence[Tensor], *, products: Products) -> list[Tensor]:
    """Inner products row by row, in float64 throughout: one tensor of as many numbers as there are rows per product.

    Args:
        matrices: two-dimensional tensors of one shape.
        products: the pairs to form.

    Example:
        >>> [product.tolist() for product in row_dots([torch.eye(2), torch.ones(2, 2)], products=[(0, 1), (1, 1)])]
        [[1.0, 1.0], [2.0, 2.0]]
    """
    exact = [matrix.double() for matrix in matrices]
    return [torch.linalg.vecdot(exact[i], exact[j]) for i, j in products]


def _stretches(vector: Tensor) -> tuple[Tensor, ...]:
    if len(vector) <= _STRETCH:
        return (vector,)
    parts: tuple[Tensor, ...] = torch.split(vector, _STRETCH)
    return parts


def _add(totals: list[float], vectors: Sequence[Tensor], products: Products) -> None:
    for at, (i, j) in enumerate(products):
        totals[at] += torch.dot(vectors[i], vectors[j]).item()


def _on_device(vectors: Sequence[Tensor], products: Products) -> list[Tensor]:
    return [torch.dot(vectors[i], vectors[j]).double() for i, j in products]


def _move(before: Tensor, after: Tensor, shrink: float) -> Tensor:
    """e = after - (1 - shrink) before, formed so that nothing cancels: the difference first, which is exact."""
    move = after - before
    return move.add_(before, alpha=shrink) if shrink else move


def _summing_type(vectors: Sequence[Tensor], *, exact: bool) -> torch.dtype:
    """float32, but float64 where one of the vectors has it, or where all sums would be rounded the same way.

    Numbers of a coarser type lie on a grid, and so do their products: a processor's float32 sum, which adds them one
    after the other, then loses 4e-6 instead of 1e-7. A device adds them as a tree.
    """
    types = {vector.dtype for vector in vectors}
    on_grid = vectors[0].device.type == "cpu" and types != {torch.float32}
    return torch.float64 if exact or on_grid or torch.float64 in types else torch.float32
