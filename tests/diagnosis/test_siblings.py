"""Layers of one kind: found by name and shape, and those that are unlike the others."""

from __future__ import annotations

import dataclasses

import pytest
from tests.helpers.report_helpers import run, transformer_run

from equilibria.diagnosis.siblings import FEW_LAYERS, block_of, far_from_median, folded, kind_of, siblings
from equilibria.diagnosis.summary import summarise

(LAYER,) = summarise(run(1)[0], metadata=run(1)[1])


def layers(*names, shapes=None):
    shapes = shapes or [(64, 64)] * len(names)
    return [dataclasses.replace(LAYER, name=name, shape=shape) for name, shape in zip(names, shapes, strict=True)]


@pytest.mark.parametrize(
    ("name", "kind", "block"),
    [
        ("transformer.h.11.mlp.c_proj.weight", "transformer.h.*.mlp.c_proj.weight", "transformer.h.11"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.*.self_attn.q_proj.weight", "model.layers.0"),
        ("layer1.0.conv2.weight", "layer1.*.conv2.weight", "layer1.0"),
        ("layers.3.experts.17.up.weight", "layers.*.experts.*.up.weight", "layers.3"),
        ("stages.1.3.conv.weight", "stages.*.*.conv.weight", "stages.1.3"),
        ("stages.1.3.weight", "stages.*.*.weight", "stages.1.3"),
        ("layers.2.blocks.5.attn.qkv.weight", "layers.*.blocks.*.attn.qkv.weight", "layers.2.blocks.5"),
        ("h.3.mlp.2.weight", "h.*.mlp.2.weight", "h.3"),
        ("features.4.conv.1.0.weight", "features.*.conv.1.0.weight", "features.4"),
        ("layer_00.weight", "layer_*.weight", "layer_00"),
        ("net.block_7.attn.weight", "net.block_*.attn.weight", "net.block_7"),
        ("h.3.conv_1.weight", "h.*.conv_1.weight", "h.3"),
        ("0.weight", "*.weight", "0"),
        ("conv1.weight", "conv1.weight", None),
        ("encoder.lstm.weight_hh_l0", "encoder.lstm.weight_hh_l0", None),
        ("layer1.0.conv2.weight[12]", "layer1.0.conv2.weight[*]", "layer1.0"),
    ],
)
def test_kinds_and_blocks_are_read_off_the_names(name, kind, block):
    assert (kind_of(name), block_of(name)) == (kind, block)


def test_kinds_stand_where_their_first_layer_does():
    found = siblings(layers("wte", "h.0.a.w", "h.0.b.w", "h.1.a.w", "h.1.b.w", "head"))
    assert [row.kind for row in found] == ["wte", "h.*.a.w", "h.*.b.w", "head"]
    assert [member.name for member in found[1].members] == ["h.0.a.w", "h.1.a.w"]


def test_shapes_of_one_kind_are_analogous():
    """The width may change from block to block; the number of axes and the kernel may not."""
    names = [f"blocks.{block}.conv.weight" for block in range(4)]
    shapes = [(64, 3, 3, 3), (128, 64, 3, 3), (128, 128, 1, 1), (64, 64)]
    assert [len(row.members) for row in siblings(layers(*names, shapes=shapes))] == [2, 1, 1]


def test_a_plain_sequence_has_kinds_of_one_shape_with_names_of_their_own():
    names = [f"features.{place}.weight" for place in (0, 3, 6, 9, 12)]
    shapes = [(64, 32), (64, 64), (64, 64), (10, 64), (10, 64)]
    found = siblings(layers(*names, shapes=shapes))
    assert [row.kind for row in found] == [
        "features.0.weight",
        "features.*.weight (64 x 64)",
        "features.*.weight (10 x 64)",
    ]


def test_few_layers_are_not_folded_and_many_are():
    names = [f"h.{block}.{kind}.weight" for block in range(4) for kind in "abc"]
    assert len(names) == FEW_LAYERS
    assert [row.kind for row in folded(layers(*names))] == names
    many = folded(layers(*names, "lm_head.weight"))
    assert [(row.kind, len(row.members)) for row in many] == [
        *((f"h.*.{kind}.weight", 4) for kind in "abc"),
        ("lm_head.weight", 1),
    ]


def test_two_of_a_kind_keep_their_rows_and_the_order_of_the_model():
    names = [f"h.{block}.{kind}.weight" for block in range(2) for kind in "abcdefg"]
    assert [row.kind for row in folded(layers(*names))] == names


@pytest.mark.parametrize(
    ("values", "unlike"),
    [
        ([1, 1, 1, 2.1], {"3": 2.1}),
        ([1, 1, 1, 0.4], {"3": 0.4}),
        ([1, 1, 1, 0], {"3": 0}),
        ([1, 1, 1, 1.45], {}),  # less than the factor
        ([0.5, 0.7, 1, 1.4, 2, 2.8], {}),  # spread evenly over a wide range: no one is unlike the others
        ([1, 3], {}),
        ([0, 0, 0, 1], {}),
    ],
)
def test_unlike_is_a_factor_against_the_median_beyond_the_usual_distance(values, unlike):
    found = far_from_median({str(place): value for place, value in enumerate(values)})
    assert found == pytest.approx(unlike)


def test_the_summaries_of_a_run_know_what_siblings_need():
    samples, metadata = transformer_run(3)
    layer = summarise(samples, metadata=metadata)[2]
    assert (layer.shape, layer.recorded_from, layer.first_norm) == ((64, 64), 0, 10.0)
    assert layer.norm == pytest.approx(12.0)
    angles = [row["angle"] for row in samples.to_pylist() if row["param"] == layer.name]
    assert layer.angle_over_run == pytest.approx((sum(angle**2 for angle in angles) / len(angles)) ** 0.5)
