"""Symmetries computed in float32, for models that insist on it."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.scaling import assert_same_space
from tests.helpers.small_nets import CASES
from torch import nn
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.objectives import objective
from equilibria.symmetry import symmetries

LARGE = {"pre-activation ResNet-20", "scale-invariant ResNet-20"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in LARGE])
def test_the_symmetries_are_those_derived_by_hand(name):
    case = CASES[name]
    torch.manual_seed(1)
    batch = torch.randn(24, *case.shape), torch.randint(5, (24,))
    torch.manual_seed(0)
    sym = symmetries(objective(case.make(), functional.cross_entropy), [batch], dtype=torch.float32)
    assert_same_space(sym.basis, case.basis(), list(sym.elements))
    assert {tensor: sym.how[tensor] for tensor in case.how} == case.how
    assert sym.notes == ()
    assert sym.gap > 1e3


class Rotary(nn.Module):
    """A GPT as nanochat's: rotary embeddings that must be float32, and a loss as its only output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.query, self.key = nn.Embedding(11, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.value, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        angles = torch.outer(torch.arange(6.0), 0.5 ** torch.arange(4.0))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx, targets):
        assert self.cos.dtype == torch.float32, "Rotary embeddings must be in float32"
        features = functional.rms_norm(self.embed(idx), (8,))
        query, key = (functional.rms_norm(self.rotated(part(features)), (8,)) for part in (self.query, self.key))
        mixed = functional.scaled_dot_product_attention(query, key, self.value(features), is_causal=True)
        logits = self.head(functional.rms_norm(features + self.out(mixed), (8,)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def rotated(self, features):
        first, second = features.chunk(2, dim=-1)
        return torch.cat([first * self.cos + second * self.sin, second * self.cos - first * self.sin], dim=-1)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randint(11, (16, 6)), torch.randint(11, (16, 6))


def test_a_model_that_insists_on_float32():
    loss = objective(Rotary())
    sym = symmetries(loss, [tokens() for _ in range(2)], dtype=torch.float32)
    assert set(sym.alone) == {"embed.weight", "query.weight", "key.weight"}
    assert sym.how["value.weight"] == "against out.weight"
    assert sym.how["head.weight"] == "no"
    with pytest.raises(
        EquilibriaError, match=r"fails in torch.float64 \(AssertionError: Rotary emb.*: pass dtype=torch.float32"
    ) as e:
        symmetries(loss, [tokens()])
    assert e.value.argument == "dtype"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, "float32", None])
def test_other_types_are_refused(dtype):
    with pytest.raises(EquilibriaError, match=r"got dtype=.*; expected torch.float64 or torch.float32") as caught:
        symmetries(objective(Rotary()), [tokens()], dtype=dtype)
    assert caught.value.argument == "dtype"
