"""Output fits the terminal, and colour goes only where it is wanted."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from equilibria.cli import app

SGD = "--optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9"
STEP = "--schedule step --milestones 60,120,160 --factor 0.2 --epochs 200 --steps-per-epoch 391"
ADAMW = "--optimizer adamw --lr 1e-3 --wd 0.1 --schedule cosine"
LINES = {
    "steps down": f"plan {SGD} {STEP}",
    "many steps": f"plan {SGD} --schedule step --milestones 30000,60000,90000 --steps 100000",
    "cosine": f"plan {ADAMW} --warmup 500 --steps 10000",
    "cosine, epochs, far start": f"plan {ADAMW} --warmup 5 --epochs 100 --steps-per-epoch 91 --init-std 0.02",
    "no decay": f"plan --optimizer sgd --lr 0.1 --wd 0 --init-norm 3 --unit-grad-sq 10 {STEP}",
    "fold": f"fold {SGD} {STEP}",
    "translate": "translate --optimizer adamw --lr 1e-3 --wd 0.1 --to lion --dim 1000000",
    "equilibrium": "equilibrium --optimizer adamw --lr 1e-3 --wd 0.1",
}


def output(line: str) -> str:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.exception
    return result.output


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("name", LINES)
def test_no_line_is_wider_than_the_terminal(name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, output(LINES[name]).splitlines())) <= columns


def test_a_narrow_table_keeps_what_says_most(monkeypatch):
    """The ratios and the verdict stay; what is left out is the same in every row, or can be read elsewhere."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = output(LINES["steps down"]).splitlines()
    assert lines[2].split() == ["phase", "epochs", "lr", "angle*", "start", "middle", "end", "needs"]
    assert lines[5].split() == ["3", "120-160", "0.004", "0.00145", "0.45", "0.56", "0.68", "115", "never"]
    assert "wd 0.0005 throughout" in lines[7]
    assert lines[1].split() == ["angle", "/", "angle*", "to", "settle"]


def on_a_terminal(line: str, **environment: str) -> str:
    """What the command writes to a terminal of 100 columns."""
    leader, follower = pty.openpty()
    variables = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-m", "equilibria.cli", *line.split()], stdout=follower, env=variables | environment
    ):
        os.close(follower)
        text = b""
        while part := _read(leader):
            text += part
    os.close(leader)
    return text.decode().replace("\r\n", "\n")


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 1 << 16)
    except OSError:  # Linux says so when the other end is closed
        return b""


def test_colour_on_a_terminal_unless_no_color_is_set(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    coloured = on_a_terminal(LINES["steps down"])
    assert "\033[33;1m!\033[0m" in coloured
    plain = on_a_terminal(LINES["steps down"], NO_COLOR="1")
    assert "\033" not in plain and plain == output(LINES["steps down"])
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain  # colours take no room when lines are wrapped
    assert "\033[33;1m" in on_a_terminal(LINES["steps down"], NO_COLOR="")
