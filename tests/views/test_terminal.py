"""The chart in plain characters: what its axis shows, and what it leaves out."""

from __future__ import annotations

from equilibria.views.terminal import chart


def axis(lines: list[str]) -> list[float]:
    """The numbers written beside the vertical axis."""
    return [float(line.split("┤")[0]) for line in lines if "┤" in line]


def columns_with(lines: list[str], mark: str) -> int:
    """How many columns of the plot hold the mark."""
    cells = [line[15:] for line in lines if line[14:15] in "┤│"]
    return sum(mark in column for column in zip(*(row.ljust(100) for row in cells), strict=True))


def test_the_axis_goes_down_three_decades_and_no_further():
    """A fall over six decades: the lower half of it is left out, instead of flattening the rest."""
    x = list(range(601))
    lines = chart(x, [("*", [10 ** (-step / 100) for step in x])], columns=60)
    labels = axis(lines)
    assert max(labels) == 1 and min(labels) == 1e-3
    assert columns_with(lines, "*") == 30


def test_a_fall_over_less_is_shown_whole():
    x = list(range(201))
    lines = chart(x, [("*", [10 ** (-step / 100) for step in x])], columns=60)
    assert min(axis(lines)) == 0.01
    assert columns_with(lines, "*") == 60
