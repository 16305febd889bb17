"""A pre-norm GPT in the manner of nanoGPT: tied embedding, biases off, a model that returns its loss in a tuple."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, bias=False), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width, bias=False), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model; called with targets it returns its logits and its loss."""

    def __init__(self, *, vocabulary: int = 16, length: int = 16, blocks: int = 2, width: int = 16, heads: int = 2):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList(Block(width, heads) for _ in range(blocks)),
                "ln_f": nn.LayerNorm(width, bias=False),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, param in self.named_parameters():
            if param.ndim >= 2:
                deep = math.sqrt(2 * blocks) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(param, std=0.02 / deep)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Matrices and embeddings decay; gains do not."""
        params = list(self.parameters())
        return [
            {"params": [param for param in params if param.ndim >= 2], "weight_decay": weight_decay},
            {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
        ]


def warm_up_and_cosine(step: int, *, peak: float, warm_up: int, steps: int) -> float:
    """The lr of a step, down to a tenth of its peak."""
    if step < warm_up:
        return peak * (step + 1) / (warm_up + 1)
    along = (step - warm_up) / (steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * along)))
