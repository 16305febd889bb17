"""The table of a watched run and the live line in the terminal."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from rich.console import Console
from tests.helpers.watched_worlds import column, make_net, train

import equilibria as eq
from equilibria.watching._status_line import StatusLine, status_text


def test_the_table_of_a_run(capsys):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    with eq.watch(net, optimizer, every=1) as monitor:
        assert str(monitor.table()).startswith("no samples yet")
        train(net, optimizer, 30)
        print(monitor.table())  # noqa: T201
        assert monitor.table()._repr_html_() == monitor._repr_html_()
    headline, table, details = capsys.readouterr().out.split("\n\n")[:3]
    assert headline.startswith("The 3 layers turn ") and " have a prediction; " in details
    assert {line.split()[0] for line in table.splitlines()[1:4]} == {"0", "4", "7"}


def test_the_report_of_a_run_knows_the_steps_after_the_last_sample(tmp_path):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    with eq.watch(net, optimizer, every=10) as monitor:
        train(net, optimizer, 37)
        page = monitor.report(tmp_path / "run.html").read_text()
    assert "steps 0 to 36" in page
    assert page.count("steps 0 to 30") == page.count("per step (steps 0 to 30)")  # of samples, in the headline


# ---- the live line


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=20)


def run_live(console, steps=8):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    with eq.watch(net, optimizer, every=1) as monitor, StatusLine(monitor, console=console).shown():
        train(net, optimizer, steps, after_step=lambda _: monitor.flush())
        assert monitor.failure is None
        yield monitor
    assert monitor._monitor._sinks == []
    assert column(monitor, "step", "0.weight") == list(range(steps))


def test_the_live_line_shows_samples():
    console = terminal()
    for _ in run_live(console):
        pass
    shown = console.file.getvalue()
    assert "step 0: 0 of 2 layers settled" in shown
    assert shown.endswith("\x1b[2K")  # it is wiped off in the end


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    console = Console(file=io.StringIO(), force_terminal=False)
    for monitor in run_live(console):
        assert monitor._monitor._sinks == []  # and nothing is done for it
    assert console.file.getvalue() == ""
    net = make_net()
    with eq.watch(net, torch.optim.SGD(net.parameters())) as monitor, monitor.live():
        sys.stdout.write("plain\n")
    assert capsys.readouterr() == ("plain\n", "")


def test_prints_to_a_file_stay_there(monkeypatch):
    """Standard output may be a file while standard error, where the line is, is a terminal."""
    out, console = io.StringIO(), terminal()
    monkeypatch.setattr(sys, "stdout", out)
    for _ in run_live(console):
        print("epoch 1: loss 0.5")  # noqa: T201
    assert out.getvalue() == "epoch 1: loss 0.5\n"
    assert "epoch 1" not in console.file.getvalue()
    assert sys.stdout is out


def test_prints_to_the_terminal_go_above_the_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out, console = Terminal(), terminal()
    monkeypatch.setattr(sys, "stdout", out)
    for _ in run_live(console):
        print("epoch 1: loss 0.5")  # noqa: T201
    assert "epoch 1: loss 0.5" in console.file.getvalue()
    assert sys.stdout is out


def test_an_error_in_the_training_leaves_the_terminal_in_order():
    console, before = terminal(), (sys.stdout, sys.stderr)
    net = make_net()
    monitor = eq.watch(net, torch.optim.SGD(net.parameters()))
    with pytest.raises(KeyError), monitor, StatusLine(monitor, console=console).shown():
        raise KeyError
    assert (sys.stdout, sys.stderr) == before
    assert monitor._monitor._sinks == []


def test_the_text_of_the_line():
    columns = {
        "step": [1234] * 4,
        "param": ["conv[/x]", "b", "c", "d"],
        "state": ["settled", "settling", "none", "disturbed"],
        "angle": [0.02, 0.01, float("nan"), None],
        "angle_predicted": [0.01, 0.0101, None, 0.1],
    }
    assert status_text(columns) == "step 1,234: 1 of 3 layers settled; conv[/x] turns 2.00x its prediction"
    nothing = {**columns, "angle": [None] * 4, "state": ["none"] * 4}
    assert status_text(nothing) == "step 1,234: 0 of 0 layers settled"


def test_a_line_longer_than_the_terminal_is_cut():
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=20)
    net = make_net()
    with eq.watch(net, torch.optim.SGD(net.parameters())) as monitor:
        line = StatusLine(monitor, console=console)
        with line.shown():
            line.append(
                {
                    "step": [1],
                    "param": ["name[/] " * 20],
                    "state": ["settled"],
                    "angle": [1.0],
                    "angle_predicted": [2.0],
                }
            )
        assert "…" in console.file.getvalue()
    assert "name[/] name[/] name" not in console.file.getvalue()
