"""Every number in the README, and on the pages it was once part of, comes from a command: run each and compare."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria import control
from tests.helpers.page_runner import Page, Tolerance, assert_shown, commands, run_command

ROOT = Path(__file__).parents[1]
README, COMMANDS, IN_PYTHON = ROOT / "README.md", ROOT / "docs" / "command-line.md", ROOT / "docs" / "in-python.md"
CONSOLE = [
    each
    for page in (README, COMMANDS)
    for block in Page(page).blocks()
    if block.language == "console"
    for each in commands(block.body, "")
]


def test_the_readme_has_commands():
    assert len(CONSOLE) >= 4


@pytest.mark.parametrize(("line", "shown"), CONSOLE, ids=[line.split()[1] for line, _ in CONSOLE])
def test_a_command_prints_what_the_readme_shows(line, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert_shown(run_command(line, "README.md", 0), shown, Tolerance(exact=True), f"README.md: $ {line}")


def test_the_python_examples_run():
    failed, attempted = doctest.testfile(
        str(IN_PYTHON), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert attempted >= 8
    assert failed == 0


def scripts() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_script_of_the_controllers_runs_and_so_does_each_of_the_other_lines(capsys, monkeypatch, tmp_path):
    torch.manual_seed(0)
    (script,) = (code for code in scripts() if "start_in_equilibrium(model" in code)
    (lines,) = (code for code in scripts() if "Rotational(" in code)
    (sharpness,) = (code for code in scripts() if "SharpnessTracker(" in code)
    world: dict = {}
    exec(compile(script, "README.md", "exec"), world)
    assert re.search(r"^0 .* rows *$", capsys.readouterr().out, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(sharpness, world)
    world["tracker"].close()
    assert world["sharp"].converged
    for line in lines.strip().splitlines():
        groups = eq.split_decay(world["model"], weight_decay=5e-3, invariant=world["sym"]).groups
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, [100])
        exec(line, {**vars(control), **world, "optimizer": optimizer, "drops": drops})
    assert len(lines.strip().splitlines()) == 4
