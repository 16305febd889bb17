"""A run read from disk shows what the monitor showed, in the same words."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.diagnosis import diagnose
from equilibria.watching import RecordedRun


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A closed monitor and the run that it left."""
    place = tmp_path_factory.mktemp("runs") / "a"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0)
    with eq.watch(net, optimizer, every=2, log_dir=place) as monitor:
        for _ in range(120):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(torch.randn(16, 6)), torch.randint(0, 3, (16,))).backward()
            optimizer.step()
    return monitor, eq.read_run(place)


def test_findings_and_table_are_those_of_the_monitor(both):
    monitor, run = both
    assert isinstance(run, RecordedRun)
    assert run.findings() == monitor.findings() == diagnose(run.samples(), metadata=run.metadata) != ()
    assert str(run.table()) == str(monitor.table()) != ""
    assert run.table()._repr_html_() == run._repr_html_()


def test_the_report_is_that_of_the_monitor(both, tmp_path):
    monitor, run = both
    assert run.report(tmp_path / "run.html") == tmp_path / "run.html"
    monitor.report(tmp_path / "monitor.html", title="a")  # the name of the directory
    assert (tmp_path / "run.html").read_text() == (tmp_path / "monitor.html").read_text()


def test_the_text_of_both_is_short(both):
    monitor, run = both
    assert repr(run) == f"<RecordedRun {run.path}: 2 parameters, steps 0 to 118, 120 samples>"
    assert repr(monitor) == f"<WatchedRun: 2 layers, 120 steps; 2 none; closed; recorded in {run.path}>"


def test_a_run_has_only_names_that_people_use(both):
    """dir() hides nothing: what the hooks call belongs to the monitor inside."""
    offered = {name for name in dir(both[0]) if not name.startswith("_")}
    assert offered == {name for name in {*vars(type(both[0])), *vars(both[0])} if not name.startswith("_")}
    views = {"diffusion", "findings", "live", "log_dir", "metadata", "metrics", "noise", "report", "samples", "table"}
    measurement = {"every", "failure", "flush", "log", "step", "add_sink", "remove_sink", "reattach", "close"}
    assert offered == views | measurement | {"state_dict", "load_state_dict", "mark_weights"}


def test_reading_a_run_needs_no_torch(both):
    code = "import sys, equilibria as eq; print(eq.read_run(sys.argv[1]).table()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(both[1].path)], check=True, capture_output=True, timeout=60)


def test_the_optimizer_is_told_over_the_whole_run(tmp_path):
    """The metadata of a record are of its beginning, those of a monitor of now: the page says the same."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "a") as monitor:
        for step in range(40):
            optimizer.param_groups[0]["lr"] = 0.1 if step < 30 else 0.01
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(torch.randn(16, 6)), torch.randint(0, 3, (16,))).backward()
            optimizer.step()
        monitor.report(tmp_path / "live.html")
    eq.read_run(tmp_path / "a").report(tmp_path / "later.html")
    for page in ("live.html", "later.html"):
        assert "<dd>SGD(lr=0.1 -&gt; 0.01, wd=1e-3, momentum=0.9)</dd>" in (tmp_path / page).read_text()


def test_names_that_utf8_cannot_hold_break_nothing(tmp_path):
    net = nn.Sequential()
    net.add_module("half \ud800 a pair", nn.Linear(6, 8, bias=False))
    net.add_module("norm", nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "a") as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(16, 6)).square().sum().backward()
            optimizer.step()
    assert monitor.failure is None
    run = eq.read_run(tmp_path / "a")
    assert run.params == ("half \\ud800 a pair.weight",)
    assert "half \\ud800 a pair" in run.report(tmp_path / "a.html", title="\udcff").read_text()
    assert [entry["name"] for entry in run.metadata["params"]] == list(run.params)
