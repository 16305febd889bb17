"""A small language model: pre-norm transformer blocks, causal, with turned or learnt positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError, one_of, whole

POSITIONS = ("rope", "learnt")
_INIT = 0.02  # of GPT-2
_ROPE_BASE = 10_000.0


class Attention(nn.Module):
    """Causal attention of several heads, without biases; projections are apart: each turns by an angle of its own."""

    turns: Tensor | None  # cosine and sine of the angle of every position and pair of coordinates

    def __init__(self, width: int, heads: int, *, turns: Tensor | None, qk_norm: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.query_norm = nn.RMSNorm(width // heads) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(width // heads) if qk_norm else nn.Identity()
        self.heads = heads
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time, width) to the same shape."""
        query, key, value = (
            layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = self._turned(self.query_norm(query)), self._turned(self.key_norm(key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _turned(self, vectors: Tensor) -> Tensor:
        if self.turns is None:
            return vectors
        cosine, sine = self.turns[:, : vectors.shape[2]].to(vectors.dtype)
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class TransformerBlock(nn.Module):
    """Attention and two layers with GELU between, each behind a LayerNorm and added to the stream."""

    def __init__(self, width: int, heads: int, *, turns: Tensor | None, qk_norm: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, turns=turns, qk_norm=qk_norm)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The stream with both added."""
        tokens = tokens + self.attention(self.norm1(tokens))
        result: Tensor = tokens + self.down(functional.gelu(self.up(self.norm2(tokens))))
        return result


class GPT(nn.Module):
    """Embedding, pre-norm transformer blocks, a last LayerNorm, and a linear layer to the next token.

    Invariances: with ``qk_norm`` queries and keys alone, head by head. Nothing else is invariant alone: what writes
    into the stream (embeddings, ``out`` and ``down`` of all layers) is so jointly. Otherwise tensors are scaled against
    each other: value against out; query against key (with ``qk_norm`` the scales of their norms); scale and shift of a
    LayerNorm against what reads them.

    Args:
        vocabulary: number of different tokens.
        width: numbers per token.
        layers: blocks.
        heads: of the attention; a divisor of the width.
        context: the largest number of tokens at once.
        positions: "rope" (queries and keys are turned by an angle that grows with the position) or "learnt" (an
            embedding of the position is added).
        qk_norm: whether queries and keys are normalised in each head.

    Example:
        >>> model = GPT(65, 32, layers=2, heads=4, context=16)
        >>> model(torch.zeros(2, 10, dtype=torch.int64)).shape
        torch.Size([2, 10, 65])
    """

    def __init__(
        self,
        vocabulary: int,
        width: int = 64,
        *,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        positions: str = "rope",
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        _check(vocabulary=vocabulary, width=width, layers=layers, heads=heads, context=context, positions=positions)
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width) if positions == "learnt" else None
        turns = _turns(context, width // heads) if positions == "rope" else None
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, turns=turns, qk_norm=qk_norm) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """As GPT-2: what is added to the stream starts smaller, so that its variance does not grow with the depth."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                added = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=_INIT * (2 * layers) ** -0.5 if added else _INIT)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time) to logits of the next one (batch, time, vocabulary)."""
        if tokens.shape[1] > self.context:
            raise EquilibriaError(f"got {tokens.shape[1]} tokens; expected at most context={self.context}")
        stream = self.embedding(tokens)
        if self.positions is not None:
            stream = stream + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


def _check(*, width: int, heads: int, positions: str, **counts: int) -> None:
    for name, count in {"width": width, "heads": heads, **counts}.items():
        whole(name, count, low=1)
    one_of("positions", positions, POSITIONS)
    if width % heads:
        raise EquilibriaError(f"got width={width}, heads={heads}; expected heads to divide the width")
    if positions == "rope" and (width // heads) % 2:
        raise EquilibriaError(f"got width={width}, heads={heads}; expected an even number of coordinates in each head")


def _turns(context: int, width: int) -> Tensor:
    """Cosine and sine, (2, context, width/2): coordinate pairs turn slower and slower."""
    rates = _ROPE_BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(context, dtype=torch.float64).view(-1, 1) * rates
    return torch.stack([angles.cos(), angles.sin()]).to(torch.float32)
