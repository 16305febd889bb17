"""Figures: y-axes say their quantity, legends lie outside the data, and a difference is drawn seed by seed."""

from __future__ import annotations

import numpy as np
import pytest

from equilibria.lab.harness import figures
from equilibria.lab.harness.figures import COLOURS, draw_over, label_panel, panels


@pytest.mark.parametrize(
    ("text", "given", "title", "ylabel"),
    [
        ("test accuracy, %", {}, "(a)", "test accuracy, %"),
        ("SGD: angle, rad", {}, "(a) SGD", "angle, rad"),
        ("SGD: both trainings", {"ylabel": "loss"}, "(a) SGD: both trainings", "loss"),
        ("bars", {"ylabel": ""}, "(a) bars", ""),
        ("training loss above its minimum, nats", {}, "(a)", "training loss above its\nminimum, nats"),
    ],
)
def test_a_panel_without_a_label_takes_its_text_for_the_y_axis(text, given, title, ylabel):
    _, (axes,) = panels(1, 1)
    label_panel(axes, "a", text, **given)
    assert (axes.get_title(loc="left"), axes.get_ylabel()) == (title, ylabel)


def drawn(tmp_path, monkeypatch, *, labels, colours):
    """A saved figure of two panels, a line and a legend in each; its panels and all its legends, in pixels."""
    monkeypatch.setattr(figures, "SUFFIXES", ("png",))
    figure, axes = panels(1, 2, width=2.5, height=2.0)
    height = figure.get_figheight()
    for panel, label, colour in zip(axes, labels, colours, strict=True):
        panel.plot([0, 1], [0, 1], color=colour, label=label)
        label_panel(panel, "a", "y", xlabel="x", legend=True)
    with figures.style():
        figures.save(figure, tmp_path, "figure")
    assert figure.get_figheight() > height
    legends = [*figure.legends, *(panel.get_legend() for panel in axes if panel.get_legend() is not None)]
    boxes = [legend.get_window_extent() for legend in legends]
    return [panel.get_window_extent() for panel in axes], boxes, figure


@pytest.mark.parametrize(
    ("labels", "colours", "count"),
    [
        (("law", "law"), (COLOURS[0], COLOURS[0]), 1),
        (("law", "walk"), (COLOURS[0], COLOURS[1]), 1),
        (("law", "law"), (COLOURS[0], COLOURS[1]), 2),
        (("law", "walk"), (COLOURS[0], COLOURS[0]), 2),
    ],
    ids=["the same twice", "two entries", "one name, two looks", "one look, two names"],
)
def test_legends_are_outside_the_data_and_one_where_no_entry_is_ambiguous(
    tmp_path, monkeypatch, labels, colours, count
):
    shown, legends, figure = drawn(tmp_path, monkeypatch, labels=labels, colours=colours)
    assert len(legends) == count
    for legend in legends:
        assert legend.x0 >= 0 and legend.y0 >= 0 and legend.x1 <= figure.bbox.x1
        assert not any(legend.overlaps(panel) for panel in shown)


def test_a_difference_is_taken_seed_by_seed():
    step = np.arange(3.0)
    base = [{"step": step, "loss": step + seed} for seed in range(3)]
    other = [{"step": step, "loss": step + seed + 0.5} for seed in range(3)]
    _, (axes,) = panels(1, 1)
    draw_over(axes, {"other": other}, "loss", less=base)
    curves = [line.get_ydata() for line in axes.lines[:4]]
    np.testing.assert_allclose(curves, 0.5 * np.ones((4, 3)))  # of every seed, and their mean
