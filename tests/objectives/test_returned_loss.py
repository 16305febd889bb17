"""Models that return their loss, as those of transformers do: `objective(model)` finds it in the output."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.curvature import sharpness
from equilibria.errors import EquilibriaError
from equilibria.objectives import objective
from equilibria.symmetry import symmetries


class ModelOutput(OrderedDict):
    """As transformers' class of this name: keys are attributes, entries that are None are left out."""

    def __init__(self, **entries):
        super().__init__({key: value for key, value in entries.items() if value is not None})
        vars(self).update(entries)


@dataclass
class PlainOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None


FORMS = {
    "model output": lambda loss, logits: ModelOutput(loss=loss, logits=logits),
    "object": lambda loss, logits: PlainOutput(logits, loss),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "dict without logits": lambda loss, logits: {"loss": loss, "scores": logits, "labels": None},
    "loss first": lambda loss, logits: (loss, logits),
    "loss last": lambda loss, logits: (logits, loss),  # as nanoGPT has it
    "scalar": lambda loss, logits: loss,
    "vector of one": lambda loss, logits: loss.reshape(1),
}


class Classifier(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)
        self.form = FORMS[form]

    def forward(self, inputs, labels=None):
        logits = self.head(self.body(inputs))
        return self.form(None if labels is None else functional.cross_entropy(logits, labels), logits)


def data(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def reference(form: str):
    """The same network with the loss taken from outside."""
    net = Classifier(form)
    return objective(nn.Sequential(OrderedDict(body=net.body, head=net.head)), functional.cross_entropy)


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_found_in_every_form_of_output(form):
    inputs, labels = data()
    value, grads = objective(Classifier(form)).value_and_grad({"inputs": inputs, "labels": labels})
    expected, truth = reference(form).value_and_grad((inputs, labels))
    assert torch.equal(value, expected)
    assert [grad.tolist() for grad in grads.values()] == [grad.tolist() for grad in truth.values()]


def test_a_batch_is_a_dict_a_tuple_or_the_result_of_unpack():
    inputs, labels = data()
    returned = objective(Classifier("model output"))
    keywords = returned({}, {"inputs": inputs, "labels": labels})
    unpacked = objective(Classifier("model output"), unpack=lambda row: {"inputs": row["x"], "labels": row["y"]})
    assert returned({}, (inputs, labels)) == returned({}, [inputs, labels]) == keywords
    assert unpacked({}, {"x": inputs, "y": labels}) == keywords
    assert returned.split((inputs, labels)) == ((inputs, labels), None)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_do_not_include_the_loss(form):
    inputs, labels = data()
    outputs = objective(Classifier(form)).outputs({}, (inputs, labels))
    if form in ("scalar", "vector of one"):
        assert outputs is None
    else:
        assert torch.equal(outputs, reference(form).outputs({}, (inputs, labels)))


@pytest.mark.parametrize("form", ["model output", "loss last", "scalar"])
def test_double_is_the_same_loss_in_float64(form):
    inputs, labels = data()
    returned = objective(Classifier(form))
    value, grads = returned.double().value_and_grad((inputs, labels))
    assert value.dtype == torch.float64
    assert {grad.dtype for grad in grads.values()} == {torch.float64}
    assert value.item() == pytest.approx(returned({}, (inputs, labels)).item(), rel=1e-6)


@pytest.mark.parametrize("form", ["model output", "loss last", "scalar"])
def test_symmetries_and_sharpness_are_those_of_the_loss_from_outside(form):
    inputs, labels = data()
    returned, outside = objective(Classifier(form)), reference(form)
    batches = [{"inputs": inputs, "labels": labels}]
    result, expected = symmetries(returned, batches), symmetries(outside, [(inputs, labels)])
    assert result.how == expected.how
    value, truth = sharpness(returned, (inputs, labels)), sharpness(outside, (inputs, labels))
    assert value.value == pytest.approx(truth.value, rel=1e-4)


class Returns(nn.Module):
    """A model whose output is computed by a function of its parameter."""

    def __init__(self, make) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(3)), make

    def forward(self, inputs):
        return self.make(self.weight * inputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: w, r"got a tensor of shape \(3,\) as loss; expected a tensor with one number"),
        (
            lambda w: (w, w),
            r"a tuple with 0 scalars among 2 entries, a tuple of tensor \(3,\), tensor \(3,\); expected exactly one",
        ),
        (lambda w: (w.sum(), w.mean()), "returns a tuple with 2 scalars among 2 entries, .*; expected exactly one"),
        (lambda w: {"logits": w}, "returns a dict with keys logits whose loss is None; .*give the model labels"),
        (lambda w: {"loss": 3.0}, "whose loss is 3.0; expected a scalar"),
        (lambda w: PlainOutput(w, None), "returns a PlainOutput whose loss is None; .*or pass loss="),
        (lambda w: {"loss": w}, r"got a tensor of shape \(3,\) as loss"),
        (lambda w: 3.0, "returns a float whose loss is None"),
        (lambda w: None, "returns a NoneType whose loss is None"),
    ],
)
def test_a_model_without_a_loss_raises(make, message):
    with pytest.raises(EquilibriaError, match=message) as caught:
        objective(Returns(make))({}, torch.ones(3))
    assert caught.value.argument == "loss"


# ---- the README's form, on models as people write them


class TiedGPT(nn.Module):
    """nanoGPT's shape: token and position embeddings, pre-norm blocks, tied head, (logits, loss)."""

    def __init__(self, tokens: int = 11, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(tokens, width), nn.Embedding(6, width)
        self.ln, self.fc, self.proj = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        features = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        features = features + self.proj(functional.gelu(self.fc(self.ln(features))))
        if targets is None:
            return self.head(self.ln_f(features[:, [-1]])), None
        logits = self.head(self.ln_f(features))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(11, (12, 6), generator=generator), torch.randint(11, (12, 6), generator=generator)


def test_symmetries_of_a_tied_gpt_that_returns_its_loss():
    sym = symmetries(objective(TiedGPT()), [token_batch()])
    assert sym.notes == () and sym.gap > 1e6
    assert "head.weight" not in sym.elements  # it is the embedding
    assert sym.how["fc.weight"] == "against ln.weight, ln.bias"
    assert set(sym.jointly["wte.weight"]) >= {"wte.weight", "wpe.weight", "proj.weight", "proj.bias"}


def test_a_loss_beside_a_model_that_returns_its_own_is_an_error_that_says_so():
    tokens = token_batch()
    with pytest.raises(
        EquilibriaError, match=r"returns a tuple of tensor \(8, 1, 11\), NoneType, which loss= does not"
    ) as e:
        symmetries(objective(TiedGPT(), functional.cross_entropy), [tokens])
    assert "expected objective(model), without a loss, if the model returns its loss" in str(e.value)
    assert e.value.argument == "loss"


def test_a_loss_that_fails_on_a_tensor_keeps_its_own_error():
    inputs, labels = data()
    net = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="batch_size"):
        objective(net, functional.cross_entropy)({}, (inputs, labels[:5]))


@pytest.mark.parametrize(
    ("make", "batch", "words"),
    [
        (lambda: objective(nn.Linear(4, 3)), data(), "because no loss is given; pass loss= if batches are"),
        (lambda: objective(Classifier("scalar")), {"x": data()[0]}, r"got a dict with keys x as the model's input"),
        (
            lambda: objective(nn.Linear(4, 3), functional.cross_entropy),
            ((data()[0], data()[0]), data()[1]),
            r"got a tuple of tensor \(24, 4\), tensor \(24, 4\) as the model's input, with which Linear cannot be",
        ),
    ],
    ids=["a pair without a loss", "a wrong keyword", "too many inputs"],
)
def test_a_batch_that_the_model_does_not_take_is_an_error_that_shows_it(make, batch, words):
    with pytest.raises(EquilibriaError, match=words):
        make()({}, batch)


def test_a_type_error_inside_the_model_is_not_taken_for_a_wrong_batch():
    with pytest.raises(TypeError, match="unsupported operand"):
        objective(Returns(lambda w: w + None))({}, torch.ones(3))
