"""Networks with tensors that are shared, frozen, concatenated, shuffled, gated or recurrent, and their symmetries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.small_nets import Case, against, one, pair


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.down, self.up = nn.Linear(6, 4), nn.Linear(4, 6)
        self.last, self.last_norm, self.head = nn.Conv2d(6, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Linear(96, 5)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm(self.conv(images)).relu()
        gate = self.up(self.down(maps.mean((2, 3))).relu()).sigmoid()
        return self.head(self.last_norm(self.last(maps * gate[:, :, None, None])).tanh().flatten(1))


class Dense(nn.Module):
    """DenseNet: what a layer reads is everything before it, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first_norm, self.first = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False)
        self.second_norm, self.second = nn.BatchNorm1d(12), nn.Linear(12, 8, bias=False)
        self.last_norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        before = self.stem(inputs)
        both = torch.cat([before, self.first(self.first_norm(before).relu())], dim=1)
        return self.head(self.last_norm(self.second(self.second_norm(both).relu())).tanh())


class Shared(nn.Module):
    """One matrix that is used three times, with or without a normalisation behind it."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.matrix, self.norms, self.head = nn.Linear(6, 6, bias=False), nn.ModuleList(), nn.Linear(6, 5)
        self.norms.extend(norm() if norm is nn.Identity else norm(6) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for norm in self.norms:
            inputs = norm(self.matrix(inputs)).relu()
        return self.head(inputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.head = nn.GRU(4, 6, batch_first=True), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.cell(tokens)[0][:, -1]))


class LowRank(nn.Module):
    """LoRA: a frozen matrix, and a product beside it whose second factor starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.inner, self.outer = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 5)
        nn.init.zeros_(self.outer.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(inputs) + self.outer(self.inner(inputs))))


class StandardisedConv(nn.Conv2d):
    """Weight standardisation: every filter without its mean, over its deviation with an eps."""

    def forward(self, images: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(images, centred / (centred.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


class TwoTowers(nn.Module):
    """CLIP: two unit vectors and a temperature without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
        self.classes = nn.Parameter(torch.randn(5, 6))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        images, texts = functional.normalize(self.image(inputs)), functional.normalize(self.text(self.classes))
        return self.log_scale.exp() * images @ texts.T


class Plain(nn.Module):
    """Attention without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.value(tokens))
        return self.head(torch.tanh(self.out(mixed))).mean(1)


def _grouped(*between: nn.Module) -> nn.Module:
    grouped = nn.Conv2d(4, 8, 3, groups=2, bias=False)
    last = [nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 4, 5)]
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), grouped, *between, *last)


def _frozen_norm() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 5))
    net[1].requires_grad_(False)
    return net


UNUSUAL = {
    "squeeze-excite": Case(
        SqueezeExcite,
        (3, 8, 8),
        lambda: [
            one("conv.weight"),
            one("last.weight"),
            against(pair("norm"), "down.weight"),  # last_norm forgets the size of the maps, the gate must not change
            against(pair("down"), "up.weight"),
        ],
        {"conv.weight": "rows", "last.weight": "rows", "head.weight": "no"},
    ),
    "dense": Case(
        Dense,
        (6,),
        lambda: [
            *(one(name) for name in ("stem.weight", "stem.bias", "first.weight", "second.weight")),
            pair("first_norm"),
            pair("second_norm"),
        ],
        {"stem.weight": "rows", "stem.bias": "no effect", "first.weight": "rows"},
    ),
    "shared matrix before norms": Case(
        lambda: Shared(nn.BatchNorm1d),
        (6,),
        lambda: [
            one("matrix.weight"),
            pair("norms.0"),
            pair("norms.1"),
            against(pair("norms.2"), "head.weight"),
        ],
        {"matrix.weight": "rows"},
    ),
    "shared matrix": Case(
        lambda: Shared(nn.Identity),
        (6,),
        lambda: [{"matrix.weight": 1, "head.weight": -3}],
        {"matrix.weight": "against head.weight^3"},
    ),
    "recurrent": Case(Recurrent, (5, 4), lambda: [against(pair("norm"), "head.weight")], {"cell.weight_hh_l0": "no"}),
    "low rank": Case(LowRank, (6,), lambda: [{"inner.weight": 1, "outer.weight": -1}], {"head.weight": "no"}),
    "standardised weights": Case(
        lambda: nn.Sequential(StandardisedConv(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5)),
        (3, 4, 4),
        lambda: [one("0.weight")],
        {"0.weight": "rows", "0.bias": "no"},
    ),
    "two towers": Case(
        TwoTowers,
        (6,),
        lambda: [one("image.weight"), one("text.weight"), one("classes")],
        {"image.weight": "alone", "classes": "rows", "log_scale": "no"},
    ),
    "attention without normalisation": Case(
        Plain,
        (5, 4),
        lambda: [{"query.weight": 1, "key.weight": -1}, {"value.weight": 1, "out.weight": -1}],
    ),
    "grouped convolution": Case(
        _grouped, (3, 4, 4), lambda: [one("2.weight")], {"2.weight": "groups of 4 rows", "0.weight": "no"}
    ),
    "shuffled channels": Case(
        lambda: _grouped(nn.ChannelShuffle(2)),
        (3, 4, 4),
        lambda: [one("2.weight")],
        {"2.weight": "alone"},  # every second row belongs to a group, which is no block
    ),
    "frozen scale and shift": Case(
        _frozen_norm, (6,), lambda: [one("0.weight"), one("0.bias")], {"0.weight": "rows", "4.weight": "no"}
    ),
    "spectral norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 5)),
        (6,),
        lambda: [one("0.weight")],
        {"0.weight": "alone", "0.bias": "no"},
    ),
    "PReLU": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 5)),
        (6,),
        lambda: [against(pair("0"), "2.weight")],
        {"1.weight": "no"},
    ),
}
