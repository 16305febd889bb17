"""What symmetries are checked against: exact linear algebra, and scaling done by hand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import nn

Vector = Mapping[str, int]


def exact_rank(vectors: Iterable[Vector], names: Sequence[str]) -> int:
    """Rank over the rational numbers, by Gaussian elimination."""
    rows = [[Fraction(vector.get(name, 0)) for name in names] for vector in vectors]
    rank = 0
    for column in range(len(names)):
        pivot = next((row for row in rows[rank:] if row[column]), None)
        if pivot is None:
            continue
        index = rows.index(pivot, rank)
        rows[rank], rows[index] = rows[index], rows[rank]
        for row in rows[rank + 1 :]:
            if not row[column]:
                continue
            factor = row[column] / rows[rank][column]
            row[:] = [a - factor * b for a, b in zip(row, rows[rank], strict=True)]
        rank += 1
    return rank


def assert_same_space(result: Sequence[Vector], truth: Sequence[Vector], names: Sequence[str]) -> None:
    """Both sets of exponent vectors are bases of one and the same space."""
    assert all(set(vector) <= set(names) for vector in truth), "the truth names what is not there"
    assert exact_rank(truth, names) == len(truth), "the truth is not a basis"
    assert exact_rank(result, names) == len(result)
    if exact_rank([*result, *truth], names) == len(result) == len(truth):
        return
    missed = [vector for vector in truth if exact_rank([*result, vector], names) > len(result)]
    further = [vector for vector in result if exact_rank([*truth, vector], names) > len(truth)]
    raise AssertionError(f"missed {missed}, found in addition {further}")


@functools.lru_cache(maxsize=2)
def precise_copy(model: nn.Module) -> nn.Module:
    """A float64 copy away from special values, without dropout and eps, made without the library."""
    torch.manual_seed(3)
    copied = copy.deepcopy(model).double().train()
    for module in copied.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-20)
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-20
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for param in copied.parameters():
            param.mul_(1 + 0.2 * torch.randn_like(param)).add_(0.05 * torch.randn_like(param))
    return copied


def change_when_scaled(model: nn.Module, call, vector: Vector, *, factor: float = 3.0) -> float:
    """Largest change of an output relative to the outputs' spread when tensors are scaled, in float64."""
    net = precise_copy(model)
    scaled = [(param, vector[name]) for name, param in net.named_parameters() if name in vector]
    assert len(scaled) == len(vector)
    with torch.no_grad():
        before = call(net)
        kept = [param.clone() for param, _ in scaled]
        for param, exponent in scaled:
            param.mul_(factor**exponent)
        after = call(net)
        for (param, _), old in zip(scaled, kept, strict=True):
            param.copy_(old)
    return float((after - before).abs().max() / before.std())
