"""The small language model: against attention written out, what it may see, and its positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.lab.nets import GPT
from equilibria.lab.nets.gpt import Attention, _turns


def tokens(count: int = 3, length: int = 8) -> torch.Tensor:
    return torch.randint(11, (count, length), generator=torch.Generator().manual_seed(2))


def model(**settings) -> GPT:
    torch.manual_seed(0)
    made = GPT(11, 16, **{"layers": 2, "heads": 4, "context": 8, **settings}).double()
    for param in made.parameters():  # larger than at the start, so that attention is not nearly uniform
        nn.init.normal_(param, std=0.4)
    return made


def slow_attention(attention: Attention, stream: torch.Tensor) -> torch.Tensor:
    """Token by token, head by head; pairs of coordinates turned as complex numbers."""
    length, width = stream.shape[1:]
    size = width // attention.heads
    result = torch.zeros_like(stream)
    for head in range(attention.heads):
        rows = slice(head * size, (head + 1) * size)
        query, key, value = (
            stream @ layer.weight[rows].T for layer in (attention.query, attention.key, attention.value)
        )
        query, key = attention.query_norm(query), attention.key_norm(key)
        if attention.turns is not None:
            rates = torch.tensor([10_000 ** (-2 * pair / size) for pair in range(size // 2)], dtype=torch.float64)
            turn = torch.exp(1j * torch.arange(length).view(-1, 1) * rates)
            query, key = (torch.complex(each[..., : size // 2], each[..., size // 2 :]) * turn for each in (query, key))
        for at in range(length):
            scores = torch.stack([(query[:, at].conj() * key[:, past]).real.sum(-1) for past in range(at + 1)], 1)
            weights = torch.softmax(scores / math.sqrt(size), 1)
            result[:, at, rows] = (weights.unsqueeze(2) * value[:, : at + 1]).sum(1)
    return result @ attention.out.weight.T


@pytest.mark.parametrize("positions", ["rope", "learnt"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_what_its_definition_says(positions, qk_norm):
    """Cosines are stored in float32: relative errors of 6e-8 in the scores."""
    attention = model(positions=positions, qk_norm=qk_norm).blocks[0].attention
    stream = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = slow_attention(attention, stream)
    assert torch.allclose(attention(stream), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("positions", ["rope", "learnt"])
def test_no_token_sees_a_later_one(positions):
    net, given = model(positions=positions), tokens()
    changed = given.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = net(given), net(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert torch.allclose(net(given[:, :5]), before[:, :5], rtol=0, atol=1e-12)


def test_turned_positions_matter_only_by_their_difference():
    turns = _turns(20, 8)
    attention = Attention(8, 1, turns=turns, qk_norm=False)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    turned_query, turned_key = (attention._turned(each.expand(1, 1, 20, 8))[0, 0] for each in (query, key))
    scores = turned_query @ turned_key.T
    for difference in (-7, 0, 3):
        assert torch.allclose(scores.diagonal(difference), scores.diagonal(difference)[0], rtol=0, atol=1e-5)
    assert not torch.allclose(scores[0], scores[0, 0], atol=0.1)


def test_it_starts_as_gpt_2_does_and_near_a_uniform_guess():
    torch.manual_seed(0)
    net = GPT(50, 128, layers=8, heads=4, context=16)
    for name, weight in net.named_parameters():
        if weight.ndim == 2:
            expected = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
            # the standard error of a deviation is 1/sqrt(2n) of it
            assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel()))
    given = torch.randint(50, (4, 16))
    loss = functional.cross_entropy(net(given).flatten(0, 1), given.flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "expected heads to divide the width"),
        ({"heads": 16}, "even number of coordinates"),
        ({"positions": "none"}, "got positions='none'; expected one of: rope, learnt"),
        ({"layers": 0}, "got layers=0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(EquilibriaError, match=message):
        GPT(11, 16, **settings)


def test_too_many_tokens():
    with pytest.raises(EquilibriaError, match="got 9 tokens; expected at most context=8"):
        model()(tokens(length=9))
