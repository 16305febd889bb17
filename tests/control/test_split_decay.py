"""Which parameters decay, by measurement and by role."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.control import FoldedWeightDecay, regroup, split_decay
from equilibria.errors import EquilibriaError
from equilibria.lab.nets import GPT, BasicBlockResNet
from equilibria.objectives._objective import objective
from equilibria.symmetry import symmetries


def measured(net: nn.Module, *shape: int):
    torch.manual_seed(0)
    batch = torch.randn(16, *shape), torch.randint(3, (16,))
    return symmetries(objective(net, functional.cross_entropy), [batch])


def test_invariant_parameters_decay_and_others_do_not():
    torch.manual_seed(0)
    net = BasicBlockResNet(4, (1,), in_channels=3)
    split = split_decay(net, weight_decay=5e-4, invariant=measured(net, 3, 8, 8))
    inner = {
        "blocks.0.first.norm.weight",
        "blocks.0.first.norm.bias",
    }  # jointly invariant: a convolution and norm follow
    convs = {f"{name}.conv.weight" for name in ("stem", "blocks.0.first", "blocks.0.second")}
    assert set(split.decayed) == convs | inner | {"head.weight"}
    assert "the gradient holds its size" in split.kept["blocks.0.second.norm.weight"]
    assert "scale-invariant (rows)" in split.decayed["stem.conv.weight"]
    assert "not scale-invariant" in split.decayed["head.weight"]


def test_with_symmetries_weights_that_are_invariant_alone_and_jointly_have_groups_which_can_be_folded():
    torch.manual_seed(0)
    net = BasicBlockResNet(4, (1,), in_channels=3)
    sym = measured(net, 3, 8, 8)
    split = split_decay(net, weight_decay=5e-4, invariant=sym)
    called = {id(param): name for name, param in net.named_parameters()}
    groups = [{called[id(param)] for param in group["params"]} for group in split.groups]
    jointly = {name for names in sym.uniform_sets() if len(names) > 1 for name in names}
    assert jointly == {"blocks.0.first.norm.weight", "blocks.0.first.norm.bias"}
    assert groups == [set(sym.alone), jointly, set(split.decayed) - set(sym.alone) - jointly, set(split.kept)]
    assert [group["weight_decay"] for group in split.groups] == [5e-4, 5e-4, 5e-4, 0.0]
    folded = FoldedWeightDecay(torch.optim.SGD(split.groups, lr=0.1), model=net, invariant=sym)
    assert list(folded.scales) == [0, 1]


def test_every_parameter_is_in_one_group():
    net = BasicBlockResNet(4, (1, 1), in_channels=3)
    split = split_decay(net, weight_decay=0.1)
    grouped = [id(param) for group in split.groups for param in group["params"]]
    assert sorted(grouped) == sorted(id(param) for param in net.parameters())
    assert [group["weight_decay"] for group in split.groups] == [0.1, 0.0]
    torch.optim.AdamW(split.groups, lr=1e-3)
    assert all("not measured" in reason for reason in (*split.decayed.values(), *split.kept.values()))
    assert "no decay  head.bias" in str(split)


def test_roles_of_weight_norm_and_frozen_parameters():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 3))
    net[1].weight.requires_grad_(False)
    split = split_decay(net, weight_decay=0.1)
    assert list(split.decayed) == ["0.weight.original1"]
    assert set(split.kept) == {"0.bias", "0.weight.original0", "1.bias"}


def test_a_bias_without_effect_does_not_decay():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    assert "nothing depends on it" in split_decay(net, weight_decay=0.1, invariant=measured(net, 4)).kept["0.bias"]


class PreNorm(nn.Module):
    """x + linear2(relu(linear1(norm(x)))): linear1 or linear2 may grow with the stem, never both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.linear1, self.linear2, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        features = self.stem(inputs)
        features = features + self.linear2(torch.relu(self.linear1(self.norm(features))))
        return self.head(self.last(features))


def test_the_groups_of_invariant_weights_may_be_scaled_all_at_once():
    torch.manual_seed(0)
    net = PreNorm()
    sym = measured(net, 4)
    split = split_decay(net, weight_decay=0.1, invariant=sym)
    chosen = {id(param) for param in split.groups[0]["params"]}
    invariant = {name for name, param in net.named_parameters() if id(param) in chosen}
    assert invariant == sym.largest_uniform() - set(sym.no_effect)
    precise = PreNorm().double()
    precise.load_state_dict(net.state_dict())
    precise.norm.eps = precise.last.eps = 1e-30
    inputs = torch.randn(16, 4, dtype=torch.float64)
    before = precise(inputs)
    with torch.no_grad():
        for name in invariant:
            precise.get_parameter(name).mul_(3.0)
    assert torch.allclose(precise(inputs), before, rtol=1e-10, atol=1e-10)
    assert split.decayed["stem.bias"].endswith("; decays as they do, which keeps their proportions")
    either = [split.decayed[f"linear{number}.weight"] for number in (1, 2)]
    assert all("not scale-invariant by itself (jointly with" in reason for reason in either)


def test_equivalent_layers_of_a_transformer_get_the_same_reason():
    """Value and output projection may each take the place of the other; all blocks are alike."""
    torch.manual_seed(0)
    net = GPT(16, 8, layers=2, heads=2, context=4)
    tokens = [(torch.randint(16, (4, 4)), torch.randint(16, (4, 4))) for _ in range(2)]
    sym = symmetries(
        objective(net, lambda scores, labels: functional.cross_entropy(scores.flatten(0, 1), labels.flatten())), tokens
    )
    split = split_decay(net, weight_decay=0.1, invariant=sym)
    reasons = {re.sub(r"\(.*\)", "()", reason.partition(": ")[2]) for reason in split.decayed.values()}
    assert reasons == {"not scale-invariant by itself (); decay, gradient and random steps set its norm"}
    reasons = {re.sub(r"\(.*\)", "()", reason.partition(": ")[2]) for reason in split.kept.values()}
    assert all(reason.endswith("the gradient holds its size, decay would shift it") for reason in reasons)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_decay("net", weight_decay=0.1), "got model of type str"),
        (lambda: split_decay(nn.Linear(2, 2), weight_decay=-1), "got weight_decay=-1"),
        (lambda: split_decay(nn.ReLU(), weight_decay=0.1), "without parameters"),
        (lambda: split_decay(nn.Linear(2, 2), weight_decay=0.1, invariant=5), "got invariant=int; expected"),
        (lambda: split_decay(nn.LazyLinear(2), weight_decay=0.1), "have no shape yet, such as weight"),
        (
            lambda: split_decay(nn.Linear(2, 2), weight_decay=0.1, invariant=["wieght"]),
            "got invariant name 'wieght', which is none of the model's parameters; expected their names, such as w",
        ),
        (
            lambda: split_decay(
                nn.Linear(4, 3), weight_decay=0.1, invariant=measured(nn.Sequential(nn.Linear(4, 3)), 4)
            ),
            "got symmetries of 0.weight",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(EquilibriaError, match=message) as caught:
        call()
    assert caught.value.argument in ("model", "weight_decay", "invariant")


@pytest.mark.parametrize("as_tensors", [False, True], ids=["names", "tensors"])
def test_weights_named_as_invariant_decay_in_a_separate_group(as_tensors):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    split = split_decay(net, weight_decay=0.1, invariant=[net[0].weight] if as_tensors else ["0.weight"])
    sizes = [(group["weight_decay"], len(group["params"])) for group in split.groups]
    assert sizes == [(0.1, 1), (0.1, 1), (0.0, 4)]
    assert split.groups[0]["params"][0] is net[0].weight
    assert split.decayed["0.weight"] == "Linear weight: scale-invariant by invariant=; decay sets how fast it turns"
    assert split.decayed["2.weight"] == "Linear weight: by its role, not measured"


def test_regrouping_changes_the_decay_of_named_parameters_only():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    groups = [{"params": list(net[0].parameters()), "lr": 0.1}, {"params": list(net[1].parameters()), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, weight_decay=0.5, momentum=0.9)
    changed = regroup(optimizer, model=nn.DataParallel(net), weight_decay={"0.bias": 0.0, "1.weight": 0.25})
    rows = [(group["lr"], group["weight_decay"], group["momentum"], len(group["params"])) for group in changed]
    assert rows == [(0.1, 0.5, 0.9, 1), (0.1, 0.0, 0.9, 1), (0.2, 0.25, 0.9, 1), (0.2, 0.5, 0.9, 1)]
    assert torch.optim.SGD(changed, lr=1.0).param_groups[2]["params"] == [net[1].weight]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]
    with pytest.raises(EquilibriaError, match=r"got weight_decay for .*, which the model lacks"):
        regroup(optimizer, model=net, weight_decay={"3.bias": 0.0})
