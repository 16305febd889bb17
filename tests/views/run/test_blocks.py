"""Block by block: one line per kind of tensor, a point per block."""

from __future__ import annotations

import dataclasses
import re

from tests.helpers.report_helpers import run, transformer_run

from equilibria.diagnosis.summary import summarise
from equilibria.views.run.blocks import block_section


def test_every_kind_is_a_line_with_a_point_per_block():
    samples, metadata = transformer_run(5)
    layers = [
        dataclasses.replace(layer, relative_update=layer.angle, gain=20.0 + place, update_per_entry=None)
        for place, layer in enumerate(summarise(samples, metadata=metadata))
    ]
    section = block_section(layers)
    ratio, gain = section.split("</svg>")[:2]
    for picture, words in ((ratio, "update ratio"), (gain, "growth gain G")):
        assert words in picture
        assert len(re.findall("<polyline", picture)) == 4 and len(re.findall("<circle", picture)) == 4 * 5
    assert "attn.c_attn" in ratio and "wte" not in section
    heights = {float(down) for down in re.findall(r'cy="([\d.]+)"', gain)}
    assert len(heights) == 20  # every gain is another


def test_a_network_without_blocks_has_no_section():
    samples, metadata = run(1)
    assert block_section(summarise(samples, metadata=metadata)) == ""
    assert block_section(()) == ""


def test_a_legend_of_many_kinds_takes_more_rows():
    samples, metadata = transformer_run(3)
    layers = [
        dataclasses.replace(layer, relative_update=layer.angle) for layer in summarise(samples, metadata=metadata)
    ]
    long = [dataclasses.replace(layer, name=layer.name.replace("attn", "a_rather_long_name" * 2)) for layer in layers]
    few, many = (float(re.search(r'<svg viewBox="0 0 \d+ (\d+)"', block_section(some))[1]) for some in (layers, long))
    assert many > few
