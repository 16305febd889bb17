"""Names, selection and rows of watched tensors, on wrapped and tied models."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from equilibria.errors import EquilibriaError
from equilibria.tensors.parameters import checked_granularity, find_watched, plain_name, unwrap_optimizer


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def names(model, optimizers=None, *, select=None, granularity="tensor"):
    trained_by = optimizers if optimizers is not None else [sgd(model)]
    return [tensor.name for tensor in find_watched(model, trained_by, select=select, granularity=granularity)]


# ---- names


def test_matrices_and_kernels_are_watched_by_default():
    assert names(net()) == ["0.weight", "3.weight"]


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("module.layer.weight", "layer.weight"),
        ("module.module.layer.weight", "layer.weight"),
        ("_orig_mod.layer.weight", "layer.weight"),
        ("module._orig_mod.layer.weight", "layer.weight"),
        ("_orig_mod.module.layer.weight", "layer.weight"),
        ("blocks.0._orig_mod.fc.weight", "blocks.0.fc.weight"),
        ("_fsdp_wrapped_module.layer._fsdp_wrapped_module.weight", "layer.weight"),
        ("blocks.0._checkpoint_wrapped_module.fc.weight", "blocks.0.fc.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("layer.module.weight", "layer.module.weight"),
        ("submodule.weight", "submodule.weight"),
        ("fc.parametrizations.weight.original", "fc.weight"),
        ("fc.parametrizations.weight.original0", "fc.weight.original0"),
        ("parametrizations.weight.original1", "weight.original1"),
        ("fc.parametrizations.weight.0.scale", "fc.parametrizations.weight.0.scale"),
        ("original.weight", "original.weight"),
    ],
)
def test_plain_names(raw, plain):
    assert plain_name(raw) == plain


class Wrapper(nn.Module):
    """As DistributedDataParallel keeps its model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrapped_and_compiled_models_keep_their_plain_names():
    model = net()
    assert names(Wrapper(model), [sgd(model)]) == ["0.weight", "3.weight"]
    assert names(torch.compile(model, backend="eager"), [sgd(model)]) == ["0.weight", "3.weight"]
    assert names(Wrapper(torch.compile(Wrapper(model), backend="eager")), [sgd(model)]) == ["0.weight", "3.weight"]


def test_names_that_would_become_the_same_are_left_alone():
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    assert sorted(names(model)) == ["_orig_mod.module.weight", "module.weight"]


def test_a_tied_weight_is_watched_once_under_its_first_name():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    (only,) = find_watched(model, [sgd(model)], select=None, granularity="tensor")
    assert (only.name, only.aliases) == ("embed.weight", ("head.weight",))
    assert names(model, select=["head.weight"]) == ["embed.weight"]


def test_parametrised_weights():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 4))

    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    parametrize.register_parametrization(model[1], "weight", Doubled())
    assert names(model) == ["0.weight.original0", "0.weight.original1", "1.weight"]
    assert find_watched(model, [sgd(model)], select="1.weight", granularity="tensor")[0].param is (
        model[1].parametrizations.weight.original
    )


def test_frozen_tensors_are_left_out():
    model = net()
    model[0].weight.requires_grad_(False)
    assert names(model) == ["3.weight"]


def test_tensors_outside_the_model_have_a_name_by_their_place():
    model, extra = net(), nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([{"params": [model[3].weight]}, {"params": [extra]}], lr=0.1)
    assert names(model, [optimizer]) == ["3.weight", "optimizer0.group1.0"]


def test_several_optimizers_and_groups():
    model = net()
    first = torch.optim.SGD([{"params": [model[0].bias]}, {"params": [model[0].weight]}], lr=0.1)
    second = torch.optim.AdamW([model[3].weight])
    watched = find_watched(model, [first, second], select=None, granularity="tensor")
    assert [(tensor.name, tensor.optimizer, tensor.group) for tensor in watched] == [
        ("0.weight", 0, 1),
        ("3.weight", 1, 0),
    ]


def test_a_tensor_of_two_optimizers_has_two_names():
    model = net()
    watched = find_watched(model, [sgd(model), sgd(model[3])], select=None, granularity="row")
    watched_names = [name for tensor in watched for name in tensor.unit_names]
    assert len(set(watched_names)) == len(watched_names) == 4 + 2 + 2
    assert watched[-1].name == "3.weight (optimizer 1)"


# ---- selection


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("3.weight", ["3.weight"]),
        (["3.*"], ["3.weight", "3.bias"]),
        (["0.weight", "3.bias"], ["0.weight", "3.bias"]),
        (("*.weight",), ["0.weight", "1.weight", "3.weight"]),
        ((name for name in ["1.*"]), ["1.weight", "1.bias"]),
        (lambda name, param: param.ndim == 1 and name.startswith("3"), ["3.bias"]),
    ],
    ids=["name", "list", "names", "tuple", "generator", "function"],
)
def test_selection_by_name_pattern_and_function(select, expected):
    assert names(net(), select=select) == expected


def test_a_name_with_brackets_is_found():
    model = nn.ModuleDict({"block[0]": nn.Linear(2, 2), "block0": nn.Linear(2, 2)})
    assert names(model, select="block[0].weight") == ["block[0].weight", "block0.weight"]


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("3.wieght", "got select '3.wieght', which matches no parameter; there are: 3.weight"),
        (["0.weight", "layer9.*"], "got select 'layer9.*'"),
        ("3.WEIGHT", "got select '3.WEIGHT'"),
        ([3], "got 3 in select"),
        ([], "leaves nothing of 6 parameters to watch"),
        (lambda _name, _param: False, "leaves nothing of 6 parameters"),
    ],
    ids=["misspelt", "unknown pattern", "capitals", "number", "nothing", "function"],
)
def test_a_selection_of_nothing_raises(select, words):
    with pytest.raises(EquilibriaError, match=re.escape(words)):
        names(net(), select=select)


def test_an_optimizer_of_another_model_raises():
    with pytest.raises(EquilibriaError, match=r"none of the model's 6; expected the optimizer that trains this model"):
        names(net(), [sgd(net())])


def test_flattened_parameters_raise():
    class FlatParameter(nn.Parameter):
        """Of the name that FSDP1 gives it."""

    model = nn.Module()
    model.flat = FlatParameter(torch.ones(10))
    with pytest.raises(EquilibriaError, match=r"FSDP1.*use_orig_params=True, or fully_shard"):
        names(model, [torch.optim.SGD([model.flat], lr=0.1)])


# ---- rows


def rows_of(model: nn.Module) -> dict[str, tuple[int | None, int, int]]:
    watched = find_watched(model, [sgd(model)], select="*", granularity="row")
    return {tensor.name: (tensor.axis, tensor.units, tensor.entries) for tensor in watched}


def test_rows_are_outputs():
    assert rows_of(net()) == {
        "0.weight": (0, 4, 27),
        "0.bias": (None, 1, 4),
        "1.weight": (None, 1, 4),
        "1.bias": (None, 1, 4),
        "3.weight": (0, 2, 4),
        "3.bias": (None, 1, 2),
    }


def test_rows_of_transposed_convolutions_also_if_parametrised():
    plain, normalised = (nn.ConvTranspose2d(3, 5, 2, bias=False) for _ in range(2))
    model = nn.Sequential(plain, parametrizations.weight_norm(normalised, dim=1))
    assert rows_of(model) == {
        "0.weight": (1, 5, 12),
        "1.weight.original0": (1, 5, 1),
        "1.weight.original1": (1, 5, 12),
    }


def test_entries_are_real_numbers():
    model = nn.Linear(3, 4, dtype=torch.complex64)
    assert rows_of(model)["weight"] == (0, 4, 6)
    assert find_watched(model, [sgd(model)], select=None, granularity="tensor")[0].entries == 24


def test_units_are_named_by_their_row():
    model = nn.Linear(3, 2)
    (watched,) = find_watched(model, [sgd(model)], select=None, granularity="row")
    assert watched.unit_names == ["weight[0]", "weight[1]"]
    (whole,) = find_watched(model, [sgd(model)], select=None, granularity="tensor")
    assert whole.unit_names == ["weight"]


# ---- optimizers in wrappers


class Accelerated:
    """As trainers wrap an optimizer."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def test_wrapped_optimizers_are_unwrapped():
    inner = sgd(net())
    assert unwrap_optimizer(inner) is inner
    assert unwrap_optimizer(Accelerated(Accelerated(inner))) is inner


def test_an_optimizer_that_names_itself_is_found():
    inner = sgd(net())
    inner.optimizer = inner  # type: ignore[attr-defined]
    assert unwrap_optimizer(inner) is inner


@pytest.mark.parametrize(
    "thing", [None, "sgd", nn.Linear(2, 2), Accelerated(None)], ids=lambda thing: type(thing).__name__
)
def test_a_bad_optimizer_raises(thing):
    with pytest.raises(EquilibriaError, match=f"got optimizer of type {type(thing).__name__}"):
        unwrap_optimizer(thing)


# ---- granularity


class Mixture(nn.Module):
    """An embedding, three stacked experts, a convolution with a kernel of three axes, and a token of three axes."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.up = nn.Parameter(torch.zeros(experts, 4, 6))
        self.conv = nn.Conv1d(4, 2, 3)
        self.token = nn.Parameter(torch.zeros(1, 1, 4))


def units(granularity, model=None):
    model = model or Mixture()
    watched = find_watched(model, [sgd(model)], select=None, granularity=granularity)
    return {tensor.name: (tensor.axis, tensor.units, tensor.entries) for tensor in watched}


def test_stacked_matrices_count_as_so_many_tensors():
    whole = {"conv.weight": (None, 1, 24), "token": (None, 1, 4), "embedding.weight": (None, 1, 20)}
    assert units("tensor") == whole | {"up": (0, 3, 24)}
    assert units("tensor", Mixture(experts=65))["up"] == (None, 1, 65 * 24)
    assert units({"up": "tensor"})["up"] == (None, 1, 72)


def test_rows_of_named_tensors_are_watched_one_by_one_and_the_first_pattern_counts():
    assert units({"embedding.*": "row"})["embedding.weight"] == (0, 5, 4)
    assert units({"embedding.*": "row"})["conv.weight"] == (None, 1, 24)
    assert units({"conv.weight": "tensor", "*": "row"})["conv.weight"] == (None, 1, 24)
    assert units({"conv.weight": "tensor", "*": "row"})["embedding.weight"] == (0, 5, 4)


@pytest.mark.parametrize("granularity", ["rows", {"embedding.weight": "rows"}, {3: "row"}])
def test_another_granularity_raises(granularity):
    with pytest.raises(EquilibriaError, match="granularity"):
        checked_granularity(granularity)
