"""Equal layers get equal words, whichever basis of the symmetries the computation happens to find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.control import split_decay
from equilibria.control._split_decay import is_scale_invariant
from equilibria.objectives import objective
from equilibria.symmetry import symmetries
from equilibria.symmetry._null_space import IntegerSpace
from equilibria.symmetry._result import largest_uniform_set

LAYERS = 3
SIZES = {"norm1": 16, "value": 256, "out": 256, "norm2": 16, "gate": 384, "up": 384, "down": 384}
NAMES = ["embed", *(f"{layer}.{part}" for layer in range(LAYERS) for part in SIZES)]
ELEMENTS = [640, *(SIZES[part] for _ in range(LAYERS) for part in SIZES)]


def pre_norm_space(seed: int) -> IntegerSpace:
    """The joint symmetries of a pre-norm transformer with SwiGLU, in a random basis."""
    vectors = [{"embed": 1, **{f"{layer}.{part}": 1 for layer in range(LAYERS) for part in ("out", "down")}}]
    for layer in range(LAYERS):
        vectors += [
            {f"{layer}.value": 1, f"{layer}.out": -1},
            {f"{layer}.norm1": 1, f"{layer}.value": -1},
            {f"{layer}.up": 1, f"{layer}.down": -1},
            {f"{layer}.norm2": 1, f"{layer}.gate": -1, f"{layer}.up": -1},
        ]
    matrix = np.array([[vector.get(name, 0) for vector in vectors] for name in NAMES], dtype=float)
    mixing = np.random.default_rng(seed).standard_normal((len(vectors), len(vectors)))
    return IntegerSpace(np.linalg.qr(matrix @ mixing)[0], sizes=ELEMENTS)


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_uniform_set_has_the_same_part_of_every_layer(seed):
    chosen = largest_uniform_set(pre_norm_space(seed).constraints, np.array(ELEMENTS))
    uniform = {name for name, is_chosen in zip(NAMES, chosen, strict=True) if is_chosen}
    assert uniform == {"embed", *(f"{layer}.{part}" for layer in range(LAYERS) for part in ("out", "down"))}


@pytest.mark.parametrize("negative", [False, True])
def test_the_smallest_symmetry_of_a_tensor_does_not_depend_on_the_basis(negative):
    first, *others = [
        [space.smallest_with(index, negative=negative) for index in range(len(NAMES))]
        for space in map(pre_norm_space, range(3))
    ]
    assert all(vectors == first for vectors in others)


class Block(nn.Module):
    """A pre-norm SwiGLU block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(8), nn.Linear(8, 12, bias=False)
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, features):
        normed = self.norm(features)
        return features + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def test_twin_layers_have_one_reason():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), Block(), Block(), nn.RMSNorm(8), nn.Linear(8, 3))
    batch = torch.randn(32, 6), torch.randint(3, (32,))
    sym = symmetries(objective(net, functional.cross_entropy), [batch])
    split = split_decay(net, weight_decay=0.1, invariant=sym)
    reasons = split.decayed | split.kept
    twins = {"1.": "own.", "2.": "other."}, {"2.": "own.", "1.": "other."}
    for part in ("norm", "gate", "up", "down"):
        words = [renamed(reasons[f"{layer}.{part}.weight"], names) for layer, names in zip((1, 2), twins, strict=True)]
        assert words[0] == words[1]
    assert [is_scale_invariant(f"{layer}.down.weight", sym) for layer in (1, 2)] == [True, True]
    assert [is_scale_invariant(f"{layer}.up.weight", sym) for layer in (1, 2)] == [False, False]
    assert "not scale-invariant by itself" in reasons["1.up.weight"]


def renamed(reason: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        reason = reason.replace(f" {old}", f" {new}")
    return reason
