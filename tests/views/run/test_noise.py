"""The table of gradient noise, and its section in a report."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.diagnosis.noise import GradientNoise, LayerNoise
from equilibria.views.run.noise import noise_section, noise_table

TURNING = {1: 1.0, 2: 0.9, 16: 0.45, 1024: 0.06}
CONV = LayerNoise("conv", 2000, 4000, 0.115, 0.01, 7.7, 4.2, 0.3, 0.23, "", "", TURNING)
HEAD = LayerNoise("head", 2000, 4000, 0.2, 0.1, 4.0, 1.5, 1.0, 0.4, "its standard error is 50 %", "few", {})
ALL = LayerNoise("network", 2000, 4000, 0.12, 0.01, 7.3, doubt="", curvature_doubt="see layers")


def test_a_line_for_the_network_and_every_layer():
    table = noise_table(GradientNoise((CONV, HEAD), ALL, 64))
    lines = table.text.splitlines()
    assert lines[1].split() == ["layer", "gradient", "scale", *["curvature"] * 2, *["independent"] * 2]
    assert lines[2].split()[:5] == ["network", "12", "%", "±", "1"]
    assert "493" in lines[3]
    assert "0.45" in lines[3]
    assert "256?" in lines[4]
    assert max(map(len, lines[:5])) <= 80
    assert "- steps 2,000-4,000, batch 64" in table.text
    assert "? noise scale of head: its standard error is 50 %" in table.text
    assert "<svg" in table.html


def test_without_a_batch_size_it_is_a_ratio():
    text = noise_table(GradientNoise((CONV,), ALL, None)).text
    assert "÷ batch" in text
    assert "7.7" in text


def test_the_section_has_the_chart_and_the_table():
    section = noise_section(GradientNoise((CONV, HEAD), ALL, 64))
    assert section.count('<div class="picture"><svg') == section.count("<svg") == 1  # phones scroll only the picture
    assert "<td>493</td>" in section
    assert section.startswith('<section aria-labelledby="noise-heading">')
    assert section.endswith("</section>")


def test_nothing_measured_is_no_section():
    assert noise_section(GradientNoise((LayerNoise("a"),), LayerNoise("network"), None)) == ""


@pytest.mark.parametrize("steps", [0, 400])
def test_a_report_is_written_with_and_without_samples(tmp_path, steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eq.watch(model, optimizer, every=1, log_dir=tmp_path / "run") as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        page = monitor.report(tmp_path / "page.html").read_text()
    assert ('id="noise-heading"' in page) == (steps > 0)
    assert eq.read_run(tmp_path / "run").report(tmp_path / "again.html").exists()
