"""Models of the transformers library with random weights, against symmetries derived by hand."""

from __future__ import annotations

import os

import pytest
import torch
from tests.helpers.scaling import assert_same_space, change_when_scaled
from tests.helpers.small_nets import against, one, pair
from torch.nn import functional

from equilibria.control import split_decay
from equilibria.objectives._objective import objective
from equilibria.symmetry import symmetries

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

TOKENS = 40


def search(model, inputs, targets, **options):
    def loss(output, target):
        return functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())

    return symmetries(objective(model, loss), [(inputs, targets)], **options)


def check(model, sym, inputs, truth):
    """The space is the one derived by hand, and each vector of that passes scaling by hand."""
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    assert_same_space(sym.basis, truth, list(sym.elements))
    assert sym.notes == ()
    for vector in truth:
        change = change_when_scaled(model, lambda network: network(inputs).logits, vector)
        assert change < 1e-4, vector  # these models step down to float32 inside
    sizes = {
        name: change_when_scaled(model, lambda network: network(inputs).logits, one(name)) for name in sym.elements
    }
    free = {*sym.alone, *sym.no_effect}
    assert {name for name, change in sizes.items() if change < 1e-4} == free


def tokens():
    torch.manual_seed(0)
    return torch.randint(TOKENS, (12, 6)), torch.randint(TOKENS, (12, 6))


def test_gpt2():
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    inputs, targets = tokens()
    sym = search(model, inputs, targets)
    root, layers = "transformer", ["transformer.h.0", "transformer.h.1"]
    written = [
        f"{layer}.{part}.c_proj.{kind}" for layer in layers for part in ("attn", "mlp") for kind in ("weight", "bias")
    ]
    # The stream with all that writes into it; its embedding is also the head, whose scale the last norm takes back.
    stream = against(
        one(f"{root}.wte.weight", f"{root}.wpe.weight", *written), f"{root}.ln_f.weight", f"{root}.ln_f.bias"
    )
    truth = [stream]
    for layer in layers:
        truth.append(against(pair(f"{layer}.ln_1"), f"{layer}.attn.c_attn.weight"))
        truth.append(against(pair(f"{layer}.ln_2"), f"{layer}.mlp.c_fc.weight"))
    check(model, sym, inputs, truth)
    assert sym.alone == ()


def test_a_tied_qwen3_that_returns_its_loss_has_one_reason_per_kind_of_layer():
    config = transformers.Qwen3Config(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    inputs, _ = tokens()
    sym = symmetries(objective(model), [{"input_ids": inputs, "labels": inputs}])
    assert sym.notes == () and sym.gap > 1e6
    assert set(sym.alone) == {f"model.layers.{i}.self_attn.{part}_proj.weight" for i in (0, 1) for part in "qk"}
    split = split_decay(model, weight_decay=0.1, invariant=sym)
    reasons = split.decayed | split.kept
    first = {name: reason for name, reason in reasons.items() if ".layers.0." in name}
    assert len(first) == 11
    in_second = {name: reasons[name.replace(".layers.0.", ".layers.1.")] for name in first}
    assert {name: reason.replace(".layers.0.", ".layers.1.") for name, reason in first.items()} == in_second


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing():
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    inputs, targets = tokens()
    expected = search(model, inputs, targets)
    model.gradient_checkpointing_enable()
    sym = search(model, inputs, targets)
    assert (sym.how, sym.notes) == (expected.how, expected.notes)


@pytest.mark.slow
def test_llama_like_with_qk_norm():
    config = transformers.Qwen3Config(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    inputs, targets = tokens()
    sym = search(model, inputs, targets)
    layers = ["model.layers.0", "model.layers.1"]
    written = [f"{layer}.{part}.weight" for layer in layers for part in ("self_attn.o_proj", "mlp.down_proj")]
    truth = [one("model.embed_tokens.weight", *written), {"model.norm.weight": 1, "lm_head.weight": -1}]
    for layer in layers:
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        truth += [
            one(f"{attention}.q_proj.weight"),
            one(f"{attention}.k_proj.weight"),
            {f"{attention}.q_norm.weight": 1, f"{attention}.k_norm.weight": -1},
            {f"{attention}.v_proj.weight": 1, f"{attention}.o_proj.weight": -1},
            {f"{layer}.input_layernorm.weight": 1, f"{attention}.v_proj.weight": -1},
            {f"{mlp}.up_proj.weight": 1, f"{mlp}.down_proj.weight": -1},
            against(
                one(f"{layer}.post_attention_layernorm.weight"), f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"
            ),
        ]
    check(model, sym, inputs, truth)
    assert sym.how["model.layers.0.self_attn.q_proj.weight"] == "groups of 4 rows"  # one head


def images(side):
    torch.manual_seed(0)
    return torch.randn(12, 3, side, side), torch.randint(5, (12,))


@pytest.mark.slow
def test_resnet():
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[2, 1], layer_type="basic", num_labels=5
    )
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(config)
    inputs, targets = images(16)
    sym = search(model, inputs, targets)
    stem, stages = "resnet.embedder.embedder", "resnet.encoder.stages"
    blocks = [f"{stages}.0.layers.0", f"{stages}.0.layers.1", f"{stages}.1.layers.0"]
    convs = [stem, *(f"{block}.layer.{index}" for block in blocks for index in (0, 1)), f"{blocks[2]}.shortcut"]
    norms = [f"{block}.layer.{{}}.normalization" for block in blocks]
    last = {**pair(norms[2].format(1)), **pair(f"{blocks[2]}.shortcut.normalization")}
    truth = [
        *(one(f"{conv}.convolution.weight") for conv in convs),
        *(pair(norm.format(0)) for norm in norms),
        {**pair(f"{stem}.normalization"), **pair(norms[0].format(1)), **pair(norms[1].format(1))},
        against(last, "classifier.1.weight"),
    ]
    check(model, sym, inputs, truth)


@pytest.mark.slow
def test_mobilenet_v2():
    """Its stem, streams of two, two and one blocks, and its last convolution; all narrow ends have 4 channels."""
    config = transformers.MobileNetV2Config(depth_multiplier=0.02, min_depth=4, depth_divisible_by=4, num_labels=5)
    torch.manual_seed(0)
    model = transformers.MobileNetV2ForImageClassification(config)
    layers = model.mobilenet_v2.layer
    model.mobilenet_v2.layer = torch.nn.ModuleList([layers[index] for index in (0, 1, 2, 3, 15)])
    inputs, targets = images(24)  # several pixels at the end: one would leave a depthwise convolution only its sign
    sym = search(model, inputs, targets, samples=6)
    # Every convolution stands before a BatchNorm. ReLU6 is not homogeneous: no scale and shift in front of it. The
    # narrow ends of the blocks have no activation: their shifts vanish in the next normalisation, their scales may
    # change together along a stream of residual blocks.
    convs = [name for name in sym.elements if name.endswith("convolution.weight")]
    narrow = [f"mobilenet_v2.layer.{index}.reduce_1x1.normalization" for index in range(5)]
    stem = "mobilenet_v2.conv_stem.reduce_1x1.normalization"
    shifts = [f"{stem}.bias", *(f"{name}.bias" for name in narrow)]
    streams = [(0, 1), (2, 3), (4,)]
    truth = [
        *(one(name) for name in (*convs, *shifts, f"{stem}.weight")),
        *(one(*(f"{narrow[index]}.weight" for index in stream)) for stream in streams),
    ]
    assert_same_space(sym.basis, truth, list(sym.elements))
    assert set(sym.no_effect) == set(shifts)
    for vector in truth[-4:]:
        assert change_when_scaled(model, lambda network: network(inputs.double()).logits, vector) < 1e-6
