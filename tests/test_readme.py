"""Every number in the README comes from a command: run each one and compare its output to the letter."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from equilibria.cli import app

README = Path(__file__).parents[1] / "README.md"
CONSOLE = re.findall(r"```console\n\$ equilibria (.*?)\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_readme_has_commands():
    assert len(CONSOLE) >= 4


@pytest.mark.parametrize(("line", "shown"), CONSOLE, ids=[line.split()[0] for line, _ in CONSOLE])
def test_a_command_prints_what_the_readme_shows(line, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0
    assert result.output.strip("\n") == shown.strip("\n")


def test_the_python_examples_run():
    failed, attempted = doctest.testfile(str(README), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert attempted >= 8
    assert failed == 0
