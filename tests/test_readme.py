"""The README is short, and what the pages on commands show is what the commands print."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

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


def test_there_are_commands():
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


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").split()) <= 1000
