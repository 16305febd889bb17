"""Small networks with the symmetries that a person derives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.nets import BasicBlockResNet, PreActivationResNet, ScaleInvariantVGG11

Vector = dict[str, int]


def one(*names: str) -> Vector:
    return dict.fromkeys(names, 1)


def pair(norm: str) -> Vector:
    """A normalisation's scale and shift."""
    return one(f"{norm}.weight", f"{norm}.bias")


def against(along: Vector, *others: str) -> Vector:
    return {**along, **dict.fromkeys(others, -1)}


@dataclass
class Case:
    """A network, how a batch of its inputs looks, and its symmetries.

    Attributes:
        make: the network.
        shape: of one input.
        basis: a basis of all its symmetries, derived by hand.
        how: words for some of its tensors.
    """

    make: Callable[[], nn.Module]
    shape: Sequence[int]
    basis: Callable[[], list[Vector]]
    how: dict[str, str] = field(default_factory=dict)


def vectors() -> Sequence[int]:
    return (6,)


def _norm_net(norm: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm,
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(4 * 16, 5),
    )


class Attention(nn.Module):
    """Attention with QK-norm over each of two heads of four."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(4), nn.RMSNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (layer(tokens).unflatten(2, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


class FusedAttention(Attention):
    """The same with one projection for all three: its rows differ."""

    def __init__(self) -> None:
        super().__init__()
        del self.query, self.key, self.value
        self.fused = nn.Linear(8, 24, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.fused(tokens).chunk(3, dim=2))
        mixed = functional.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


class OwnNorm(nn.Module):
    """Somebody's RMSNorm: an eps in the code, and a step to float32."""

    def forward(self, features: Tensor) -> Tensor:
        in_float = features.to(torch.float32)
        return (in_float * torch.rsqrt(in_float.pow(2).mean(-1, keepdim=True) + 1e-6)).to(features.dtype)


class Square(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.square()


def _zero_gamma() -> nn.Module:
    net = BasicBlockResNet(4, (1,), in_channels=3)
    nn.init.zeros_(net.blocks[0].second.norm.weight)
    return net


def preactivation_basis(*, blocks: int, scale_invariant: bool) -> list[Vector]:
    """Symmetries of a `PreActivationResNet`, block by block and stage by stage."""
    names = [f"blocks.{index}" for index in range(3 * blocks)]
    basis = [one(f"{name}.conv1.weight") for name in names]  # behind it norm2
    if not scale_invariant:
        basis += [pair(f"{name}.norm1") for name in names]  # conv1 is linear, norm2 forgets the scale
        basis += [against(pair(f"{name}.norm2"), f"{name}.conv2.weight") for name in names]
        basis += [against(pair("norm"), "head.weight")]
    else:
        basis += [one("head.weight")]
    for stage in range(3):  # every stream of a stage is read through normalisations only
        inside = names[stage * blocks : (stage + 1) * blocks]
        written = one(*(f"{name}.conv2.weight" for name in inside))
        enters = "stem.weight" if stage == 0 else f"{inside[0]}.shortcut.{'1' if scale_invariant else '0'}.weight"
        leaves = [f"{names[(stage + 1) * blocks]}.shortcut.0.weight"] if stage < 2 else []
        basis.append({**written, enters: 1, **({} if scale_invariant else dict.fromkeys(leaves, -1))})
        if scale_invariant and stage:
            basis += [one(f"{inside[0]}.shortcut.0.weight"), one(f"{inside[0]}.shortcut.1.bias")]
    return basis


def basic_block_basis() -> list[Vector]:
    """Symmetries of BasicBlockResNet(4, (1, 1)): all normalisations affine, ReLU after the sum."""
    convs = ["stem", "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "blocks.1.shortcut"]
    last = {**pair("blocks.1.second.norm"), **pair("blocks.1.shortcut.norm")}
    return [
        *(one(f"{name}.conv.weight") for name in convs),
        pair("blocks.0.first.norm"),
        pair("blocks.1.first.norm"),
        {**pair("stem.norm"), **pair("blocks.0.second.norm")},
        against(last, "head.weight"),
    ]


IMAGE = (3, 4, 4)
CASES = {
    "batch norm": Case(
        _norm_net(nn.BatchNorm2d(8)),
        IMAGE,
        lambda: [one("0.weight"), one("0.bias"), against(pair("1"), "3.weight")],
        {"0.weight": "rows", "0.bias": "no effect", "1.weight": "jointly with 1.bias and against 3.weight"},
    ),
    "group norm": Case(
        _norm_net(nn.GroupNorm(2, 8)),
        IMAGE,
        lambda: [one("0.weight", "0.bias"), against(pair("1"), "3.weight")],
        {"0.weight": "jointly with 0.bias"},
    ),
    "group norm, no bias": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.GroupNorm(2, 8), nn.Flatten(), nn.Tanh(), nn.Linear(32, 5)
        ),
        IMAGE,
        lambda: [one("0.weight")],
        {"0.weight": "groups of 4 rows", "1.weight": "no", "4.weight": "no", "4.bias": "no"},
    ),
    "instance norm": Case(
        _norm_net(nn.InstanceNorm2d(8)),
        IMAGE,
        lambda: [one("0.weight"), one("0.bias")],
        {"0.weight": "rows", "0.bias": "no effect", "3.weight": "no"},
    ),
    "layer norm": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5)),
        (6,),
        lambda: [one("0.weight", "0.bias")],
        {"0.weight": "jointly with 0.bias", "1.weight": "no"},
    ),
    "rms norm": Case(
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 5)),
        (6,),
        lambda: [one("0.weight"), {"1.weight": 1, "2.weight": -1}],
        {"0.weight": "alone", "1.weight": "against 2.weight"},
    ),
    "own norm with an eps in the code": Case(
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), OwnNorm(), nn.Linear(8, 5)),
        (6,),
        lambda: [one("0.weight")],
        {"0.weight": "alone"},
    ),
    "weight norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 5)),
        (6,),
        lambda: [one("0.weight.original1")],
        {"0.weight.original1": "rows", "0.weight.original0": "no", "0.bias": "no"},
    ),
    "two layers of ReLU": Case(
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 5)),
        (6,),
        lambda: [{"0.weight": 1, "2.weight": -1}],
        {"0.weight": "against 2.weight", "2.bias": "no"},
    ),
    "three layers of ReLU with biases": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)),
        (6,),
        lambda: [against(pair("0"), "2.weight"), against(pair("2"), "4.weight")],
    ),
    "squares": Case(
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), Square(), nn.Linear(8, 5, bias=False)),
        (6,),
        lambda: [{"0.weight": 1, "2.weight": -2}],
        {"0.weight": "against 2.weight^2", "2.weight": "against 0.weight^0.5"},
    ),
    "ReLU6 only looks homogeneous": Case(
        lambda: nn.Sequential(
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.ReLU6(),
            nn.Linear(8, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Linear(8, 5),
        ),
        (6,),
        lambda: [one("0.weight"), one("3.weight")],
        {"1.weight": "no", "1.bias": "no"},
    ),
    "no symmetry": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), (6,), list),
    "QK-norm": Case(
        Attention,
        (5, 8),
        lambda: [
            one("query.weight"),
            one("key.weight"),
            {"query_norm.weight": 1, "key_norm.weight": -1},
            {"value.weight": 1, "out.weight": -1},
        ],
        {"query.weight": "groups of 4 rows", "key.weight": "groups of 4 rows", "value.weight": "against out.weight"},
    ),
    "QK-norm, fused": Case(
        FusedAttention,
        (5, 8),
        lambda: [{"fused.weight": 1, "out.weight": -1}, {"query_norm.weight": 1, "key_norm.weight": -1}],
    ),
    "transposed convolution": Case(
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 6, 2, bias=False), nn.BatchNorm2d(6), nn.Flatten(), nn.Tanh(), nn.Linear(150, 5)
        ),
        IMAGE,
        lambda: [one("0.weight")],
        {"0.weight": "rows"},
    ),
    "post-activation ResNet": Case(lambda: BasicBlockResNet(4, (1, 1), in_channels=3), (3, 8, 8), basic_block_basis),
    "zero-initialised gamma": Case(
        _zero_gamma,
        (3, 8, 8),
        lambda: [
            *(one(f"{name}.conv.weight") for name in ("stem", "blocks.0.first", "blocks.0.second")),
            pair("blocks.0.first.norm"),
            against({**pair("stem.norm"), **pair("blocks.0.second.norm")}, "head.weight"),
        ],
    ),
    "pre-activation ResNet-20": Case(
        lambda: PreActivationResNet(20, 2), (3, 8, 8), lambda: preactivation_basis(blocks=3, scale_invariant=False)
    ),
    "scale-invariant ResNet-20": Case(
        lambda: PreActivationResNet(20, 2, scale_invariant=True),
        (3, 8, 8),
        lambda: preactivation_basis(blocks=3, scale_invariant=True),
    ),
    "scale-invariant VGG-11": Case(
        lambda: ScaleInvariantVGG11(2),
        (3, 8, 8),
        lambda: [one(f"features.{index}.weight") for index in (0, 4, 8, 11, 15, 18, 22, 25)] + [one("head.weight")],
        {"features.0.weight": "rows", "head.weight": "rows"},
    ),
}
