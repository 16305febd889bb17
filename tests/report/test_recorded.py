"""A run read from disk shows what the monitor showed, in the same words."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.measure.diagnose import diagnose
from equilibria.report import RecordedRun


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


def test_findings_and_table_are_those_of_the_monitor(both, capsys):
    monitor, run = both
    assert isinstance(run, RecordedRun)
    assert run.findings() == monitor.findings() == diagnose(run.samples(), metadata=run.metadata) != ()
    monitor.table()
    live = capsys.readouterr().out
    run.table()
    assert capsys.readouterr().out == live != ""


def test_the_report_is_that_of_the_monitor(both, tmp_path):
    monitor, run = both
    assert run.report(tmp_path / "run.html") == tmp_path / "run.html"
    monitor.report(tmp_path / "monitor.html", title="a")  # the name of the directory
    assert (tmp_path / "run.html").read_text() == (tmp_path / "monitor.html").read_text()


def test_the_text_of_both_is_short(both):
    monitor, run = both
    assert repr(run) == f"<RecordedRun {run.path}: 2 parameters, steps 0 to 118, 120 samples>"
    assert repr(monitor) == f"<WatchedRun: 2 layers, 120 steps; 2 no equilibrium; closed; recorded in {run.path}>"


def test_completions_offer_what_people_use(both):
    offered = {name for name in dir(both[0]) if not name.startswith("_")}
    assert {"table", "findings", "samples", "report", "close", "live", "state_dict"} <= offered
    assert not {"take", "guarded", "missed", "is_due"} & offered


def test_reading_a_run_needs_no_torch(both):
    code = "import sys, equilibria as eq; eq.read_run(sys.argv[1]).table(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(both[1].path)], check=True, capture_output=True, timeout=60)
