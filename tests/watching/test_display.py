"""The table and the live line in the terminal."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest
import torch
from rich.console import Console
from tests.helpers.watched_worlds import column, make_net, train

import equilibria as eq
from equilibria.diagnosis.summary import LayerSummary
from equilibria.findings import Finding
from equilibria.views.run.terminal import print_table
from equilibria.watching._status_line import StatusLine, status_text

LAYER = LayerSummary(
    name="layer3.5.conv2.weight",
    samples=20,
    last_step=99,
    angle=0.0103456,
    angle_predicted=0.0073,
    angle_equilibrium=0.00725,
    angle_vs_predicted=1.417,
    angle_vs_equilibrium=1.43,
    norm=1.23456,
    norm_predicted=1.2,
    norm_equilibrium=1.7,
    norm_vs_predicted=1.03,
    norm_vs_equilibrium=0.72,
    cosine=1e-5,
    invariant=True,
    state="settling",
    steps_to_settle=2099.2,
    epochs_to_settle=5.37,
    lr=0.1,
    weight_decay=5e-4,
    momentum=0.9,
    settings="SGD(lr=0.1, wd=0.0005, momentum=0.9)",
    no_law=None,
    how_wrong=0.35,
)
OTHERS = {
    "layer1.0.conv1.weight": {"state": "settled", "how_wrong": 0.01, "angle_vs_predicted": 1.01},
    "layer1.0.conv2.weight": {"state": "disturbed", "how_wrong": 0.02, "epochs_to_settle": None, "angle": 7.25e-5},
    "fc.weight": {
        "invariant": False,
        "state": "none",
        "how_wrong": None,
        "angle_predicted": None,
        "angle_vs_predicted": None,
        "norm_equilibrium": None,
        "steps_to_settle": None,
    },
    "embed.weight": {"no_law": "no law for RMSprop", "state": "none", "how_wrong": None},
    "free.weight": {"state": "none", "weight_decay": 0.0, "how_wrong": 0.0, "steps_to_settle": None},
}
LAYERS = [LAYER, *(dataclasses.replace(LAYER, name=name, **changes) for name, changes in OTHERS.items())]


def printed(width, layers=LAYERS, **more):
    out = io.StringIO()
    print_table(layers, console=Console(file=out, width=width), **more)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if layers and "findings" not in more:  # what is said then is tested by itself
        lines = lines[: next(at for at, line in enumerate(lines) if line.startswith("- "))]
    below_headline = next((at for at, line in enumerate(lines) if line.startswith("layer ")), 0)
    return [line for line in lines[below_headline:] if line]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_one_line_per_layer_that_fits(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    names = [line.split()[0] for line in lines]
    assert names[:7] == [
        "layer",
        "layer3.5.conv2",
        "layer1.0.conv2",
        "layer1.0.conv1",
        "free",
        *sorted(names[5:7], key=["fc", "embed"].index),
    ]
    assert len(lines) == 8 + (width >= 80)  # nothing was folded; below is a legend, where there is room
    states = ["settling", "disturbed", "settled", "no decay", "not invariant", "no law"]
    assert all(line.endswith(state) for line, state in zip(lines[1:7], states, strict=True))


def test_the_numbers_at_80_columns():
    lines = printed(80)
    assert lines[0].split() == ["layer", "rad/step", "theory", "ratio", "norm", "goal", "ep.", "left", "state"]
    assert lines[1].split() == ["layer3.5.conv2", "0.0103", "0.0073", "1.42", "1.23", "1.7", "5.4", "settling"]
    assert lines[2].split() == ["layer1.0.conv2", "7.25e-05", "0.0073", "1.42", "1.23", "1.7", "2,100", "disturbed"]
    assert lines[3].split() == ["layer1.0.conv1", "0.0103", "0.0073", "1.01", "1.23", "1.7", "settled"]
    assert lines[5].split() == ["fc", "0.0103", "1.23", "not", "invariant"]


def test_names_that_are_no_weights_are_shown_in_full_and_long_ones_are_folded_not_cut():
    rows = [dataclasses.replace(LAYER, name=name) for name in ("conv.weight", "lstm.weight_hh_l0", "conv.weight[12]")]
    assert [line.split()[0] for line in printed(80, rows)[1:4]] == [row.name for row in rows]
    long = dataclasses.replace(LAYER, name="encoder.transformer.blocks.11.attention.output.dense.weight")
    lines = printed(60, [long])
    assert "".join(line.split()[0] for line in lines[1:-1]) == long.name.removesuffix(".weight")


HOWS = {
    "transformer.h.0.attn.c_attn.weight": "jointly with transformer.h.0.ln_1.weight, lm_head.weight and 6 more",
    "transformer.h.0.mlp.c_fc.weight": "jointly with transformer.h.0.mlp.c_fc.bias and against lm_head.weight",
    "transformer.h.0.mlp.c_proj.weight": "against transformer.h.0.mlp.c_fc.weight, transformer.h.0.mlp.c_fc.bias",
    "transformer.h.0.attn.bias.weight": "no effect",
    "lm_head.weight": "no",
    "conv.weight": "rows",
}


@pytest.mark.parametrize("width", [80, 100])
def test_partners_are_counted_and_names_are_not_folded(width):
    """Columns are left out instead; the state does not contradict what is said beside it."""
    free = {name: how for name, how in HOWS.items() if how != "rows"}
    rows = [dataclasses.replace(LAYER, name=name, how=how, invariant=False) for name, how in free.items()]
    lines = printed(width, [*rows, dataclasses.replace(LAYER, name="conv.weight", how="rows")])
    assert max(map(len, lines)) <= width
    shown = {line.split()[0]: " ".join(line.split()[-4:]) for line in lines[1:7]}
    assert shown.keys() == {name.removesuffix(".weight") for name in HOWS}
    assert shown["transformer.h.0.attn.c_attn"].endswith("not alone jointly (9)")
    assert shown["transformer.h.0.mlp.c_fc"].endswith("not alone against (3)")
    assert shown["transformer.h.0.mlp.c_proj"].endswith("not alone against (3)")
    assert shown["transformer.h.0.attn.bias"].endswith("no effect no effect")
    assert shown["lm_head"].endswith("not invariant no")
    assert shown["conv"].endswith("settling rows")
    assert "jointly (n): n may be scaled together" in " ".join(lines[7:])


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0.0, "1.7"), (0.2, "1"), (999.5, "1,000"), (9999, "9,999"), (12345, "12.3k"), (3.21e6, "3.21M"), (1e10, "10G")],
)
def test_long_times_are_short(steps, text):
    (line,) = printed(80, [dataclasses.replace(LAYER, steps_to_settle=steps, epochs_to_settle=None)])[1:2]
    assert line.split()[-2] == text


def test_findings_are_sentences_below():
    findings = [
        Finding("warning", "conv [a]", "is [bold]not[/bold] right " * 5, "change [x] it", "law"),
        Finding("note", "all", "is well", "", ""),
    ]
    lines = printed(60, findings=findings)
    assert "! conv [a]: is [bold]not[/bold] right is [bold]not[/bold]" in lines
    assert "  change [x] it" in lines
    assert lines[-1] == "- all: is well"
    assert max(map(len, lines)) <= 60


def test_without_findings_a_sentence_says_what_that_means():
    settled = dataclasses.replace(LAYER, angle_vs_predicted=1.01, how_wrong=0.01, samples=50)
    assert printed(80, [settled], findings=())[-1] == "- Nothing to change: Nothing about this run calls for a change."


def test_columns_without_a_number_are_left_out_with_their_legend():
    nothing = ("angle_predicted", "angle_vs_predicted", "angle_equilibrium", "norm_equilibrium", "steps_to_settle")
    bare = dataclasses.replace(LAYER, invariant=False, how_wrong=None, **dict.fromkeys((*nothing, "epochs_to_settle")))
    lines = printed(100, [bare])
    assert lines[0].split() == ["layer", "rad/step", "norm", "state"]
    assert len(lines) == 3 and lines[2].startswith("root mean square of"), "no legend"


def test_before_the_first_sample():
    said = " ".join(printed(80, []))
    assert said.startswith(
        "no samples yet: train a few steps first; or the watched optimizer is not the one that steps"
    )


def test_the_table_of_a_run(capsys):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    with eq.watch(net, optimizer, every=1) as monitor:
        assert str(monitor.table()).startswith("no samples yet")
        train(net, optimizer, 30)
        print(monitor.table())  # noqa: T201
        assert monitor.table()._repr_html_() == monitor._repr_html_()
    headline, table = capsys.readouterr().out.split("\n\n")[:2]
    assert "as predicted" in headline or "no prediction" in headline
    assert {line.split()[0] for line in table.splitlines()[1:4]} == {"0", "4", "7"}


def test_the_report_of_a_run_knows_the_steps_after_the_last_sample(tmp_path):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    with eq.watch(net, optimizer, every=10) as monitor:
        train(net, optimizer, 37)
        page = monitor.report(tmp_path / "run.html").read_text()
    assert "steps 0 to 36" in page and "steps 0 to 30" not in page


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
